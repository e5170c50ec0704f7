"""The arguments for bounds, one file for each kind; docs/bounds.md has the proofs."""
