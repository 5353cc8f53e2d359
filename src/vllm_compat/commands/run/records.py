"""What the processes of a run have written of it, read and summed by the launcher.

The program's own process writes the run's record. One that it has started, and that has built a
generator or a dataset of its own (under torchrun, accelerate, a script around the script), writes a
record too, into the folder in which processes say what they are doing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from vllm_compat.commands.run.watch import Process

Record = Mapping[str, Any]

_COUNTS = ("samples", "tokens", "calls", "saved", "from_files")


def read_record(path: Path, folder: Path, processes: Sequence[Process]) -> Record | None:
    """Return the record of the whole run, or None where the program's process wrote nothing.

    Args:
        path: The record of the program's process; it is replaced where others have something to add.
        folder: Where the processes of the run say what they are doing.
        processes: What they have said there.
    """
    record = completed(summed(_read(path), read_children(folder)), processes)
    if record is not None and "processes" in record:
        new = path.with_name(f"{path.name}.{os.getpid()}")
        with suppress(OSError):
            new.write_text(json.dumps(record), encoding="utf-8")
            os.replace(new, path)
    return record


def _read(path: Path) -> Record | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return {"summary": f"The run's record could not be read: {error}."}
    return _sound(record) if isinstance(record, dict) else {"summary": "The run's record is malformed."}


def _sound(record: dict[str, Any]) -> Record:
    """Return a record without what no process of ours writes so: a program may write there too."""
    numbers = [*_COUNTS, "opened", "written"]
    wrong = {name for name in numbers if type(record.get(name, 0)) not in (int, float)}
    wrong |= {name for name in numbers if type(record.get(name)) is float and not isfinite(record[name])}
    out = record.get("left_out", [])
    if not isinstance(out, list) or not all(type(number) is int for number in out):
        wrong.add("left_out")
    if type(record.get("bad_sample")) is not int:
        wrong.add("bad_sample")
    if not isinstance(record.get("adapters", {}), dict):
        wrong.add("adapters")
    return {name: value for name, value in record.items() if name not in wrong}


def read_children(folder: Path) -> list[Record]:
    """Return the records of processes that the program has started, in the order of their beginning."""
    found = []
    for path in folder.glob("*.record"):
        record = _read(path)
        if record and record.get("kind") == "run":
            found.append({**record, "pid": int(path.stem)})
    return sorted(found, key=lambda record: record.get("opened", 0.0))


def summed(record: Record | None, children: Sequence[Record]) -> Record | None:
    """Return the record of a run whose work was done by several processes.

    One that has failed counts as failed unless a later one was begun after its end: then whoever has
    started both has tried again.
    """
    if record is None or not children:
        return record
    lasting = [
        child
        for child in children
        if not child.get("failed")
        or not any(other.get("opened", 0) > child.get("written", 0) for other in children)
    ]
    everyone = [record, *children]
    counts = {name: sum(int(each.get(name) or 0) for each in everyone) for name in _COUNTS}
    failure = next((each["failure"] for each in (record, *lasting) if each.get("failure")), None)
    told = [
        str(each.get("extracted"))
        for each in everyone
        if any(each.get(done) for done in ("samples", "from_files", "left_out"))
    ]
    extracted = "; ".join(told) or "no hidden states were extracted"
    if len(told) > 1:
        together = f"{counts['samples']} samples ({counts['tokens']} tokens) in {len(told)} processes"
        extracted = f"{together}: {extracted}"
    summary = f"{extracted[:1].upper()}{extracted[1:]}."
    if failure:
        summary = f"First cause: {str(failure).rstrip('.')}. Before it: {extracted}."
    kept = ("pid", *_COUNTS, "left_out", "failed", "failure")
    bad = next((each["bad_sample"] for each in everyone if each.get("bad_sample") is not None), None)
    return {
        **record,
        **counts,
        "left_out": sorted({number for each in everyone for number in each.get("left_out") or ()}),
        "bad_sample": bad,
        "summary": summary,
        "extracted": extracted,
        "failure": failure,
        "failed": bool(record.get("failed")) or any(child.get("failed") for child in lasting),
        "processes": [{name: child.get(name) for name in kept} for child in children],
    }


def completed(record: Record | None, processes: Sequence[Process]) -> Record | None:
    """Return the record with what a process could say only by its other file: that the record is old."""
    untold = [process.said for process in processes if "record_error" in process.said]
    if not untold:
        return record
    summary = str((record or {}).get("summary") or "")
    summary += (
        f"{' ' if summary else ''}The record could not be written ({untold[-1]['record_error']}): it"
    )
    summary += " does not tell all."
    failed = bool((record or {}).get("failed")) or any(said.get("record_failed") for said in untold)
    return {**(record or {}), "summary": summary, "failed": failed}
