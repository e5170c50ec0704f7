"""Fully sharded training (FSDP2): its rules as a model, what planning its groups wins, and a bound."""
