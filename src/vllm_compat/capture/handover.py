"""The driver's half of the way out of the worker: rows handed over without a copy.

A reply holds only where the rows are (:class:`vllm_compat.capture.transfer.SharedStates`); unpickling
it calls :func:`open_states`. Each tensor has a storage of exactly its own rows, since ``torch.save``
writes whole storages. What the downstream does next, ``h.clone().cpu()``, would copy all of it once
more; here the first ``clone()`` *is* the handing over: it returns a plain ``torch.Tensor`` over the
same rows. Nobody writes to them as long as any tensor over them lives: each tensor owns its block, and
only when it is gone, the block goes back to the worker, which uses it for a later batch.

A caller that keeps results keeps shared memory. From :func:`vllm_compat.capture.slabs.limit` on,
rows are copied into the caller's own memory instead, so that shared memory stays below that limit and
two batches, however much is kept.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from typing import Any

import torch

from vllm_compat.capture import slabs
from vllm_compat.errors import GuardError
from vllm_compat.runtime import run

_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()
"""All that tensors of this process look into: facts of the process, whatever became of the run."""


class Mapping:
    """A worker's slab in this process, and how many bytes of it are in use here."""

    def __init__(self, pid: int, fd: int, size: int, inode: int) -> None:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(own).st_ino != inode:
                raise GuardError(
                    f"Process {pid} is not the worker whose rows were announced: it has ended, and"
                    " its number was given to another."
                )
            self.memory = mmap.mmap(own, size)
        finally:
            os.close(own)
        _mappings.add(self)
        self._taken = 0
        # Blocks come back from whatever thread drops the last tensor, in the middle of anything.
        self._returned: deque[int] = deque()

    def lease(self, offset: int, size: int) -> memoryview:
        """Take a block; when nothing refers to the returned buffer any more, it goes back.

        Raises:
            GuardError: The worker has given the block to nobody, or to somebody else.
        """
        place = offset // slabs.GRANULE
        if self.memory[place] != slabs.OURS:
            raise GuardError(
                f"Rows were announced at {offset} of a slab, where none are: a reply of an earlier"
                " batch came late."
            )
        self.memory[place] = slabs.TAKEN
        self._taken += size
        block = memoryview(self.memory)
        weakref.finalize(block, self._give_back, place, size, os.getpid()).atexit = False
        return block

    def _give_back(self, place: int, size: int, pid: int) -> None:
        if os.getpid() == pid:  # a forked child's copies say nothing about ours
            self.memory[place] = slabs.RETURNED
            self._returned.append(size)

    @property
    def live(self) -> int:
        """Bytes of this slab that tensors of this process look into."""
        while self._returned:
            self._taken -= self._returned.popleft()
        return self._taken


