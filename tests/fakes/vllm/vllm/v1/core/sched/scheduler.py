"""FAKE scheduler: admission, chunked prefill, preemption when blocks run out, news of the finished.

It follows the rules of vLLM's own as far as prompts are concerned: running requests come first, the
youngest is preempted when a block is wanted and none is free, and nobody starts in a step with a
preemption or while ``max_num_seqs`` requests run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager


class Scheduler:
    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        block_size: int,
        log_stats: bool = False,
    ) -> None:
        assert vllm_config.scheduler_config is not None
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.block_size = block_size
        self.max_num_running_reqs = vllm_config.scheduler_config.max_num_seqs
        self.max_num_scheduled_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished_req_ids: set[str] = set()
        self.held: dict[str, int] = {}
        self.preemptions = 0

    @property
    def free(self) -> int:
        """Blocks that nobody holds; one is the null block and never to be had."""
        return self.kv_cache_config.num_blocks - 1 - sum(self.held.values())

    def add_request(self, request: Request) -> None:
        assert request.request_id not in self.requests, "duplicate request id"
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        budget = self.max_num_scheduled_tokens
        scheduled: dict[str, int] = {}
        cached: list[Request] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if count == 0:
                index += 1
                continue
            while not self._allocate(request, count):
                preempted = True
                youngest = self.running.pop()
                self._preempt(youngest)
                if youngest in cached:
                    cached.remove(youngest)
                    budget += scheduled.pop(youngest.request_id)
                if youngest is request:
                    break
            else:
                scheduled[request.request_id] = count
                cached.append(request)
                budget -= count
                index += 1
        new: list[NewRequestData] = []
        while self.waiting and budget > 0 and not preempted:
            request = self.waiting[0]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if len(self.running) == self.max_num_running_reqs or not self._allocate(request, count):
                break
            self.waiting.popleft()
            self.running.append(request)
            if request.status is RequestStatus.PREEMPTED:
                cached.append(request)
            else:
                new.append(NewRequestData(request.request_id, request.num_computed_tokens))
            request.status = RequestStatus.RUNNING
            scheduled[request.request_id] = count
            budget -= count
        output = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=CachedRequestData(
                [r.request_id for r in cached], [r.num_computed_tokens for r in cached]
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=self.finished_req_ids,
        )
        for request_id, count in scheduled.items():
            self.requests[request_id].num_computed_tokens += count
        self.finished_req_ids = set()
        return output

    def finish_requests(self, request_ids: str | Iterable[str], finished_status: RequestStatus) -> None:
        for request_id in (request_ids,) if isinstance(request_ids, str) else set(request_ids):
            request = self.requests.pop(request_id, None)
            if request is None:
                continue
            if request in self.running:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            request.status = finished_status
            self.held.pop(request_id, None)
            self.finished_req_ids.add(request_id)

    def update_from_output(self, scheduler_output: SchedulerOutput, output: Any) -> dict[str, Any]:
        return {}

    def _allocate(self, request: Request, count: int) -> bool:
        have = self.held.get(request.request_id, 0)
        tokens = request.num_computed_tokens + count
        wanted = sum(
            -(-tokens // group.kv_cache_spec.block_size)
            for group in self.kv_cache_config.kv_cache_groups
        )
        if wanted - have > self.free:
            return False
        self.held[request.request_id] = wanted
        return True

    def _preempt(self, request: Request) -> None:
        self.held.pop(request.request_id, None)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)
