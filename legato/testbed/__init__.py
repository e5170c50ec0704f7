"""Try plans on real processes: hosts with shaped links on one machine, or the machines of a cluster."""
