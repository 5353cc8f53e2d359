"""What is in force in this process: ``apply``, ``revert``, ``status`` and the plugin's half.

The process that makes the plan is the *driver*. One that takes a published plan over is a *worker*: of
the adapters, checks and features it has only those that belong there. A spawned worker installs them; a
forked one has inherited all of the driver's and takes back what is the driver's alone. A forked process
that never takes the plan over (of ``datasets.map``) keeps what it has inherited. A worker that turns out
to be another driver, because it builds a generator or a dataset of its own (a program that the launched
program has started), becomes one in that moment.

What is held for a run stands in :mod:`vllm_compat.runtime.run`.
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

from vllm_compat.analysis.environment import MAX_LOSS
from vllm_compat.analysis.knowledge import Knowledge, Word
from vllm_compat.analysis.plan import Plan, loads
from vllm_compat.errors import IncompatibleError, PatchError, UsageError
from vllm_compat.runtime import env, origin, run, run_record
from vllm_compat.runtime.engines import Engines, RankStatus
from vllm_compat.runtime.patching import Patch, Transaction
from vllm_compat.runtime.run import DRIVER, FORKED, WORKER, Run


@dataclass(frozen=True)
class _Options:
    """What ``apply()`` was asked for."""

    downstream: str
    capture: str
    transfer: str
    canary: bool
    max_loss: float
    engine: str
    without: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.downstream}, capture={self.capture!r}, transfer={self.transfer!r},"
            f" canary={self.canary}, max_loss={self.max_loss}, engine={self.engine!r},"
            f" without={self.without}"
        )


@dataclass(frozen=True)
class PatchStatus:
    """One patch: its adapter, feature or check (``check: NAME``), what it changes, and its state."""

    owner: str
    target: str
    state: str


@dataclass(frozen=True)
class Status:
    """What is in force in this process.

    ``in_force`` is False before ``apply()`` and after ``revert()``; ``plan`` is None then.
    ``seconds`` is what planning and patching took. ``left`` are patches that ``revert()`` could not
    take out of the chain because somebody has wrapped over them; they do nothing any more. ``ranks``
    says what ``revert()`` has come to in the workers of each engine that was alive, and in ``status()``
    which of them were busy then and are still patched. ``role`` is
    ``driver``, ``worker``, or ``forked`` for a copy of one of them; ``features`` are those in force.
    ``knowledge`` says whether this pair has been run on such a device, or is judged by its source alone
    (``knowledge.word`` is ``"known"`` or ``"inferred"``).
    """

    in_force: bool
    pid: int
    plan: Plan | None = None
    patches: tuple[PatchStatus, ...] = ()
    left: tuple[PatchStatus, ...] = field(default=())
    seconds: float = 0.0
    ranks: tuple[RankStatus, ...] = ()
    role: str = ""
    features: tuple[str, ...] = ()
    knowledge: Knowledge | None = None


_lock = threading.RLock()

FORK_PATIENCE = 5.0
"""Seconds that a fork waits for another thread to be done with applying or reverting."""

_OWN_DRIVER = "driver of its own"
"""Owner of what lets a worker become a driver."""

_forking = threading.local()
"""Whether the thread that forks holds the lock for it."""


def _before_fork() -> None:
    """Let no child be born with half of the patches; but no fork waits for good.

    The other thread may itself wait for what the forking one holds (an import's lock).
    """
    _forking.held = _lock.acquire(timeout=FORK_PATIENCE)


def _after_fork() -> None:
    if _forking.held:
        _lock.release()


def _in_child() -> None:
    """Take a lock of its own: who held the parent's is not here to let go of it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def apply(
    *,
    downstream: str = "speculators",
    capture: str = "auto",
    transfer: str = "auto",
    canary: bool = False,
    max_loss: float = MAX_LOSS,
    engine: str = "auto",
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
        max_loss: The largest share, 0 to 1, of conversations, of their turns and of their answers that
            may be lost on the way to token ids. Losses are always told.
        engine: ``stock`` for the engine that the downstream builds out of vLLM's internals, fitted by
            adapters; ``public`` for one on vLLM's public interface alone (``vllm.LLM``), which is not
            the downstream's code; ``alone`` for that with one prompt a step, which is slower and asks
            nobody in which order a batch holds its prompts; ``auto`` for the first, and for ``public``
            only where no adapter repairs what the first needs.
        without: Adapters and features to leave out by their names: an adapter although it is needed, to
            see what it is good for; a feature because its change of behaviour is not wanted. With
            ``proofs`` the captured rows are not proven, with ``remote_code`` no code that a model
            brings is run, in any process; the record of the run says so.

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
    left_out = tuple(sorted(set(without)))
    asked = _Options(downstream, capture, transfer, canary, max_loss, engine, left_out)
    with _lock:
        if run.current().in_force:
            _same(run.current().asked, asked)
            return status()
        if (engines := run.current().find(Engines)) is not None:
            engines.ask_again(revert_rank)  # of an ended run: what still runs has its patches
        begin = time.perf_counter()
        inherited = env.plan_from_environment(os.environ)
        if inherited is not None and not _of_elsewhere():
            plan = loads(inherited)
            _same(_options_of(plan), asked)
            _force(plan, asked, begin, WORKER)
        else:
            plan = plan_installed(
                downstream=downstream,
                capture=capture,
                transfer=transfer,
                canary=canary,
                max_loss=max_loss,
                engine=engine,
                without=asked.without,
            )
            plan.refuse()
            shut = env.allow_list_shuts_us_out(os.environ)
            if shut:
                raise IncompatibleError(shut)
            _force(plan, asked, begin, DRIVER)
            try:
                _publish(plan)
                run_record.open_for(plan, of_child=inherited is not None)
                _tell_inferred(plan)
            except BaseException:
                revert()
                raise
        run.current().error = None
        return status()


def _tell_inferred(plan: Plan) -> None:
    """Say on standard error, once, that nobody has run this pair on such a device."""
    found = run_record.knowledge(plan)
    if found.word is not Word.KNOWN:
        proofs = "are NOT proven (proofs left out)" if "proofs" in plan.switched_off else "are proven"
        print(
            f"vllm_compat: {plan.downstream} {plan.downstream_version} on vLLM {plan.vllm} is"
            f" {found.word.value}. {found.sentence} The rows that are captured {proofs}.",
            file=sys.stderr,
            flush=True,
        )


def plan_installed(
    *,
    downstream: str = "speculators",
    capture: str = "auto",
    transfer: str = "auto",
    canary: bool = False,
    max_loss: float = MAX_LOSS,
    engine: str = "auto",
    without: Collection[str] = (),
) -> Plan:
    """Return the plan for what is installed in this interpreter, changing nothing."""
    from vllm_compat import checks, features
    from vllm_compat.adapters import make_plan, registry
    from vllm_compat.analysis.environment import ALONE, CAPTURES, ENGINES, PUBLIC
    from vllm_compat.analysis.installed import installed_pair
    from vllm_compat.analysis.planner import refuse_unknown
    from vllm_compat.analysis.surface.syntax import uncollected

    if capture not in CAPTURES:
        raise UsageError(f"capture is {capture!r}; it must be one of {', '.join(CAPTURES)}.")
    if transfer not in ("auto", "rpc"):
        raise UsageError(f"transfer is {transfer!r}; it must be 'auto' or 'rpc'.")
    if engine not in ENGINES:
        raise UsageError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}.")
    if engine in (PUBLIC, ALONE) and capture == "stock":
        raise UsageError(
            "capture='stock' is the loop of the downstream's own worker, which the second engine"
            f" (engine={engine!r}) does not use: leave one of them out."
        )
    if not 0 <= max_loss <= 1:
        raise UsageError(f"max_loss is {max_loss!r}; it is a share, from 0 to 1.")
    others = (*features.names(), *checks.SWITCHES)
    refuse_unknown(without, registry(), others)
    with uncollected():
        contract, surface, environment = installed_pair(
            downstream,
            capture=capture,
            transfer=transfer,
            canary=canary,
            max_loss=max_loss,
            engine=engine,
        )
        return make_plan(contract, surface, environment, switched_off=without, features=others)


