"""Anonymous memory that one worker and its driver share, and who owns which part of it.

A slab is a memfd: it has no name, so nothing is left of it when the processes end, however they end,
and the size of ``/dev/shm`` does not matter. The driver opens it through ``/proc/<worker>/fd``.

A slab begins with one byte for each of its granules; the byte of a block's first granule says whose
the block is. The worker takes free blocks and writes rows into them (``OURS``), the driver marks those
that it has found in a reply (``TAKEN``) and, when the last tensor over a block is gone, gives it back
(``RETURNED``); the worker looks at the bytes before each batch. The first byte belongs to the slab
itself: the driver sets it before it forks (``RETIRED``), since a forked child goes on seeing the memory,
and what somebody holds must not change. The worker then writes no more into that slab.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_compat.runtime import run

SLAB = 256 * 2**20
"""Bytes of a slab; a block that needs more gets a slab of its own size."""

GRANULE = 4096

OURS, RETURNED, TAKEN = 1, 2, 3
RETIRED = 1

LIMIT = 8 * 2**30
"""Most bytes of slabs whose rows the driver hands over without a copy."""


def limit() -> int:
    """Return how many bytes a run hands out at most: 8 GiB, or a quarter of all memory."""
    return min(LIMIT, machine_memory() // 4)


def machine_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: the machine's, or its control group's."""
    text = (root / "proc/meminfo").read_text()
    total = int(text.split("MemTotal:")[1].split()[0]) * 1024
    mount = root / "sys/fs/cgroup"
    groups = [mount / "memory.max", mount / "memory/memory.limit_in_bytes"]
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, kinds, path = line.split(":", 2)
            own = mount / path.lstrip("/") if number == "0" else mount / "memory" / path.lstrip("/")
            if number == "0" or "memory" in kinds.split(","):
                name = "memory.max" if number == "0" else "memory.limit_in_bytes"
                groups += [folder / name for folder in (own, *own.parents) if mount in folder.parents]
    for file in groups:
        with suppress(OSError, ValueError):
            total = min(total, int(file.read_text()))  # "max" is no number, and no limit
    return total


class Space:
    """Which bytes of a slab are free; the first hole that is large enough is taken."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = [(0, size)]

    @property
    def empty(self) -> bool:
        """Whether nothing is taken."""
        return self._free == [(0, self._size)]

    def take(self, size: int) -> int | None:
        """Return the offset of ``size`` bytes, or None where no hole is large enough."""
        for index, (offset, hole) in enumerate(self._free):
            if hole >= size:
                rest = [(offset + size, hole - size)] if hole > size else []
                self._free[index : index + 1] = rest
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Take bytes back, joined with the holes beside them."""
        index = bisect(self._free, (offset, 0))
        if index < len(self._free) and offset + size == self._free[index][0]:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            before, hole = self._free.pop(index - 1)
            self._free.insert(index - 1, (before, hole + size))
        else:
            self._free.insert(index, (offset, size))


