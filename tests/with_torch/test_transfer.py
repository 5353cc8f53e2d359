"""Rows through shared memory: bit for bit, handed over without a copy, never written to again."""

from __future__ import annotations

import gc
import io
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_compat.capture import handover, slabs  # noqa: E402
from vllm_compat.capture.rows import Span  # noqa: E402
from vllm_compat.capture.transfer import SharedRowStore, Values  # noqa: E402
from vllm_compat.errors import GuardError  # noqa: E402
from vllm_compat.runtime import run  # noqa: E402

WIDTH = 8


def rows_of(lengths: dict[str, int], dtype: Any = torch.float32, layers: int = 2) -> dict[str, Any]:
    return {r: [torch.randn(n, WIDTH).to(dtype) for _ in range(layers)] for r, n in lengths.items()}


def reply(store: SharedRowStore, rows: dict[str, Any], order: list[int] | None = None) -> Any:
    """Run one batch through the store, in one step, as the driver gets it."""
    store.clear()
    store.expect({r: len(layers[0]) for r, layers in rows.items()})
    spans = [Span(r, 0, len(layers[0])) for r, layers in rows.items()]
    store.add(spans, [torch.cat(layer) for layer in zip(*rows.values(), strict=True)])
    return pickle.loads(pickle.dumps(store.shared(order or list(range(store.layers)))))


def handed(states: Any) -> dict[str, list[Any]]:
    """Do what the downstream does with a reply."""
    return {r: [h.clone().cpu() for h in layers] for r, layers in states.items()}


