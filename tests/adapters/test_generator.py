"""Adapters of the downstream's generator, on a FAKE one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from vllm_compat.adapters import by_name
from vllm_compat.adapters.base import Case
from vllm_compat.analysis.plan import Plan
from vllm_compat.errors import GuardError
from vllm_compat.runtime.context import call_of

MakeCase = Callable[..., Case]
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
FILE = f"{GENERATOR.replace('.', '/')}.py"


def test_order_is_restored_where_results_are_built_by_sorted_ids(make_case: MakeCase) -> None:
    adapter = by_name("generator.input_order")
    need = adapter.need(make_case("speculators_0_4"))
    assert need is not None
    assert f"{FILE}:" in need.reason
    assert adapter.need(make_case("speculators_0_3")) is None
    kept = (FILE, "for r in sorted(lengths)", "for r in lengths")
    assert adapter.need(make_case("speculators_0_4", kept)) is None


def test_sorting_elsewhere_is_nobodys_business(make_case: MakeCase) -> None:
    kept = (FILE, "for r in sorted(lengths)", "for r in lengths")
    other = (FILE, "self.layer_ids = layer_ids", "self.layer_ids = sorted(layer_ids)")
    assert by_name("generator.input_order").need(make_case("speculators_0_4", kept, other)) is None


@pytest.fixture
def generator(fake_modules: Callable[..., None]) -> Any:
    """A FAKE generator that was never built; ``generate`` is what a test makes of it."""
    fake_modules("vllm", "speculators_0_4", "transformers_4", "torch")
    module = importlib.import_module(GENERATOR)
    return object.__new__(module.VllmHiddenStatesGenerator)


def results_by_sorted_ids(prompts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"request": r, "input_ids": prompts[r]} for r in sorted(prompts)]


@pytest.mark.parametrize("count", [1, 2, 10, 11, 13, 32, 101])
def test_results_stand_in_the_order_of_the_inputs(
    generator: Any, make_case: MakeCase, install: Callable[[str, Case], Plan], count: int
) -> None:
    prompts = {f"req_7_{i}": list(range(i + 1)) for i in range(count)}
    type(generator).generate = lambda self, token_ids: results_by_sorted_ids(prompts)
    install("generator.input_order", make_case("speculators_0_4"))
    with call_of(generator) as call:
        call.prompts.update(prompts)
        results = generator.generate(list(prompts.values()))
    assert [len(r["input_ids"]) for r in results] == list(range(1, count + 1))
    assert [r["request"] for r in results] == list(prompts)


def test_duplicates_get_their_own_results(
    generator: Any, make_case: MakeCase, install: Callable[[str, Case], Plan]
) -> None:
    prompts = {f"req_0_{i}": [1, 2] for i in range(12)}
    type(generator).generate = lambda self, token_ids: results_by_sorted_ids(prompts)
    install("generator.input_order", make_case("speculators_0_4"))
    with call_of(generator) as call:
        call.prompts.update(prompts)
        results = generator.generate([[1, 2]] * 12)
    assert [r["request"] for r in results] == [f"req_0_{i}" for i in range(12)]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_results_that_cannot_be_attributed_are_refused(
    generator: Any, make_case: MakeCase, install: Callable[[str, Case], Plan], count: int
) -> None:
    type(generator).generate = lambda self, token_ids: [{}] * count
    install("generator.input_order", make_case("speculators_0_4"))
    with call_of(generator) as call:
        call.prompts.update(a=[1], b=[2])
        with pytest.raises(GuardError, match=rf"returned {count} results for 2 requests"):
            generator.generate([[1], [2]])


def test_a_failure_comes_through_as_it_is(
    generator: Any, make_case: MakeCase, install: Callable[[str, Case], Plan]
) -> None:
    def fail(self: Any, token_ids: Any) -> None:
        raise ValueError("token_ids cannot be empty")

    type(generator).generate = fail
    install("generator.input_order", make_case("speculators_0_4"))
    with call_of(generator), pytest.raises(ValueError, match="cannot be empty"):
        generator.generate([])
