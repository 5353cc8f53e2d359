"""Real vLLM, stock speculators, tiny models: environments and models made once per session.

With ``VLLM_COMPAT_RECORDS=FOLDER`` every cell's record is kept there.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.environments import EnvironmentPaths, ensure

LIMIT = 400
"""Seconds after which a run counts as hung; a cell takes 20 to 80."""


@pytest.fixture(scope="session")
def environment(capsys_disabled: Callable[[str], None]) -> Callable[[str, str], EnvironmentPaths]:
    """Return ``environment(vllm, speculators)``, made with uv or found complete."""
    made: dict[tuple[str, str], EnvironmentPaths] = {}

    def get(vllm: str, speculators: str) -> EnvironmentPaths:
        if (vllm, speculators) not in made:
            made[vllm, speculators] = ensure(vllm, speculators, progress=capsys_disabled)
        return made[vllm, speculators]

    return get


@pytest.fixture(scope="session")
def capsys_disabled(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Return a function that prints a line whatever pytest captures."""
    manager: Any = pytestconfig.pluginmanager.getplugin("capturemanager")

    def tell(text: str) -> None:
        with manager.global_and_fixture_disabled():
            print(f"\n{text}", flush=True)

    return tell


@pytest.fixture(scope="session")
def models(
    tmp_path_factory: pytest.TempPathFactory,
    environment: Callable[[str, str], EnvironmentPaths],
) -> Callable[..., Path]:
    """Return ``models(name, dtype="float32")``, the folder of a tiny model."""
    root = tmp_path_factory.mktemp("models")

    def get(name: str, dtype: str = "float32") -> Path:
        folder = root / f"{name}-{dtype}"
        if not folder.exists():
            paths = environment("0.16.0", "0.3.0")
            code = (
                "import sys; from vllm_compat.trial.families import make_tiny;"
                " make_tiny(*sys.argv[1:3], dtype=sys.argv[3])"
            )
            done = paths.run(["-c", code, name, folder, dtype], timeout=LIMIT)
            assert done.returncode == 0, done.stderr
        return folder

    return get


@pytest.fixture
def cell(
    environment: Callable[[str, str], EnvironmentPaths],
    models: Callable[..., Path],
    tmp_path: Path,
) -> Callable[..., dict[str, Any]]:
    """Return ``cell(vllm, speculators, model, *arguments)``: run one cell, give its record.

    ``launched`` are options of the launcher. The record has the run's output under ``output`` beside
    what `vllm_compat.trial.cell` writes.
    """

    def run(
        vllm: str,
        speculators: str,
        model: str,
        *arguments: str,
        launcher: bool = False,
        launched: tuple[str, ...] = (),
        ranks: int = 1,
        variables: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        paths = environment(vllm, speculators)
        out = tmp_path / "record.json"
        command = ["-m", "vllm_compat.trial.cell", str(models(model)), "--out", str(out), *arguments]
        if launcher:
            command = ["-m", "vllm_compat", "run", *launched, *command, "--already"]
        command += ["--tensor-parallel-size", str(ranks)]
        try:
            done = paths.run(command, tensor_parallel_size=ranks, environment=variables, timeout=LIMIT)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"The cell hung: {command}") from error
        output = f"{done.stdout}\n{done.stderr}"
        assert out.exists(), output[-4000:]
        record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        if kept := os.environ.get("VLLM_COMPAT_RECORDS"):
            Path(kept).mkdir(parents=True, exist_ok=True)
            (Path(kept) / f"{uuid.uuid4().hex}.json").write_text(json.dumps(record))
        record["output"] = output
        record["status"] = done.returncode
        return record

    return run