def same(found: dict[str, list[Any]], right: dict[str, Any]) -> bool:
    return set(found) == set(right) and all(
        torch.equal(a, b) for r in right for a, b in zip(found[r], right[r], strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slab", [4096, 2**20])
def test_rows_arrive_bit_for_bit(dtype: Any, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SLAB", slab)
    rows = rows_of({"a": 5, "b": 1, "c": 3}, dtype)
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
    states = pickle.loads(pickle.dumps(store.shared([1, 0, 1])))
    assert same(handed(states), {r: [b, a, b] for r, (a, b) in rows.items()})


def test_the_first_clone_hands_over_a_plain_tensor_of_its_own() -> None:
    rows = rows_of({"a": 5, "b": 3})
    states = reply(SharedRowStore(2, torch.device("cpu")), rows, [0, 1, 0])
    first = states["a"][0].clone()
    assert first.data_ptr() == states["a"][0].data_ptr(), "nothing was copied"
    assert type(first.cpu()) is torch.Tensor
    assert first.untyped_storage().nbytes() == 5 * WIDTH * 4, "torch.save writes whole storages"
    assert not first._is_view()
    assert first.is_contiguous()
    second = states["a"][0].clone()
    assert second.data_ptr() != first.data_ptr(), "two clones are two tensors"
    again = states["a"][2].clone()
    first.zero_()
    assert torch.equal(second, rows["a"][0])
    assert torch.equal(again, rows["a"][0]), "a layer asked for twice is two tensors"
    assert type(states["b"][0] + 1) is torch.Tensor
    assert torch.equal(states["b"][1][1:3].clone(), rows["b"][1][1:3])


def test_what_is_saved_is_what_a_copy_would_be() -> None:
    states = reply(SharedRowStore(2, torch.device("cpu")), rows_of({"a": 5}, torch.bfloat16))
    ours, stock = io.BytesIO(), io.BytesIO()
    kept = states["a"][1].clone().cpu()
    torch.save({"hidden_states": [kept.contiguous()]}, ours)
    torch.save({"hidden_states": [torch.empty_like(kept).copy_(kept)]}, stock)
    assert ours.getvalue() == stock.getvalue()


def test_a_kept_result_never_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SLAB", 2**16)
    monkeypatch.setattr(slabs, "limit", lambda: 2**20)
    choose = random.Random(1)
    store = SharedRowStore(2, torch.device("cpu"))
    kept: list[tuple[Any, Any]] = []
    for batch in range(300):
        rows = rows_of({f"{batch}_{i}": choose.randint(1, 200) for i in range(8)})
        for request, layers in handed(reply(store, rows)).items():
            for tensor, right in zip(layers, rows[request], strict=True):
                if choose.random() < 0.3:
                    kept.append((tensor, right))
        choose.shuffle(kept)
        del kept[: choose.randint(0, 8)]
        if batch % 20 == 0:
            assert all(torch.equal(a, b) for a, b in kept)
    assert all(torch.equal(a, b) for a, b in kept)
    assert handover.facts()["copied_bytes"], "the limit was reached"


@pytest.mark.parametrize("keep", ["nothing", "everything", "one row in a batch"])
def test_shared_memory_stays_below_the_limit_and_two_batches(
    keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab, limit = 2**16, 2**19
    monkeypatch.setattr(slabs, "SLAB", slab)
    monkeypatch.setattr(slabs, "limit", lambda: limit)
    store = SharedRowStore(2, torch.device("cpu"))
    kept: Any = []
    batch = 0
    for number in range(200):
        rows = rows_of({f"{number}_{i}": 60 + i for i in range(10)})
        batch = max(batch, sum(t.nbytes + slabs.GRANULE for ts in rows.values() for t in ts))
        results = handed(reply(store, rows))
        if keep == "everything":
            kept.append(results)
        elif keep == "one row in a batch":
            kept.append(results[f"{number}_3"][0])
        held = sum(s.size for s in store.slabs)
        assert held <= limit + 2 * batch + 3 * (slab + 2 * slabs.GRANULE), (number, held)
    assert handover.live_bytes() <= limit


def test_ten_thousand_requests_in_a_row_grow_nothing() -> None:
    store = SharedRowStore(2, torch.device("cpu"))

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    rows = rows_of({str(i): 4 + i for i in range(32)})
    for _ in range(20):
        handed(reply(store, rows))
    mapped = run.current().part(handover.Slabs).mapped
    before = descriptors(), len(store.slabs), len(mapped), len(gc.get_objects())
    memory = resident()
    for _ in range(313):
        results = handed(reply(store, rows))
    assert same(results, rows)
    del results
    after = descriptors(), len(store.slabs), len(mapped), len(gc.get_objects())
    assert after[0] <= before[0]
    assert after[1:3] == before[1:3]
    assert after[3] < before[3] + 500
    assert resident() < memory + 8 * 2**20


def test_blocks_come_back_from_other_threads() -> None:
    store = SharedRowStore(1, torch.device("cpu"))
    rows = rows_of({str(i): 9 for i in range(16)}, layers=1)
    for _ in range(20):
        results = handed(reply(store, rows))
        threads = [
            threading.Thread(target=torch.save, args=(results.pop(r), io.BytesIO())) for r in rows
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        threads.clear()
    del thread
    store.clear()
    assert not store.offered
    assert handover.live_bytes() == 0


def test_what_a_forked_child_sees_never_changes() -> None:
    store = SharedRowStore(2, torch.device("cpu"))
    rows = rows_of({"a": 7})
    results = handed(reply(store, rows))
    ask, answer = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(ask[0], 1)
        os.write(answer[1], b"y" if same(results, rows) else b"n")
        del results
        os._exit(0)
    del results
    for _ in range(5):
        again = rows_of({"a": 7})
        assert same(handed(reply(store, again)), again)
    os.write(ask[1], b"x")
    assert os.read(answer[0], 1) == b"y"
    os.waitpid(child, 0)
    assert len(store.slabs) == 1, "the slab that the child sees was left to it"


def test_a_batch_that_failed_half_way_leaves_its_blocks() -> None:
    store = SharedRowStore(2, torch.device("cpu"))
    rows = rows_of({"a": 7})
    store.expect({"a": 9})
    store.add([Span("a", 0, 7)], rows["a"])  # never asked for
    store.clear()
    assert store.slabs[0].space.empty
    reply(store, rows)
    store.shared([0, 1])  # asked for again: nothing
    late = pickle.dumps(pickled(store, rows))  # offered, and the reply never read
    store.clear()
    with pytest.raises(GuardError, match="came late"):
        pickle.loads(late)


def test_memory_that_cannot_be_page_locked_is_used_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = [1]  # FAKE: what CUDA would tell the next kernel
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 1, cudaGetLastError=lambda: errors.pop())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    slab = slabs.Slab(2**16, pin=True)
    assert not slab.pinned
    assert not errors, "a failed registration leaves no error behind"
    store = SharedRowStore(2, torch.device("cpu"))
    store.slabs.append(slab)
    rows = rows_of({"a": 7})
    assert same(handed(reply(store, rows)), rows)
    assert handover.facts()["not_page_locked"] == "cudaHostRegister returned 1"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only there an error stays")
@pytest.mark.parametrize("forget", [True, False])
def test_a_failed_registration_leaves_cudas_last_error_clear(
    monkeypatch: pytest.MonkeyPatch, forget: bool
) -> None:
    torch.ones(1, device="cuda")
    runtime = torch.cuda.cudart()
    get = slabs._of_the_runtime()
    assert get is not None

    def twice(*arguments: int) -> int:
        assert int(runtime.cudaHostRegister(*arguments)) == 0
        return int(runtime.cudaHostRegister(*arguments))  # the same range again: a real failure

    registering = SimpleNamespace(cudaHostRegister=twice)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: registering)
    if not forget:
        monkeypatch.setattr(slabs, "_forget_error", lambda: None)
    slab = slabs.Slab(2**20, pin=True)
    assert not slab.pinned
    last = int(get())
    runtime.cudaHostUnregister(slab.bytes.data_ptr())
    assert (last == 0) is forget, "without it the next kernel would find the error"
    assert float((torch.ones(8, device="cuda") + 1).sum()) == 16


class pickled:
    """A reply in the worker, before it is sent."""

    def __init__(self, store: SharedRowStore, rows: dict[str, Any]) -> None:
        store.clear()
        store.expect({r: len(layers[0]) for r, layers in rows.items()})
        store.add([Span(r, 0, len(layers[0])) for r, layers in rows.items()], rows["a"])
        self.states = store.shared([0, 1])

    def __reduce__(self) -> Any:
        return self.states.__reduce__()


def processes_with_slabs() -> set[str]:
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "memfd:vllm_compat" in os.readlink(link):
                found.add(link.parts[2])
        except OSError:
            continue
    return found


@pytest.mark.parametrize("killed", ["worker", "driver"])
def test_a_kept_result_outlives_its_worker_and_nothing_is_left(killed: str) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout
    assert driver.stdin
    worker = int(driver.stdout.readline())
    mine = {str(worker), str(driver.pid)}
    assert str(worker) in processes_with_slabs()
    if killed == "worker":
        os.kill(worker, signal.SIGKILL)
        assert driver.communicate("go\n", timeout=60)[0].strip() == "[[0.0, 1.0], [2.0, 3.0]]"
    else:
        driver.kill()
        driver.communicate(timeout=60)
        os.kill(worker, signal.SIGKILL)  # vLLM's workers end by themselves; this one is a stand-in
    deadline = time.monotonic() + 30  # a killed process takes a moment to go
    while (left := mine & processes_with_slabs()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


DRIVER = """
import pickle, subprocess, sys, torch
worker = subprocess.Popen([sys.executable, "-c", '''
import pickle, sys, time, torch
from vllm_compat.capture.rows import Span
from vllm_compat.capture.transfer import SharedRowStore
store = SharedRowStore(1, torch.device("cpu"))
store.expect({"r": 2})
store.add([Span("r", 0, 2)], [torch.arange(4.0).view(2, 2)])
data = pickle.dumps(store.shared([0]))
sys.stdout.buffer.write(f"{len(data)}\\\\n".encode() + data)
sys.stdout.flush()
time.sleep(600)
'''], stdout=subprocess.PIPE)
size = int(worker.stdout.readline())
states = pickle.loads(worker.stdout.read(size))
kept = states["r"][0].clone().cpu()
del states
print(worker.pid, flush=True)
sys.stdin.readline()
worker.wait()
print(kept.tolist(), flush=True)
"""


def test_a_worker_that_has_ended_is_named() -> None:
    worker = subprocess.Popen([sys.executable, "-c", "pass"])
    worker.wait()
    with pytest.raises((OSError, GuardError)):
        handover.open_states(worker.pid, ((3, 4096, 1),), {"r": (1, ((0, 0),))}, (0,), 2, "float32")


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
