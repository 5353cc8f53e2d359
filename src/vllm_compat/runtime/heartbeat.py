"""What each process of a launched run says of itself: phase, shards, batches, its first error.

The launcher makes a folder and names it in the environment (:mod:`vllm_compat.runtime.env`); each
process
of the run keeps one small file there, ``<pid>.json``, replaced as a whole when something has changed.
:mod:`vllm_compat.commands.run.watch` reads them. Nothing here may disturb a run: a state that cannot be
written is dropped, and that is said once.

A process in which the feature ``progress`` is in force also answers a signal (:data:`DUMP`) with the
stacks of its threads, in ``<pid>.stack``; Python's ``faulthandler`` writes them, so that this works in
a process that hangs in C.
"""

from __future__ import annotations

import functools
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ParamSpec

from vllm_compat.runtime import env, identity, run

Params = ParamSpec("Params")

DUMP = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - 2
"""The signal that makes a process write its stacks; nothing else is known to use it."""

LONGEST_CAUSE = 600
"""Characters of an error's text that are kept."""


class Said:
    """What this process has said of itself; the launcher's, so that it outlives a revert.

    Threads say things at once; a forked child has a `Said` of its own, and so a lock that nobody holds.
    """

    outlives = True

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.listener: Listener | None = None
        self.lock = threading.RLock()  # a signal handler may interrupt whoever holds it
        self.complained: set[str] = set()

    def end(self) -> None:
        """Forget the error of a run that is over: the next one may have its own."""
        note(error=None, error_where=None, error_at=None)


def said() -> dict[str, Any]:
    """Return what this process has said of itself."""
    return run.current().part(Said).fields


def only_told(function: Callable[Params, None]) -> Callable[Params, None]:
    """Make a function that only keeps the book unable to fail the work that it tells of.

    What it raises is said once, on standard error.
    """

    @functools.wraps(function)
    def tell(*args: Params.args, **kwargs: Params.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            complain(function.__name__, error)

    return tell


def complain(what: str, error: Exception) -> None:
    """Say once that something could not be told, where anybody hears it; never raise."""
    with suppress(Exception):
        mine = run.current().part(Said)
        with mine.lock:
            if what in mine.complained:
                return
            mine.complained.add(what)
        print(
            f"vllm_compat: what this process (pid {os.getpid()}) does goes on, but could not be told to"
            f" the launcher ({what}: {describe(error)}); counts in the verdict may be too low.",
            file=sys.stderr,
            flush=True,
        )


@only_told
def note(**fields: Any) -> None:
    """Add to what this process says of itself; a field given as None is taken out."""
    folder = env.status_directory()
    if folder is None:
        return
    import json

    known = json.loads(json.dumps(fields, default=_plain, skipkeys=True))
    mine = run.current().part(Said)
    with mine.lock:
        state = mine.fields
        now = time.monotonic()
        if not state:
            state.update(pid=os.getpid(), started=identity.start_of(os.getpid()), entered=now)
        state.update(known, changed=now)
        for name in [name for name, value in state.items() if value is None]:
            del state[name]
        path = os.path.join(folder, f"{os.getpid()}.json")
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(state, file)
        os.replace(f"{path}.new", path)


def _plain(value: Any) -> Any:
    """Return what JSON knows for what it does not: numbers of numpy or torch, sets, anything."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(type(value), "__index__"):
        return operator.index(value)
    if isinstance(value, Iterable):
        return list(value)
    return str(value)


def phase(name: str, **fields: Any) -> None:
    """Say that this process has begun something else."""
    note(phase=name, since=time.monotonic(), **fields)


def fail(error: BaseException, where: str) -> None:
    """Keep the first error of this process."""
    if "error" in said():
        return
    note(error=describe(error), error_where=where, error_at=time.monotonic())


def describe(error: BaseException) -> str:
    """Return an error as ``Type: text``, on one line, cut to a sensible length."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # an error of somebody's own class
        text = "(its text cannot be had)"
    if len(text) > LONGEST_CAUSE:
        text = f"{text[:LONGEST_CAUSE]}…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Listener:
    """Answers :data:`DUMP` in this process, and in its forked children, until it is told to stop."""

    def __init__(self) -> None:
        self._file: Any = None
        self._path = ""
        self._on = False
        # Nothing can be taken out of this list of Python's: what stands there does nothing while off.
        os.register_at_fork(after_in_child=self._forked)

    def begin(self) -> None:
        """Answer from now on, where the launcher has named a folder."""
        folder = env.status_directory()
        if folder is None:
            return
        import faulthandler

        self._path, self._on = os.path.join(folder, f"{os.getpid()}.stack"), True
        try:
            self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115 (it must stay open)
            faulthandler.register(DUMP, file=self._file, all_threads=True, chain=False)
        except (OSError, AttributeError, RuntimeError, ValueError):
            pass

    def end(self) -> str:
        """Answer no more: the launcher signals only whose file is there, and the signal ends others."""
        if not self._on:
            return "reverted"
        import faulthandler

        self._on = False
        with suppress(OSError):
            os.unlink(self._path)
        with suppress(AttributeError, RuntimeError, ValueError):
            faulthandler.unregister(DUMP)
        if self._file is not None:
            self._file.close()
            self._file = None
        return "reverted"

    def _forked(self) -> None:
        if self._on:
            run.current().part(Said).listener = self  # what stops the child must find it
            self.begin()


def listen() -> Callable[[], str]:
    """Answer :data:`DUMP` with this process's stacks, and in forked children; return what ends it."""
    mine = run.current().part(Said)
    if mine.listener is None:
        mine.listener = Listener()
    mine.listener.begin()
    return mine.listener.end
