#!/usr/bin/env python3
"""Put the records of single cells into one file.

usage: collect_cells.py FOLDER OUT.json [--overlay]
       collect_cells.py FOLDER OUT.json --families WHERE     (WHERE: "CPU, float32")
       collect_cells.py FOLDER OUT.json --transfers BENCH    (BENCH: a record that names the device)

With --families the file is one of records/families: what `docs/families.md` is made of. Records of
`lab.plain` in the folder (FAMILY.plain.json) say what vLLM alone does with a family.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm_compat.trial.stamp import made_by


def slim(cell: dict[str, Any]) -> dict[str, Any]:
    """Return a cell without paths of the machine it ran on, and without what nobody reads again."""
    kept = {k: v for k, v in cell.items() if k not in ("options", "traceback", "log", "output")}
    kept["model"] = kept["model"].removesuffix("-float32").removesuffix("-bfloat16")
    kept["patches"] = len(cell.get("patches") or [])
    kept["error"] = str(cell.get("error") or "")[:300] or None
    return kept


def families(folder: str, out: str, where: str) -> None:
    """Collect the cells of families, each with what `lab.plain` says where it is wrong.

    Files are read in the order of their names. Of several runs of one cell the last right one counts;
    those before it that failed, and those with an adapter switched off, are kept as ``failed``.
    """
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    failed: list[dict[str, Any]] = []
    for path in sorted(Path(folder).glob("*.json")):
        if path.name.endswith(".plain.json"):
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        for cell in record.get("cells", [record]):
            found = brief(slim(cell))
            asked = (cell.get("options") or {}).get("tensor_parallel_size")
            found["ranks"] = int(asked or found["ranks"])
            plain = path.with_suffix(".plain.json")
            if plain.exists():
                alone = json.loads(plain.read_text(encoding="utf-8"))
                found["plain"] = {k: str(alone.get(k))[:300] for k in ("outcome", "worst", "error")}
            key = found["model"], str(found["capture"])
            if found["without"]:
                failed.append(found)
            elif found["outcome"] == "right" or not any(model == key[0] for model, _ in cells):
                if before := cells.pop((key[0], "None"), None):
                    failed.append(before)
                cells[key] = found
    made = {
        "kind": "families",
        "vllm_compat": made_by(),
        "schema_version": 1,
        "where": where,
        "families": list(cells.values()),
        "failed": failed,
    }
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def transfers(folder: str, out: str, device: str) -> None:
    """Collect cells that differ in how rows leave the worker: the digests of their scenarios."""
    facts = json.loads(Path(device).read_text(encoding="utf-8"))
    keys = ("vllm", "torch", "device", "driver", "compute_capability", "memory_mib", "gpus", "cores")
    cells = []
    for path in sorted(Path(folder).glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for cell in record.get("cells", [record]):
            cells.append(
                {
                    "speculators": cell["versions"]["speculators"],
                    "model": cell["model"],
                    "runner": "V2" if ".gpu.model_runner" in cell["workers"][0]["runner"] else "V1",
                    "ranks": len(cell["workers"]),
                    "transfer": cell["plan"]["environment"]["transfer"],
                    "outcome": cell["outcome"],
                    "digests": {name: s["digest"] for name, s in cell["scenarios"].items()},
                    "endurance": cell.get("endurance"),
                }
            )
    made = {
        "kind": "transfers",
        "vllm_compat": made_by(),
        **{k: facts[k] for k in keys if k in facts},
        "cells": cells,
    }
    Path(out).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def brief(cell: dict[str, Any]) -> dict[str, Any]:
    """Return what the page of families shows of a cell."""
    workers = cell.get("workers") or [{}]
    scenarios = (cell.get("scenarios") or {}).values()
    return {
        "model": cell["model"],
        "versions": cell.get("versions") or {},
        "ranks": len(workers),
        "capture": workers[0].get("capture"),
        "runner": workers[0].get("runner"),
        "attention": workers[0].get("attention"),
        "without": (cell.get("plan") or {}).get("switched_off") or [],
        "outcome": cell["outcome"],
        "worst": cell.get("worst"),
        "median": max((s["median"] for s in scenarios if "median" in s), default=None),
        "scenarios": sorted(cell.get("scenarios") or {}),
        "error": cell["error"],
    }


def main(folder: str, out: str, *flags: str) -> None:
    """Collect every record of the folder, in a stable order."""
    if "--families" in flags:
        families(folder, out, flags[flags.index("--families") + 1])
        return
    if "--transfers" in flags:
        transfers(folder, out, flags[flags.index("--transfers") + 1])
        return
    cells: list[dict[str, Any]] = []
    for path in sorted(Path(folder).glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        cells += record["cells"] if record.get("kind") == "suite" else [record]
    for cell in cells:
        cell["overlay"] = "--overlay" in flags
    cells = sorted(map(slim, cells), key=lambda c: json.dumps([
        c.get("plan", {}).get("vllm", ""), c.get("plan", {}).get("downstream_version", ""), c["model"],
        c.get("plan", {}).get("switched_off", []), len(c.get("workers") or [])]))  # fmt: skip
    record = {"kind": "suite", "schema_version": 1, "vllm_compat": made_by(), "cells": cells}
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
