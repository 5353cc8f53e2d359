"""The version of this release, by itself: every layer may ask for it."""

__version__ = "0.1.0"
