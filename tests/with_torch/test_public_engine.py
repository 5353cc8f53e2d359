"""The second engine's ``generate()``: from prompts to rows, over a FAKE ``vllm.LLM`` and real hooks.

The engine cuts prompts into chunks, and holds several requests a step, in an order of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.with_torch.test_worker import LAYERS, RunnerV1, RunnerV2, rows, step

from vllm_compat.analysis.environment import ALONE, PUBLIC, Environment
from vllm_compat.analysis.plan import Plan, Roles
from vllm_compat.engine import driver
from vllm_compat.engine.worker import Extension
from vllm_compat.errors import GuardError
from vllm_compat.runtime import context, run
from vllm_compat.runtime.patching import Transaction

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

CHUNK = 3


class Silent(RunnerV1):
    """A runner that has no ``input_batch`` and no ``prepare_inputs``."""

    def __init__(self) -> None:
        super().__init__()
        del self.input_batch

    def execute_model(self, output: Any, **_: Any) -> Any:
        return self.forward(list(output.num_scheduled_tokens), output)


class Worker(Extension):
    """A FAKE worker of one rank."""

    def __init__(self, runner: Any) -> None:
        text = SimpleNamespace(num_hidden_layers=LAYERS, num_experts=8)
        config = SimpleNamespace(
            hf_text_config=text,
            hf_config=SimpleNamespace(architectures=[]),
            model="m",
            dtype=torch.float32,
            max_model_len=64,
            get_hidden_size=lambda: 2,
            get_vocab_size=lambda: 100,
        )
        self.rank, self.model_runner = 0, runner
        self.vllm_config = SimpleNamespace(
            model_config=config, parallel_config=SimpleNamespace(tensor_parallel_size=1)
        )


class LLM:
    """A FAKE engine: two requests a step, each in chunks; request *n* has rows ``[n + 1, position]``."""

    def __init__(self, runner: Any) -> None:
        self.worker = Worker(runner)
        self.count = 0
        self.most = 0
        self.suffix = "-0a1b2c3d"
        self.ahead = False

    def collective_rpc(self, method: str, timeout: float | None = None, args: Any = ()) -> list[bytes]:
        return [getattr(self.worker, method)(*args)]

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool = True) -> list[Any]:
        waiting = []
        for prompt in prompts:
            self.count += 1
            waiting.append((f"r{self.count}{self.suffix}", prompt["prompt_token_ids"]))
        for start in range(0, len(waiting), 2):
            self._compute(dict(waiting[start : start + 2]))
        return [
            SimpleNamespace(request_id=name.removesuffix(self.suffix), prompt_token_ids=list(ids))
            for name, ids in waiting
        ]

    def _compute(self, prompts: dict[str, list[int]]) -> None:
        done = dict.fromkeys(prompts, 0)
        while left := {r: len(prompts[r]) - n for r, n in done.items() if n < len(prompts[r])}:
            self.most = max(self.most, len(left))
            new, cached = {}, {}
            for request, rest in left.items():
                count = min(rest, CHUNK)
                if self.ahead and count == rest:
                    count += 1
                if done[request]:
                    cached[request] = (done[request], count)
                else:
                    new[request] = (0, count, len(prompts[request]))
                done[request] += count
            output = step(new, cached)
            for request in output.scheduled_new_reqs:
                request.prompt_token_ids = prompts[request.req_id]
            self.worker.model_runner.execute_model(output)


@pytest.fixture
def generator_on(
    fake_modules: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, LLM]]:
    """Return ``generator_on(runner, engine)``: a generator that is set up, and its engine."""
    fake_modules("vllm")
    monkeypatch.setattr(RunnerV1, "forward", _forward)

    def make(runner: Any, engine: str = PUBLIC, layers: tuple[int, ...] = (2, 0)) -> tuple[Any, LLM]:
        llm = LLM(runner)
        module = importlib.import_module("vllm")
        monkeypatch.setattr(module, "LLM", lambda **_: llm, raising=False)
        monkeypatch.setattr(module, "SamplingParams", dict, raising=False)
        environment = Environment("3.11", (), "cpu", engine=engine)
        mine = run.current()
        mine.plan = Plan(
            "speculators", "0.4", "0.16.0", Roles("speculators"), environment, engine=engine
        )
        mine.plan = replace(mine.plan, switched_off=("proofs",))  # this model has no embedding
        mine.transaction = Transaction()
        executor = driver.PublicExecutor({})
        facts = driver._set_up(executor, layers)
        return SimpleNamespace(
            executor=executor, vllm_config=driver._Config(facts), layer_ids=layers
        ), llm

    return make


def _forward(self: Any, order: list[str], output: Any) -> Any:
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return self.model(
        torch.tensor(
            [
                [float(r[1:].partition("-")[0]), float(computed[r] + i)]
                for r in order
                for i in range(output.num_scheduled_tokens[r])
            ]
        )
    )


PROMPTS = [[5, 6, 7, 8], [9], [5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7], [9]]


def right(results: list[Any], first: int = 1, layers: tuple[int, ...] = (2, 0)) -> None:
    assert [result["input_ids"].tolist() for result in results] == PROMPTS
    for place, result in enumerate(results):
        for found, layer in zip(result["hidden_states"], layers, strict=True):
            assert torch.equal(found, rows(first + place, len(PROMPTS[place]), layer))
            assert type(found) is torch.Tensor
        assert result["loss_mask"] is None


@pytest.mark.parametrize("runner", [RunnerV1, RunnerV2])
@pytest.mark.parametrize("ahead", [False, True])
def test_rows_come_in_the_order_of_prompts_and_layers(
    generator_on: Any, runner: Any, ahead: bool
) -> None:
    generator, llm = generator_on(runner())
    llm.ahead = ahead
    with context.call_of(generator) as call:
        right(driver.generate(generator, PROMPTS))
        assert list(call.prompts.values()) == PROMPTS
        assert next(iter(call.prompts)) == "r1-0a1b2c3d"
    right(driver.generate(generator, [torch.tensor(ids) for ids in PROMPTS]), first=6)
    assert llm.most == 2
    model = generator.vllm_config.model_config
    assert (model.get_hidden_size(), model.get_vocab_size(), model.dtype) == (2, 100, "torch.float32")
    assert model.hf_text_config == {"num_experts": 8}


@pytest.mark.parametrize("runner", [Silent, RunnerV1])
def test_one_prompt_a_step_needs_no_order(generator_on: Any, runner: Any) -> None:
    generator, llm = generator_on(runner(), ALONE if runner is RunnerV1 else PUBLIC)
    assert generator.vllm_config.model_config.alone
    right(driver.generate(generator, PROMPTS))
    assert llm.most == 1


def test_two_prompts_in_a_step_are_refused_where_no_order_is_known(generator_on: Any) -> None:
    generator, _ = generator_on(Silent())
    object.__setattr__(generator.vllm_config.model_config, "alone", False)
    with pytest.raises(GuardError, match="where one at a time was asked for"):
        driver.generate(generator, PROMPTS)
    object.__setattr__(generator.vllm_config.model_config, "alone", True)
    right(driver.generate(generator, PROMPTS), first=6)


def test_a_fault_that_a_worker_has_noticed_is_raised_with_the_requests_booked(generator_on: Any) -> None:
    generator, llm = generator_on(RunnerV1())
    llm.worker.model_runner.model.skip = 2  # a layer is left out
    with context.call_of(generator) as call, pytest.raises(GuardError):
        driver.generate(generator, PROMPTS)
    assert [name.partition("-")[0] for name in call.prompts] == [f"r{n}" for n in range(1, 6)]


def test_a_prompt_that_the_engine_has_not_computed_is_no_result(
    generator_on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, llm = generator_on(RunnerV1())
    monkeypatch.setattr(
        llm, "_compute", lambda prompts, real=llm._compute: real(dict([*prompts.items()][:1]))
    )
    with pytest.raises(GuardError, match="Prompt 3 of this batch has no rows that are surely its own"):
        driver.generate(generator, PROMPTS)


def test_prompts_are_cut_one_short_of_the_longest_and_none_are_an_error(generator_on: Any) -> None:
    generator, _ = generator_on(RunnerV1())
    (result,) = driver.generate(generator, [list(range(90))])
    assert result["input_ids"].tolist() == list(range(63))
    with pytest.raises(ValueError, match="cannot be empty"):
        driver.generate(generator, [])
