"""The second engine (adapters engine.public, engine.stand_ins): the rows of the first, on real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.e2e
beyond = pytest.mark.beyond
Cell = Callable[..., dict[str, Any]]

PUBLIC = ("--engine", "public")


@pytest.mark.parametrize(
    ("vllm", "speculators", "model", "ranks"),
    [
        ("0.16.0", "0.4.0.1", "llama", 1),
        ("0.16.0", "0.3.0", "llama", 2),
        pytest.param("0.16.0", "0.4.0.1", "kimi_k25", 1, marks=beyond),
        pytest.param("0.32.0", "0.4.0.1", "llama", 1, marks=beyond),
        pytest.param("0.32.0", "0.4.0.1", "kimi_k25", 1, marks=beyond),
        pytest.param("0.32.0", "0.3.0", "llama", 2, marks=beyond),
    ],
)
def test_every_scenario_is_right(
    cell: Cell, vllm: str, speculators: str, model: str, ranks: int
) -> None:
    record = cell(vllm, speculators, model, *PUBLIC, ranks=ranks)
    assert record["outcome"] == "right", record["error"]
    assert record["plan"]["engine"] == "public"
    assert len(record["workers"]) == ranks
    assert {"engine.public"} <= {patch["owner"] for patch in record["patches"]}
    assert record["workers"][0]["capture"] == "hooks"
    assert "did not end by itself" not in record["output"]


def test_its_rows_are_those_of_the_first_engine_bit_for_bit_where_a_batch_has_one_prompt(
    cell: Cell,
) -> None:
    only = ("--scenario", "one prompt of one token")
    first = cell("0.16.0", "0.4.0.1", "llama", *only)
    second = cell("0.16.0", "0.4.0.1", "llama", *only, *PUBLIC)
    digests = [record["scenarios"][only[1]]["digest"] for record in (first, second)]
    assert digests[0] == digests[1]


def test_prompts_that_have_no_room_in_a_small_cache_wait(cell: Cell) -> None:
    record = cell("0.16.0", "0.4.0.1", "llama", *PUBLIC, "--kv-blocks", "4")  # of 128 tokens
    assert record["outcome"] == "right", record["error"]


def test_one_prompt_a_step_is_right_and_says_so(cell: Cell) -> None:
    record = cell("0.16.0", "0.4.0.1", "llama", "--engine", "alone")
    assert record["outcome"] == "right", record["error"]
    assert "each prompt is computed in steps of its own" in record["output"]


def test_a_launched_run_says_in_its_verdict_which_engine_served(cell: Cell) -> None:
    record = cell("0.16.0", "0.4.0.1", "llama", *PUBLIC, launcher=True, launched=PUBLIC)
    assert record["outcome"] == "right", record["error"]
    assert record["status"] == 0
    assert "served by the second engine (vLLM's public interface)" in record["output"]
