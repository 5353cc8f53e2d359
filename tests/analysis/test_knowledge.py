"""Known, inferred, unknown: which word a pair gets, and why; on a FAKE file of runs, and on ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.analysis.environment import compute_capabilities
from vllm_compat.analysis.knowledge import Knowledge, Word, knowledge_of, known_runs

COLUMNS = [
    "downstream", "vllm", "kind", "device", "capability", "runner", "kernels", "models", "layers",
    "ranks", "dtypes", "python", "torch", "transformers", "last",
]  # fmt: skip
MORE = ["3.11.7", "2.11.0", "5.17.0", "2026-11-30"]


def run(vllm: str, *where: str, kernels: str = "", layers: tuple[str, ...] = ("ADecoderLayer",)) -> Any:
    return ["0.3.0", vllm, *where, kernels, ["a"], list(layers), [1, 2], ["float32"], *MORE]


CPU = ("cpu", "x86_64", "", "V1")
H200 = ("cuda", "NVIDIA H200", "9.0", "V2")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a FAKE file of what has been run."""
    path = tmp_path / "known.json"
    found = {
        "columns": COLUMNS,
        "runs": [
            run("0.9.0", *CPU),
            run("0.9.0", *H200, layers=("ADecoderLayer", "BDecoderLayer", "C", "D")),
            run("0.10.0", *CPU, kernels="0.9.0"),
        ],
        "layers": {
            "ADecoderLayer": ["AForCausalLM", "A2ForCausalLM"],
            "BDecoderLayer": ["BForCausalLM"],
        },
    }
    path.write_text(json.dumps(found))
    return path


def ask(runs: Path, vllm: str, device: str = "unknown", **more: Any) -> Knowledge:
    return knowledge_of("speculators", "0.3.0", vllm, device, path=runs, **more)


def test_what_has_been_run_on_this_kind_of_device_is_known(runs: Path) -> None:
    found = ask(runs, "0.9.0+cpu", "cpu")
    assert (found.word, found.brief) == (Word.KNOWN, "known on CPU")
    assert found.sentence == (
        "It has been run on CPU (x86_64, model runner V1), 1 and 2 ranks, layers ADecoderLayer; last on"
        " 2026-11-30 with torch 2.11.0, transformers 5.17.0. Nothing is known by that of GPUs and of"
        " other layer classes."
    )
    assert [one.kind for one in found.runs] == ["cpu"]


def test_on_a_device_that_is_not_known_the_word_says_where(runs: Path) -> None:
    assert ask(runs, "0.9.0").brief == "known on CPU and compute capability 9.0"
    assert "ADecoderLayer, BDecoderLayer, C and 1 more" in ask(runs, "0.9.0").sentence


def test_a_run_on_a_cpu_makes_nothing_known_of_a_gpu(runs: Path) -> None:
    found = ask(runs, "0.10.0", "cuda")
    assert found.word is Word.INFERRED
    assert found.sentence.startswith("It has been run on CPU only, never on CUDA: judged by its source")
    assert found.runs == ()


@pytest.mark.parametrize(
    ("capabilities", "word"), [(["9.0"], "known"), (["12.0"], "inferred"), (["12.0", "9.0"], "inferred")]
)
def test_a_run_on_one_gpu_makes_nothing_known_of_another(
    runs: Path, capabilities: list[str], word: str
) -> None:
    found = ask(runs, "0.9.0", "cuda", capabilities=capabilities)
    assert found.word.value == word
    if word == "inferred":
        assert "never on compute capability 12.0" in found.sentence


@pytest.mark.parametrize(
    ("architecture", "word"), [("A2ForCausalLM", "known"), ("BForCausalLM", "inferred")]
)
def test_a_run_makes_other_layer_classes_not_known(runs: Path, architecture: str, word: str) -> None:
    found = ask(runs, "0.9.0", "cpu", architectures=[architecture])
    assert found.word.value == word
    if word == "inferred":
        assert "never with the layers of BForCausalLM" in found.sentence
    assert ask(runs, "0.9.0", "cuda", architectures=[architecture]).word is Word.KNOWN


def test_kernels_of_another_release_are_told(runs: Path) -> None:
    assert "its Python sources over the kernels of 0.9.0" in ask(runs, "0.10.0", "cpu").sentence


@pytest.mark.parametrize("vllm", ["0.11.0", "0.10.1.dev3+g1234", "1.0"])
def test_a_release_that_is_newer_than_every_run_is_inferred(runs: Path, vllm: str) -> None:
    found = ask(runs, vllm, "cpu")
    assert found.word is Word.INFERRED
    assert "is newer than every release that has been run (0.10.0 is the newest)" in found.sentence


@pytest.mark.parametrize("vllm", ["0.9.1", "unknown", "0.10.0.dev2"])
def test_what_nobody_has_run_is_inferred(runs: Path, vllm: str) -> None:
    assert ask(runs, vllm).sentence == "This pair has never been run: judged by its source alone."


def test_what_its_source_does_not_tell_is_unknown_unless_it_has_been_run(runs: Path) -> None:
    assert ask(runs, "0.9.1", can_tell=False).word is Word.UNKNOWN
    assert ask(runs, "0.9.0", can_tell=False).word is Word.KNOWN


def test_runs_of_speculators_say_nothing_of_another_downstream(runs: Path) -> None:
    assert knowledge_of("other", "0.3.0", "0.9.0", path=runs).word is Word.INFERRED


def test_our_own_runs_name_layers_days_and_versions() -> None:
    runs = known_runs()
    assert len(runs) > 100
    assert {run.kind for run in runs} >= {"cpu", "cuda"}
    for run in runs:
        assert run.layers, run
        assert run.last.startswith("20"), run
        assert all((run.torch, run.transformers, run.ranks, run.models)), run
        assert bool(run.capability) == (run.kind != "cpu"), run
        assert run.runner in ("V1", "V2", "V2 without Triton"), run


def test_a_machine_without_the_drivers_library_has_no_capabilities() -> None:
    assert compute_capabilities("libnothing-of-this-name.so") == ()
    assert compute_capabilities("libm.so.6") == ()  # a library that has none of its functions
