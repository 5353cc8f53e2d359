"""FAKE of transformers 5: see tests/fakes/README.md."""

from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.tokenization_auto import AutoTokenizer

__all__ = ["AutoConfig", "AutoTokenizer"]
