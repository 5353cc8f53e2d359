"""Features: changes of behaviour that no drift asks for, so that nothing is lost in a long run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction


def install(transaction: Transaction, plan: Plan) -> None:
    """Enlist the features. Call it after the checks: what comes before a batch comes before all."""
    from vllm_compat.features import atomic_save, resume_samples
    from vllm_compat.runtime import env, heartbeat

    transaction.owned_by("guard")
    module, _, cls = plan.roles.generator.partition(":")
    transaction.wrap(f"{module}:{cls}.generate", _before_a_batch)
    atomic_save.install(transaction)
    heartbeat.install(transaction)
    told = env.resume_notes()
    if told is not None:
        resume_samples.install(transaction, plan, told)


def _before_a_batch(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse a batch that could not be saved, and let it wait while too much waits to be saved."""
    from vllm_compat.features import atomic_save, save_backlog

    atomic_save.refuse_after_failure()
    if save_backlog.wait_for_saves():
        atomic_save.refuse_after_failure()
    return wrapped(*args, **kwargs)