def adopt(text: str) -> None:
    """Put the parent's plan in force in this process: the plugin's and the bootstrap's half."""
    with _lock:
        mine = run.current()
        if mine.in_force:
            if mine.role == FORKED:
                _become_worker(mine)
            return
        begin = time.perf_counter()
        plan = loads(text)
        if elsewhere := _of_elsewhere():
            _plan_anew(_options_of(plan), elsewhere, begin)
            return
        if (python := platform.python_version()) != plan.environment.python:
            raise PatchError(
                f"the plan is for Python {plan.environment.python}, this process runs {python}"
            )
        _force(plan, _options_of(plan), begin, WORKER)


def _publish(plan: Plan) -> None:
    names = (plan.roles.package, "vllm", "transformers")
    env.publish_plan(plan.dumps(), origin.describe(names))


def _of_elsewhere() -> str:
    """Return in words why the published plan is none for this process, or nothing."""
    told = env.origin_of_plan(os.environ)
    return origin.difference(told) if told else ""


def _plan_anew(asked: _Options, elsewhere: str, begin: float) -> None:
    """Put a plan of its own in force in a child that has other packages than its parent.

    Raises:
        IncompatibleError: There is none for them; it is also said on standard error, since whoever
            starts such a process does not look into it.
    """
    try:
        plan = plan_installed(
            downstream=asked.downstream,
            capture=asked.capture,
            transfer=asked.transfer,
            canary=asked.canary,
            max_loss=asked.max_loss,
            engine=asked.engine,
            without=asked.without,
        )
        plan.refuse()
    except UsageError:
        env.withdraw_plan()  # without vLLM or the downstream there is nothing to do here
        raise
    except IncompatibleError as error:
        env.withdraw_plan()
        print(f"vllm_compat: {elsewhere}, so that it is not used here. {error}", file=sys.stderr)
        raise
    _force(plan, asked, begin, WORKER)
    _publish(plan)