class Slab:
    """A slab in the worker that owns it, page-locked where there is a CUDA device.

    ``refused`` says why it is not, where that was asked for.

    Raises:
        OSError: The system gives no such memory.
    """

    def __init__(self, capacity: int, *, pin: bool) -> None:
        import torch

        granules = -(-capacity // GRANULE)
        self.head = -(-(granules + granules // GRANULE + 2) // GRANULE) * GRANULE
        self.size = self.head + granules * GRANULE
        self.space = Space(granules * GRANULE)
        self.fd = os.memfd_create("vllm_compat", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.size)
        self.inode = os.fstat(self.fd).st_ino
        self.memory = mmap.mmap(self.fd, self.size)
        self.bytes: Any = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.pinned = False
        self.refused = ""
        if pin:
            status = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.size, 0)
            self.pinned = int(status) == 0
            if not self.pinned:
                _forget_error()
                self.refused = f"cudaHostRegister returned {int(status)}"

    @property
    def key(self) -> tuple[int, int, int]:
        """File descriptor, size and inode, by which the driver finds it."""
        return self.fd, self.size, self.inode

    @property
    def retired(self) -> bool:
        """Whether the driver has asked that nothing be written here any more."""
        return self.memory[0] == RETIRED

    def take(self, size: int) -> int | None:
        """Return the offset of a free block of ``size`` bytes, ours now; None where none fits."""
        offset = self.space.take(_rounded(size))
        if offset is None:
            return None
        self.memory[(self.head + offset) // GRANULE] = OURS
        return self.head + offset

    def state(self, offset: int) -> int:
        """Return whose the block at ``offset`` is."""
        return self.memory[offset // GRANULE]

    def give(self, offset: int, size: int) -> None:
        """Make a block free again."""
        self.memory[offset // GRANULE] = 0
        self.space.give(offset - self.head, _rounded(size))

    def close(self) -> None:
        """Let go of the memory; whoever has mapped it keeps it."""
        import torch

        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self.pinned = False
        self.bytes = None
        os.close(self.fd)


def _forget_error() -> None:
    """Take the error of a failed call back from CUDA's runtime, where the next kernel would find it.

    ``cudaGetLastError`` returns a thread's last error and forgets it. Where torch's ``cudart()``, which
    has some functions only, does not hand it on, the runtime that torch has loaded is asked itself.
    """
    import torch

    get = getattr(torch.cuda.cudart(), "cudaGetLastError", None) or _of_the_runtime()
    if get is not None:
        get()


def _of_the_runtime(maps: Path = Path("/proc/self/maps")) -> Any:
    """Return that function of the CUDA (or HIP) runtime which this process has loaded, or None."""
    import ctypes

    names = {"libcudart": "cudaGetLastError", "libamdhip64": "hipGetLastError"}
    with suppress(OSError, AttributeError):
        for line in maps.read_text().splitlines():
            path = line[line.find("/") :]
            for library, function in names.items():
                if os.path.basename(path).startswith(library):
                    return getattr(ctypes.CDLL(path), function)
    return None


def _rounded(size: int) -> int:
    return max(-(-size // GRANULE), 1) * GRANULE


class Probe:
    """A little shared memory with which a driver finds out whether it can open a worker's."""

    def __init__(self) -> None:
        self.secret = os.urandom(16)
        self.fd = os.memfd_create("vllm_compat", os.MFD_CLOEXEC)
        os.write(self.fd, self.secret)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)


class Agreement:
    """What this worker and its driver have agreed on, for the length of a run."""

    def __init__(self) -> None:
        self.probe: Probe | None = None
        self.refused = "the driver has not asked for shared memory"


def offer(worker: Any) -> dict[str, Any]:
    """Return what a driver needs to try shared memory; runs in the worker, sent by the driver."""
    try:
        probe = Probe()
    except (AttributeError, OSError) as error:
        return {"refused": f"the worker gets no anonymous shared memory ({error})"}
    run.current().part(Agreement).probe = probe
    return {"pid": os.getpid(), "fd": probe.fd, "secret": probe.secret}


def try_offer(offered: dict[str, Any]) -> str:
    """Return why this process cannot share memory with the worker that made the offer, or nothing."""
    if offered.get("refused"):
        return str(offered["refused"])
    try:
        with open(f"/proc/{offered['pid']}/fd/{offered['fd']}", "rb") as file:
            if file.read() == offered["secret"]:
                return ""
    except OSError as error:
        return f"the driver cannot open the worker's memory ({error})"
    return "the worker runs on another host or in another process namespace"


def settle(worker: Any, refused: str) -> None:
    """Take the driver's answer; runs in the worker, sent by the driver."""
    agreement = run.current().part(Agreement)
    if agreement.probe is not None:
        agreement.probe.close()
        agreement.probe = None
    agreement.refused = refused


def agree(ask: Callable[..., Sequence[Any]]) -> str:
    """Settle with all workers whether memory is shared; return why not, or nothing.

    ``ask`` is an executor's ``collective_rpc``. Runs in the driver.
    """
    why = next(filter(None, map(try_offer, ask(offer))), "")
    ask(settle, args=(why,))
    return why


def refused() -> str:
    """Return why this worker does not share memory with its driver, or nothing."""
    return run.current().part(Agreement).refused
