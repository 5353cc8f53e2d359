"""``vllm.v1.executor``: stepping workers and asking them, by hand."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_compat.adapters.base import Adapter, Case, Need
from vllm_compat.analysis.drift import FindingKind
from vllm_compat.errors import GuardError
from vllm_compat.runtime.context import belongs, current_call

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction

EXECUTOR = "vllm.v1.executor.multiproc_executor.MultiprocExecutor"


class TwoPhaseStep(Adapter):
    """Complete each step with ``sample_tokens``."""

    name = "executor.two_phase_step"
    order = 310
    targets = ("vllm.v1.executor.multiproc_executor:MultiprocExecutor.execute_model",)
    vllm = ">=0.11.1"
    downstream = "<0.4"
    excluded_by = ("engine.public",)
    changed = (
        "0.11.1 split a step in two: execute_model may return None and must then be completed by"
        " sample_tokens."
    )
    relies = "Calls execute_model alone."
    does = "Calls sample_tokens(None) when execute_model has returned None: one forward, one sampling."
    until = "speculators 0.3.0 is out of use; 0.4.0 calls sample_tokens itself."
    shown_by = (
        "llama, speculators 0.3.0, vLLM 0.16.0, two generate() calls: `State error: sample_tokens()"
        " must be called after execute_model() returns None`"
    )

    def need(self, case: Case) -> Need | None:
        if not case.calls(f"{EXECUTOR}.execute_model"):
            return None
        if case.calls(f"{EXECUTOR}.sample_tokens"):
            return None
        if case.surface.resolve(f"{EXECUTOR}.sample_tokens") is None:
            return None
        return Need(
            "a step has two phases and the downstream never calls the second",
            case.found(FindingKind.RETURN_SHAPE, f"{EXECUTOR}.execute_model"),
        )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        package = plan.roles.package

        def complete(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            output = wrapped(*args, **kwargs)
            if output is None and belongs(instance.vllm_config, package):
                return instance.sample_tokens(None)
            return output

        (target,) = self.targets
        transaction.wrap(target, complete)


class UniqueReply(Adapter):
    """Give the captured states back in the list, and in the shape, that the downstream expects."""

    name = "executor.unique_reply"
    order = 320
    targets = ("vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc",)
    vllm = ">=0.11.0"
    downstream = "<0.4"
    excluded_by = ("engine.public",)
    changed = (
        "0.11.1: collective_rpc(unique_reply_rank=…) returns the bare reply, not a list of one. On"
        " every release worker.capture answers with rows by request, not with one tensor a layer."
    )
    relies = (
        "Takes [0] of the reply, which is then the first layer's tensor; every token is saved as if"
        " it were a layer (771 tensors of shape [512] a sample, without an error)."
    )
    does = (
        "Gives each layer the rows of all requests, in the order of the inputs; puts the reply into a"
        " list of one where vLLM has not."
    )
    until = "speculators 0.3.0 is out of use."
    shown_by = (
        "llama, speculators 0.3.0, vLLM 0.16.0: the truth value of a tensor is ambiguous; vLLM 0.11.0:"
        " 'str' object has no attribute 'clone'"
    )

    def need(self, case: Case) -> Need | None:
        signature = case.surface.signature(f"{EXECUTOR}.collective_rpc")
        if signature is None:
            return None
        sites = tuple(
            site
            for site in case.calls(f"{EXECUTOR}.collective_rpc")
            if site.keyword("unique_reply_rank") is not None
            and any(use.how == "subscript" and use.detail == "0" for use in site.uses)
        )
        if not sites:
            return None
        if (signature.returns or "").startswith("list["):
            return Need(f"rows are captured by request, {sites[0].where} expects them by layer")
        return Need(
            f"collective_rpc(unique_reply_rank=…) returns the bare reply, {sites[0].where} takes [0]"
            " of it",
            case.found(FindingKind.RETURN_SHAPE, f"{EXECUTOR}.collective_rpc"),
        )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        package = plan.roles.package

        def enlist(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            reply = wrapped(*args, **kwargs)
            method = args[0] if args else kwargs.get("method")
            if (
                kwargs.get("unique_reply_rank") is None
                or not belongs(instance.vllm_config, package)
                or method != "_get_captured_states"
            ):
                return reply
            # 0.11.0 returns a list of one already, and says so in its signature.
            listed = str(inspect.signature(wrapped).return_annotation).startswith("list[")
            states = reply[0] if listed else reply
            return [_in_input_order(states) if isinstance(states, dict) else states]

        (target,) = self.targets
        transaction.wrap(target, enlist)


def _in_input_order(states: dict[str, list[Any]]) -> list[Any]:
    """Return one tensor per layer, the requests' rows one after another as they were added.

    Raises:
        GuardError: A request has no rows, or another number than its prompt has tokens.
    """
    call = current_call()
    if call is None:
        raise GuardError("Captured states were fetched outside of a generate() call.")
    for request_id, prompt in call.prompts.items():
        rows = [len(layer) for layer in states.get(request_id, ())]
        if not rows or any(n != len(prompt) for n in rows):
            raise GuardError(
                f"Request {request_id} has {len(prompt)} prompt tokens, but its layers have"
                f" {rows or 'no'} rows; nothing of this batch may be used."
            )
    layers = zip(*(states[request_id] for request_id in call.prompts), strict=True)
    return [_Rows(layer) for layer in layers]


class _Rows:
    """One layer's rows of all requests, one after another, without putting them together.

    The downstream only ever takes the slice of one request, ``rows[offset : offset + length]``,
    which is then that request's own tensor; any other slice is put together for it.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts: dict[tuple[int, int], Any] = {}
        offset = 0
        for part in parts:
            self._parts[offset, offset + len(part)] = part
            offset += len(part)
        self._length = offset

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, rows: slice) -> Any:
        part = self._parts.get((rows.start, rows.stop)) if rows.step is None else None
        if part is not None:
            return part
        import torch

        return torch.cat(list(self._parts.values()))[rows]
