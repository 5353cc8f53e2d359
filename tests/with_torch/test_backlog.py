"""Saves that wait in a thread pool: counted until they end, a bound for them, and nobody blocked."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_compat.features import save_backlog  # noqa: E402
from vllm_compat.features.save_backlog import Backlog, tensor_bytes  # noqa: E402
from vllm_compat.runtime import run, run_record  # noqa: E402

MIB = 2**20


def sample(mib: int = 1) -> dict[str, Any]:
    """Return what stock's script hands to its pool."""
    states = [torch.zeros(mib * MIB // 8) for _ in range(2)]
    return {"input_ids": torch.zeros(3), "hidden_states": states, "loss_mask": None}


def save(data: Any, path: str) -> str:
    return path


BYTES = MIB + 12


@pytest.mark.parametrize(
    "work",
    [
        ((save, sample(), "data_0.pt"), {}),
        ((save,), {"data": sample(), "path": "data_0.pt"}),
        ((functools.partial(save, sample()),), {}),
        ((functools.partial(save, path="x", data=sample()),), {}),
        ((save, [(sample(),)], 3), {}),
    ],
)
def test_tensors_are_found_where_they_are_handed_over(work: Any) -> None:
    assert tensor_bytes(work) == BYTES


def test_tensors_in_a_closure_are_found_and_a_storage_counts_once() -> None:
    data = sample()
    assert tensor_bytes(lambda: save(data, "x")) == BYTES
    assert tensor_bytes([data, data["hidden_states"][0][3:]]) == BYTES
    assert tensor_bytes((print, "text", 3, {"a": [None, b"x"]})) == 0


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    """A pool of four threads, watched as it is in a driver."""
    monkeypatch.setattr(save_backlog, "bound", lambda: 4 * MIB)
    monkeypatch.setattr(run_record, "is_ours", lambda: True)
    with ThreadPoolExecutor(4) as made:
        yield made


def submit(pool: ThreadPoolExecutor, *args: Any) -> Future[Any]:
    return save_backlog.submit(pool.submit, pool, args, {})


def test_the_status_line_says_what_a_run_waits_for() -> None:
    from vllm_compat.commands.run.watch import Process, view

    said = {"role": "program", "pid": 1, "phase": "extracting", "samples": 8, "changed": 0.0}
    assert "waiting" not in view([Process(said)], 1.0).line
    waiting = {**said, "waiting": "waiting for results to be saved"}
    assert view([Process(waiting)], 1.0).line.endswith("waiting for results to be saved")


def generate() -> str:
    save_backlog.wait_for_saves()
    return "extracted"


def test_a_slow_disk_holds_the_next_batch_back(pool: ThreadPoolExecutor) -> None:
    peak = 0
    for _ in range(12):
        generate()
        for _ in range(4):  # a batch of 4 MiB
            submit(pool, lambda data: time.sleep(0.2), sample())
        peak = max(peak, run.current().part(Backlog).bytes)
    assert peak <= 4 * MIB + 4 * BYTES, "the bound and one batch"
    assert save_backlog.facts()["most_bytes"] == peak
    assert save_backlog.facts()["waited_seconds"] > 0


def test_without_a_bound_they_pile_up(pool: ThreadPoolExecutor) -> None:
    """The control: what the wait is good for."""
    gate = threading.Event()
    for _ in range(12):
        for _ in range(4):
            submit(pool, lambda data: gate.wait(), sample())
    assert run.current().part(Backlog).most == 48 * BYTES
    gate.set()


def test_a_caller_that_keeps_results_never_waits(pool: ThreadPoolExecutor) -> None:
    kept = []
    for _ in range(20):
        generate()
        kept.append(sample())
        submit(pool, save, kept[-1], "x").result()
    assert save_backlog.facts()["waited_seconds"] < 1


def test_failed_and_cancelled_saves_count_no_more(pool: ThreadPoolExecutor) -> None:
    gate = threading.Event()
    blockers = [pool.submit(gate.wait) for _ in range(4)]
    waiting = [submit(pool, save, sample(9), "x") for _ in range(2)]
    assert run.current().part(Backlog).bytes > 16 * MIB
    assert all(future.cancel() for future in waiting)
    assert generate() == "extracted"
    gate.set()

    def fail(data: Any) -> None:
        raise OSError("disk full")

    failed = submit(pool, fail, sample(9))
    assert isinstance(failed.exception(), OSError)
    assert generate() == "extracted"
    assert all(future.result() for future in blockers)


def test_a_caller_inside_the_pool_does_not_wait_for_itself(pool: ThreadPoolExecutor) -> None:
    with ThreadPoolExecutor(1) as single:

        def work() -> Any:
            submit(single, save, sample(9), "x")  # can only run after this one has ended
            return generate()

        assert single.submit(work).result(timeout=30) == "extracted"


def test_a_save_that_never_ends_is_told_and_not_waited_for(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    submit(pool, lambda data: gate.wait(), sample(9))
    with caplog.at_level(logging.WARNING):
        run.current().part(Backlog).wait(4 * MIB, stall=0.1)
    gate.set()
    assert "extraction goes on" in caplog.text
