"""What a revert says of the workers of each engine, and what their generators do then."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_compat.errors import UsageError
from vllm_compat.runtime import context, engines, run
from vllm_compat.runtime.engines import Engines, RankStatus


def take_back(rank: int) -> dict[str, Any]:
    """Answer as a worker does that has taken its patches back."""
    return {"rank": rank, "pid": os.getpid(), "left": ["a.module:wrapped.over"] if rank else []}


def serve(pipe: Any, rank: int) -> None:
    while True:
        pipe.send(pipe.recv()(rank))


class Executor:
    """A FAKE of vLLM's executor with real processes: it raises for all ranks where one is silent."""

    def __init__(self, ranks: int) -> None:
        spawn: Any = multiprocessing.get_context("fork")
        self.asked = 0
        self.workers: list[tuple[Any, Any]] = []
        for rank in range(ranks):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [{"rank": rank, "pid": pid} for rank, pid in enumerate(self.pids)]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self.workers]

    def collective_rpc(self, method: Callable[[int], Any], timeout: float) -> list[Any]:
        self.asked += 1
        deadline = time.monotonic() + timeout
        for _, pipe in self.workers:
            pipe.send(method)
        replies = []
        for _, pipe in self.workers:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError("RPC call to take_back timed out.")
            replies.append(pipe.recv())
        return replies

    def end(self, rank: int) -> None:
        """Kill a worker, and leave what is left of it to its parent, as a zombie."""
        pid = self.pids[rank]
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


class Generator:
    """A FAKE generator with a ``generate`` of its class."""

    def generate(self, token_ids: list[list[int]]) -> str:
        return "rows"


@pytest.fixture
def executor() -> Iterator[Callable[[int], Executor]]:
    """Make executors whose workers are ended after the test."""
    pids: list[Any] = []

    def make(ranks: int = 2) -> Executor:
        made = Executor(ranks)
        pids.extend(process for process, _ in made.workers)
        return made

    yield make
    for process in pids:
        process.kill()
        process.join(10)


def known(executor: Executor, generator: Any = None) -> Engines:
    """Return what this run knows when an executor has started, inside of a generator's construction."""
    found = run.current().part(Engines)
    if generator is None:
        found.add(executor, executor.reports)
    else:
        with context.building(generator, "a model"):
            found.add(executor, executor.reports)
    return found


Make = Callable[..., Executor]


def test_a_rank_that_answers_is_reverted_and_names_what_had_to_stay(executor: Make) -> None:
    engine = executor(2)
    assert known(engine).take_back(take_back) == (
        RankStatus(0, engine.pids[0], "reverted"),
        RankStatus(1, engine.pids[1], "reverted", ("a.module:wrapped.over",)),
    )


def test_a_rank_that_hangs_makes_all_ranks_busy_and_is_not_waited_for_longer(
    executor: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "SECONDS", 0.3)
    engine = executor(2)
    os.kill(engine.pids[1], signal.SIGSTOP)
    begin = time.monotonic()
    found = known(engine).take_back(take_back)
    assert 0.3 <= time.monotonic() - begin < 3
    assert [(rank.rank, rank.state, rank.left) for rank in found] == [(0, "busy", ()), (1, "busy", ())]


def test_a_rank_whose_process_has_ended_is_gone_and_the_others_are_busy(executor: Make) -> None:
    engine = executor(2)
    engine.end(0)
    found = known(engine).take_back(take_back)
    assert [rank.state for rank in found] == ["gone", "busy"]


def test_an_engine_of_ended_processes_is_asked_nothing(executor: Make) -> None:
    engine = executor(2)
    engine.end(0)
    engine.end(1)
    found = known(engine).take_back(take_back)
    assert [rank.state for rank in found] == ["gone", "gone"]
    assert engine.asked == 0


def test_a_generate_call_that_is_under_way_is_not_disturbed(executor: Make) -> None:
    engine, generator, other = executor(2), Generator(), Generator()
    found = known(engine, generator)
    with context.call_of(generator):
        assert [rank.state for rank in found.take_back(take_back)] == ["busy", "busy"]
        assert engine.asked == 0
    with context.call_of(other):  # another generator's call is no hindrance
        assert [rank.state for rank in found.take_back(take_back)] == ["reverted", "reverted"]
    assert other.generate([[1]]) == "rows"


