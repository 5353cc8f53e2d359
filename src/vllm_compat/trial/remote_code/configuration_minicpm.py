# mypy: allow-subclassing-any
"""Configuration of the tiny MiniCPM, which transformers does not know."""

from __future__ import annotations

from transformers import PretrainedConfig


class MiniCPMConfig(PretrainedConfig):
    """Keep the fields as they stand in ``config.json``."""

    model_type = "minicpm"
