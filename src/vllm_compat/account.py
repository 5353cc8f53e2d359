"""What a run has extracted so far, and the record that the launcher reads at its end.

Only the driver keeps an account: the process that made the plan. Nothing is written without the
launcher (:func:`vllm_compat.doors.write_record`).
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_compat import doors

if TYPE_CHECKING:
    from vllm_compat.plan import Plan

SCHEMA_VERSION = 1
WRITE_EVERY = 10.0
"""Seconds between two writings of the record while a run extracts."""


@dataclass
class _Account:
    pid: int
    plan: Plan
    calls: int = 0
    samples: int = 0
    tokens: int = 0
    timed_tokens: int = 0  # those of all calls but the first, which only starts the clock
    layers: int = 0
    width: int = 0
    dtype: str = ""
    first: float = 0.0
    last: float = 0.0
    written: float = 0.0
    failure: str = ""
    notes: list[str] = field(default_factory=list)


_account: _Account | None = None


def open_for(plan: Plan) -> None:
    """Begin the account of a run; it is written when this process ends."""
    global _account
    fresh = _account is None
    _account = _Account(os.getpid(), plan)
    write()
    if fresh:
        atexit.register(write)


def add(results: Sequence[Mapping[str, Any]]) -> None:
    """Add one checked batch."""
    account = _account
    if account is None or account.pid != os.getpid() or not results:
        return
    now = time.monotonic()
    account.first = account.first or now
    account.last = now
    account.calls += 1
    account.samples += len(results)
    tokens = sum(len(result["input_ids"]) for result in results)
    account.tokens += tokens
    if account.calls > 1:
        account.timed_tokens += tokens
    states = results[0]["hidden_states"]
    account.layers, account.width = len(states), int(states[0].shape[1])
    account.dtype = str(states[0].dtype)
    if now - account.written > WRITE_EVERY:
        write()


def note(sentence: str) -> None:
    """Add to the verdict what was seen of the data."""
    account = _account
    if account is not None and account.pid == os.getpid():
        account.notes.append(sentence)


def fail(cause: str) -> None:
    """Note why a ``generate()`` call has failed; the first cause stays."""
    account = _account
    if account is not None and account.pid == os.getpid() and not account.failure:
        account.failure = cause
        write()


def summary() -> str:
    """Return what was extracted, in which shape, checked; or what went wrong first."""
    account = _account
    if account is not None and account.failure:
        return f"First cause: {account.failure} Before it: {_extracted(account)}."
    return f"{_extracted(account)}." if account else "No hidden states were extracted."


def _extracted(account: _Account) -> str:
    if not account.samples:
        return "no hidden states were extracted"
    seconds = account.last - account.first
    speed = f", {account.timed_tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
    return (
        f"{account.samples} samples ({account.tokens} tokens), {account.layers} layers of [tokens,"
        f" {account.width}] in {account.dtype}{speed}; rows, order and values checked"
        + "".join(f", {sentence}" for sentence in account.notes)
    )


def write() -> None:
    """Write the record where the launcher wants one."""
    account = _account
    if account is None or account.pid != os.getpid():
        return
    account.written = time.monotonic()
    plan = account.plan
    doors.write_record(
        {
            "schema_version": SCHEMA_VERSION,
            "kind": "run",
            "summary": summary(),
            "downstream": f"{plan.downstream} {plan.downstream_version}",
            "vllm": plan.vllm,
            "plan": plan.digest,
            "adapters": {step.adapter: step.reason for step in plan.steps},
            "samples": account.samples,
            "tokens": account.tokens,
            "calls": account.calls,
            "failure": account.failure or None,
        }
    )
