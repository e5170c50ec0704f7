"""The arguments for bounds, as docs/bounds.md proves them: one file for each kind."""
