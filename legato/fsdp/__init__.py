"""Fully sharded training (FSDP2): a model of how FSDP2 runs, a planner of its groups of modules, and a lower bound."""