def remember(error: str) -> None:
    """Keep why this process is not patched; the driver asks before the first batch."""
    run.current().error = error


def revert() -> Status:
    """Take every patch of this process back and shut the door for later children.

    Without anything in force it changes nothing, but asks those workers once more that were busy when an
    earlier revert asked them. It raises nothing.

    In the driver, the workers of each engine that is alive are asked to take theirs back too, with one
    message and a few seconds to answer it; what came of it is in ``ranks``. The generators of these
    engines refuse further calls, whatever their workers have answered: nobody would check the rows. All
    that was held for the run is forgotten, so that a later ``apply()`` begins as the first one did.

    Returns:
        The status after it; ``left`` names patches that others have wrapped over.

    Example:
        >>> assert not vllm_compat.revert().left
    """
    with _lock:
        env.withdraw_plan()
        mine = run.current()
        engines = mine.find(Engines)
        if mine.transaction is None:
            ranks = engines.ask_again(revert_rank) if engines is not None else ()
            return Status(in_force=False, pid=os.getpid(), ranks=ranks)
        ranks = engines.take_back(revert_rank) if engines is not None else ()
        left = mine.transaction.revert()
        run.end()
        return Status(in_force=False, pid=os.getpid(), left=tuple(map(_describe, left)), ranks=ranks)


def status() -> Status:
    """Say what is in force in this process; change nothing, and raise nothing.

    Returns:
        ``in_force`` says whether a plan is; if so, ``plan``, ``patches`` and
        ``seconds`` as ``apply()`` returned them. A patch that waits for its module to be imported
        has the state ``waiting``. ``ranks`` are those that were busy when a revert asked them and are
        still patched; the next ``revert()`` or ``apply()`` asks them again.

    Example:
        >>> for patch in vllm_compat.status().patches:
        ...     print(patch.owner, patch.target, patch.state)
    """
    with _lock:
        mine = run.current()
        engines = mine.find(Engines)
        busy = engines.busy if engines is not None else ()
        if not mine.in_force:
            return Status(in_force=False, pid=os.getpid(), ranks=busy)
        assert mine.transaction is not None
        return Status(
            in_force=True,
            pid=mine.pid,
            plan=mine.plan,
            patches=tuple(map(_describe, mine.transaction.patches)),
            seconds=mine.seconds,
            role=mine.role,
            features=mine.features,
            knowledge=run_record.knowledge(mine.plan) if mine.plan is not None else None,
            ranks=busy,
        )


def report_rank(worker: Any) -> dict[str, Any]:
    """Return what this worker process has in force; runs in the worker, sent by the driver."""
    with _lock:
        mine = run.current()
        if mine.in_force and mine.role == FORKED:
            _become_worker(mine)  # vLLM loads no plugin in a worker whose parent has loaded them
    return {"rank": getattr(worker, "rank", None), "pid": os.getpid(), **report()}


def revert_rank(worker: Any) -> dict[str, Any]:
    """Take the patches of this worker process back; runs in the worker, sent by the driver."""
    left: list[str] = []
    # An executor without processes of its own runs in the driver, which is none after a revert.
    if run.current().role in (WORKER, FORKED):
        left = [patch.target for patch in revert().left]
    return {"rank": getattr(worker, "rank", None), "pid": os.getpid(), "left": left}


def report() -> dict[str, Any]:
    """Return this process's part of a rank's report: plan digest, patches, error."""
    mine = run.current()
    if mine.transaction is None or mine.plan is None:
        return {"digest": None, "patches": [], "error": mine.error}
    transaction = mine.transaction
    return {
        "digest": mine.plan.digest if transaction.active else None,
        "patches": [(p.owner, p.target, p.state) for p in transaction.patches],
        "error": transaction.failure or mine.error or _missed(transaction),
    }


