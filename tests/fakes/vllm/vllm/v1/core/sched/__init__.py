"""FAKE."""
