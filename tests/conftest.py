"""Puts this folder on the path for `strategies`, and takes hypothesis off the clock."""

from hypothesis import settings

settings.register_profile("legato", deadline=None)
settings.load_profile("legato")
