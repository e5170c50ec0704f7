"""Predict the timeline of a workload under a plan: on a `Cluster` (`collective`), or on every link (`flow`)."""
