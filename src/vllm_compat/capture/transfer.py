"""How captured rows leave the worker: through memory that driver and worker share.

A reply that holds the tensors themselves is pickled, sent in pieces and unpickled; measured on an
H200, that takes four times as long as the forward. Here each layer's rows of each request are copied
to a block of shared memory (:mod:`vllm_compat.capture.slabs`) on a stream of their own, as soon as the
layer has run and while the next ones do, and the reply holds only where they are. Pickling
:class:`SharedStates` in the worker and unpickling it in the driver gives the ``{request id: [tensor a
layer]}`` that the downstream expects (:mod:`vllm_compat.capture.handover`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_compat.capture import slabs
from vllm_compat.capture.rows import RowStore, Span
from vllm_compat.capture.slabs import Slab
from vllm_compat.errors import GuardError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Block:
    slab: Slab
    offset: int
    size: int


@dataclass
class _Place:
    """Where the rows of one request go: a block for each captured layer."""

    length: int
    blocks: tuple[_Block, ...]
    rows: int = 0


@dataclass(frozen=True)
class SharedStates:
    """Where the rows of some requests are. Pickles into what ``handover.open_states`` returns.

    ``slabs`` are (file descriptor, size, inode) of the process ``pid``; ``places`` maps request ids
    to (rows, [(slab, offset) per captured layer]); ``order`` are positions of the layers asked for;
    ``refused`` says why the memory is not page-locked where it should be.
    """

    pid: int
    slabs: tuple[tuple[int, int, int], ...]
    places: dict[str, tuple[int, tuple[tuple[int, int], ...]]]
    order: tuple[int, ...]
    width: int
    dtype: str
    refused: str = ""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        from vllm_compat.capture.handover import open_states

        fields = (self.pid, self.slabs, self.places, self.order, self.width, self.dtype, self.refused)
        return open_states, fields


class SharedRowStore(RowStore):
    """A :class:`RowStore` whose rows lie in slabs, a block for each layer of each request.

    Blocks that the driver has given back are used again. Slabs beyond the limit that hold nothing
    are let go, so that there is never more shared memory than the limit and twice the largest batch,
    rounded up to slabs.
    """

    def __init__(self, layers: int, device: Any) -> None:
        super().__init__(layers)
        self.cuda = device.type == "cuda"
        self.slabs: list[Slab] = []
        self.places: dict[str, _Place] = {}
        self.offered: list[_Block] = []
        self.width = 0
        self.dtype: Any = None
        self.ready: Sequence[Any] | None = None
        self._stream: Any = None
        self._batch = self._largest = 0
        self._limit = slabs.limit()

    def mark(self) -> Any:
        """Return an event that tells when what was launched so far is there; None without CUDA."""
        if not self.cuda:
            return None
        import torch

        event = torch.cuda.Event()
        event.record()
        return event

    def keep(self, span: Span, have: int, parts: Sequence[Any]) -> None:
        """Copy one request's rows of one step to their place; the copy may still be under way.

        ``ready``, where it is set, holds for each layer the event after which its rows are there.
        """
        self.width, self.dtype = parts[0].shape[1], parts[0].dtype
        place = self.places.get(span.request_id)
        if place is None:
            place = self.places[span.request_id] = self._new_place(self.lengths[span.request_id])
        place.rows = span.start + span.count
        for layer, part in enumerate(parts):
            self._copy(place, layer, span, part)

    def _copy(self, place: _Place, layer: int, span: Span, part: Any) -> None:
        import torch

        block = place.blocks[layer]
        row = self.width * self.dtype.itemsize
        begin = block.offset + span.start * row
        target = block.slab.bytes[begin : begin + span.count * row].view(self.dtype)
        target = target.view(span.count, self.width)
        if not self.cuda:
            target.copy_(part)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        ready = self.ready[layer] if self.ready else None
        if ready is None:
            self._stream.wait_stream(torch.cuda.current_stream())
        else:
            self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            target.copy_(part, non_blocking=True)
            part.record_stream(self._stream)

    def shared(self, order: Sequence[int]) -> SharedStates:
        """Wait for the copies and return where everything is; the rows are the driver's from now on."""
        if self._stream is not None:
            self._stream.synchronize()
        number = {id(slab): index for index, slab in enumerate(self.slabs)}
        states = SharedStates(
            pid=os.getpid(),
            slabs=tuple(slab.key for slab in self.slabs),
            places={
                request_id: (p.rows, tuple((number[id(b.slab)], b.offset) for b in p.blocks))
                for request_id, p in self.places.items()
            },
            order=tuple(order),
            width=self.width,
            dtype=str(self.dtype).removeprefix("torch."),
            refused=next((slab.refused for slab in self.slabs if slab.refused), ""),
        )
        for place in self.places.values():
            self.offered.extend(place.blocks)
        self.rows.clear()
        self.places.clear()
        self.lengths.clear()
        return states

    def clear(self) -> None:
        """Forget everything; free what the driver has given back or never taken."""
        super().clear()
        if self._stream is not None:
            self._stream.synchronize()
        for place in self.places.values():
            for block in place.blocks:
                block.slab.give(block.offset, block.size)
        self.places.clear()
        self._largest, self._batch = max(self._largest, self._batch), 0
        retired = {id(slab) for slab in self.slabs if slab.retired}
        kept = []
        for block in self.offered:
            if id(block.slab) in retired:
                continue
            if block.slab.state(block.offset) == slabs.TAKEN:
                kept.append(block)
            else:
                block.slab.give(block.offset, block.size)
        self.offered = kept
        self._let_go(retired)

    def _let_go(self, retired: set[int]) -> None:
        """Let go of retired slabs, and of empty ones beyond the limit and the largest batch."""
        total = sum(slab.size for slab in self.slabs)
        kept = []
        for slab in self.slabs:
            spare = total - slab.size >= self._limit + self._largest and slab.space.empty
            if id(slab) in retired or spare:
                total -= slab.size
                slab.close()
            else:
                kept.append(slab)
        self.slabs = kept

    def _new_place(self, length: int) -> _Place:
        size = length * self.width * self.dtype.itemsize
        self._batch += size * self.layers
        return _Place(length, tuple(self._new_block(size) for _ in range(self.layers)))

    def _new_block(self, size: int) -> _Block:
        for slab in self.slabs:
            offset = slab.take(size)
            if offset is not None:
                return _Block(slab, offset, size)
        try:
            slab = Slab(max(size, slabs.SLAB), pin=self.cuda)
        except OSError as error:
            raise GuardError(
                f"The system gives no shared memory for captured rows ({error}); use"
                " transfer='rpc', or smaller batches."
            ) from None
        if slab.refused:
            logger.warning(
                "vllm_compat: host memory could not be page-locked (%s); copies are slower.",
                slab.refused,
            )
        self.slabs.append(slab)
        offset = slab.take(size)
        assert offset is not None
        return _Block(slab, offset, size)


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
