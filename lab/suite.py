"""Run many cells, each in processes of its own, and keep their records in one file.

A suite is a JSON list of cells::

    {"name": "…", "speculators": "0.3.0", "model": "llama", "arguments": ["--stock"],
     "environ": {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, "expect": "right",
     "workers": {"start_method": "fork"}}

``expect`` is ``right``, or a text that the error must hold: a cell that shows a failure counts only
if it fails with those words. ``workers`` holds texts that must be found in what every worker says of
itself (`vllm_compat.trial.cell.describe_worker`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; return 0 if every cell ended as expected."""
    parser = argparse.ArgumentParser(prog="python -m lab.suite", description=__doc__)
    parser.add_argument("suite", help="JSON file with the list of cells")
    parser.add_argument("--out", required=True, help="file for the records")
    parser.add_argument("--models", required=True, help="folder of the tiny models")
    parser.add_argument("--downstreams", required=True, help="folder with one folder per release")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one cell")
    parser.add_argument("--deadline", type=float, default=3600, help="seconds for all of them")
    options = parser.parse_args(argv)
    cells = json.loads(Path(options.suite).read_text(encoding="utf-8"))
    end = time.monotonic() + options.deadline
    out = Path(options.out)
    with ThreadPoolExecutor(options.jobs) as pool:
        records = list(pool.map(lambda cell: _run_cell(cell, options, end), cells))
    out.write_text(json.dumps({"kind": "suite", "cells": records}, indent=1) + "\n")
    wrong = [record for record in records if not record["as_expected"]]
    print(f"{len(records) - len(wrong)} cells as expected, {len(wrong)} not")
    return 1 if wrong else 0


def _run_cell(cell: dict[str, Any], options: argparse.Namespace, end: float) -> dict[str, Any]:
    work = Path(options.out).parent / "cells"
    work.mkdir(parents=True, exist_ok=True)
    name = cell["name"]
    slug = "".join(c if c.isalnum() else "-" for c in name)
    target, log = work / f"{slug}.json", work / f"{slug}.log"
    target.unlink(missing_ok=True)
    limit = max(1.0, min(options.limit, end - time.monotonic()))
    begin = time.perf_counter()
    _start(cell, options, target, log, limit)
    text = log.read_text(encoding="utf-8", errors="replace")
    record: dict[str, Any] = {"outcome": "failed", "error": f"no record after {limit:.0f} s"}
    if target.exists():
        record = json.loads(target.read_text(encoding="utf-8"))
    record.update(name=name, cell=cell, wall_seconds=round(time.perf_counter() - begin, 1))
    _judge(cell, record, text)
    if not record["as_expected"] or record["outcome"] != "right":
        record["log"] = text[-3000:].splitlines()
    mark = "ok " if record["as_expected"] else "NOT"
    print(
        f"{mark} {name}: {record['outcome']}, worst {record.get('worst')},"
        f" {record['wall_seconds']} s, {str(record.get('error') or '')[:200]}",
        flush=True,
    )
    return record


def _start(
    cell: dict[str, Any], options: argparse.Namespace, target: Path, log: Path, limit: float
) -> None:
    """Run a cell's processes to their end, or to the limit."""
    environ = {**os.environ, **cell.get("environ", {})}
    downstream = Path(options.downstreams) / cell["speculators"]
    environ["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(downstream), environ.get("PYTHONPATH")) if part
    )
    command = [sys.executable, "-m", "vllm_compat.trial.cell"]
    if "launcher" in cell:  # its own options
        command = [sys.executable, "-m", "vllm_compat", "run", *cell["launcher"]]
        command += ["-m", "vllm_compat.trial.cell"]
    command += [str(Path(options.models) / cell["model"]), "--out", str(target)]
    command += cell.get("arguments", [])
    with log.open("wb") as stream:
        child = subprocess.Popen(
            command, env=environ, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end_session(child)


def _judge(cell: dict[str, Any], record: dict[str, Any], text: str) -> None:
    """Say in a record whether its cell ended as expected; ``text`` is the cell's output."""
    expect = cell.get("expect", "right")
    if expect == "right":
        record["as_expected"] = record["outcome"] == "right"
    else:
        record["as_expected"] = record["outcome"] != "right" and expect in (
            f"{record.get('error')}\n{text}"
        )
    for key, text_wanted in cell.get("workers", {}).items():
        for worker in record.get("workers", []):
            if text_wanted not in str(worker.get(key)):
                record["as_expected"] = False
                record["error"] = f"workers say {key} is {worker.get(key)}, not {text_wanted}"


def _end_session(child: subprocess.Popen[bytes]) -> None:
    """End what a cell has left in its session: workers outlive a killed driver for a while."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        time.sleep(0.5)
    child.wait()


if __name__ == "__main__":
    sys.exit(main())
