"""FAKE of transformers 5: see tests/fakes/README.md."""

from transformers.models.auto.tokenization_auto import AutoConfig, AutoTokenizer

__all__ = ["AutoConfig", "AutoTokenizer"]
