#!/usr/bin/env python3
"""Put the records of single cells into one suite: collect_cells.py FOLDER OUT.json [--overlay]."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def slim(cell: dict[str, Any]) -> dict[str, Any]:
    """Return a cell without paths of the machine it ran on, and without what nobody reads again."""
    kept = {k: v for k, v in cell.items() if k not in ("options", "traceback", "log", "output")}
    kept["model"] = kept["model"].removesuffix("-float32").removesuffix("-bfloat16")
    kept["patches"] = len(cell.get("patches") or [])
    kept["error"] = str(cell.get("error") or "")[:300] or None
    return kept


def main(folder: str, out: str, *flags: str) -> None:
    """Collect every record of the folder, in a stable order."""
    cells: list[dict[str, Any]] = []
    for path in sorted(Path(folder).glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        cells += record["cells"] if record.get("kind") == "suite" else [record]
    for cell in cells:
        cell["overlay"] = "--overlay" in flags
    cells = sorted(map(slim, cells), key=lambda c: json.dumps([
        c.get("plan", {}).get("vllm", ""), c.get("plan", {}).get("downstream_version", ""), c["model"],
        c.get("plan", {}).get("switched_off", []), len(c.get("workers") or [])]))  # fmt: skip
    record = {"kind": "suite", "schema_version": 1, "cells": cells}
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