def _missed(transaction: Transaction) -> str | None:
    """Return which patch still waits for a module that is there: another hook has kept it from us."""
    for patch in transaction.patches:
        if patch.state == "waiting" and patch.target.partition(":")[0] in sys.modules:
            return f"{patch.target} was imported past the import hook, so {patch.owner} is not in force"
    return None


def _force(plan: Plan, asked: _Options, begin: float, role: str) -> None:
    """Patch, all or nothing; the run holds it last."""
    from vllm_compat import features

    if run.current().transaction is not None:
        run.end()  # of a run that a later import has ended
    mine = run.current()
    # With a patch that fails later, children must not get the plan either.
    transaction = Transaction(on_failure=env.withdraw_plan)
    try:
        _install(transaction, plan, role)
    except BaseException as error:
        transaction.revert()
        run.end()
        if isinstance(error, PatchError) or not isinstance(error, Exception):
            raise
        raise PatchError(f"A patch failed, everything has been taken back: {error}") from error
    mine.plan, mine.transaction, mine.asked, mine.role = plan, transaction, asked, role
    mine.features = features.in_force(plan)
    mine.seconds = time.perf_counter() - begin


def _install(transaction: Transaction, plan: Plan, role: str, leave: Collection[str] = ()) -> None:
    """Enlist what belongs to a process of this role; ``leave`` is in force already."""
    from vllm_compat import checks, features
    from vllm_compat.adapters import by_name
    from vllm_compat.checks import remote_code

    if remote_code.OWNER not in leave:
        remote_code.install(transaction, plan)
    for step in plan.steps:
        adapter = by_name(step.adapter)  # one that is not known here is told in every process
        if role in step.processes and step.adapter not in leave:
            adapter.install(transaction.owned_by(step.adapter), plan)
    features.install(transaction, plan, role, leave, beneath_checks=True)
    if role == DRIVER:
        checks.install(transaction, plan, report_rank)
    features.install(transaction, plan, role, leave, beneath_checks=False)
    if role == WORKER and _OWN_DRIVER not in leave:
        _let_it_drive(transaction.owned_by(_OWN_DRIVER), plan)


def _become_worker(mine: Run) -> None:
    """Take back what is the driver's alone: this process is its copy, and has taken its plan over.

    Features go all, and come back as a worker has them: one of both may do more in the driver.
    """
    assert mine.transaction is not None
    assert mine.plan is not None
    from vllm_compat.checks import remote_code

    stay = {step.adapter for step in mine.plan.steps if WORKER in step.processes}
    stay |= {_OWN_DRIVER, remote_code.OWNER}
    patches = mine.transaction.patches
    mine.transaction.take_back([patch for patch in patches if patch.owner not in stay])
    leave = {patch.owner for patch in patches if patch.owner in stay}
    _install(mine.transaction, mine.plan, WORKER, leave)
    mine.role = WORKER


def _let_it_drive(transaction: Transaction, plan: Plan) -> None:
    """Let this worker become a driver when it builds a generator, or a dataset for step 1."""
    from vllm_compat.analysis.facts import preprocessing_of

    def wrap(target: str) -> None:
        module, _, path = target.partition(":")

        def first(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not _drive():
                return wrapped(*args, **kwargs)
            # What has just been put around it must see this very call.
            found: Any = sys.modules[module]
            for part in path.split("."):
                found = getattr(found, part)
            return found(*args, **kwargs) if instance is None else found(instance, *args, **kwargs)

        transaction.wrap(target, first)

    if plan.roles.generator:
        wrap(f"{plan.roles.generator}.__init__")
    if (place := preprocessing_of(plan.environment)) is not None:
        wrap(place.dataset)


def _drive() -> bool:
    """Make this worker a driver; return whether it was none."""
    with _lock:
        mine = run.current()
        if mine.role not in (WORKER, FORKED) or mine.transaction is None or mine.plan is None:
            return False
        mine.role = DRIVER
        _install(
            mine.transaction, mine.plan, DRIVER, {patch.owner for patch in mine.transaction.patches}
        )
        return True


def _options_of(plan: Plan) -> _Options:
    environment = plan.environment
    return _Options(
        plan.downstream,
        environment.capture,
        environment.transfer,
        environment.canary,
        environment.max_loss,
        environment.engine,
        plan.switched_off,
    )


def _same(held: _Options, asked: _Options) -> None:
    if asked != held:
        raise UsageError(
            f"vllm_compat is in force already with other options ({held}); call revert() first."
        )


def _describe(patch: Patch) -> PatchStatus:
    return PatchStatus(patch.owner, patch.target, patch.state)
