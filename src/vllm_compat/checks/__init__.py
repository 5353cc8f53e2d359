"""Checks: what must hold of processes and data, always. They look, and change nothing.

They are in force with every plan and are never switched off for an ablation. One can be left out by a
user who must (`SWITCHES`), and the record of the run says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction

SAMPLE_TOKENS = "vllm.v1.executor.multiproc_executor.MultiprocExecutor.sample_tokens"


SWITCHES = ("proofs", "remote_code")
"""What `apply(without=…)` takes besides adapters and features: the proofs of what workers capture, and
the code that models bring."""


def install(transaction: Transaction, plan: Plan, report_rank: Callable[[Any], dict[str, Any]]) -> None:
    """Enlist the checks of a plan. Call it after the adapters, so that checks see what they did.

    All of them belong to the driver: it builds the generator, adds the requests and asks the workers.
    ``report_rank`` runs in each worker and returns what is in force there.
    """
    from vllm_compat.analysis.facts import preprocessing_of
    from vllm_compat.checks import batch, dataset, ranks

    of_batch = transaction.owned_by("check: batch")
    module, _, cls = plan.roles.generator.partition(":")
    of_batch.wrap(f"{module}:{cls}.__init__", batch.while_building(plan))
    of_batch.wrap(
        f"{module}:{cls}.generate",
        batch.checked_generate(everything=not plan.captures_by_request, canary=plan.environment.canary),
    )
    if (place := preprocessing_of(plan.environment)) is not None:
        dataset.install(
            transaction.owned_by("check: dataset"), place, max_loss=plan.environment.max_loss
        )
    of_ranks = transaction.owned_by("check: ranks")
    if plan.is_public:  # it books its requests itself, and none of vLLM's internals are in the way
        of_ranks.wrap(
            "vllm_compat.engine.driver:PublicExecutor.__init__",
            ranks.compared_in_public(plan, report_rank),
        )
        return
    of_batch.wrap("vllm.v1.core.sched.scheduler:Scheduler.add_request", batch.book_request)
    executor = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"
    if SAMPLE_TOKENS in plan.guarded:
        of_batch.wrap(f"{executor}.sample_tokens", batch.grammar_or_none)
    of_ranks.wrap(f"{executor}.__init__", ranks.compared(plan, report_rank))
