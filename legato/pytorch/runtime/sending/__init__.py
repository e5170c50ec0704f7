"""How gradients travel: packed, sent, and delivered to their parameters."""
