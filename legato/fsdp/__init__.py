"""Fully sharded training (FSDP2): a model of its rules, a planner for its groups, and a lower bound."""
