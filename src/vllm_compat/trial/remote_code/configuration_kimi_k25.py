# mypy: allow-subclassing-any, allow-untyped-calls
"""Configuration of the tiny Kimi-K2.5, for a transformers before 5, which does not know it."""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV3Config, PretrainedConfig


class KimiK25VisionConfig(PretrainedConfig):
    """Keep the vision tower's fields as they stand in ``config.json``."""

    model_type = "kimi_k25_vision"


class KimiK25Config(PretrainedConfig):
    """Nest a DeepSeek-V3 text configuration and a vision configuration."""

    model_type = "kimi_k25"

    def __init__(
        self,
        text_config: dict[str, Any] | DeepseekV3Config | None = None,
        vision_config: dict[str, Any] | KimiK25VisionConfig | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(text_config, DeepseekV3Config):
            text_config = DeepseekV3Config(**(text_config or {}))
        if not isinstance(vision_config, KimiK25VisionConfig):
            vision_config = KimiK25VisionConfig(**(vision_config or {}))
        self.text_config = text_config
        self.vision_config = vision_config
        super().__init__(**kwargs)
