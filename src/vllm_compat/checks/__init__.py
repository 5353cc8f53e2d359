"""Checks: what must hold of processes and data, always. They look, and change nothing.

They are in force with every plan and are never switched off for an ablation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction

SAMPLE_TOKENS = "vllm.v1.executor.multiproc_executor.MultiprocExecutor.sample_tokens"


def install(transaction: Transaction, plan: Plan, report_rank: Callable[[Any], dict[str, Any]]) -> None:
    """Enlist the checks of a plan. Call it after the adapters, so that checks see what they did.

    ``report_rank`` runs in each worker and returns what is in force there.
    """
    from vllm_compat.analysis.environment import preprocessing_of
    from vllm_compat.checks import batch, dataset, ranks

    transaction.owned_by("guard")
    module, _, cls = plan.roles.generator.partition(":")
    transaction.wrap(f"{module}:{cls}.__init__", batch.while_building(plan))
    transaction.wrap(
        f"{module}:{cls}.generate",
        batch.checked_generate(
            everything="worker.capture" not in plan.adapters, canary=plan.environment.canary
        ),
    )
    transaction.wrap("vllm.v1.core.sched.scheduler:Scheduler.add_request", batch.book_request)
    if (place := preprocessing_of(plan.environment)) is not None:
        dataset.install(transaction, place)
    executor = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"
    if SAMPLE_TOKENS in plan.guarded:
        transaction.wrap(f"{executor}.sample_tokens", batch.grammar_or_none)
    transaction.wrap(f"{executor}.__init__", ranks.compared(plan, report_rank))
