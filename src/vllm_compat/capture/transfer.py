"""How captured rows leave the worker: through memory that driver and worker share.

A reply that holds the tensors themselves is pickled, sent in pieces and unpickled; measured on an
H200, that takes four times as long as the forward. Here the rows of each request are copied to their
place in a slab of anonymous shared memory while the next step already runs, and the reply holds only
where they are. Pickling :class:`SharedStates` in the worker and unpickling it in the driver gives the
``{request id: [tensor a layer]}`` that the downstream expects.

Slabs are memfds: they have no name, so nothing is left of them when the processes end, however they
end, and the size of ``/dev/shm`` does not matter. The driver opens them through
``/proc/<worker>/fd``. A worker keeps its slabs and uses them again after each reset, so host memory
is bounded by the largest batch, rounded up to slabs. The tensors that the driver sees are views; the
downstream clones them before ``generate()`` returns, and a guard checks that it has.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_compat.capture.rows import RowStore, Span
from vllm_compat.errors import GuardError

logger = logging.getLogger(__name__)

SLAB = 256 * 2**20
"""Bytes of a slab; a request that needs more gets a slab of its own size."""

ALIGNMENT = 4096


_mapped: dict[tuple[int, int, int, int], Any] = {}
"""Slabs mapped into this process, by (pid, file descriptor, size, inode)."""


class Slab:
    """Shared anonymous memory of one worker, page-locked where there is a CUDA device."""

    def __init__(self, size: int, *, pin: bool) -> None:
        import torch

        self.size = -(-size // ALIGNMENT) * ALIGNMENT
        self.fd = os.memfd_create("vllm_compat", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.size)
        self.inode = os.fstat(self.fd).st_ino
        self.memory = mmap.mmap(self.fd, self.size)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.used = 0
        self.pinned = False
        if pin:
            status = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.size, 0)
            self.pinned = int(status) == 0

    def take(self, size: int) -> int | None:
        """Return the offset of ``size`` free bytes, or None where they do not fit."""
        if self.used + size > self.size:
            return None
        offset = self.used
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        return offset


@dataclass
class _Place:
    slab: int
    offset: int
    length: int
    rows: int = 0


@dataclass(frozen=True)
class SharedStates:
    """Where the rows of some requests are. Pickles into what :func:`open_states` returns.

    ``slabs`` are (file descriptor, size, inode) of the process ``pid``; ``places`` maps request ids
    to (slab, offset, prompt length, rows); ``order`` are positions of the layers asked for.
    """

    pid: int
    slabs: tuple[tuple[int, int, int], ...]
    places: dict[str, tuple[int, int, int, int]]
    layers: int
    order: tuple[int, ...]
    width: int
    dtype: str

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        fields = (self.pid, self.slabs, self.places, self.layers, self.order, self.width, self.dtype)
        return open_states, fields


def open_states(
    pid: int,
    slabs: tuple[tuple[int, int, int], ...],
    places: dict[str, tuple[int, int, int, int]],
    layers: int,
    order: tuple[int, ...],
    width: int,
    dtype: str,
) -> dict[str, list[Any]]:
    """Return ``{request id: [tensor [rows, width] per layer asked for]}``, views of shared memory."""
    import torch

    if torch.get_num_threads() == 1:
        # vLLM leaves the driver one thread; the downstream's copies of large states want more.
        torch.set_num_threads(min(8, len(os.sched_getaffinity(0))))
    kind = getattr(torch, dtype)
    states = {}
    for request_id, (slab, offset, length, rows) in places.items():
        memory = _opened(pid, *slabs[slab])
        size = layers * length * width * kind.itemsize
        whole = memory[offset : offset + size].view(kind).view(layers, length, width)
        states[request_id] = [whole[layer][:rows] for layer in order]
    return states


def _opened(pid: int, fd: int, size: int, inode: int) -> Any:
    """Map a worker's slab into this process, once; slabs of workers that have ended are let go."""
    import torch

    key = (pid, fd, size, inode)
    if key in _mapped:
        return _mapped[key]
    for other in [known for known in _mapped if not os.path.exists(f"/proc/{known[0]}")]:
        del _mapped[other]
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(own).st_ino != inode:
            raise GuardError(
                f"Process {pid} is not the worker whose rows were announced: it has ended, and its"
                " number was given to another."
            )
        memory = torch.frombuffer(mmap.mmap(own, size), dtype=torch.uint8)
    finally:
        os.close(own)
    _mapped[key] = memory
    return memory


def is_view(tensor: Any) -> bool:
    """Whether a tensor looks into a worker's slab, which the next batch will overwrite."""
    return any(
        memory.data_ptr() <= tensor.data_ptr() < memory.data_ptr() + len(memory)
        for memory in _mapped.values()
    )


