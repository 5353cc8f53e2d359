"""FAKE engine."""
