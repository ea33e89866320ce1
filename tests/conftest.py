"""For all tests."""

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
"""Time limits are pytest's: on a shared machine one example takes 20 ms, and the same again 800."""
settings.load_profile("shared-machine")
