"""What a run has extracted so far, and the record that the launcher reads at its end.

Only a driver keeps an account: the process that made the plan, and any that builds a generator or a
dataset, be it a child of the program's process or a copy of it. Nothing is written without the launcher
(:func:`vllm_compat.runtime.env.write_record`), which sums over all of them.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_compat.runtime import env, heartbeat, run

if TYPE_CHECKING:
    from vllm_compat.analysis.knowledge import Knowledge
    from vllm_compat.analysis.plan import Plan

SCHEMA_VERSION = 1
WRITE_EVERY = 10.0
"""Seconds between two writings of the record while a run extracts."""


@dataclass
class Account:
    """What one run has extracted so far."""

    plan: Plan
    of_child: bool = False
    opened: float = field(default_factory=time.monotonic)
    calls: int = 0
    samples: int = 0
    tokens: int = 0
    timed_tokens: int = 0  # those of all calls but the first, which only starts the clock
    from_files: int = 0
    left_out: list[int] = field(default_factory=list)
    bad_sample: int | None = None  # the file's number of the one that the run could not do
    layers: int = 0
    width: int = 0
    dtype: str = ""
    first: float = 0.0
    last: float = 0.0
    written: float = 0.0
    failure: str = ""
    notes: list[str] = field(default_factory=list)
    failing: bool = False  # the last generate() call has failed
    saved: int = 0
    saving_failure: str = ""
    transfer: dict[str, Any] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock, repr=False)  # samples are saved in threads

    def end(self) -> None:
        """Write the record for the last time."""
        atexit.unregister(write)
        write()


def open_for(plan: Plan, *, of_child: bool = False) -> None:
    """Begin the account of a run; it is written when this process ends."""
    atexit.unregister(write)
    run.current().hold(Account(plan, of_child))
    write()
    atexit.register(write)
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing import util

        util.Finalize(None, write, exitpriority=100)  # a forked one ends without `atexit`


def knowledge(plan: Plan) -> Knowledge:
    """Return whether a plan's pair has been run on such a device, or is judged by its source alone."""
    from vllm_compat.analysis.environment import compute_capabilities
    from vllm_compat.analysis.knowledge import knowledge_of

    device = plan.environment.device
    return knowledge_of(
        plan.downstream,
        plan.downstream_version,
        plan.vllm,
        device,
        capabilities=compute_capabilities() if device == "cuda" else (),
    )


@heartbeat.only_told
def open_here() -> None:
    """Begin an account where a generator or a dataset is built, if this process keeps none yet.

    What protects and counts the samples asks for it (:func:`is_ours`), so that it is in force where they
    are made, whichever process has made the plan.
    """
    mine = run.current()
    if mine.plan is not None and mine.find(Account) is None:
        open_for(mine.plan, of_child=True)
        heartbeat.note(role="program")  # the one whose progress is that of the run


def is_ours() -> bool:
    """Whether this process is the driver, which keeps the account."""
    return _ours() is not None


def _ours() -> Account | None:
    """Return the account where this process keeps it; a forked child of the driver keeps none."""
    return run.current().find(Account)


@heartbeat.only_told
def add(results: Sequence[Mapping[str, Any]]) -> None:
    """Add one checked batch."""
    account = _ours()
    if account is None or not results:
        return
    now = time.monotonic()
    account.first = account.first or now
    account.last = now
    account.calls += 1
    account.failing = False
    account.samples += len(results)
    tokens = sum(len(result["input_ids"]) for result in results)
    account.tokens += tokens
    if account.calls > 1:
        account.timed_tokens += tokens
    states = results[0]["hidden_states"]
    account.layers, account.width = len(states), int(states[0].shape[1])
    account.dtype = str(states[0].dtype)
    heartbeat.note(
        samples=samples_so_far(),
        tokens=account.tokens,
        tokens_per_second=_speed(account),
        calls=account.calls,
        extracting_seconds=round(now - account.first, 2),
    )
    if account.of_child or now - account.written > WRITE_EVERY:
        write()


def samples_so_far() -> int:
    """Return how many samples this process has given back: computed, from files, left out."""
    account = _ours()
    return account.samples + account.from_files + len(account.left_out) if account is not None else 0


@heartbeat.only_told
def tell_transfer(how: str, reason: str = "") -> None:
    """Note how rows leave the worker: ``shared memory`` or ``replies``, and why not otherwise."""
    account = _ours()
    if account is not None:
        account.transfer = {"how": how, "reason": reason or None}


def _transfer(account: Account) -> dict[str, Any]:
    if not account.transfer:
        reason = "the executor is not vLLM's MultiprocExecutor"
        if account.plan.environment.transfer == "rpc":
            reason = "asked for"
        elif not account.plan.captures_by_request:
            reason = "the downstream's own capture is in force"
        return {"how": "replies", "reason": reason}
    return {**account.transfer, **_facts("transfer")}


def _facts(section: str) -> dict[str, Any]:
    """Return what the parts of this run have to tell for one section of the record."""
    found: dict[str, Any] = {}
    for part in list(run.current().parts.values()):
        if getattr(part, "section", None) == section:
            found.update(part.facts())
    return found


@heartbeat.only_told
def note(sentence: str) -> None:
    """Add to the verdict what was seen of the data."""
    account = _ours()
    if account is not None:
        account.notes.append(sentence)


