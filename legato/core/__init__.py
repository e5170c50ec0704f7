"""Immutable values (`Workload`, `Cluster`, `Plan`, `Timeline` and others), with their files, units and errors."""

__version__ = "0.1.0"
