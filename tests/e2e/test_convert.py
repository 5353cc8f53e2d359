"""Converted data are, for stock's own trainers, the data that they were converted from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from lab.environments import EnvironmentPaths

pytestmark = pytest.mark.e2e

PROGRAM = Path(__file__).parents[1] / "programs" / "read_with_stock.py"
LIMIT = 120
Environment = Callable[[str, str], EnvironmentPaths]


def do(paths: EnvironmentPaths, *steps: Sequence[str | os.PathLike[str]]) -> str:
    """Do some steps of the program in one interpreter; return what it said."""
    words = [word for step in steps for word in (*step, ",")][:-1]
    done = paths.run([PROGRAM, *words], timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def old(environment: Environment) -> EnvironmentPaths:
    return environment("0.16.0", "0.4.0.1")


@pytest.fixture(scope="module")
def folder(old: EnvironmentPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In-process data, what stock 0.4.0.1 reads of them, and the same data for the server flow."""
    root = tmp_path_factory.mktemp("convert")
    said = do(
        old,
        ["make", root / "in"],
        ["read", root / "in", root / "in.reading"],
        ["convert", root / "in", root / "server", "--num-layers", "8"],
    )
    assert "--target-layer-ids 3 5 6 " in said
    return root


@pytest.mark.parametrize("release", ["0.5.0", "0.8.1", "0.9.0"])
def test_servers_trainers_read_what_the_old_one_did(
    environment: Environment, folder: Path, release: str
) -> None:
    paths = environment("0.32.0", release)
    out = folder / f"server-{release}.reading"
    do(paths, ["read", folder / "server", out], ["compare", folder / "in.reading", out])


def test_the_old_trainer_reads_what_comes_back(
    environment: Environment, old: EnvironmentPaths, folder: Path
) -> None:
    """From what was converted, and from a folder as stock 0.9 leaves it: fp8, no word of layers."""
    fp8 = shutil.copytree(folder / "server", folder / "fp8")
    ids = ("--layers", "3", "5", "6", "8", "--num-layers", "8")
    do(
        environment("0.32.0", "0.9.0"),
        ["quantise", fp8],
        ["read", fp8, folder / "fp8.reading"],
        ["convert", fp8, folder / "from-fp8", *ids],
    )
    do(
        old,
        ["read", folder / "from-fp8", folder / "from-fp8.reading"],
        ["compare", folder / "fp8.reading", folder / "from-fp8.reading"],
        ["convert", folder / "server", folder / "back"],
        ["read", folder / "back", folder / "back.reading"],
        ["compare", folder / "in.reading", folder / "back.reading"],
    )