@heartbeat.only_told
def add_from_files(count: int) -> None:
    """Add samples that were not computed: their whole files were there."""
    account = _ours()
    if account is not None:
        account.from_files += count
        heartbeat.note(samples=samples_so_far())


@heartbeat.only_told
def leave_out(numbers: Sequence[int]) -> None:
    """Add samples that were left out on request, by the numbers of their files."""
    account = _ours()
    if account is not None:
        account.left_out += numbers
        heartbeat.note(samples=samples_so_far())


@heartbeat.only_told
def blame(number: int) -> None:
    """Note which sample, by the number of its file, the run cannot do; the first stays."""
    account = _ours()
    if account is not None and account.bad_sample is None:
        account.bad_sample = number


@heartbeat.only_told
def saved(path: str) -> None:
    """Count a sample that has been written."""
    account = _ours()
    if account is not None:
        with account.lock:
            account.saved += 1
        if account.of_child and time.monotonic() - account.written > 1.0:
            write()  # a forked child may end without a word


@heartbeat.only_told
def fail(cause: str) -> None:
    """Note why building or a ``generate()`` call has failed; the first cause stays."""
    account = _ours()
    if account is None:
        return
    account.failing = True
    if not account.failure:
        account.failure = cause
    write()


@heartbeat.only_told
def fail_saving(cause: str) -> None:
    """Note that a sample could not be saved: the run has failed, whatever its status says."""
    account = _ours()
    if account is None:
        return
    account.saving_failure = account.saving_failure or cause
    account.failure = account.failure or cause
    write()


@heartbeat.only_told
def recover_saving() -> None:
    """Note that the sample that could not be saved has been saved after all."""
    account = _ours()
    if account is None:
        return
    if account.failure == account.saving_failure:
        account.failure = ""
    account.saving_failure = ""
    write()


def summary() -> str:
    """Return what was extracted, in which shape, checked; or what went wrong first."""
    account = _ours()
    if account is not None and account.failure:
        cause = account.failure.rstrip(".")
        return f"First cause: {cause}. Before it: {_extracted(account)}."
    extracted = _extracted(account) if account is not None else "no hidden states were extracted"
    return f"{extracted[:1].upper()}{extracted[1:]}."


def _extracted(account: Account) -> str:
    kept = f"{account.from_files} samples taken from their whole files" if account.from_files else ""
    if account.left_out:
        kept += f"{'; ' if kept else ''}{len(account.left_out)} left out on request"
        kept += (
            f" ({', '.join(map(str, account.left_out[:10]))}{', …' if account.left_out[10:] else ''})"
        )
    if not account.samples:
        return kept or "no hidden states were extracted"
    rate = _speed(account)
    speed = f", {rate:.0f} tokens/s" if rate else ""
    return (
        f"{account.samples} samples ({account.tokens} tokens), {account.layers} layers of [tokens,"
        f" {account.width}] in {account.dtype}{speed}; rows, order and values checked"
        + (", residual stream NOT proven (proofs left out)" if _unproven(account.plan) else "")
        + (", served by the second engine (vLLM's public interface)" if account.plan.is_public else "")
        + (", remote code refused" if "remote_code" in account.plan.switched_off else "")
        + "".join(f", {sentence}" for sentence in account.notes)
        + (f"; {account.saved} files saved" if account.saved else "")
        + (f"; {kept}" if kept else "")
    )


def _unproven(plan: Plan) -> bool:
    """Whether the user has left out the proofs of what workers capture."""
    return "proofs" in plan.switched_off


def _speed(account: Account) -> float:
    """Return tokens a second, 0 where there was nothing to measure."""
    seconds = account.last - account.first
    return account.timed_tokens / seconds if seconds > 0 else 0.0


def write() -> None:
    """Write the record where the launcher wants one; where that fails, tell it by another way."""
    account = _ours()
    if account is None:
        return
    try:
        with account.lock:
            account.written = time.monotonic()
            env.write_record(_as_record(account), of_child=account.of_child)
    except Exception as error:
        heartbeat.complain("write", error)
        heartbeat.note(record_error=heartbeat.describe(error), record_failed=_has_failed(account))


def _has_failed(account: Account) -> bool:
    # A program may catch the error of a call and go on; not so where it was the last one.
    return account.failing or bool(account.saving_failure)


def _as_record(account: Account) -> dict[str, Any]:
    plan = account.plan
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "run",
        "opened": account.opened,
        "written": account.written,
        "summary": summary(),
        "downstream": f"{plan.downstream} {plan.downstream_version}",
        "vllm": plan.vllm,
        "knowledge": knowledge(plan).as_record(),
        "plan": plan.digest,
        "adapters": {step.adapter: step.reason for step in plan.steps},
        "features": list(run.current().features),
        "switched_off": list(plan.switched_off),
        "samples": account.samples,
        "tokens": account.tokens,
        "calls": account.calls,
        "saved": account.saved,
        "from_files": account.from_files,
        "left_out": account.left_out,
        "bad_sample": account.bad_sample,
        "transfer": _transfer(account),
        "saving": _facts("saving") or None,
        "failure": account.failure or None,
        "extracted": _extracted(account),
        "failed": _has_failed(account),
    }
