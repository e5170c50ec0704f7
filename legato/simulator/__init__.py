"""Predict the Timeline of a Workload under a Plan: on a Cluster (`collective`), or on every link (`flow`)."""
