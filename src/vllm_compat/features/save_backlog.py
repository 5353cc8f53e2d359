"""Results that wait in a thread pool to be saved, and no more of them than the host can hold.

Stock's offline script hands each sample to a thread pool whose queue has no bound, and extracts on.
Where the disk is slower than the extraction, the queue grows until the host's memory is full and the
run is killed. So the next ``generate()`` call waits while more than :func:`bound` bytes of tensors lie
in submitted work that has not ended. Only such work counts: a caller that keeps results, for whatever
reason, never waits. Work ends by itself, whatever the caller does, with two exceptions, which do not
block: work of a pool in one of whose threads the caller itself runs does not count, and when nothing
has ended for :data:`STALL` seconds, extraction goes on and says so.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any

from vllm_compat.capture.slabs import machine_memory
from vllm_compat.features.base import Feature
from vllm_compat.runtime import heartbeat, run, run_record

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction

logger = logging.getLogger(__name__)

BOUND = 2 * 2**30
"""Bytes of submitted and unfinished work above which the next batch waits, on a large machine."""

STALL = 60.0
"""Seconds without any work ending after which extraction goes on."""

DEPTH = 8


@functools.cache
def bound() -> int:
    """Return how many bytes may wait before the next batch does: 2 GiB, or an eighth of all memory."""
    return min(BOUND, machine_memory() // 8)


class Backlog:
    """Tensors in submitted work that has not ended, of all thread pools of this process."""

    section = "saving"

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Future[Any], tuple[Executor, int]] = {}
        self._ended = 0
        self.most = 0
        self.seconds = 0.0

    def add(self, pool: Executor, future: Future[Any], size: int) -> None:
        """Count a submitted piece of work until it ends."""
        with self._changed:
            self._waiting[future] = pool, size
            self.most = max(self.most, self.bytes)
        future.add_done_callback(self._end)

    def _end(self, future: Future[Any]) -> None:
        with self._changed:
            self._waiting.pop(future, None)
            self._ended += 1
            self._changed.notify_all()

    @property
    def bytes(self) -> int:
        """Bytes of tensors that wait."""
        return sum(size for _, size in list(self._waiting.values()))

    def wait(self, most: int, stall: float = STALL) -> float:
        """Wait until no more than ``most`` bytes wait; return the seconds that it took."""
        begin = time.monotonic()
        with self._changed:
            while self._of_others() > most:
                ended = self._ended
                if not self._changed.wait(stall) and self._ended == ended:
                    logger.warning(
                        "vllm_compat: %.1f GB of results wait to be saved, and none was saved for"
                        " %.0f s; extraction goes on.",
                        self.bytes / 1e9,
                        stall,
                    )
                    break
            waited = time.monotonic() - begin
            self.seconds += waited
        return waited

    def _of_others(self) -> int:
        """Bytes that wait in pools of which this thread is none: its own would wait for itself."""
        me = threading.current_thread()
        return sum(
            size for pool, size in self._waiting.values() if me not in getattr(pool, "_threads", ())
        )

    def facts(self) -> dict[str, Any]:
        """Return the bound, the most bytes that waited to be saved, and how long batches waited."""
        return {
            "bound_bytes": bound(),
            "most_bytes": self.most,
            "waited_seconds": round(self.seconds, 2),
        }


class SaveBacklog(Feature):
    """Let the next batch wait while too many results wait to be saved."""

    name = "save_backlog"
    does = (
        "Lets generate() begin only while at most 2 GiB of tensors (an eighth of the memory where that"
        " is less) lie in work that was submitted to thread pools and has not ended. Results that a"
        " caller keeps do not count."
    )
    why = (
        "The offline script hands each sample to a thread pool whose queue has no bound: where the disk"
        " is slower than the extraction, results pile up in the host's memory until the run is killed"
        " (records/gpu/h200-save-backlog.json)."
    )
    targets = (
        "concurrent.futures.ThreadPoolExecutor.submit",
        "VllmHiddenStatesGenerator.generate",
    )

    def install(self, transaction: Transaction, plan: Plan, role: str) -> None:
        """Enlist the count of what is submitted, and the wait before each batch."""
        run.current().part(Backlog)
        transaction.wrap("concurrent.futures.thread:ThreadPoolExecutor.submit", submit)
        module, _, cls = plan.roles.generator.partition(":")
        transaction.wrap(f"{module}:{cls}.generate", _before_a_batch)


def _before_a_batch(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wait_for_saves()
    return wrapped(*args, **kwargs)


def submit(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Submit, and count what tensors are handed over: the wrapper of ``ThreadPoolExecutor.submit``."""
    future = wrapped(*args, **kwargs)
    if run_record.is_ours() and (size := tensor_bytes((args, kwargs))):
        run.current().part(Backlog).add(instance, future, size)
    return future


def wait_for_saves() -> bool:
    """Wait until the next batch may begin, and return whether that took any time."""
    backlog = run.current().part(Backlog)
    if not run_record.is_ours() or backlog.bytes <= bound():
        return False
    heartbeat.note(waiting="waiting for results to be saved")
    try:
        backlog.wait(bound())
    finally:
        heartbeat.note(waiting=None)
    return True


def facts() -> dict[str, Any]:
    """Return the bound, the most bytes that waited to be saved, and how long batches waited."""
    return run.current().part(Backlog).facts()


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all CPU tensors in what is handed to a thread pool, each storage once.

    Looks into dicts, lists, tuples, partials and the closures of functions; not into other objects,
    which may compute what they are asked for.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return 0
    storages: dict[int, int] = {}
    with suppress(Exception):  # containers of somebody's own
        for tensor in _tensors(value, torch.Tensor, DEPTH):
            with suppress(Exception):  # a subclass that has no storage of its own, or hides it
                if tensor.device.type == "cpu" and tensor.layout == torch.strided:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any, kind: type, depth: int) -> Iterable[Any]:
    if isinstance(value, kind):
        yield value
        return
    if not depth:
        return
    inside: Iterable[Any] = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    elif isinstance(value, functools.partial):
        inside = (value.func, value.args, value.keywords)
    elif isinstance(value, FunctionType) and value.__closure__:
        inside = list(_contents(value.__closure__))
    for one in inside:
        if not isinstance(one, str | bytes | int | float):
            yield from _tensors(one, kind, depth - 1)


def _contents(closure: Iterable[Any]) -> Iterable[Any]:
    for cell in closure:
        with suppress(ValueError):  # a variable that has no value yet
            yield cell.cell_contents
