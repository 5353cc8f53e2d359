"""What stands behind the generator with the second engine: over a FAKE ``vllm.LLM``, without torch."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_compat.engine import driver
from vllm_compat.engine.driver import PublicExecutor, paired
from vllm_compat.engine.worker import Extension, digest
from vllm_compat.errors import GuardError, UsageError


class Worker(Extension):
    """A FAKE worker of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def named(self, word: str) -> str:
        return f"{word} from {self.rank}"


class LLM:
    """A FAKE engine: its front end speaks bytes with two workers, and it may break off."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.workers = [Worker(0), Worker(1)]
        self.asked: list[list[list[int]]] = []
        self.fail: BaseException | None = None
        self.ended = 0
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self.end))

    def end(self) -> None:
        self.ended += 1

    def collective_rpc(self, method: str, timeout: float | None = None, args: Any = ()) -> list[bytes]:
        return [getattr(worker, method)(*args) for worker in self.workers]

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool = True) -> list[Any]:
        self.asked.append([prompt["prompt_token_ids"] for prompt in prompts])
        if self.fail is not None:
            raise self.fail
        return [SimpleNamespace(request_id=str(i), **prompt) for i, prompt in enumerate(prompts)]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> list[LLM]:
    """Return the engines that are made, in order."""
    made: list[LLM] = []

    def make(**arguments: Any) -> LLM:
        made.append(LLM(**arguments))
        return made[-1]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=make, SamplingParams=dict))  # type: ignore[arg-type]
    return made


def rank_of(worker: Any, plus: int = 0) -> int:
    return int(worker.rank) + plus


def refuse(worker: Any) -> None:
    raise GuardError(f"rank {worker.rank} has seen something")


def break_down(worker: Any) -> None:
    raise KeyError("what")


def test_functions_and_methods_run_in_every_worker(llm: list[LLM]) -> None:
    executor = PublicExecutor({"model": "m"})
    assert llm[0].arguments == {"model": "m"}
    assert executor.collective_rpc(rank_of, args=(5,)) == [5, 6]
    assert executor.collective_rpc(rank_of, kwargs={"plus": 1}, unique_reply_rank=1) == 2
    assert executor.collective_rpc("named", args=("a word",)) == ["a word from 0", "a word from 1"]


@pytest.mark.usefixtures("llm")
def test_what_a_worker_raises_of_ours_comes_as_it_is_and_the_rest_in_words() -> None:
    executor = PublicExecutor({})
    with pytest.raises(GuardError, match="rank 0 has seen something"):
        executor.collective_rpc(refuse)
    with pytest.raises(RuntimeError, match="KeyError: 'what'"):
        executor.collective_rpc(break_down)


def test_an_engine_that_does_not_answer_is_waited_for_no_longer_than_asked(
    llm: list[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = PublicExecutor({})
    monkeypatch.setattr(llm[0], "collective_rpc", lambda *_: time.sleep(60))
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        executor.collective_rpc(rank_of, timeout=0.1)
    assert time.monotonic() - begin < 10


def test_prompts_go_as_tokens_in_one_call_or_each_alone(llm: list[LLM]) -> None:
    executor = PublicExecutor({})
    assert [o.prompt_token_ids for o in executor.compute([[1, 2], [3]])] == [[1, 2], [3]]
    assert len(executor.compute([[1, 2], [3]], alone=True)) == 2
    assert llm[0].asked == [[[1, 2], [3]], [[1, 2]], [[3]]]


def test_what_a_broken_call_has_left_is_computed_before_the_next(llm: list[LLM]) -> None:
    executor = PublicExecutor({})
    executor.clean()
    assert llm[0].asked == []
    llm[0].fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        executor.compute([[1]])
    llm[0].fail = None
    executor.clean()
    assert llm[0].asked == [[[1]], [[0]]]
    executor.clean()
    assert len(llm[0].asked) == 2


def test_an_engine_that_has_ended_is_named(llm: list[LLM]) -> None:
    executor = PublicExecutor({})
    llm[0].fail = RuntimeError("engine dead")
    with pytest.raises(RuntimeError):
        executor.compute([[1]])
    with pytest.raises(GuardError, match="build a new generator"):
        executor.clean()


def test_shutting_down_ends_the_engine_once_and_its_processes(llm: list[LLM]) -> None:
    executor = PublicExecutor({})
    stays = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    executor.know([stays.pid, os.getpid()])
    engine, driver.SECONDS_TO_END = llm[0], 0.3
    try:
        executor.shutdown()
        executor.shutdown()
    finally:
        driver.SECONDS_TO_END = 10.0
    assert engine.ended == 1
    assert stays.wait(10) != 0
    for use in (lambda: executor.collective_rpc(rank_of), lambda: executor.compute([[1]])):
        with pytest.raises(UsageError, match="has been shut down"):
            use()


def constructor(
    model_path: str, layer_ids: list[int] | None = None, max_model_len: int = 2048,
    gpu_memory_utilization: float = 0.8, tensor_parallel_size: int = 1, seed: int = 0,
) -> None: ...  # fmt: skip


def test_arguments_have_the_downstreams_defaults_and_one_that_is_not_known_is_refused() -> None:
    given = driver._bound(constructor, ("m",), {"tensor_parallel_size": 2})
    asked = driver.arguments(given)
    assert (asked["model"], asked["max_model_len"], asked["tensor_parallel_size"]) == ("m", 2048, 2)
    assert (asked["max_num_batched_tokens"], asked["max_num_seqs"]) == (8192, 32)
    assert (asked["enable_prefix_caching"], asked["enforce_eager"]) == (False, True)
    assert driver.arguments({**given, "max_model_len": 9000})["max_num_batched_tokens"] == 9000
    assert driver.arguments({**given, "max_num_batched_tokens": 48})["max_num_batched_tokens"] == 48
    driver._bound(constructor, ("m",), {"seed": 0})
    with pytest.raises(UsageError, match="argument seed: leave it out, or use engine='stock'"):
        driver._bound(constructor, ("m",), {"seed": 1})


def test_layers_are_chosen_and_bounded_by_the_downstreams_rule() -> None:
    config = SimpleNamespace(num_hidden_layers=8)
    assert driver._layer_ids(config, None) == [2, 4, 5, 7]
    assert driver._layer_ids(SimpleNamespace(text_config=config), [6, 1]) == [6, 1]
    with pytest.raises(ValueError, match=r"Layer index 8 out of bounds \[0, 7\]"):
        driver._layer_ids(config, [8])
    with pytest.raises(ValueError, match="Cannot determine num_layers"):
        driver._layer_ids(SimpleNamespace(), None)


@pytest.mark.parametrize("name", ["{}", "{}-0a1b2c3d", "request-{}"])
@given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), max_size=30))
def test_every_prompt_gets_a_request_of_its_own_with_its_tokens(
    name: str, prompts: Sequence[list[int]]
) -> None:
    seen = {name.format(i): digest(ids) for i, ids in reversed(list(enumerate(prompts)))}
    found = paired([str(i) for i in range(len(prompts))], prompts, seen)
    assert len(set(found)) == len(prompts)
    assert [seen[str(request)] for request in found] == [digest(ids) for ids in prompts]
    if not name.startswith("request"):
        assert found == [name.format(i) for i in range(len(prompts))]


def test_a_prompt_whose_tokens_no_worker_has_seen_has_no_request() -> None:
    assert paired(["0", "1"], [[1], [2]], {"0": digest([2]), "1": digest([1])}) == ["1", "0"]
    assert paired(["0", "1"], [[1], [1]], {"0": digest([1])}) == ["0", None]


def test_a_function_of_the_programs_own_file_is_not_sent_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []
    fake = SimpleNamespace(dumps=lambda call: sent.append(call) or b"by value")
    monkeypatch.setitem(sys.modules, "cloudpickle", fake)  # type: ignore[arg-type]
    own: Callable[..., Any] = eval("lambda worker: 1", {"__name__": "__main__"})
    assert driver._packed(own, (), {}) == b"by value"
    assert pickle.loads(driver._packed(rank_of, (), {}))[0] is rank_of
    assert len(sent) == 1
