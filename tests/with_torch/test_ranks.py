"""Two ranks in two processes meet through gloo: whatever goes wrong on one of them, none waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "programs" / "two_ranks.py"


def test_no_rank_waits_for_another_whatever_goes_wrong(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    said, other = (json.loads(output.splitlines()[-1]) for output, _ in outputs)  # gloo prints, too
    assert set(other.values()) == {"nothing"}
    assert said.pop("clean") == said.pop("clean again") == "right"
    assert said.pop("hooks fail on rank 1") == "right", "rank 0 has proven its own rows"
    for way, words in (
        ("partial sums", "ranks 0 and 1 hold different rows"),
        ("a wrong stream on rank 0", "hands on something else"),
        ("the step raises on rank 0", "A step has failed: RuntimeError: no memory"),
    ):
        assert words in said.pop(way)
    assert said == {"the step raises on rank 1": "right"}
