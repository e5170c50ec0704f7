"""The five nouns, their files, units and errors."""

__version__ = "0.1.0"
