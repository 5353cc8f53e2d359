"""FAKE engine core: a release that resolves no block sizes itself."""
