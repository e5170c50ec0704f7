"""Run plans in real processes, on hosts with shaped links on one machine, or on the machines of a cluster."""
