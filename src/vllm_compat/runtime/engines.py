"""The engines that a driver has started, so that a revert can reach into their workers.

A worker's patches are in a process that nobody calls ``revert()`` in. The driver asks by one message to
all ranks of an engine, and waits a few seconds; a rank that computes or hangs is not waited for longer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm_compat.errors import UsageError
from vllm_compat.runtime import context, identity

SECONDS = 5.0
"""How long a revert waits for the workers of one engine."""


@dataclass(frozen=True)
class RankStatus:
    """What became of the patches in one worker.

    ``state`` is ``reverted``; ``busy`` where no answer came in time, from this rank or from another that
    vLLM waits for, or a ``generate()`` call is under way; ``gone`` where the process has ended. ``left``
    are targets that others have wrapped over; they do nothing any more.
    """

    rank: int
    pid: int
    state: str
    left: tuple[str, ...] = ()


class _Engine:
    """One executor, the generator that has made it, and its ranks."""

    def __init__(self, executor: Any, generator: Any, ranks: Sequence[tuple[int, int]]) -> None:
        self.executor = weakref.ref(executor)
        self.generator = weakref.ref(generator) if generator is not None else None
        self.ranks = tuple(ranks)

    def take_back(self, ask: Callable[[Any], Mapping[str, Any]]) -> list[RankStatus]:
        executor = self.executor()
        if executor is None:
            return []
        generator = self.generator() if self.generator else None
        if generator is not None:
            # The class has its own method back in a moment, and would answer with unchecked rows.
            vars(generator)["generate"] = _refuse
        replies: dict[int, Mapping[str, Any]] = {}
        if any(identity.is_alive(pid) for _, pid in self.ranks) and not context.is_under_way(generator):
            try:
                answers = executor.collective_rpc(ask, timeout=SECONDS)
                replies = {answer["pid"]: answer for answer in answers}
            except Exception:
                pass  # vLLM raises for all ranks where one does not answer
        return [self._status(rank, pid, replies.get(pid)) for rank, pid in self.ranks]

    def unasked(self) -> list[RankStatus]:
        """Return the ranks as they are without being asked: busy, or gone."""
        alive = self.executor() is not None
        return [self._status(rank, pid, None) for rank, pid in self.ranks] if alive else []

    @staticmethod
    def _status(rank: int, pid: int, reply: Mapping[str, Any] | None) -> RankStatus:
        if reply is not None:
            return RankStatus(rank, pid, "reverted", tuple(reply["left"]))
        return RankStatus(rank, pid, "busy" if identity.is_alive(pid) else "gone")


class Engines:
    """All engines of the downstream that have been started with a plan in force.

    One whose workers were busy when they were asked outlives the revert, and is asked again with the
    next ``revert()`` or ``apply()``, until they have answered or are gone.
    """

    outlives = True

    def __init__(self) -> None:
        self._known: list[_Engine] = []
        self._busy: list[_Engine] = []

    @property
    def busy(self) -> tuple[RankStatus, ...]:
        """The ranks that were asked, have not answered and are alive: they are still patched."""
        return tuple(
            status for engine in self._busy for status in engine.unasked() if status.state == "busy"
        )

    def add(self, executor: Any, reports: Sequence[Mapping[str, Any]]) -> None:
        """Remember an engine whose ranks have reported."""
        build = context.current_build()
        ranks = [
            (place if report.get("rank") is None else report["rank"], report["pid"])
            for place, report in enumerate(reports)
        ]
        self._known = [engine for engine in self._known if engine.executor() is not None]
        self._known.append(_Engine(executor, build.generator if build else None, ranks))

    def take_back(self, ask: Callable[[Any], Mapping[str, Any]]) -> tuple[RankStatus, ...]:
        """Ask the workers of each engine that is alive to take their patches back.

        ``ask`` runs in each worker. The generators refuse further calls, whatever the workers answer.
        """
        self._busy, self._known = [*self._busy, *self._known], []
        return self.ask_again(ask)

    def ask_again(self, ask: Callable[[Any], Mapping[str, Any]]) -> tuple[RankStatus, ...]:
        """Ask those that were busy once more."""
        found: list[RankStatus] = []
        for engine in list(self._busy):
            ranks = engine.take_back(ask)
            if all(rank.state != "busy" for rank in ranks):
                self._busy.remove(engine)
            found += ranks
        return tuple(found)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise UsageError(
        "This generator was built with vllm_compat in force, and vllm_compat.revert() has ended that in"
        " the driver and in its workers: its rows would be unchecked. Build a new generator."
    )
