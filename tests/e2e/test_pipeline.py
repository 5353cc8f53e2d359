"""The whole pipeline on the tiny Kimi, as the demo shows it; resumed; and each of its adapters off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.environments import EnvironmentPaths

from vllm_compat.trial.pipeline import CONVERSATIONS, PROGRAMS

pytestmark = pytest.mark.e2e
LIMIT = 600
LEFT_OUT = 8  # files of a batch that are taken away before the run is resumed
Environment = Callable[[str, str], EnvironmentPaths]


@pytest.fixture(scope="module")
def paths(environment: Environment) -> EnvironmentPaths:
    return environment("0.16.0", "0.3.0")


@pytest.fixture(scope="module")
def whole(paths: EnvironmentPaths, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of one run of the demo, and what it said."""
    folder = tmp_path_factory.mktemp("pipeline") / "all"
    done = paths.run(["-m", "vllm_compat", "demo", "--pipeline", "--folder", folder], timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder, done.stdout


def extract(folder: Path, *more: str) -> list[str | Path]:
    return [
        PROGRAMS / "extract.py", "--target-model-path", folder / "kimi", "--train-data-path",
        folder / "chats.jsonl", "--output-dir", folder / "data", "--token-freq-path",
        folder / "token_freq.pt", "--hf-cache-dir", folder / "cache", "--seq-length", "256",
        "--num-preprocessing-workers", "2", *more,
    ]  # fmt: skip


def train(folder: Path, metrics: Path) -> list[str | Path]:
    return [
        PROGRAMS / "train.py", "--verifier-name-or-path", folder / "kimi", "--data-path",
        folder / "data", "--save-path", metrics.parent / "draft", "--d2t-path", folder / "d2t.npy",
        "--t2d-path", folder / "t2d.npy", "--total-seq-len", "512", "--epochs", "1", "--lr", "1e-3",
        "--ttt-steps", "1", "--metrics", metrics,
    ]  # fmt: skip


def test_all_four_steps_are_right(whole: tuple[Path, str]) -> None:
    _, said = whole
    steps = [line.split("]")[1].split()[:2] for line in said.splitlines() if line.startswith("[")]
    numbered = [" ".join(words) for words in steps if words[0] == "step"]
    assert numbered == ["step 1", "step 2", "step 3", "step 4"]
    assert said.strip().splitlines()[-1].startswith(f"RIGHT: all four steps, {CONVERSATIONS} samples")
    assert "with vLLM's ids [3, 5, 6]" in said


def test_extraction_goes_on_where_it_was_and_gives_the_same(
    paths: EnvironmentPaths, whole: tuple[Path, str]
) -> None:
    folder, _ = whole
    last = [folder / "data" / f"data_{CONVERSATIONS - 1 - place}.pt" for place in range(LEFT_OUT)]
    before = [file.stat().st_size for file in last]
    for file in last:
        file.unlink()
    done = paths.run(["-m", "vllm_compat", "run", *extract(folder)], timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"extracted {LEFT_OUT} samples, {CONVERSATIONS - LEFT_OUT} were there" in done.stdout
    assert [file.stat().st_size for file in last] == before


def test_without_offsets_the_loss_is_an_error(
    paths: EnvironmentPaths, whole: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = whole
    program = extract(folder, "--prepare-only", "--hf-cache-dir", str(tmp_path / "cache"))
    done = paths.run(
        ["-m", "vllm_compat", "run", "--without", "tokenizer.offsets", *program], timeout=LIMIT
    )
    assert done.returncode != 0
    lost = f"{CONVERSATIONS} of {CONVERSATIONS} conversations are lost"
    assert lost in done.stderr.strip().splitlines()[-1]
    assert "return_offset_mapping is not available" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ("training.verifier_config", "contains custom code"),
        ("training.verifier_prefix", "KeyError: 'model.embed_tokens.weight'"),
    ],
)
def test_without_an_adapter_the_trainer_stops(
    paths: EnvironmentPaths, whole: tuple[Path, str], tmp_path: Path, adapter: str, words: str
) -> None:
    program = train(whole[0], tmp_path / "metrics.jsonl")
    done = paths.run(["-m", "vllm_compat", "run", "--without", adapter, *program], timeout=LIMIT)
    assert done.returncode != 0
    assert words in done.stderr


def test_without_the_norm_the_draft_is_trained_towards_something_else(
    paths: EnvironmentPaths, whole: tuple[Path, str], tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    program = train(whole[0], metrics)
    done = paths.run(
        ["-m", "vllm_compat", "run", "--without", "training.verifier_norm", *program], timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, other = (
        json.loads(file.read_text().splitlines()[0])["train"]["loss"]
        for file in (whole[0] / "metrics.jsonl", metrics)
    )
    # The same seed, data and first batch: only the targets differ.
    assert abs(other - first) > 0.2 * first


@pytest.mark.parametrize(
    ("options", "named"), [([], [3, 5, 6]), (["--without", "training.layer_ids"], None)]
)
def test_the_draft_names_its_layers_and_without_the_adapter_none(
    paths: EnvironmentPaths, whole: tuple[Path, str], tmp_path: Path, options: list[str], named: object
) -> None:
    program = train(whole[0], tmp_path / "metrics.jsonl")
    done = paths.run(["-m", "vllm_compat", "run", *options, *program], timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    (saved,) = (tmp_path / "draft").glob("*/config.json")
    assert json.loads(saved.read_text())["eagle_aux_hidden_state_layer_ids"] == named
