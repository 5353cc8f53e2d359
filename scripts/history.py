#!/usr/bin/env python3
"""What would have been: with the knowledge of each release, how many later releases still run?

usage: history.py DOWNSTREAM [DOWNSTREAM …]     (names, folders or wheels of speculators releases)

For each recorded release R only those adapters count whose drift R or an older release shows, and
the derived ones, which follow from any surface. A later release gets through if its plan needs no
other adapter and leaves nothing unmet; counting ends at the first that does not. Writes
records/history.json, from which render_records.py makes docs/history.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
RECORD = ROOT / "records" / "history.json"


def main(downstreams: list[str]) -> int:
    """Write the record of what the downstreams' plans say."""
    if not downstreams or downstreams[0].startswith("-"):
        print(__doc__, end="")
        return 0 if downstreams else 2
    RECORD.write_text(json.dumps(history(downstreams), indent=1) + "\n", encoding="utf-8")
    return 0


def history(downstreams: Sequence[str | Path]) -> dict[str, Any]:
    """Return, for each release, how far each downstream gets with what was known then."""
    from packaging.version import Version

    from vllm_compat.adapters import make_plan, registry
    from vllm_compat.analysis.downstream import read_contract
    from vllm_compat.analysis.environment import Environment
    from vllm_compat.analysis.surface.recorded import RecordedSurface, recorded_versions

    environment = Environment("3.11.0", (), "cuda")
    versions = sorted((v for v in recorded_versions() if Version(v) >= Version("0.11.0")), key=Version)
    contracts = [read_contract(target) for target in downstreams]
    derived = {adapter.name for adapter in registry() if adapter.derived}
    plans = {
        (contract.version, version): make_plan(contract, RecordedSurface(version), environment)
        for contract in contracts
        for version in versions
    }
    rows = []
    for index, known in enumerate(versions[:-1]):
        cells = []
        for contract in contracts:
            have = set(derived)
            for version in versions[: index + 1]:
                have.update(plans[contract.version, version].adapters)
            through, stop = 0, None
            for version in versions[index + 1 :]:
                plan = plans[contract.version, version]
                lacking = set(plan.adapters) - have
                if plan.unmet or lacking:
                    stop = {"at": version, "lacking": sorted(lacking), "unmet": len(plan.unmet)}
                    break
                through += 1
            cells.append({"through": through, "of": len(versions) - index - 1, "stop": stop})
        rows.append({"known": known, "cells": cells})
    return {
        "kind": "history",
        "downstreams": [f"{contract.name} {contract.version}" for contract in contracts],
        "derived": sorted(derived),
        "rows": rows,
    }


def page(record: dict[str, Any]) -> str:
    """Return the record as a page of the documentation."""
    names = record["downstreams"]
    lines = [
        "# Would it have held for releases that came later?",
        "",
        "Generated from `records/history.json` (made by `scripts/history.py`) by"
        " `scripts/render_records.py`; do not edit.",
        "",
        "When a new vLLM comes out, vllm_compat has only its source to judge it by. How far does"
        " that go? This page plays it back: with nothing but what could be known when one release"
        " was the newest, how many of the later releases would have worked?",
        "",
        "Each entry says how many of the later releases would have worked, in order, up to the"
        " first that would not, and then which adapters that one lacks. An adapter counts as known"
        " if its drift shows in that release or an older one, or if it is *derived*: made for any"
        " vLLM from what its source says. The first release that does not pass is refused before"
        " loading, with its findings. Changes that no signature shows, such as what a layer hands"
        " on to the next, are not part of this. Plans are those for a CUDA device; [what has been"
        " run](compatibility.md) is another page.",
        "",
        f"Derived: {', '.join(f'`{name}`' for name in record['derived'])}.",
        "",
        "| newest release known | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for row in record["rows"]:
        cells = []
        for cell in row["cells"]:
            text = f"{cell['through']} of {cell['of']}"
            if stop := cell["stop"]:
                why = [f"`{name}`" for name in stop["lacking"]]
                why += [f"{stop['unmet']} unmet"] if stop["unmet"] else []
                text += f"; {stop['at']}: {', '.join(why)}"
            cells.append(text)
        lines.append(f"| {row['known']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
