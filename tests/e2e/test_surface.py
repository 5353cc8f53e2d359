"""What is read from vLLM's source is what a running vLLM shows, symbol by symbol."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lab import environments

PROGRAM = Path(__file__).parents[1] / "analysis" / "surface" / "compare_live.py"

pytestmark = pytest.mark.e2e


def test_static_and_live_reading_are_equal_but_for_the_known_limits() -> None:
    releases = ("0.3.0", "0.4.0.1")
    made = [
        environments.ensure("0.16.0", release, progress=lambda told: print(told, file=sys.stderr))
        for release in releases
    ]
    contracts = [word for paths in made for word in ("--contract", str(paths.speculators))]
    done = made[-1].run([PROGRAM, *contracts], timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " names compared" in done.stdout
