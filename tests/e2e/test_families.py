"""Families that stock's loop or a careless capture gets wrong, without an error, on vLLM 0.16.0."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.environments import EnvironmentPaths

pytestmark = pytest.mark.e2e
Cell = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("family", "speculators", "ranks", "arguments"),
    [
        ("mistral", "0.3.0", 1, ()),  # one window in every layer
        ("command_r", "0.4.0.1", 2, ()),  # a pair whose first tensor is the whole stream
        # one tensor; the list of layers is called h
        pytest.param("falcon", "0.4.0.1", 1, (), marks=pytest.mark.beyond),
        ("gemma2", "0.4.0.1", 2, ()),  # embedding scale, windows on every other layer
        ("qwen3", "0.4.0.1", 1, ("--capture", "auxiliary", "--canary", "--layer-ids", "0,1,2")),
    ],
)
def test_rows_are_right(
    cell: Cell, family: str, speculators: str, ranks: int, arguments: tuple[str, ...]
) -> None:
    record = cell("0.16.0", speculators, family, *arguments, ranks=ranks)
    assert record["outcome"] == "right", record["error"]
    expected = "auxiliary" if "auxiliary" in arguments else "hooks"
    assert [worker["capture"] for worker in record["workers"]] == [expected] * ranks
    assert "shows no residual stream" not in record["output"], "every layer asked for is proven"


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("gemma2", "worker.capture"),
        pytest.param("mistral", "config.sliding_window", marks=pytest.mark.beyond),
    ],
)
def test_without_one_adapter_rows_are_wrong(cell: Cell, family: str, adapter: str) -> None:
    record = cell("0.16.0", "0.4.0.1", family, "--without", adapter, "--scenario", "long prompts")
    assert record["outcome"] != "right"
    assert record["worst"] > 0.1, "no error, but other rows"


REDUCED: dict[int, list[tuple[str, str]]] = {
    1: [],
    2: [
        (
            "partial sums left to the next norm",
            r"Qwen3DecoderLayer \(.*ranks 0 and 1 hold different rows",
        )
    ],
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_fault_is_stopped_and_no_clean_run(
    environment: Callable[[str, str], EnvironmentPaths],
    models: Callable[..., Path],
    tmp_path: Path,
    ranks: int,
) -> None:
    paths, out = environment("0.16.0", "0.4.0.1"), tmp_path / "record.json"
    command = ["-m", "lab.faults", models("qwen3"), "--out", out, "--ranks", str(ranks)]
    done = paths.run(command, tensor_parallel_size=ranks, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["clean_runs"] == 50
    assert not record["canary"], "apply() alone"
    assert all(record["faults"].values()), record["faults"]
    for name, words in (
        ("two requests swapped", "was given other ids"),
        ("rows in another order than the runner says", "was given other ids"),
        ("a chunk repeated", "hands on something else"),
        ("rows shifted by one", "hands on something else"),
        ("one row from elsewhere", "hands on something else"),
        ("NaN in one row", "not finite"),
        ("another dtype", "float16.*digits are lost"),
        ("the last layer dropped", "without the layers"),
        (
            "layers add their output themselves",
            r"Qwen3DecoderLayer \(.*qwen3.py:\d+\), hands on something",
        ),
        ("a second forward in each step", r"Qwen3DecoderLayer \(.*\), ran more than once in one step"),
        *REDUCED[ranks],
    ):
        assert re.search(words, record["faults"][name]), record["faults"][name]
    assert record["preempted_requests"] > 0
