"""Rows of a step go to their requests: without torch, a tensor is a list of rows here."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_compat.capture.rows import RowStore, Span, spans_of
from vllm_compat.errors import GuardError


def join(parts: Any) -> list[Any]:
    return [row for part in parts for row in part]


def rows(*spans: Span, layer: int = 0, version: int = 0) -> list[Any]:
    """Return the rows that a forward over these spans would give."""
    return [(s.request_id, layer, s.start + i, version) for s in spans for i in range(s.count)]


def store_of(*steps: tuple[Span, ...], layers: int = 1) -> RowStore:
    store = RowStore(layers)
    for version, spans in enumerate(steps):
        captured = [rows(*spans, layer=layer, version=version) for layer in range(layers)]
        store.add(spans, captured)
    return store


def test_spans_stand_in_the_order_of_the_batch() -> None:
    spans = spans_of(["b", "a"], {"a": 3, "b": 1}, {"a": 0, "b": 7, "unscheduled": 5})
    assert spans == (Span("b", 7, 1), Span("a", 0, 3))
    assert spans_of([], {}, {}) == ()


@pytest.mark.parametrize(
    ("order", "scheduled"),
    [
        (["a"], {"a": 1, "b": 1}),
        (["a", "b"], {"a": 1}),
        (["a", "a"], {"a": 1}),
        (["a", "c"], {"a": 1, "b": 1}),
        ([], {"a": 1}),
    ],
)
def test_a_batch_that_is_not_what_was_scheduled_is_refused(
    order: list[str], scheduled: dict[str, int]
) -> None:
    with pytest.raises(GuardError, match="rows cannot be attributed"):
        spans_of(order, scheduled, dict.fromkeys(scheduled, 0))


def test_rows_of_one_step_are_cut_by_request() -> None:
    store = store_of((Span("b", 0, 2), Span("a", 0, 3)), layers=2)
    assert store.collect(join) == {
        "b": [[("b", layer, i, 0) for i in range(2)] for layer in range(2)],
        "a": [[("a", layer, i, 0) for i in range(3)] for layer in range(2)],
    }


def test_chunks_of_a_prompt_are_put_together() -> None:
    store = store_of((Span("a", 0, 2),), (Span("a", 2, 1), Span("b", 0, 1)), (Span("a", 3, 2),))
    states = store.collect(join)
    assert [(i, version) for _, _, i, version in states["a"][0]] == [
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 2),
    ]
    assert len(states["b"][0]) == 1


@pytest.mark.parametrize("restart", range(6))
def test_what_is_computed_again_replaces_what_was(restart: int) -> None:
    store = store_of((Span("a", 0, 2),), (Span("a", 2, 3),), (Span("a", restart, 2),))
    (found,) = store.collect(join)["a"]
    positions = [(i, version) for _, _, i, version in found]
    kept = [(i, 0 if i < 2 else 1) for i in range(restart)]
    assert positions == [*kept, (restart, 2), (restart + 1, 2)]


def test_a_hole_is_refused_with_the_request_and_the_token() -> None:
    with pytest.raises(GuardError, match="Request a continues at token 16, but only 0 of its rows"):
        store_of((Span("a", 16, 4),))
    with pytest.raises(GuardError, match=r"continues at token 5, but only 2.*lost step"):
        store_of((Span("a", 0, 2),), (Span("a", 5, 1),))
    with pytest.raises(GuardError, match="continues at token 4, but only 2"):
        store_of((Span("a", 0, 4),), (Span("a", 0, 2),), (Span("a", 4, 1),))


def test_a_missing_layer_is_refused() -> None:
    span = Span("a", 0, 2)
    with pytest.raises(GuardError, match="1 of 2 layers were captured in a step"):
        RowStore(2).add([span], [rows(span)])


@pytest.mark.parametrize("have", [0, 1, 4])
def test_rows_that_are_sharded_or_cut_are_refused_with_their_layer(have: int) -> None:
    spans = (Span("a", 0, 2), Span("b", 0, 3))
    whole = rows(*spans)
    with pytest.raises(GuardError, match=rf"layer number 1 has {have} rows for 5 tokens"):
        RowStore(2).add(spans, [whole, whole[:have]])


def test_rows_behind_the_tokens_are_padding() -> None:
    span = Span("a", 0, 2)
    store = RowStore(1)
    store.add([span], [[*rows(span), "padding", "padding"]])
    assert store.collect(join) == {"a": [rows(span)]}


def test_what_is_collected_or_cleared_is_forgotten() -> None:
    store = store_of((Span("a", 0, 2),))
    assert store.collect(join)
    assert store.collect(join) == {}
    store.add([Span("a", 0, 1)], [rows(Span("a", 0, 1))])
    store.clear()
    assert store.collect(join) == {}
    with pytest.raises(GuardError, match="continues at token 1, but only 0"):
        store.add([Span("a", 1, 1)], [["row"]])


@st.composite
def schedules(draw: st.DrawFn) -> tuple[dict[str, int], list[tuple[Span, ...]]]:
    """Draw prompts, and steps that compute them: in chunks, any order, with preemptions.

    A preempted request starts again at any earlier token; each comes to its end at last.
    """
    lengths = {
        f"r{i}": n for i, n in enumerate(draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)))
    }
    done = dict.fromkeys(lengths, 0)
    steps: list[tuple[Span, ...]] = []
    for _ in range(draw(st.integers(0, 12))):
        spans = []
        for request_id in draw(st.permutations(sorted(lengths))):
            if draw(st.booleans()):
                continue
            start = done[request_id]
            if draw(st.integers(0, 3)) == 0:
                start = draw(st.integers(0, start))
            if start < lengths[request_id]:
                count = draw(st.integers(1, lengths[request_id] - start))
                spans.append(Span(request_id, start, count))
                done[request_id] = start + count
        steps.append(tuple(spans))
    last = [Span(r, done[r], n - done[r]) for r, n in lengths.items() if done[r] < n]
    return lengths, [*steps, tuple(last)]


@settings(deadline=None)
@given(schedules(), st.integers(1, 3))
def test_every_schedule_gives_exactly_each_requests_rows_in_order(
    schedule: tuple[dict[str, int], list[tuple[Span, ...]]], layers: int
) -> None:
    lengths, steps = schedule
    states = store_of(*steps, layers=layers).collect(join)
    latest = {
        (span.request_id, span.start + i): version
        for version, spans in enumerate(steps)
        for span in spans
        for i in range(span.count)
    }
    assert states == {
        r: [[(r, layer, i, latest[r, i]) for i in range(n)] for layer in range(layers)]
        for r, n in lengths.items()
    }


def test_what_an_engine_computes_behind_a_prompt_is_dropped() -> None:
    store = RowStore(1)
    store.expect({"a": 3, "b": 1})
    store.add([Span("a", 0, 4), Span("b", 0, 1)], [rows(Span("a", 0, 4), Span("b", 0, 1))])
    store.add([Span("a", 4, 1), Span("b", 1, 1)], [rows(Span("a", 4, 1), Span("b", 1, 1))])
    found = store.collect(join)
    assert {request: len(layers[0]) for request, layers in found.items()} == {"a": 3, "b": 1}
