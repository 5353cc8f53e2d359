"""Features: changes of behaviour that no drift asks for, so that nothing is lost in a long run.

Each is an object with a header (:class:`vllm_compat.features.base.Feature`), stands in the register and
in ``status()`` under its name, and can be left out by it (``apply(without=…)``).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.features.base import Feature
    from vllm_compat.runtime.patching import Transaction


@cache
def registry() -> tuple[Feature, ...]:
    """Return all features, in the order in which they are put in.

    What comes later stands around what comes earlier: a kept sample is answered before anything waits,
    and after the wait a batch that could not be saved is refused. What is left out, nothing else sees.
    """
    from vllm_compat.features.atomic_save import AtomicSave
    from vllm_compat.features.clean_scheduler import CleanScheduler
    from vllm_compat.features.end_orphans import EndOrphans
    from vllm_compat.features.leave_out import LeaveOut
    from vllm_compat.features.progress import Progress
    from vllm_compat.features.resume_samples import ResumeSamples
    from vllm_compat.features.save_backlog import SaveBacklog
    from vllm_compat.features.shut_down import ShutDown

    inner = CleanScheduler(), ShutDown(), EndOrphans(), AtomicSave(), SaveBacklog()
    return *inner, Progress(), ResumeSamples(), LeaveOut()


def names() -> tuple[str, ...]:
    """Return the names of all features."""
    return tuple(feature.name for feature in registry())


def install(
    transaction: Transaction,
    plan: Plan,
    role: str,
    leave: Collection[str] = (),
    *,
    beneath_checks: bool,
) -> None:
    """Enlist the features of a plan that belong to a process of this role, beneath the checks or not.

    Call it before the checks for those beneath them, and after them for the others: what comes before a
    batch comes before all. ``leave`` names features that are in force already.
    """
    for feature in registry():
        if feature.beneath_checks is not beneath_checks or feature.name in leave:
            continue
        if role in feature.processes and _is_on(feature, plan):
            feature.install(transaction.owned_by(feature.name), plan, role)


def in_force(plan: Plan) -> tuple[str, ...]:
    """Return the names of the features that are in force with a plan, in one of its processes."""
    return tuple(feature.name for feature in registry() if _is_on(feature, plan))


def _is_on(feature: Feature, plan: Plan) -> bool:
    return feature.name not in plan.switched_off and feature.applies(plan)
