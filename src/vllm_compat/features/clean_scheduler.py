"""What a batch leaves in the scheduler is taken out when it ends, whole or failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_compat.features.base import Feature
from vllm_compat.runtime import context

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction


class CleanScheduler(Feature):
    """End the requests of a batch with the batch."""

    name = "clean_scheduler"
    does = (
        "When a generate() call ends, whole or with an error, ends those of its requests that are still"
        " in the scheduler (those of the canary's batches too)."
    )
    why = (
        "A batch that fails leaves its requests running: the next batch of the same generator computes"
        " them too, and fails over ids that it does not know, or gets no room."
    )
    targets = ("VllmHiddenStatesGenerator.generate",)
    beneath_checks = True

    def applies(self, plan: Plan) -> bool:
        """Whether the downstream has a scheduler of its own."""
        return bool(plan.roles.generator) and not plan.is_public

    def install(self, transaction: Transaction, plan: Plan, role: str) -> None:
        """Enlist the wrapper of ``generate``; it is beneath the check that keeps the batch's book."""
        module, _, cls = plan.roles.generator.partition(":")
        transaction.wrap(f"{module}:{cls}.generate", _generate)


def _generate(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return wrapped(*args, **kwargs)
    finally:
        call = context.current_call()
        if call is not None and call.generator is instance:
            from vllm.v1.request import RequestStatus

            call.over = True
            instance.scheduler.finish_requests(list(call.prompts), RequestStatus.FINISHED_ABORTED)
