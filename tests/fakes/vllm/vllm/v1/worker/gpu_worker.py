"""FAKE worker: a model runner that has no model, and a KV cache that is never filled."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class InputBatch:
    def __init__(self) -> None:
        self.req_ids: list[str] = []
        self.req_id_to_index: dict[str, int] = {}


class GPUModelRunner:
    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.input_batch = InputBatch()
        self.model: Any = None


class Worker:
    def __init__(self, vllm_config: VllmConfig, rank: int) -> None:
        self.vllm_config = vllm_config
        self.rank = rank
        self.model_runner = GPUModelRunner(vllm_config)
        self.pending = False

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return {"layers.0": KVCacheSpec(self.vllm_config.cache_config.block_size)}

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        return None

    def execute_model(self, scheduler_output: Any) -> None:
        if self.pending:
            raise RuntimeError("State error: sample_tokens() must be called first")
        self.pending = True

    def sample_tokens(self, grammar_output: Any) -> str:
        if not self.pending:
            raise RuntimeError("sample_tokens called without pending output")
        self.pending = False
        return "output"
