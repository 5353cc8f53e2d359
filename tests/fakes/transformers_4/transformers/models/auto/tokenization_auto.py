"""FAKE loaders that keep what they were asked for."""

from __future__ import annotations

from typing import Any, ClassVar


class AutoTokenizer:
    asked: ClassVar[list[tuple[Any, dict[str, Any]]]] = []
    eos_token_id = 2

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> AutoTokenizer:
        cls.asked.append((pretrained_model_name_or_path, kwargs))
        return cls()
