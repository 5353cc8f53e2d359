#!/usr/bin/env python3
"""What would have been: with the knowledge of each release, how many later releases still run?

usage: history.py DOWNSTREAM [DOWNSTREAM …]     (names, folders or wheels of speculators releases)

For each recorded release R only those adapters count whose drift R or an older release shows, and
the derived ones, which follow from any surface. A later release gets through if its plan needs no
other adapter and leaves nothing unmet; counting ends at the first that does not. Three ways: by adapters
alone; with the second engine, where a release that no adapter fits may be served by that, if its workers
tell the order of a batch in a way that R or an older release has; and with one prompt a step, which
needs no order. Writes records/history.json, from which render_records.py makes docs/history.md.
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


WAYS = ("adapters alone", "with the second engine", "with one prompt a step as well")
ORDERS = {
    "input_batch": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "prepare_inputs": "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
}
"""How model runners tell the order of a batch (`vllm_compat.capture.worker.batch_order`)."""
SCHEDULED = {
    "SchedulerOutput": (
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
    ),
    "NewRequestData": ("req_id", "prompt_token_ids", "num_computed_tokens"),
    "CachedRequestData": ("req_ids", "num_computed_tokens"),
}
"""What else capture asks of a step, whatever the engine and whatever the order."""
OWN = frozenset({"engine.public", "engine.stand_ins"})


def history(downstreams: Sequence[str | Path]) -> dict[str, Any]:
    """Return, for each release, how far each downstream gets with what was known then."""
    from packaging.version import Version

    from vllm_compat.adapters import registry
    from vllm_compat.analysis.downstream import read_contract
    from vllm_compat.analysis.surface.recorded import recorded_versions

    versions = sorted((v for v in recorded_versions() if Version(v) >= Version("0.11.0")), key=Version)
    contracts = [read_contract(target) for target in downstreams]
    derived = {adapter.name for adapter in registry() if adapter.derived}
    found = {
        contract.version: [_Release(contract, version) for version in versions] for contract in contracts
    }
    rows = []
    for index, known in enumerate(versions[:-1]):
        cells = []
        for contract in contracts:
            releases = found[contract.version]
            before, after = releases[: index + 1], releases[index + 1 :]
            first, second, third = (_through(way, before, after, derived) for way in range(len(WAYS)))
            cells.append({**first, "second": second, "alone": third})
        rows.append({"known": known, "cells": cells})
    return {
        "kind": "history",
        "downstreams": [f"{contract.name} {contract.version}" for contract in contracts],
        "derived": sorted(derived),
        "rows": rows,
    }


class _Release:
    """What a release asks of both engines, and how its workers tell the order of a batch."""

    def __init__(self, contract: Any, version: str) -> None:
        from vllm_compat.adapters import make_plan
        from vllm_compat.analysis.environment import PUBLIC, STOCK, Environment
        from vllm_compat.analysis.surface.recorded import RecordedSurface

        surface = RecordedSurface(version)
        self.version = version
        self.plans = [
            make_plan(contract, surface, Environment("3.11.0", (), "cuda", engine=engine))
            for engine in (STOCK, PUBLIC)
        ]
        self.orders = {name for name, runner in ORDERS.items() if _has(surface, runner, name)}
        self.steps = all(
            _has(surface, f"vllm.v1.core.sched.output.{cls}", name)
            for cls, names in SCHEDULED.items()
            for name in names
        )


def _has(surface: Any, cls: str, name: str) -> bool:
    found = surface.resolve(cls)
    return found is not None and (found.members is None or name in found.members)


def _obstacle(plan: Any, have: set[str]) -> dict[str, Any] | None:
    """Return what keeps a plan from being put in force with these adapters."""
    lacking = sorted(set(plan.adapters) - have)
    return {"lacking": lacking, "unmet": len(plan.unmet)} if lacking or plan.unmet else None


def _through(
    way: int, before: Sequence[_Release], after: Sequence[_Release], derived: set[str]
) -> dict[str, Any]:
    """Return how many releases get through one way, and where and why that ends."""
    have = derived | {name for release in before for name in release.plans[0].adapters}
    have_public = have | OWN | {name for release in before for name in release.plans[1].adapters}
    orders = {name for release in before for name in release.orders}
    through, stop = 0, None
    for release in after:
        first, public = release.plans
        stop = _obstacle(first, have)
        if stop is not None and way:
            stop = _obstacle(public, have_public)
            if not release.steps or (way == 1 and not orders & release.orders):
                stop = {**(stop or {"lacking": [], "unmet": 0}), "worker": True}
        if stop is not None:
            stop = {"at": release.version, **stop}
            break
        through += 1
    return {"through": through, "of": len(after), "stop": stop}


def page(record: dict[str, Any]) -> str:
    """Return the record as a page of the documentation."""
    names = record["downstreams"]
    lines = [
        "# Would it have held for releases that came later?",
        "",
        "Generated from `records/history.json` (made by `scripts/history.py`) by"
        " `scripts/render_records.py`; do not edit.",
        "",
        "A forward-compatibility backtest: when a new vLLM comes out, vllm_compat has only its source"
        " to judge it by. How far does that go? This page plays it back: with nothing but what could be"
        " known when one release was the newest, how many of the later releases would have worked?"
        " Nothing is run for it; [what has been run](compatibility.md) is another page.",
        "",
        "Each entry says how many of the later releases would have worked, in order, up to the"
        " first that would not, and then which adapters that one lacks. An adapter counts as known"
        " if its drift shows in that release or an older one, or if it is *derived*: made for any"
        " vLLM from what its source says. The first release that does not pass is refused before"
        " loading, with its findings. Changes that no signature shows, such as what a layer hands"
        " on to the next, are not part of this. Plans are those for a CUDA device.",
        "",
        "*With the second engine*, a release for whose drift no adapter is known is served from vLLM's"
        " public interface, if that fits (the driver's side), and if its workers tell the order of a"
        " batch in a way that was known then (the worker's side: `input_batch`, and `prepare_inputs`"
        " from 0.12.0 on; 0.34.0 has only the latter). *With one prompt a step as well*, no order is"
        " needed."
        " The second engine itself counts as known from the first row on, though it was written later:"
        " what it relies on is in every release.",
        "",
        f"Derived: {', '.join(f'`{name}`' for name in record['derived'])}.",
    ]
    for place, name in enumerate(names):
        lines += ["", f"## {name}", "", "| newest release known | " + " | ".join(WAYS) + " |"]
        lines.append("|---|" + "---|" * len(WAYS))
        for row in record["rows"]:
            cell = row["cells"][place]
            entries = [_entry(found) for found in (cell, cell["second"], cell["alone"])]
            lines.append(f"| {row['known']} | " + " | ".join(entries) + " |")
    return "\n".join(lines) + "\n"


def _entry(cell: dict[str, Any]) -> str:
    text = f"{cell['through']} of {cell['of']}"
    if stop := cell["stop"]:
        why = [f"`{name}`" for name in stop["lacking"]]
        why += [f"{stop['unmet']} unmet"] if stop["unmet"] else []
        why += ["its workers tell the order of a batch in a new way"] if stop.get("worker") else []
        text += f"; {stop['at']}: {', '.join(why)}"
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
