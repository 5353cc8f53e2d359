"""Throw many odd inputs at whatever reads something from outside, and keep a record of what came of it.

    python3 scripts/campaign_fuzz.py [--examples N]

Needs torch and hypothesis (the environment of ``scripts/test.py --torch``). The targets are those of
``tests/with_torch/fuzz.py``; the record is ``records/reliability/fuzz.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from tests.with_torch.fuzz import TARGETS, judge_one  # noqa: E402

from vllm_compat.trial import stamp  # noqa: E402


def tried(name: str, examples: int) -> dict[str, Any]:
    """Try one target; return how many inputs were taken, refused in words, or ended otherwise."""
    strategy, target = TARGETS[name]
    counts: Counter[str] = Counter()
    wrong: list[str] = []

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(value: object) -> None:
        try:
            counts[judge_one(target, value)] += 1
        except Exception as error:
            counts["wrong"] += 1
            wrong.append(f"{type(error).__name__}: {error}"[:200])

    one()
    return {
        "tried": counts.total(),
        "taken": counts["taken"],
        "refused_in_words": counts["refused in words"],
        "wrong": counts["wrong"],
        "errors": sorted(set(wrong))[:5],
    }


def main() -> int:
    """Try all targets, write the record, and return 1 where one ended in a traceback."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--record", type=Path, default=ROOT / "records" / "reliability" / "fuzz.json")
    options = parser.parse_args()
    found = {}
    for name in TARGETS:
        found[name] = tried(name, options.examples)
        print(name, found[name], flush=True)
    record = {"kind": "fuzz", "vllm_compat": stamp.made_by(), "targets": found}
    options.record.parent.mkdir(parents=True, exist_ok=True)
    options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if any(each["wrong"] for each in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
