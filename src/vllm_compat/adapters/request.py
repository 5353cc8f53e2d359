"""``vllm.v1.request``: building requests by hand."""

from __future__ import annotations

from typing import Any

from vllm_compat.adapters.base import DropsKeyword
from vllm_compat.runtime.context import current_call


class EosTokenId(DropsKeyword):
    """Drop ``eos_token_id`` from ``Request``."""

    name = "request.eos_token_id"
    order = 710
    derived = True
    targets = ("vllm.v1.request:Request.__init__",)
    symbol = "vllm.v1.request.Request"
    keyword = "eos_token_id"
    reason = "Request takes no eos_token_id; it is dropped"
    vllm = ">=0.17.0"
    downstream = "<0.5"
    excluded_by = ("engine.public",)
    changed = "0.17.0 (and nightlies of 0.16) moved the id into the sampling parameters (vllm#34435)."
    pull_requests = ("vllm#34435",)
    relies = "Passes eos_token_id=tokenizer.eos_token_id."
    does = "Drops it in the downstream's own calls: a request of one token stops by its length."
    until = "no supported downstream passes it."
    shown_by = "llama, speculators 0.4.0.1, vLLM 0.17.1: unexpected keyword argument"

    def is_ours(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return current_call() is not None
