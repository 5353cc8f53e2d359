"""FAKE reader of single weights."""

from __future__ import annotations

from typing import Any


def load_model_layers(layer_names: list[str], model_path: str) -> dict[str, Any]:
    return {name: f"{model_path}/{name}" for name in layer_names}
