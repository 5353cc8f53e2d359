"""The record that a campaign keeps in records/reliability: read where it is, written as a whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm_compat.trial import stamp


def opened(path: Path, kind: str, **empty: Any) -> dict[str, Any]:
    """Return the record at a place to go on with, or an empty one of that kind; with today's stamp."""
    record: dict[str, Any] = {"kind": kind, **empty}
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
    record["vllm_compat"] = stamp.made_by()
    return record


def put(path: Path, record: dict[str, Any]) -> None:
    """Write a record, the home folder as ``~``: whoever is killed leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    text = json.dumps(record, indent=1).replace(f"{Path.home()}/", "~/")
    new.write_text(text + "\n", encoding="utf-8")
    os.replace(new, path)
