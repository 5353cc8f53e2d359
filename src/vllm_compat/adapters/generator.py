"""The downstream's generator: results in the order of the inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_compat.adapters.base import Adapter, Case, Need
from vllm_compat.errors import GuardError
from vllm_compat.runtime.context import current_call

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction


class InputOrder(Adapter):
    """Put the results back into the order of the inputs."""

    name = "generator.input_order"
    order = 410
    targets = ("{generator}.generate",)
    vllm = ">=0.11.0"
    downstream = ">=0.4,<0.5"
    excluded_by = ("engine.public",)
    changed = "Nothing: a fault of the downstream on every vLLM (speculators#365)."
    pull_requests = ("speculators#365",)
    relies = (
        "Builds the results in the order of sorted(request ids), as text: req_0_10 stands before"
        " req_0_2, so from 11 prompts on results and inputs no longer pair up."
    )
    does = "Moves each result to the place of the prompt whose request it belongs to."
    until = "the downstream keeps the order."
    stock_starts_without = True
    shown_by = "llama, speculators 0.4.0.1, vLLM 0.16.0, 13 prompts: lengths 1, 2, 11, 12, 13, 3, …"

    def need(self, case: Case) -> Need | None:
        sites = [
            site
            for site in case.contract.others("sorted")
            if site.module == case.roles.generator_module and site.within.endswith(".generate")
        ]
        if not sites:
            return None
        return Need(f"{sites[0].where} builds the results in the order of sorted request ids")

    def install(self, transaction: Transaction, plan: Plan) -> None:
        def reorder(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            results = wrapped(*args, **kwargs)
            call = current_call()
            if call is None or len(results) != len(call.prompts):
                raise GuardError(
                    f"generate() returned {len(results)} results for"
                    f" {len(call.prompts) if call else 'unknown'} requests."
                )
            place = {request_id: i for i, request_id in enumerate(call.prompts)}
            ordered: list[Any] = [None] * len(results)
            for request_id, result in zip(sorted(call.prompts), results, strict=True):
                ordered[place[request_id]] = result
            return ordered

        (target,) = self.targets_of(plan)
        transaction.wrap(target, reorder)
