"""FAKE downstream: see tests/fakes/README.md."""
