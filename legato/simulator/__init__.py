"""Floor 1: a Workload, a Plan and a Cluster become a predicted Timeline. One file a fidelity."""
