"""The order of a batch, asked of FAKE model runners of both generations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat.capture.worker import batch_order
from vllm_compat.errors import GuardError
from vllm_compat.runtime.patching import Transaction


class RunnerV1:
    """Keeps its batch, with gaps where requests have ended, and reorders it before a forward."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=[])


class RunnerV2:
    """Sorts each step's requests by length, and tells the order in what it prepares."""

    def prepare_inputs(self, scheduled: dict[str, int], *, batch: str = "") -> Any:
        return SimpleNamespace(req_ids=tuple(sorted(scheduled, key=lambda r: scheduled[r])))


def test_a_runner_with_an_input_batch_is_asked_when_the_rows_are_there(transaction: Transaction) -> None:
    runner = RunnerV1()
    order = batch_order(runner, transaction)
    runner.input_batch.req_ids = ["a", None, "b", None]
    assert order() == ["a", "b"]
    runner.input_batch = SimpleNamespace(req_ids=["b", "a"])
    assert order() == ["b", "a"]


def test_a_runner_without_one_is_watched_while_it_prepares(transaction: Transaction) -> None:
    runner = RunnerV2()
    order = batch_order(runner, transaction)
    assert order() == []
    made = runner.prepare_inputs({"a": 3, "b": 1}, batch="first")
    assert made.req_ids == ("b", "a"), "what it returns is its own"
    assert order() == ["b", "a"]
    runner.prepare_inputs({"a": 1, "c": 2})
    assert order() == ["a", "c"]


def test_only_the_runner_itself_is_watched(transaction: Transaction) -> None:
    runner, other = RunnerV2(), RunnerV2()
    order = batch_order(runner, transaction)
    other.prepare_inputs({"x": 1})
    assert order() == []
    assert "prepare_inputs" in vars(runner)
    assert "prepare_inputs" not in vars(other)
    transaction.revert()
    assert "prepare_inputs" not in vars(runner)


def test_a_runner_of_another_kind_is_refused_with_a_way_on(transaction: Transaction) -> None:
    class RunnerV3:
        pass

    with pytest.raises(GuardError, match=r"RunnerV3 tells the order of its batch in no way.*V2_"):
        batch_order(RunnerV3(), transaction)
