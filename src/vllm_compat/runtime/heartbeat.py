"""What each process of a launched run says of itself: phase, shards, batches, its first error.

The launcher makes a folder and names it in the environment (:mod:`vllm_compat.runtime.env`); each
process
of the run keeps one small file there, ``<pid>.json``, replaced as a whole when something has changed.
:mod:`vllm_compat.commands.run.watch` reads them. Nothing here may disturb a run: a state that cannot be
written is dropped.

A process that has entered also answers a signal (:data:`DUMP`) with the stacks of its threads, in
``<pid>.stack``; Python's ``faulthandler`` writes them, so that this works in a process that hangs in C.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from vllm_compat.runtime import env

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_compat.runtime.patching import Transaction

DUMP = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - 2
"""The signal that makes a process write its stacks; nothing else is known to use it."""

LONGEST_CAUSE = 600
"""Characters of an error's text that are kept."""

_TOTAL = re.compile(r"Processing (\d+)/(\d+) samples")

_state: dict[str, Any] = {}
_stacks: Any = None


def note(**fields: Any) -> None:
    """Add to what this process says of itself; a field given as None is taken out."""
    folder = env.status_directory()
    if folder is None:
        return
    now = time.monotonic()
    if _state.get("pid") != os.getpid():
        _state.clear()  # inherited by fork
        _state.update(pid=os.getpid(), entered=now)
    _state.update(fields, changed=now)
    for name in [name for name, value in _state.items() if value is None]:
        del _state[name]
    import json

    path = os.path.join(folder, f"{os.getpid()}.json")
    try:
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(_state, file)
        os.replace(f"{path}.new", path)
    except OSError:
        pass  # a full /tmp must not end a run


def phase(name: str, **fields: Any) -> None:
    """Say that this process has begun something else."""
    note(phase=name, since=time.monotonic(), **fields)


def fail(error: BaseException, where: str) -> None:
    """Keep the first error of this process."""
    if "error" in _state and _state.get("pid") == os.getpid():
        return
    note(error=describe(error), error_where=where, error_at=time.monotonic())


def describe(error: BaseException) -> str:
    """Return an error as ``Type: text``, on one line, cut to a sensible length."""
    text = " ".join(str(error).split())
    if len(text) > LONGEST_CAUSE:
        text = f"{text[:LONGEST_CAUSE]}…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def listen() -> None:
    """Answer :data:`DUMP` with this process's stacks; its forked children will too."""
    if env.status_directory() is None:
        return
    _register()
    os.register_at_fork(after_in_child=_register)


def _register() -> None:
    global _stacks
    folder = env.status_directory()
    if folder is None:
        return
    import faulthandler

    try:
        _stacks = open(os.path.join(folder, f"{os.getpid()}.stack"), "wb", buffering=0)  # noqa: SIM115
        faulthandler.register(DUMP, file=_stacks, all_threads=True, chain=False)
    except (OSError, AttributeError, RuntimeError, ValueError):
        pass


def report_uncaught() -> None:
    """Keep the error that ends the program's own process."""
    hook = sys.excepthook

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        if isinstance(error, Exception):
            fail(error, "program")
        hook(kind, error, trace)

    sys.excepthook = excepthook


def install(transaction: Transaction) -> None:
    """Enlist what tells the phases of vLLM's workers and the number of samples.

    The places are vLLM's weight loading (``tqdm`` as ``weight_utils`` names it, one iteration a shard,
    in every release from 0.11.0 to 0.33.0) and the worker's construction.
    """
    if env.status_directory() is None:
        return
    transaction.owned_by("guard")
    executor = "vllm.v1.executor.multiproc_executor"
    transaction.wrap(f"{executor}:WorkerProc.__init__", _worker, optional=True)
    loading = "vllm.model_executor.model_loader.weight_utils:tqdm"
    transaction.wrap(loading, _shards, optional=True)
    transaction.wrap("logging:Logger.makeRecord", _read_log, optional=True)


def _worker(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    phase("starting", role="worker", rank=kwargs.get("rank"))
    try:
        result = wrapped(*args, **kwargs)
    except Exception as error:
        fail(error, "worker")
        raise
    phase("ready")
    return result


def _shards(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bar = wrapped(*args, **kwargs)
    if not args and "iterable" not in kwargs:
        return bar  # counts something else than shards, by hand
    return _Counted(bar)


class _Counted:
    """A progress bar that also tells the launcher where it is."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)

    def __iter__(self) -> Iterator[Any]:
        begin = time.monotonic()
        phase("loading", shards=0, of=getattr(self._bar, "total", None))
        for count, item in enumerate(self._bar, start=1):
            yield item
            note(shards=count, loading_seconds=round(time.monotonic() - begin, 2))
        phase("loaded")


def _read_log(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    record = wrapped(*args, **kwargs)
    if not isinstance(record.msg, str):
        return record
    # speculators' own logger gives the sentence as an argument.
    said = record.args[0] if isinstance(record.args, tuple) and record.args else record.msg
    if isinstance(said, str) and (match := _TOTAL.match(said)):
        note(samples_to_do=int(match[1]), samples_in_all=int(match[2]))
    # vLLM's worker logs what it meets and answers with a text of its own, or, on other ranks than
    # the one asked, not at all.
    elif record.msg.startswith("WorkerProc ") and record.exc_info and record.exc_info[1]:
        fail(record.exc_info[1], "worker")
    return record
