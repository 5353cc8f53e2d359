"""FAKE structured output."""

from __future__ import annotations

from vllm.config import VllmConfig


class StructuredOutputManager:
    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
