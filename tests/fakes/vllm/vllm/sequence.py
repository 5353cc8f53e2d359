"""FAKE of what pipeline stages hand on."""

from __future__ import annotations

from typing import Any


class IntermediateTensors:
    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors
