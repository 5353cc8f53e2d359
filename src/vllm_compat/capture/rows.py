"""Which rows of a step belong to which request, and the rows of each request put together.

Pure bookkeeping over anything that can be sliced and has a length: tested without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_compat.errors import GuardError


@dataclass(frozen=True)
class Span:
    """Rows of one request in one step: ``count`` rows, the first of which is token ``start``."""

    request_id: str
    start: int
    count: int


def spans_of(
    order: Sequence[str], scheduled: dict[str, int], computed: dict[str, int]
) -> tuple[Span, ...]:
    """Return the spans of a step in the order in which the batch holds them.

    ``order`` is the batch's own order of request ids, ``scheduled`` the tokens of each in this step,
    ``computed`` the tokens of each that earlier steps have computed.

    Raises:
        GuardError: ``order`` and ``scheduled`` do not name the same requests.
    """
    if sorted(order) != sorted(scheduled):
        raise GuardError(
            f"The batch holds the requests {sorted(order)}, the scheduler planned"
            f" {sorted(scheduled)}: rows cannot be attributed."
        )
    return tuple(Span(r, computed[r], scheduled[r]) for r in order)


@dataclass
class RowStore:
    """The captured rows of every request since the last reset.

    A request that is computed again (after preemption) has its rows replaced from there on, so that
    no row stands twice; rows that would leave a hole are refused.
    """

    layers: int
    chunks: dict[str, list[list[Any]]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    def expect(self, lengths: dict[str, int]) -> None:
        """Say how many rows each request will have in the end: those of its prompt, and no more."""
        self.lengths.update(lengths)

    def add(self, spans: Sequence[Span], captured: Sequence[Any]) -> None:
        """Cut one step's tensors (one a layer, ``[rows, hidden]``) by ``spans`` and keep the parts.

        Raises:
            GuardError: A layer is missing, has fewer rows than the step has tokens, or a request's
                rows do not follow on the ones it has.
        """
        total = sum(span.count for span in spans)
        if len(captured) != self.layers:
            raise GuardError(f"{len(captured)} of {self.layers} layers were captured in a step.")
        for index, tensor in enumerate(captured):
            if len(tensor) < total:
                raise GuardError(
                    f"Captured layer number {index} has {len(tensor)} rows for {total} tokens: the"
                    " rows are sharded or cut, which this capture does not serve."
                )
        offset = 0
        for span in spans:
            have = self.rows.get(span.request_id, 0)
            # An engine that schedules ahead may compute tokens behind the prompt as well.
            count = min(span.count, self.lengths.get(span.request_id, sys.maxsize) - span.start)
            if count > 0 and span.start > have:
                raise GuardError(
                    f"Request {span.request_id} continues at token {span.start}, but only {have} of"
                    " its rows were captured: a cached prefix or a lost step."
                )
            if count > 0:
                parts = [tensor[offset : offset + count] for tensor in captured]
                self.keep(replace(span, count=count), have, parts)
                self.rows[span.request_id] = span.start + count
            offset += span.count

    def keep(self, span: Span, have: int, parts: Sequence[Any]) -> None:
        """Keep one request's rows of one step, of which it has ``have`` already."""
        chunks = self.chunks.setdefault(span.request_id, [])
        if span.start < have:
            _truncate(chunks, span.start)
        chunks.append(list(parts))

    def collect(self, join: Callable[[Sequence[Any]], Any]) -> dict[str, list[Any]]:
        """Return ``{request id: [one joined tensor a layer]}`` and forget everything."""
        states = {
            request_id: [join([part[layer] for part in parts]) for layer in range(self.layers)]
            for request_id, parts in self.chunks.items()
        }
        self.clear()
        return states

    def clear(self) -> None:
        """Forget everything."""
        self.chunks.clear()
        self.rows.clear()
        self.lengths.clear()


def _truncate(parts: list[list[Any]], keep: int) -> None:
    """Keep the first ``keep`` rows of a request's parts."""
    kept = 0
    for index, part in enumerate(parts):
        rows = len(part[0])
        if kept + rows > keep:
            parts[index] = [tensor[: keep - kept] for tensor in part]
            del parts[index + 1 :]
            break
        kept += rows
    parts[:] = [part for part in parts if len(part[0])]
