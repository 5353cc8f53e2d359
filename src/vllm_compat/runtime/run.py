"""What a run holds in this process: one object, made with the first patch, ended by ``revert()``.

Modules keep no state of their own. What one of them has to remember it keeps in a class, of which the
:class:`Run` of this process holds one object (:meth:`Run.part`); so a revert forgets all of it, and what
comes after begins as the first time did. A forked child has the patches of its parent and a Run of its
own, with none of the parent's parts.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # `typing` would cost more than all the rest of this module
if TYPE_CHECKING:
    from typing import Any, TypeVar

    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction

    Part = TypeVar("Part")

DRIVER = "driver"
"""The process that has made the plan, or that builds a generator of its own."""
WORKER = "worker"
"""A process that has taken the plan of another over."""
FORKED = "forked"
"""A copy of a process, with what that one held (of `datasets.map`, or a worker's first moment)."""


class Run:
    """One run of vllm_compat as one process sees it.

    ``plan``, ``transaction``, ``role`` and ``features`` (the names of those in force) are empty as long
    as nothing is in force; ``error`` says why this process could not take a plan over.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.plan: Plan | None = None
        self.transaction: Transaction | None = None
        self.role = ""
        self.asked: Any = None
        self.features: tuple[str, ...] = ()
        self.seconds = 0.0
        self.error: str | None = None
        self.parts: dict[type, Any] = {}

    @property
    def in_force(self) -> bool:
        """Whether the patches of a plan are in force."""
        return self.transaction is not None and self.transaction.active

    def part(self, kind: type[Part]) -> Part:
        """Return this run's object of a class, made when it is first asked for."""
        found = self.parts.get(kind)
        if found is None:
            found = self.parts.setdefault(kind, kind())  # two threads get the same
        part: Part = found
        return part

    def find(self, kind: type[Part]) -> Part | None:
        """Return this run's object of a class, or None where there is none."""
        return self.parts.get(kind)

    def hold(self, part: object) -> None:
        """Keep an object as this run's only one of its class."""
        self.parts[type(part)] = part

    def forked(self) -> Run:
        """Return what a forked child of this process begins with."""
        child = Run()
        child.plan, child.transaction, child.asked = self.plan, self.transaction, self.asked
        child.features, child.seconds = self.features, self.seconds
        child.role = FORKED if self.role else ""
        return child


_current: Run | None = None


def current() -> Run:
    """Return the run of this process; one that holds nothing where nothing is in force."""
    global _current
    if _current is None:
        _current = Run()
    elif _current.pid != os.getpid():
        _current = _current.forked()
    return _current


def end() -> None:
    """Forget all that the run of this process holds.

    A part with a method ``end`` is told. One whose class says ``outlives`` belongs to the process, not
    to the run, and stays.
    """
    global _current
    ended, fresh = current(), Run()
    for kind, part in list(ended.parts.items()):
        if (tell := getattr(part, "end", None)) is not None:
            tell()
        if getattr(kind, "outlives", False):
            fresh.parts[kind] = part
    _current = fresh
