"""What is in force in this process: ``apply``, ``revert``, ``status`` and the plugin's half.

State belongs to a process id. A forked child inherits the patches of its parent and adopts them; a
spawned one reads the plan from the environment and makes them anew.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from vllm_compat import doors
from vllm_compat.errors import IncompatibleError, PatchError, UsageError
from vllm_compat.patching import Patch, Transaction
from vllm_compat.plan import Plan, loads


@dataclass
class _State:
    pid: int
    plan: Plan
    transaction: Transaction
    seconds: float = 0.0


@dataclass(frozen=True)
class PatchStatus:
    """One patch: its adapter or guard, what it changes, and its state."""

    owner: str
    target: str
    state: str


@dataclass(frozen=True)
class Status:
    """What is in force in this process.

    ``in_force`` is False before ``apply()`` and after ``revert()``; ``plan`` is None then.
    ``seconds`` is what planning and patching took. ``left`` are patches that ``revert()`` could not
    take out of the chain because somebody has wrapped over them; they do nothing any more.
    """

    in_force: bool
    pid: int
    plan: Plan | None = None
    patches: tuple[PatchStatus, ...] = ()
    left: tuple[PatchStatus, ...] = field(default=())
    seconds: float = 0.0


_lock = threading.RLock()
_state: _State | None = None
_error: str | None = None


def apply(
    *,
    downstream: str = "speculators",
    capture: str = "auto",
    without: Collection[str] = (),
) -> Status:
    """Plan from the installed source, then patch this process and open the door for its children.

    Imports neither vLLM nor torch nor the downstream; works before and after they are imported.
    Calling it again changes nothing.

    Args:
        downstream: The distribution to adapt, ``speculators``.
        capture: ``auto`` or ``hooks`` for forward hooks, ``stock`` for the downstream's own loop.
        without: Adapters to leave out although they are needed, to see what they are good for.

    Returns:
        What is in force.

    Raises:
        UsageError: vLLM or the downstream is missing, too old, or without in-process generator.
        IncompatibleError: A drift has no adapter.
        PatchError: A patch did not go in; everything has been taken back.
    """
    global _state, _error
    with _lock:
        if _state is not None and _state.pid == os.getpid() and _state.transaction.active:
            _same(_state.plan, downstream, capture, without)
            return status()
        inherited = doors.plan_from_environment(os.environ)
        begin = time.perf_counter()
        if inherited is not None:
            plan = loads(inherited)
        else:
            plan = plan_installed(downstream=downstream, capture=capture, without=without)
            plan.refuse()
            shut = doors.allow_list_shuts_us_out(os.environ)
            if shut:
                raise IncompatibleError(shut)
        _force(plan, begin)
        _error = None
        if inherited is None:
            doors.publish_plan(plan.dumps())
        return status()


def plan_installed(
    *, downstream: str = "speculators", capture: str = "auto", without: Collection[str] = ()
) -> Plan:
    """Return the plan for what is installed in this interpreter, changing nothing."""
    from vllm_compat.pair import installed_pair
    from vllm_compat.plan import make_plan

    if capture not in ("auto", "hooks", "stock"):
        raise UsageError(f"capture is {capture!r}; it must be 'auto', 'hooks' or 'stock'.")
    contract, surface, environment = installed_pair(downstream, capture=capture)
    return make_plan(contract, surface, environment, switched_off=without)


def adopt(text: str) -> None:
    """Put the parent's plan in force in this process: the plugin's and the bootstrap's half."""
    with _lock:
        if _state is not None and _state.transaction.active:
            _state.pid = os.getpid()  # inherited by fork, patches and all
            return
        _force(loads(text), time.perf_counter())


def remember(error: str) -> None:
    """Keep why this process is not patched; the driver asks before the first batch."""
    global _error
    _error = error


def revert() -> Status:
    """Take every patch of this process back and shut the door for later children.

    Returns:
        The status after it; ``left`` names patches that others have wrapped over.
    """
    global _state
    with _lock:
        doors.withdraw_plan()
        if _state is None:
            return Status(in_force=False, pid=os.getpid())
        left = _state.transaction.revert()
        _state = None
        return Status(in_force=False, pid=os.getpid(), left=tuple(map(_describe, left)))


def status() -> Status:
    """Return what is in force in this process."""
    with _lock:
        if _state is None or not _state.transaction.active:
            return Status(in_force=False, pid=os.getpid())
        return Status(
            in_force=True,
            pid=os.getpid(),
            plan=_state.plan,
            patches=tuple(map(_describe, _state.transaction.patches)),
            seconds=_state.seconds,
        )


def report() -> dict[str, Any]:
    """Return this process's part of a rank's report: plan digest, patches, error."""
    if _state is None:
        return {"digest": None, "patches": [], "error": _error}
    transaction = _state.transaction
    return {
        "digest": _state.plan.digest if transaction.active else None,
        "patches": [(p.owner, p.target, p.state) for p in transaction.patches],
        "error": transaction.failure or _error,
    }


def _force(plan: Plan, begin: float) -> None:
    """Patch, all or nothing; the state is set last."""
    global _state
    from vllm_compat import guards
    from vllm_compat.adapters import by_name

    transaction = Transaction()
    try:
        for step in plan.steps:
            by_name(step.adapter).install(transaction.owned_by(step.adapter), plan)
        guards.install(transaction, plan)
    except PatchError:
        transaction.revert()
        raise
    except Exception as error:
        transaction.revert()
        raise PatchError(f"A patch failed, everything has been taken back: {error}") from error
    _state = _State(os.getpid(), plan, transaction, time.perf_counter() - begin)


def _same(plan: Plan, downstream: str, capture: str, without: Collection[str]) -> None:
    asked = (downstream, tuple(sorted(without)))
    if asked != (plan.downstream, plan.switched_off) or capture != plan.environment.capture:
        raise UsageError(
            "vllm_compat is in force already with other options"
            f" ({plan.downstream}, capture={plan.environment.capture!r},"
            f" without={plan.switched_off}); call revert() first."
        )


def _describe(patch: Patch) -> PatchStatus:
    return PatchStatus(patch.owner, patch.target, patch.state)
