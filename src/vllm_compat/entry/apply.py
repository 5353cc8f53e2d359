"""What is in force in this process: ``apply``, ``revert``, ``status`` and the plugin's half.

State belongs to a process id. A forked child inherits the patches of its parent and adopts them; a
spawned one reads the plan from the environment and makes them anew.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from vllm_compat.analysis.plan import Plan, loads
from vllm_compat.errors import IncompatibleError, PatchError, UsageError
from vllm_compat.runtime import env, run_record
from vllm_compat.runtime.patching import Patch, Transaction


@dataclass(frozen=True)
class _Options:
    """What ``apply()`` was asked for."""

    downstream: str
    capture: str
    transfer: str
    canary: bool
    without: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.downstream}, capture={self.capture!r}, transfer={self.transfer!r},"
            f" canary={self.canary}, without={self.without}"
        )


@dataclass
class _State:
    pid: int
    plan: Plan
    transaction: Transaction
    asked: _Options
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
    transfer: str = "auto",
    canary: bool = False,
    without: Collection[str] = (),
) -> Status:
    """Plan from the installed source, then patch this process and open the door for its children.

    Imports neither vLLM nor torch nor the downstream; works before and after they are imported.
    Calling it again changes nothing.

    Args:
        downstream: The distribution to adapt, ``speculators``.
        capture: ``hooks`` for forward hooks on the decoder layers, ``auxiliary`` for the model's own
            auxiliary hidden states, ``auto`` for the first of these that fits, ``stock`` for the
            downstream's own loop.
        transfer: ``auto`` for memory that worker and driver share, ``rpc`` for pickled replies.
        canary: Repeat prompts of the first batch alone and mixed with others, and refuse to go on
            unless their rows agree.
        without: Adapters to leave out although they are needed, to see what they are good for.

    Returns:
        What is in force: ``plan`` with the adapters and the reason of each, ``patches`` one by one,
        ``seconds`` that planning and patching took.

    Raises:
        UsageError: vLLM or the downstream is missing, an option makes no sense, or vllm_compat is
            in force already with other options.
        IncompatibleError: vLLM is too old, the downstream has no in-process generator, a drift has
            no adapter, or ``VLLM_PLUGINS`` keeps us out of vLLM's processes.
        PatchError: A patch did not go in; everything has been taken back.

    Example:
        >>> import vllm_compat
        >>> vllm_compat.apply(canary=True)
        >>> from speculators.data_generation import VllmHiddenStatesGenerator
    """
    global _error
    asked = _Options(downstream, capture, transfer, canary, tuple(sorted(set(without))))
    with _lock:
        if _state is not None and _state.transaction.active:
            _same(_state.asked, asked)
            _state.pid = os.getpid()  # inherited by fork, patches and all
            return status()
        begin = time.perf_counter()
        inherited = env.plan_from_environment(os.environ)
        if inherited is not None:
            plan = loads(inherited)
            _same(_options_of(plan), asked)
            _force(plan, asked, begin)
        else:
            plan = plan_installed(
                downstream=downstream,
                capture=capture,
                transfer=transfer,
                canary=canary,
                without=asked.without,
            )
            plan.refuse()
            shut = env.allow_list_shuts_us_out(os.environ)
            if shut:
                raise IncompatibleError(shut)
            _force(plan, asked, begin)
            try:
                env.publish_plan(plan.dumps())
                run_record.open_for(plan)
            except BaseException:
                revert()
                raise
        _error = None
        return status()


def plan_installed(
    *,
    downstream: str = "speculators",
    capture: str = "auto",
    transfer: str = "auto",
    canary: bool = False,
    without: Collection[str] = (),
) -> Plan:
    """Return the plan for what is installed in this interpreter, changing nothing."""
    from vllm_compat.adapters import make_plan
    from vllm_compat.analysis.environment import CAPTURES
    from vllm_compat.analysis.installed import installed_pair
    from vllm_compat.analysis.surface.syntax import uncollected

    if capture not in CAPTURES:
        raise UsageError(f"capture is {capture!r}; it must be one of {', '.join(CAPTURES)}.")
    if transfer not in ("auto", "rpc"):
        raise UsageError(f"transfer is {transfer!r}; it must be 'auto' or 'rpc'.")
    with uncollected():
        contract, surface, environment = installed_pair(
            downstream, capture=capture, transfer=transfer, canary=canary
        )
        return make_plan(contract, surface, environment, switched_off=without)


def adopt(text: str) -> None:
    """Put the parent's plan in force in this process: the plugin's and the bootstrap's half."""
    with _lock:
        if _state is not None and _state.transaction.active:
            _state.pid = os.getpid()  # inherited by fork, patches and all
            return
        begin = time.perf_counter()
        plan = loads(text)
        if (python := platform.python_version()) != plan.environment.python:
            raise PatchError(
                f"the plan is for Python {plan.environment.python}, this process runs {python}"
            )
        _force(plan, _options_of(plan), begin)


