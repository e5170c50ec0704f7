"""Packs gradients, sends them, and delivers the averages to their parameters."""
