"""Rehearsals: right where the run would be, and failing where it would fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.environments import EnvironmentPaths

pytestmark = pytest.mark.e2e
MODELS = Path(__file__).parent.parent / "models"
Rehearse = Callable[..., dict[str, Any]]


@pytest.fixture
def rehearse(environment: Callable[[str, str], EnvironmentPaths]) -> Rehearse:
    """Return ``rehearse(model, *arguments)``: the report, whose exit status was checked."""

    def run(model: str | Path, *arguments: str) -> dict[str, Any]:
        paths = environment("0.16.0", "0.3.0")
        done = paths.run(
            ["-m", "vllm_compat", "rehearse", MODELS / model, "--json", *arguments], timeout=400
        )
        assert done.stdout, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        assert report["exit_status"] == done.returncode
        return report

    return run


def test_kimi_comes_out_right(rehearse: Rehearse) -> None:
    report = rehearse(
        "kimi-k2.5", "--layer-ids", "2", "30", "58", "60", "--batch-size", "12", "--dequantised"
    )
    assert report["outcome"] == "right", report["words"]
    assert any("compared with transformers in float32" in word for word in report["words"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--without", "executor.unique_reply"], ""),
        (["--layer-ids", "2", "61"], "out of bounds"),
    ],
)
def test_it_fails_where_the_run_would(
    rehearse: Rehearse, arguments: list[str], words: str, tmp_path: Path
) -> None:
    report = rehearse("llama-3.1-8b", *arguments, "--keep", str(tmp_path))
    assert report["folder"] == str(tmp_path)
    assert (tmp_path / "output.txt").stat().st_size
    assert report["outcome"] == "wrong", report["words"]
    assert report["exit_status"] == 1
    assert words in " ".join(report["words"])


def test_a_model_that_vllm_does_not_know_fails(rehearse: Rehearse, tmp_path: Path) -> None:
    config = json.loads((MODELS / "llama-3.1-8b" / "config.json").read_text())
    config["architectures"] = ["NoSuchForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = rehearse(tmp_path, "--keep", str(tmp_path / "kept"))
    assert report["outcome"] == "wrong"
    assert "NoSuchForCausalLM" in " ".join(report["words"])
