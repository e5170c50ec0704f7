"""Floor 0: the five nouns, their files, units and errors. Imports nothing of legato above it."""
