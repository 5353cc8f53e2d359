"""Rows through shared memory: bit for bit, across processes, views told from copies."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_compat.capture import transfer  # noqa: E402
from vllm_compat.capture.rows import Span  # noqa: E402
from vllm_compat.capture.transfer import SharedRowStore, Values, is_view  # noqa: E402


def filled(dtype: Any) -> tuple[SharedRowStore, dict[str, list[Any]]]:
    """Return a store with three requests, one in two chunks and one computed again, and the rows."""
    rows = {
        name: [torch.randn(n, 8).to(dtype) for _ in range(2)]
        for name, n in (("a", 5), ("b", 1), ("c", 3))
    }
    store = SharedRowStore(2, torch.device("cpu"))
    store.expect({name: len(layers[0]) for name, layers in rows.items()})

    def step(*spans: Span) -> None:
        captured = [
            torch.cat([rows[s.request_id][layer][s.start : s.start + s.count] for s in spans])
            for layer in range(2)
        ]
        store.add(spans, captured)

    step(Span("a", 0, 3), Span("b", 0, 1))
    step(Span("c", 0, 2), Span("a", 3, 2))
    step(Span("c", 0, 3))  # preempted and computed again
    return store, rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slab", [4096, 2**20])
def test_rows_arrive_bit_for_bit(dtype: Any, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SLAB", slab)
    store, rows = filled(dtype)
    states = pickle.loads(pickle.dumps(store.shared([1, 0, 1])))
    assert set(states) == set(rows)
    for name, layers in rows.items():
        expected = [layers[1], layers[0], layers[1]]
        for found, right in zip(states[name], expected, strict=True):
            assert found.dtype == dtype
            assert torch.equal(found, right)


def test_views_are_told_from_copies() -> None:
    store, _ = filled(torch.float32)
    states = pickle.loads(pickle.dumps(store.shared([0, 1])))
    assert is_view(states["a"][0])
    assert not is_view(states["a"][0].clone())


def test_slabs_are_used_again_after_a_reset() -> None:
    store, _ = filled(torch.float32)
    store.shared([0, 1])
    count = len(store.slabs)
    for _ in range(50):
        store.clear()
        store.expect({"x": 5})
        store.add([Span("x", 0, 5)], [torch.ones(5, 8)] * 2)
        store.shared([0, 1])
    assert len(store.slabs) == count


def test_another_process_reads_them_and_nothing_is_left(tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdout
    assert worker.stdin
    size = int(worker.stdout.readline())
    states = pickle.loads(worker.stdout.read(size))
    assert [t.tolist() for t in states["r"]] == [[[0.0, 1.0], [2.0, 3.0]]]
    kept = states["r"][0].clone()
    known = len(transfer._mapped)
    worker.kill()
    worker.wait()
    assert kept.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    store, _ = filled(torch.float32)  # the next slab lets go of those of ended workers
    pickle.loads(pickle.dumps(store.shared([0, 1])))
    assert len(transfer._mapped) <= known


WORKER = """
import pickle, sys, torch
from vllm_compat.capture.rows import Span
from vllm_compat.capture.transfer import SharedRowStore
store = SharedRowStore(1, torch.device("cpu"))
store.expect({"r": 2})
store.add([Span("r", 0, 2)], [torch.arange(4.0).view(2, 2)])
data = pickle.dumps(store.shared([0]))
sys.stdout.buffer.write(f"{len(data)}\\n".encode() + data)
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_bad_rows_are_named_by_request_layer_and_token(bad: float) -> None:
    values = Values()
    tensors = [torch.ones(5, 4), torch.ones(5, 4)]
    tensors[1][3] = bad
    values.look((Span("a", 0, 2), Span("b", 7, 3)), tensors)
    fault = values.judge([2, 30])
    assert fault is not None
    assert "Request b, layer 30: 1 rows" in fault
    assert "token 8" in fault
    assert values.judge([2, 30]) is None
