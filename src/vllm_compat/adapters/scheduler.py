"""``vllm.v1.core.sched.scheduler``: stepping the scheduler by hand."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vllm_compat.adapters.base import Adapter, Case, Need, NotOn, takes
from vllm_compat.adapters.kv_cache import forced_into_one_group, resolves_layout
from vllm_compat.analysis.drift import FindingKind
from vllm_compat.errors import CapacityError
from vllm_compat.runtime.context import belongs, current_call

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction

SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
SCHEDULER_CONFIG = "vllm.config.SchedulerConfig"


class BlockSize(Adapter):
    """Give ``Scheduler`` the block size that the KV cache has."""

    name = "scheduler.block_size"
    derived = True
    order = 810
    targets = ("vllm.v1.core.sched.scheduler:Scheduler.__init__",)
    vllm = ">=0.11.1"
    downstream = "<0.5"
    not_on = (NotOn("cpu", "<0.29.0", ">=0.4"),)  # no groups of layers there: see kv_cache.groups
    excluded_by = ("engine.public",)
    changed = (
        "0.11.1 added the required argument `block_size`; from 0.29.0 on the size in use is settled"
        " by the attention backends, not by the configuration as first given."
    )
    relies = "0.3.0 builds Scheduler without it, 0.4.x with a constant 16."
    does = (
        "Gives the size that the planned cache has, or what this release's engine core, asked for it,"
        " resolves for several groups of layers (hybrid models)."
    )
    until = "the downstream takes the size from the cache configuration."
    shown_by = (
        "llama, speculators 0.3.0, vLLM 0.16.0: missing argument block_size; speculators 0.4.0.1,"
        " vLLM 0.32.0: the scheduler's blocks are not the cache's; granite_hybrid, ditto, and on an H200"
        " with vLLM 0.26.0: AssertionError"
    )

    def need(self, case: Case) -> Need | None:
        found = case.found(FindingKind.PARAMETER_REQUIRED, SCHEDULER, "block_size")
        if found:
            return Need("Scheduler requires block_size, which is not given", found)
        given = [site for site in case.calls(SCHEDULER) if site.keyword("block_size")]
        if given and resolves_layout(case):
            return Need(f"{given[0].where} gives a constant, the backends settle the block size")
        signature = case.surface.signature(SCHEDULER)
        if given and signature and signature.get("block_size") and forced_into_one_group(case):
            return Need(f"{given[0].where} gives a constant, groups of layers have sizes of their own")
        return None

    def install(self, transaction: Transaction, plan: Plan) -> None:
        package = plan.roles.package

        def supply(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            config = kwargs.get("vllm_config")
            if config is not None and belongs(config, package):
                kwargs["block_size"] = config.cache_config.block_size
                kwargs.update(_resolved(kwargs.get("kv_cache_config"), config))
            return wrapped(*args, **kwargs)

        (target,) = self.targets
        transaction.wrap(target, supply, confirm=takes("block_size"))


def _resolved(kv_cache_config: Any, vllm_config: Any) -> dict[str, int]:
    """Return the block sizes of scheduler and hashes as the engine core resolves them, if it does."""
    from vllm.v1.engine import core

    resolve = vars(core).get("resolve_kv_cache_block_sizes")
    if resolve is None or len(getattr(kv_cache_config, "kv_cache_groups", ())) < 2:
        return {}
    block_size, hash_block_size = resolve(kv_cache_config, vllm_config)
    return {"block_size": block_size, "hash_block_size": hash_block_size}


@dataclass
class _Admission:
    """What one scheduler has taken in and what waits before its door.

    Block counts are upper bounds: every group's share of the whole prompt, no prefix shared.
    """

    capacity: int
    block_sizes: tuple[int, ...]
    waiting: deque[Any] = field(default_factory=deque)
    admitted: dict[str, Any] = field(default_factory=dict)
    undelivered: set[str] = field(default_factory=set)
    passing: bool = False  # our own call into the scheduler is under way

    def blocks(self, request: Any) -> int:
        """Return how many KV blocks the request's prompt can take at most."""
        tokens = request.num_prompt_tokens
        return sum(math.ceil(tokens / size) for size in self.block_sizes)

    @property
    def free(self) -> int:
        """Return how many blocks the admitted requests leave."""
        return self.capacity - sum(self.blocks(r) for r in self.admitted.values())

    def hold_back(self, request: Any) -> None:
        """Let a request wait, unless its prompt can never fit."""
        needed = self.blocks(request)
        if needed > self.capacity:
            raise CapacityError(
                f"Request {request.request_id} has {request.num_prompt_tokens} tokens and needs"
                f" {needed} KV cache blocks, but this run has only {self.capacity}: raise"
                " gpu_memory_utilization or the number of GPUs, or shorten the sequences."
            )
        self.waiting.append(request)

    def let_through(self, scheduler: Any) -> None:
        """End the requests whose prompts are computed, and admit what has room then, in order."""
        done = [request_id for request_id, request in self.admitted.items() if _is_computed(request)]
        self.passing = True
        try:
            if done:
                _finish(scheduler, done)
                for request_id in done:
                    del self.admitted[request_id]
            while self.waiting and self.blocks(self.waiting[0]) <= self.free:
                request = self.waiting.popleft()
                self.admitted[request.request_id] = request
                scheduler.add_request(request)
        finally:
            self.passing = False

    def deliver(self, scheduler: Any) -> None:
        """Put the news of what has finished into the next output, where an earlier one was dropped."""
        if self.undelivered:
            scheduler.finished_req_ids |= self.undelivered
            self.undelivered = set()

    def finish(self, ids: Iterable[str], *, over: bool) -> list[str]:
        """Return which of these requests the scheduler may end now, and forget them.

        Before the call is ``over`` what waits, or is not computed to its end, goes on.
        """
        if over:
            self.waiting = deque(r for r in self.waiting if r.request_id not in ids)
        held = {request.request_id for request in self.waiting}
        now = []
        for request_id in ids:
            request = self.admitted.get(request_id)
            if request_id in held or (request is not None and not over and not _is_computed(request)):
                continue
            self.admitted.pop(request_id, None)
            now.append(request_id)
        return now


