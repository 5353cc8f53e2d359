"""``vllm.v1.request``: building requests by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_compat.adapters.base import Adapter, Case, Need, lacks
from vllm_compat.drift import FindingKind

if TYPE_CHECKING:
    from vllm_compat.patching import Transaction
    from vllm_compat.plan import Plan

REQUEST = "vllm.v1.request.Request"


class EosTokenId(Adapter):
    """Drop ``eos_token_id`` from ``Request``."""

    name = "request.eos_token_id"
    derived = True
    target = "vllm.v1.request.Request.__init__"
    vllm = ">=0.17.0"
    downstream = "<0.5"
    changed = "0.17.0 (and nightlies of 0.16) moved the id into the sampling parameters (vllm#34435)."
    relies = "Passes eos_token_id=tokenizer.eos_token_id."
    does = "Drops it: a request of one token stops by its length."
    until = "no supported downstream passes it."
    shown_by = "llama, speculators 0.4.0.1, vLLM 0.17.1: unexpected keyword argument"

    def need(self, case: Case) -> Need | None:
        found = case.found(FindingKind.PARAMETER_REMOVED, REQUEST, "eos_token_id")
        if not found:
            return None
        return Need("Request takes no eos_token_id; it is dropped", found)

    def install(self, transaction: Transaction, plan: Plan) -> None:
        def drop(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kwargs.pop("eos_token_id", None)
            return wrapped(*args, **kwargs)

        transaction.wrap("vllm.v1.request:Request.__init__", drop, confirm=lacks("eos_token_id"))