@pytest.mark.parametrize("state", ["reverted", "busy", "gone"])
def test_the_generator_refuses_in_one_sentence_whatever_its_workers_say(
    executor: Make, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(engines, "SECONDS", 0.1)
    engine, generator = executor(1), Generator()
    if state == "busy":
        os.kill(engine.pids[0], signal.SIGSTOP)
    elif state == "gone":
        engine.end(0)
    assert [rank.state for rank in known(engine, generator).take_back(take_back)] == [state]
    for call in (lambda: generator.generate([[1]]), lambda: generator.generate(token_ids=[[1]])):
        with pytest.raises(UsageError, match="Build a new generator") as caught:
            call()
        assert "\n" not in str(caught.value)
    assert Generator().generate([[1]]) == "rows", "its class, and others of it, answer as before"


def test_an_executor_that_is_garbage_is_skipped(executor: Make) -> None:
    kept, lost = executor(1), executor(1)
    generator = Generator()
    found = known(lost, generator)
    known(kept)
    del lost
    gc.collect()
    assert [rank.pid for rank in found.take_back(take_back)] == kept.pids
    assert generator.generate([[1]]) == "rows", "without its engine there is nothing to refuse"


def test_an_executor_whose_generator_is_garbage_is_asked_all_the_same(executor: Make) -> None:
    engine, generator = executor(1), Generator()
    found = known(engine, generator)
    del generator
    gc.collect()
    assert [rank.state for rank in found.take_back(take_back)] == ["reverted"]


def test_a_rank_that_tells_no_number_has_that_of_its_place(executor: Make) -> None:
    engine = executor(2)
    found = Engines()
    found.add(engine, [{"rank": None, "pid": pid} for pid in engine.pids])
    assert [rank.rank for rank in found.take_back(take_back)] == [0, 1]


def test_every_engine_is_asked_though_one_of_them_hangs(
    executor: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "SECONDS", 0.2)
    first, second = executor(1), executor(1)
    os.kill(first.pids[0], signal.SIGSTOP)
    known(first)
    found = known(second).take_back(take_back)
    assert [rank.state for rank in found] == ["busy", "reverted"]


def test_who_was_busy_is_asked_again_until_it_answers_and_who_answered_is_not(
    executor: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "SECONDS", 0.2)
    first, second = executor(1), executor(1)
    os.kill(first.pids[0], signal.SIGSTOP)
    known(first)
    found = known(second)
    assert [rank.state for rank in found.take_back(take_back)] == ["busy", "reverted"]
    run.end()
    assert run.current().find(Engines) is found, "it is held on to past the end of the run"
    assert [(rank.pid, rank.state) for rank in found.busy] == [(first.pids[0], "busy")]
    assert [rank.state for rank in found.ask_again(take_back)] == ["busy"]
    os.kill(first.pids[0], signal.SIGCONT)
    monkeypatch.setattr(engines, "SECONDS", 10.0)
    assert found.ask_again(take_back) == (RankStatus(0, first.pids[0], "reverted"),)
    assert (found.busy, found.ask_again(take_back)) == ((), ())
    assert (first.asked, second.asked) == (3, 1)


def test_a_busy_engine_whose_processes_end_is_told_no_more(
    executor: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "SECONDS", 0.1)
    engine = executor(1)
    os.kill(engine.pids[0], signal.SIGSTOP)
    found = known(engine)
    found.take_back(take_back)
    engine.end(0)
    assert found.busy == ()
    assert [rank.state for rank in found.ask_again(take_back)] == ["gone"]
    assert found.ask_again(take_back) == ()


def test_a_batch_is_known_to_be_under_way_past_a_revert() -> None:
    generator = Generator()
    with context.call_of(generator):
        run.end()
        assert context.is_under_way(generator)
    assert not context.is_under_way(generator)