def _is_computed(request: Any) -> bool:
    return bool(request.num_computed_tokens >= request.num_prompt_tokens)


class _Doors:
    """The admission of each scheduler of the downstream."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._known: WeakKeyDictionary[Any, _Admission] = WeakKeyDictionary()

    def of(self, scheduler: Any) -> _Admission | None:
        """Return a scheduler's admission; None for one that somebody else drives."""
        if not belongs(getattr(scheduler, "vllm_config", None), self._package):
            return None
        if scheduler not in self._known:
            config = scheduler.kv_cache_config
            self._known[scheduler] = _Admission(
                # One block is vLLM's null block and never holds a row.
                capacity=config.num_blocks - 1,
                block_sizes=tuple(group.kv_cache_spec.block_size for group in config.kv_cache_groups),
            )
        return self._known[scheduler]


class WholePrompts(Adapter):
    """Let every prompt be computed to its end, once, and give its place to the next."""

    name = "scheduler.whole_prompts"
    order = 820
    targets = (
        "vllm.v1.core.sched.scheduler:Scheduler.add_request",
        "vllm.v1.core.sched.scheduler:Scheduler.schedule",
        "vllm.v1.core.sched.scheduler:Scheduler.finish_requests",
    )
    vllm = ">=0.11.1"
    downstream = "<0.5"
    excluded_by = ("engine.public",)
    changed = (
        "0.11.1 turned chunked prefill on for configurations made by hand; preemption and the limit of"
        " running requests are vLLM's normal behaviour, on every release."
    )
    relies = (
        "0.3.0 finishes each request after its first step, prefilled or not. 0.4.x keeps finished"
        " prompts running, so that request 33 never starts (`Request req_0_32 not found in captured"
        " states`), and counts recomputed tokens of preempted requests as progress, so that rows"
        " are missing. Both throw away the scheduler output that tells workers which requests have"
        " ended."
    )
    does = (
        "Holds requests back until the KV cache can hold their whole prompt, so that none is"
        " preempted; finishes a request when its prompt is computed, and not before; hands ids of"
        " finished requests on with the next step. A prompt that can never fit is an error before"
        " the batch starts."
    )
    until = "the downstream drives chunked prefill to its end by itself."
    stock_starts_without = True
    shown_by = (
        "llama, speculators 0.4.0.1, vLLM 0.16.0: 40 prompts fail, 15 KV blocks give 32 rows for 63"
        " tokens; speculators 0.3.0: a cut prompt ends after its first chunk"
    )

    def need(self, case: Case) -> Need | None:
        if not case.calls(f"{SCHEDULER}.schedule") or not case.calls(f"{SCHEDULER}.add_request"):
            return None
        if case.calls(f"{SCHEDULER}.update_from_output"):
            return None
        config = case.surface.signature(SCHEDULER_CONFIG)
        chunked = config.get("enable_chunked_prefill") if config else None
        if chunked is not None and chunked.default in ("None", "False"):
            return None  # every prompt is computed in its first step, after which 0.3.0 ends it
        return Need(
            "the downstream steps the scheduler without update_from_output, so nothing else ends a"
            " prompt or keeps it from being cut"
        )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        door = _Doors(plan.roles.package).of

        def add_request(
            wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            admission = door(instance)
            if admission is None or admission.passing:
                return wrapped(*args, **kwargs)
            (request,) = args or (kwargs["request"],)
            admission.hold_back(request)
            return None

        def schedule(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            admission = door(instance)
            if admission is None:
                return wrapped(*args, **kwargs)
            admission.let_through(instance)
            admission.deliver(instance)
            output = wrapped(*args, **kwargs)
            if not output.total_num_scheduled_tokens:
                # The downstream drops this output, and with it the news of what has finished.
                admission.undelivered |= set(output.finished_req_ids)
            return output

        def finish_requests(
            wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            admission = door(instance)
            if admission is None or admission.passing:
                return wrapped(*args, **kwargs)
            given, *rest = args if args else (kwargs.pop("request_ids"),)
            ids: Iterable[str] = (given,) if isinstance(given, str) else tuple(given)
            call = current_call()
            return wrapped(admission.finish(ids, over=call is None or call.over), *rest, **kwargs)

        for target, wrapper in zip(self.targets, (add_request, schedule, finish_requests), strict=True):
            transaction.wrap(target, wrapper)


def _finish(scheduler: Any, request_ids: list[str]) -> None:
    from vllm.v1.request import RequestStatus

    scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