class Handed(torch.Tensor):  # type: ignore[misc]
    """Rows in a block of their own; the first ``clone()`` hands them over instead of copying them."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    _plain: Any
    _copied: bool

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        """Return a plain tensor that nobody else holds."""
        plain, self._plain = self._plain, None
        if plain is None or args or kwargs:
            return super().clone(*args, **kwargs)
        return _copy(plain) if self._copied else plain


def _over(lease: memoryview, offset: int, rows: int, width: int, kind: Any) -> Any:
    """Return the tensor over a block: no view of another, with a storage of its own rows only."""
    flat = torch.frombuffer(lease, dtype=kind, count=rows * width, offset=offset)
    return torch.empty(0, dtype=kind).set_(flat.untyped_storage(), 0, (rows, width), (width, 1))


def _handed(plain: Any, copied: bool) -> Any:
    tensor = plain.as_subclass(Handed)
    tensor._plain, tensor._copied = plain, copied
    return tensor


def _copy(tensor: Any) -> Any:
    """Copy with several threads: vLLM leaves the driver one."""
    threads = torch.get_num_threads()
    if threads > 1:
        return tensor.clone()
    torch.set_num_threads(min(8, len(os.sched_getaffinity(0))))
    try:
        return tensor.clone()
    finally:
        torch.set_num_threads(threads)


_lock = threading.RLock()


class Slabs:
    """Slabs mapped into this process, by (pid, file descriptor, size, inode), and what came of them.

    ``told``: the bytes handed over and copied so far, and the most shared memory.
    """

    section = "transfer"

    def __init__(self) -> None:
        self.mapped: dict[tuple[int, int, int, int], Mapping] = {}
        self.told: dict[str, Any] = {
            "handed_over_bytes": 0,
            "copied_bytes": 0,
            "largest_slabs_bytes": 0,
        }

    def facts(self) -> dict[str, Any]:
        """Return what was handed over so far and what was copied, in bytes, and the most memory."""
        return dict(self.told)


def facts() -> dict[str, Any]:
    """Return what was handed over so far and what was copied, in bytes, and the most shared memory."""
    return run.current().part(Slabs).facts()


def live_bytes() -> int:
    """Return the bytes of shared memory that results in this process look into."""
    with _lock:
        return sum(mapping.live for mapping in run.current().part(Slabs).mapped.values())


def open_states(
    pid: int,
    announced: tuple[tuple[int, int, int], ...],
    places: dict[str, tuple[int, tuple[tuple[int, int], ...]]],
    order: tuple[int, ...],
    width: int,
    dtype: str,
    refused: str = "",
) -> dict[str, list[Any]]:
    """Return ``{request id: [tensor [rows, width] per layer asked for]}``.

    ``announced`` are the slabs of worker ``pid`` as (file descriptor, size, inode); ``places`` maps
    request ids to (rows, [(slab, offset) per captured layer]); ``order`` are the positions of the
    layers asked for. A layer asked for twice is a tensor of its own the second time.

    Raises:
        GuardError: The worker is gone, or the rows are not where they were announced.
    """
    kind = getattr(torch, dtype)
    with _lock:
        slabs_here = run.current().part(Slabs)
        mapped, told = slabs_here.mapped, slabs_here.told
        found = [_find(mapped, (pid, *slab)) for slab in announced]
        total = sum(size for _, size, _ in announced)
        size = sum(rows * len(blocks) for rows, blocks in places.values()) * width * kind.itemsize
        live = sum(mapping.live for mapping in mapped.values())
        limit = slabs.limit()
        # The second condition holds off holes: few rows kept in each of very many slabs.
        copied = live + size > limit or total > limit + 2 * max(size, slabs.SLAB)
        told["copied_bytes" if copied else "handed_over_bytes"] += size
        told["largest_slabs_bytes"] = max(told["largest_slabs_bytes"], total)
        told["not_page_locked"] = refused
        states = {}
        for request_id, (rows, blocks) in places.items():
            layers = [
                _over(found[slab].lease(offset, rows * width * kind.itemsize), offset, rows, width, kind)
                for slab, offset in blocks
            ]
            # A layer asked for twice is two tensors: what a caller does to one leaves the other.
            again = [i in order[:place] for place, i in enumerate(order)]
            states[request_id] = [
                layers[i].clone() if twice else _handed(layers[i], copied)
                for i, twice in zip(order, again, strict=True)
            ]
        for key in [key for key in mapped if key[0] == pid and key[1:] not in announced]:
            del mapped[key]  # the worker has let go of it; tensors keep what they look into
    return states


def _find(mapped: dict[tuple[int, int, int, int], Mapping], key: tuple[int, int, int, int]) -> Mapping:
    """Return a worker's slab, mapped once; slabs of workers that have ended are let go."""
    if key not in mapped:
        for other in [known for known in mapped if not os.path.exists(f"/proc/{known[0]}")]:
            del mapped[other]
        mapped[key] = Mapping(*key)
    return mapped[key]


def _before_fork() -> None:
    """Keep what the child will go on seeing from being written over."""
    _lock.acquire()
    for mapping in list(_mappings):
        if mapping.live:
            mapping.memory[0] = slabs.RETIRED


def _in_child() -> None:
    """Forget the parent's slabs; tensors keep what they look into."""
    _mappings.clear()
    _lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_lock.release, after_in_child=_in_child)
