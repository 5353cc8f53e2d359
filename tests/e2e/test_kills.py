"""A short part of the campaign of random kills: a few rounds, each looked at as the campaign does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.environments import EnvironmentPaths

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
import campaign_kills  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.beyond]  # test_nothing_lost.py has one kill, at one moment
ROUNDS = 3


def test_after_random_kills_nothing_is_left_and_the_resumed_run_is_equal(
    environment: Callable[[str, str], EnvironmentPaths], tmp_path: Path
) -> None:
    paths = environment("0.16.0", "0.3.0")
    campaign = campaign_kills.Campaign(paths, tmp_path / "work", tmp_path / "kills.json")
    campaign.prepare()
    number, finished = campaign.pick(), False
    out = campaign.work / f"series-{number}"
    for _ in range(ROUNDS):
        finished = finished or campaign.one(out, number)
    assert finished or campaign.one(out, number, disturb=False)
    campaign.compare(out, number)
    entries = campaign.record["entries"]
    assert entries
    for entry in entries:
        assert (entry["torn"], entry["gaps"]) == ([], False), entry
        assert (entry["roles_left"], entry["shared_memory_left"]) == ([], 0), entry
        assert entry["verdict"] or "launcher SIGKILL" in entry["hit"], entry
    (series,) = campaign.record["series"]
    assert series["same"], series
    assert not series["wrong"], series
    assert series["worst"] < 0.02, series
