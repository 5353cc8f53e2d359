"""Converted data are, for stock's own trainers, the data that they were converted from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.environments import EnvironmentPaths

pytestmark = pytest.mark.e2e

PROGRAM = Path(__file__).parents[1] / "programs" / "read_with_stock.py"
LIMIT = 120
Environment = Callable[[str, str], EnvironmentPaths]


def do(paths: EnvironmentPaths, *words: str | os.PathLike[str]) -> None:
    done = paths.run([PROGRAM, *words], timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def converted(paths: EnvironmentPaths, source: Path, target: Path, *options: str) -> str:
    done = paths.run(["-m", "vllm_compat", "convert", source, target, *options], timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def old(environment: Environment) -> EnvironmentPaths:
    return environment("0.16.0", "0.4.0.1")


@pytest.fixture(scope="module")
def folder(old: EnvironmentPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In-process data, what stock 0.4.0.1 reads of them, and the same data for the server flow."""
    root = tmp_path_factory.mktemp("convert")
    do(old, "make", root / "in", ",", "read", root / "in", root / "in.reading")
    said = converted(old, root / "in", root / "server", "--num-layers", "8")
    assert "--target-layer-ids 3 5 6 " in said
    return root


@pytest.mark.parametrize("release", ["0.5.0", "0.8.1", "0.9.0"])
def test_servers_trainers_read_what_the_old_one_did(
    environment: Environment, folder: Path, release: str
) -> None:
    paths = environment("0.32.0", release)
    out = folder / f"server-{release}.reading"
    do(paths, "read", folder / "server", out, ",", "compare", folder / "in.reading", out)


def test_the_old_trainer_reads_what_comes_back(
    environment: Environment, old: EnvironmentPaths, folder: Path
) -> None:
    """From a folder as stock 0.9 leaves it: states in fp8 with scales, and nothing about layers."""
    new = environment("0.32.0", "0.9.0")
    fp8 = shutil.copytree(folder / "server", folder / "fp8")
    do(new, "quantise", fp8, ",", "read", fp8, folder / "fp8.reading")
    ids = ("--layers", "3", "5", "6", "8", "--num-layers", "8")
    converted(new, fp8, folder / "back", *ids)
    out = folder / "back.reading"
    do(old, "read", folder / "back", out, ",", "compare", folder / "fp8.reading", out)


def test_a_round_trip_is_the_same_to_the_old_trainer(old: EnvironmentPaths, folder: Path) -> None:
    converted(old, folder / "in", folder / "there", "--num-layers", "8")
    converted(old, folder / "there", folder / "here")
    out = folder / "here.reading"
    do(old, "read", folder / "here", out, ",", "compare", folder / "in.reading", out)
