"""A draft of stock's trainer is trained towards its verifier's own logits, whatever its head is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.environments import EnvironmentPaths

pytestmark = pytest.mark.e2e
PROGRAM = Path(__file__).parents[1] / "programs" / "verifier_targets.py"
RIGHT, WRONG = 1e-5, 1e-4
"""Largest difference of a probability; both sides compute in float32."""
FAMILIES = ("llama", "gemma2", "granite")
Differences = Callable[..., dict[str, Any]]


@pytest.fixture
def differences(
    environment: Callable[[str, str], EnvironmentPaths], models: Callable[..., Path]
) -> Differences:
    """Return the largest difference between targets and logits for some families, by name."""

    def measure(speculators: str, *options: str, families: tuple[str, ...] = FAMILIES) -> dict[str, Any]:
        folders = [models(name) for name in families]
        paths = environment("0.16.0", speculators)
        done = paths.run([PROGRAM, *options, *folders], timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        return {name: found[folder.name] for name, folder in zip(families, folders, strict=True)}

    return measure


@pytest.mark.parametrize("speculators", ["0.3.0", "0.4.0.1"])
def test_targets_are_the_verifiers_logits(differences: Differences, speculators: str) -> None:
    found = differences(speculators, families=(*FAMILIES, "command_r"))
    assert "has no last norm of the kind rms_norm" in found.pop("command_r")
    assert max(found.values()) < RIGHT, found
    without = differences(speculators, "--without", "training.verifier_head")
    assert without["llama"] < RIGHT
    assert min(without["gemma2"], without["granite"]) > WRONG, without
