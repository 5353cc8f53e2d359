"""FAKE of vLLM 0.16: see tests/fakes/README.md."""

__version__ = "0.16.0"
