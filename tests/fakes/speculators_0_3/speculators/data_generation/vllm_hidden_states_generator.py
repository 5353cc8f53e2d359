"""FAKE generator of the first in-process generation: each request ends with its first step."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from vllm.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import (
    _get_kv_cache_groups_uniform_spec,
    get_kv_cache_config_from_groups,
    unify_hybrid_kv_cache_specs,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


class VllmHiddenStatesGenerator:
    def __init__(self, model_path: str, layer_ids: list[int], tensor_parallel_size: int = 1) -> None:
        self.layer_ids = layer_ids
        self._request_counter = 0
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.model_config = AutoConfig.from_pretrained(model_path, trust_remote_code=True)
        self.vllm_config = self._create_vllm_config(model_path, tensor_parallel_size)
        self.executor = MultiprocExecutor(vllm_config=self.vllm_config)
        specs = self.executor.collective_rpc("get_kv_cache_spec")[0]
        unify_hybrid_kv_cache_specs(specs)
        groups = _get_kv_cache_groups_uniform_spec(specs)
        free, _ = torch.cuda.mem_get_info()
        kv_cache_config = get_kv_cache_config_from_groups(
            vllm_config=self.vllm_config,
            kv_cache_groups=groups,
            kv_cache_specs=specs,
            available_memory=free,
        )
        self.scheduler = Scheduler(
            vllm_config=self.vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(vllm_config=self.vllm_config),
        )
        self.executor.initialize_from_config([kv_cache_config] * tensor_parallel_size)

    def _create_vllm_config(self, model_path: str, tensor_parallel_size: int) -> VllmConfig:
        cache_config = CacheConfig(block_size=16, gpu_memory_utilization=0.8)
        return VllmConfig(
            model_config=ModelConfig(model=model_path, tokenizer=model_path, enforce_eager=True),
            cache_config=cache_config,
            parallel_config=ParallelConfig(
                tensor_parallel_size=tensor_parallel_size,
                worker_extension_cls="speculators.data_generation.custom_worker.HiddenStatesWorkerExtension",
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=32, max_model_len=2048, max_num_batched_tokens=8192
            ),
        )

    def setup_capture(self) -> None:
        self.executor.collective_rpc("_setup_hidden_states_capture", args=(self.layer_ids,))

    def generate(self, token_ids: list[list[int]]) -> list[dict[str, Any]]:
        for i, ids in enumerate(token_ids):
            request = Request(
                request_id=f"req_{self._request_counter}_{i}",
                prompt_token_ids=ids,
                sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
                pooling_params=None,
                eos_token_id=self.tokenizer.eos_token_id,
                arrival_time=0.0,
            )
            self.scheduler.add_request(request)
        self._request_counter += 1
        self.executor.collective_rpc("_reset_capture")
        while (output := self.scheduler.schedule()).total_num_scheduled_tokens > 0:
            self.executor.execute_model(output)
            for request_id in output.num_scheduled_tokens:
                self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
        captured = self.executor.collective_rpc("_get_captured_states", unique_reply_rank=0)[0]
        results = []
        offset = 0
        for ids in token_ids:
            states = [layer[offset : offset + len(ids)] for layer in captured]
            results.append({"input_ids": ids, "hidden_states": states})
            offset += len(ids)
        return results
