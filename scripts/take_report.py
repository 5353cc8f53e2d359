#!/usr/bin/env python3
"""Take a report of `vllm-compat bench --report`, as somebody has attached it, into records/reports/.

usage: take_report.py FILE [--check] [--records DIR]      (--check: say whether it could be taken, only)

It is refused, in one sentence, where it holds a path, a field that the schema does not know, or a number
that no machine gives. scripts/render_records.py then shows it in docs/performance.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
LARGEST = 2**20
_PATH = re.compile(r"[/\\~@]|\.\.|\bhome\b|\.(?:json|safetensors|pt|py)\b", re.IGNORECASE)


def main(arguments: list[str]) -> int:
    """Check one file and take it; return 1 where it is refused."""
    parser = argparse.ArgumentParser(prog="take_report.py", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the report")
    parser.add_argument("--check", action="store_true", help="only say whether it could be taken")
    parser.add_argument(
        "--records", type=Path, default=ROOT / "records", help="where records stand (default: here)"
    )
    options = parser.parse_args(arguments)
    report, fault = read(options.file)
    if fault:
        print(f"take_report: {options.file.name} is refused: {fault}", file=sys.stderr)
        return 1
    text = json.dumps(report, indent=1) + "\n"
    target = options.records / "reports" / name_of(report, text)
    if target.exists():
        print(f"take_report: {options.file.name} is refused: it was taken before.", file=sys.stderr)
        return 1
    if options.check:
        print(f"{options.file.name} can be taken, as {target.name}.")
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    print(f"Taken as {target}; now run scripts/render_records.py.")
    return 0


def read(path: Path) -> tuple[dict[str, Any], str]:
    """Return a report and nothing, or what is wrong with it in one sentence."""
    try:
        if path.stat().st_size > LARGEST:
            return {}, f"it is larger than {LARGEST:,} bytes, and no report is."
        report = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=_once, parse_constant=_number
        )
    except OSError as error:
        return {}, f"it cannot be read: {error.strerror}."
    except (ValueError, RecursionError) as error:
        return {}, f"it is no JSON file: {str(error).partition(chr(10))[0]}."
    return report, fault_of(report)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that stands twice: who reads the file may see another than is checked."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _number(word: str) -> float:
    """Refuse NaN and infinities, which pass every comparison with a limit."""
    raise ValueError(f"{word} is no number")


def fault_of(report: Any) -> str:
    """Return what is wrong with a report in one sentence, nothing if it can be taken."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    from vllm_compat.commands.bench_report import schema

    for where, text in _texts(report):
        if _PATH.search(text) or any(ord(letter) < 32 for letter in text):
            return f"{where} holds {text[:60]!r}, which looks like a path or an address."
    error = best_match(Draft202012Validator(schema()).iter_errors(report))
    if error is not None:
        where = ".".join(map(str, error.absolute_path)) or "the report"
        return f"at {where}: {error.message[:200]}."
    return next(_absurd(report), "")


def _texts(part: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text of a report, names of fields included, with where it stands."""
    if isinstance(part, dict):
        for key, value in part.items():
            yield f"a name in {where or 'the report'}", key
            yield from _texts(value, f"{where}.{key}".lstrip("."))
    elif isinstance(part, list):
        for number, value in enumerate(part):
            yield from _texts(value, f"{where}.{number}")
    elif isinstance(part, str):
        yield where, part


def _absurd(report: dict[str, Any]) -> Iterator[str]:
    """Yield what of a well-formed report contradicts itself."""
    made, machine, ranks = (
        report["vllm_compat"]["date"],
        report["machine"],
        report["tensor_parallel_size"],
    )
    try:
        day = date.fromisoformat(made)
    except ValueError:
        yield f"there is no day {made}."
        return
    if day > date.today() + timedelta(days=1):
        yield f"it was made on {made}, which is still to come."
    if machine.get("gpus", ranks) < ranks:
        yield f"{ranks} ranks cannot run on {machine['gpus']} GPUs."
    if (machine["device"] == "cpu") != ("compute_capability" not in machine):
        yield f"machine: a device {machine['device']!r} and its compute capability do not go together."
    for batch in report["batches"]:
        name = f"{batch['prompts']}x{batch['tokens']}"
        base = batch["modes"].get("plain", {}).get("tokens_per_second")
        for mode, found in batch["modes"].items():
            speed, ratio = found["tokens_per_second"], found["of_plain"]
            if (speed is None or not base) != (ratio is None):
                yield f"{name}, {mode}: a ratio without its speeds, or speeds without their ratio."
            elif ratio is not None and abs(ratio - speed / base) > 0.005 * max(1, ratio):
                yield f"{name}, {mode}: {ratio} of plain is not {speed} tokens/s through {base}."
            if found["guards"] == "refused" and speed is not None:
                yield f"{name}, {mode}: a batch that a guard has refused has a speed."
    memory = machine.get("memory_mib", 0) * 2**20
    for peak in (report["measured"] or {}).get("peak_bytes", []):
        if memory and peak > memory:
            yield f"a rank has held {peak:,} bytes on a card of {memory:,}."
    predicted = (report["predicted"] or {}).get("memory")
    if predicted:
        parts = sum(predicted[part] for part in ("weights", "kv_cache", "activations", "context"))
        if parts != predicted["total"]:
            yield f"the predicted {predicted['total']:,} bytes are not the sum of their parts."


def name_of(report: dict[str, Any], text: str) -> str:
    """Return the name of the record: device, vLLM, and by what it is told from others like it."""
    device = re.sub(r"[^a-z0-9]+", "-", report["machine"]["device"].lower()).strip("-")
    version = re.sub(r"[^0-9a-z.]+", "-", report["versions"]["vllm"].lower())
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{device}-x{report['tensor_parallel_size']}-vllm-{version}-{digest}.json"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