def remember(error: str) -> None:
    """Keep why this process is not patched; the driver asks before the first batch."""
    global _error
    _error = error


def revert() -> Status:
    """Take every patch of this process back and shut the door for later children.

    Without anything in force it changes nothing. Worker processes that run already keep theirs.

    Returns:
        The status after it; ``left`` names patches that others have wrapped over.

    Raises:
        Nothing.

    Example:
        >>> assert not vllm_compat.revert().left
    """
    global _state
    with _lock:
        env.withdraw_plan()
        if _state is None:
            return Status(in_force=False, pid=os.getpid())
        left = _state.transaction.revert()
        _state = None
        return Status(in_force=False, pid=os.getpid(), left=tuple(map(_describe, left)))


def status() -> Status:
    """Say what is in force in this process; change nothing.

    Returns:
        ``in_force`` says whether a plan is; if so, ``plan``, ``patches`` and
        ``seconds`` as ``apply()`` returned them. A patch that waits for its module to be imported
        has the state ``waiting``.

    Raises:
        Nothing.

    Example:
        >>> for patch in vllm_compat.status().patches:
        ...     print(patch.owner, patch.target, patch.state)
    """
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


def report_rank(worker: Any) -> dict[str, Any]:
    """Return what this worker process has in force; runs in the worker, sent by the driver."""
    return {"rank": getattr(worker, "rank", None), "pid": os.getpid(), **report()}


def report() -> dict[str, Any]:
    """Return this process's part of a rank's report: plan digest, patches, error."""
    if _state is None:
        return {"digest": None, "patches": [], "error": _error}
    transaction = _state.transaction
    return {
        "digest": _state.plan.digest if transaction.active else None,
        "patches": [(p.owner, p.target, p.state) for p in transaction.patches],
        "error": transaction.failure or _error or _missed(transaction),
    }


def _missed(transaction: Transaction) -> str | None:
    """Return which patch still waits for a module that is there: another hook has kept it from us."""
    for patch in transaction.patches:
        if patch.state == "waiting" and patch.target.partition(":")[0] in sys.modules:
            return f"{patch.target} was imported past the import hook, so {patch.owner} is not in force"
    return None


def _force(plan: Plan, asked: _Options, begin: float) -> None:
    """Patch, all or nothing; the state is set last."""
    global _state
    from vllm_compat import checks, features
    from vllm_compat.adapters import by_name

    # With a patch that fails later, children must not get the plan either.
    transaction = Transaction(on_failure=env.withdraw_plan)
    try:
        for step in plan.steps:
            by_name(step.adapter).install(transaction.owned_by(step.adapter), plan)
        checks.install(transaction, plan, report_rank)
        features.install(transaction, plan)
    except PatchError:
        transaction.revert()
        raise
    except Exception as error:
        transaction.revert()
        raise PatchError(f"A patch failed, everything has been taken back: {error}") from error
    except BaseException:
        transaction.revert()
        raise
    _state = _State(os.getpid(), plan, transaction, asked, time.perf_counter() - begin)


def _options_of(plan: Plan) -> _Options:
    environment = plan.environment
    return _Options(
        plan.downstream,
        environment.capture,
        environment.transfer,
        environment.canary,
        plan.switched_off,
    )


def _same(held: _Options, asked: _Options) -> None:
    if asked != held:
        raise UsageError(
            f"vllm_compat is in force already with other options ({held}); call revert() first."
        )


def _describe(patch: Patch) -> PatchStatus:
    return PatchStatus(patch.owner, patch.target, patch.state)
