"""Workload, Cluster, Plan, Timeline: immutable values, with their files, units and errors."""

__version__ = "0.1.0"
