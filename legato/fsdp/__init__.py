"""Fully sharded training (FSDP2): its rules as a model, a planner of its groups, and a bound."""