class SharedRowStore(RowStore):
    """A :class:`RowStore` whose rows lie in slabs, each request's in one piece, layer by layer."""

    def __init__(self, layers: int, device: Any) -> None:
        super().__init__(layers)
        self.cuda = device.type == "cuda"
        self.slabs: list[Slab] = []
        self.places: dict[str, _Place] = {}
        self.lengths: dict[str, int] = {}
        self.width = 0
        self.dtype: Any = None
        self._stream: Any = None

    def expect(self, lengths: dict[str, int]) -> None:
        """Say how many rows each request will have in the end."""
        self.lengths.update(lengths)

    def keep(self, span: Span, have: int, parts: Sequence[Any]) -> None:
        """Copy one request's rows of one step to their place; the copy may still be under way."""
        import torch

        self.width, self.dtype = parts[0].shape[1], parts[0].dtype
        place = self.places.get(span.request_id)
        if place is None:
            place = self.places[span.request_id] = self._new_place(self.lengths[span.request_id])
        target = self._view(place)[:, span.start : span.start + span.count]
        place.rows = span.start + span.count
        if not self.cuda:
            for layer, part in enumerate(parts):
                target[layer].copy_(part)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for layer, part in enumerate(parts):
                target[layer].copy_(part, non_blocking=True)
                part.record_stream(self._stream)

    def shared(self, order: Sequence[int]) -> SharedStates:
        """Wait for the copies and return where everything is; the rows stay until the next clear."""
        if self._stream is not None:
            self._stream.synchronize()
        states = SharedStates(
            pid=os.getpid(),
            slabs=tuple((slab.fd, slab.size, slab.inode) for slab in self.slabs),
            places={r: (p.slab, p.offset, p.length, p.rows) for r, p in self.places.items()},
            layers=self.layers,
            order=tuple(order),
            width=self.width,
            dtype=str(self.dtype).removeprefix("torch."),
        )
        self.rows.clear()
        self.places.clear()
        self.lengths.clear()
        return states

    def clear(self) -> None:
        """Forget everything; the slabs are free again."""
        super().clear()
        if self._stream is not None:
            self._stream.synchronize()
        self.places.clear()
        self.lengths.clear()
        for slab in self.slabs:
            slab.used = 0

    def _new_place(self, length: int) -> _Place:
        size = self.layers * length * self.width * self.dtype.itemsize
        for index, slab in enumerate(self.slabs):
            offset = slab.take(size)
            if offset is not None:
                return _Place(index, offset, length)
        slab = Slab(max(size, SLAB), pin=self.cuda)
        if self.cuda and not slab.pinned:
            logger.warning("vllm_compat: host memory could not be page-locked; copies are slower.")
        self.slabs.append(slab)
        offset = slab.take(size)
        assert offset is not None
        return _Place(len(self.slabs) - 1, offset, length)

    def _view(self, place: _Place) -> Any:
        size = self.layers * place.length * self.width * self.dtype.itemsize
        memory = self.slabs[place.slab].bytes[place.offset : place.offset + size]
        return memory.view(self.dtype).view(self.layers, place.length, self.width)


@dataclass
class Values:
    """Whether captured rows are finite and not all zero, looked at where they are, on the device."""

    flags: list[tuple[tuple[Span, ...], int, Any]] = field(default_factory=list)

    def look(self, spans: tuple[Span, ...], captured: Sequence[Any]) -> None:
        """Mark the bad rows of one step; nothing waits for the device."""
        import torch

        total = sum(span.count for span in spans)
        for layer, tensor in enumerate(captured):
            low, high = torch.aminmax(tensor[:total], dim=1)
            bad = ~(torch.isfinite(low) & torch.isfinite(high)) | ((low == 0) & (high == 0))
            self.flags.append((spans, layer, bad))

    def judge(self, layer_ids: Sequence[int]) -> str | None:
        """Return the first bad row in words, or None; waits for the device."""
        import torch

        flags, self.flags = self.flags, []
        if not flags or not bool(torch.stack([bad.any() for _, _, bad in flags]).any()):
            return None
        for spans, layer, bad in flags:
            if not bool(bad.any()):
                continue
            first, count = int(bad.nonzero()[0]), int(bad.sum())
            offset = 0
            for span in spans:
                if first < offset + span.count:
                    return (
                        f"Request {span.request_id}, layer {layer_ids[layer]}: {count} rows of this"
                        " step are not finite or all zero, the first is token"
                        f" {span.start + first - offset}."
                    )
                offset += span.count
        raise AssertionError("a bad row belongs to no request")
