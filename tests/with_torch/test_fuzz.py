"""Whatever comes from outside is taken or refused in a sentence: never a traceback (issue 18)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings
from tests.with_torch.fuzz import TARGETS, judge_one

EXAMPLES = 40


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_from_outside_ends_in_a_traceback(name: str) -> None:
    strategy, target = TARGETS[name]

    @settings(
        max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(strategy)
    def tried(value: object) -> None:
        assert judge_one(target, value) in ("taken", "refused in words")

    tried()


def test_the_campaign_can_be_started() -> None:
    """Seen: a module had moved, and no test imported the script."""
    scripts = str(Path(__file__).parents[2] / "scripts")
    sys.path.append(scripts)
    try:
        import campaign_fuzz

        assert set(campaign_fuzz.TARGETS) == set(TARGETS)
    finally:
        sys.path.remove(scripts)
