"""Reports and repairs for people and for programs."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from typing import Any, TextIO

from vllm_compat.commands.verify.model import (
    SCHEMA_VERSION,
    Certainty,
    Fault,
    Kind,
    Remedy,
    Repair,
    Report,
)
from vllm_compat.commands.verify.words import runs_of
from vllm_compat.errors import UsageError


class Progress:
    """Shows how far reading has come: a bar on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, stream: TextIO, name: str = "verify") -> None:
        self._stream = stream
        self._name = name
        self._begin = self._last = time.monotonic()
        self._terminal = stream.isatty()

    def __call__(self, done: int, total: int, size: int) -> None:
        """Take note of files done, files in all and bytes read."""
        now = time.monotonic()
        if now - self._last < (0.1 if self._terminal else 10.0) and done < total:
            return
        self._last = now
        rate = size / max(now - self._begin, 1e-6)
        words = f"{done} of {total} files, {size / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s"
        if not self._terminal:
            self._stream.write(f"{self._name}: {words}\n")
        else:
            bar = "█" * (30 * done // total)
            self._stream.write(f"\r\x1b[K{bar:░<30} {words}" + ("\n" if done == total else ""))
        self._stream.flush()


def render(report: Report, form: str = "text") -> str:
    """Return the report as ``text`` for people or as ``json`` for programs."""
    if form == "json":
        record: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "clean": report.clean}
        record.update(asdict(report))
        del record["entries"]
        record["megabytes_per_second"] = round(report.size / 1e6 / max(report.seconds, 1e-9), 1)
        return json.dumps(record, indent=2, default=str) + "\n"
    if form != "text":
        raise UsageError(f"There is no form {form!r} of the report: choose text or json.")
    rate = report.size / max(report.seconds, 1e-9) / 1e9
    lines = [
        f"{report.folder}: {report.files:,} files, {report.tokens:,} tokens, {report.layers} layers"
        f" of {report.hidden_size} in {report.dtype}; {report.size / 1e9:.2f} GB read in"
        f" {report.seconds:.1f} s ({rate:.2f} GB/s)"
    ]
    groups: dict[tuple[Certainty, Kind], list[Fault]] = defaultdict(list)
    for fault in report.faults:
        groups[fault.certainty, fault.kind].append(fault)
    for certainty in Certainty:
        for (level, kind), faults in groups.items():
            if level is certainty:
                lines += ["", f"{certainty.value}: {kind.value} ({len(faults)})"]
                lines += [f"  {fault.message}" for fault in faults[:5]]
                if len(faults) > 5:
                    lines.append(f"  … and {len(faults) - 5} more, all in the JSON report")
    lines += ["", *report.notes]
    counts = Counter(fault.certainty for fault in report.faults)
    remedies = sum(fault.remedy is not Remedy.NONE for fault in report.faults)
    lines.append(
        "No fault found."
        if report.clean
        else f"{counts[Certainty.CERTAIN]} certain and {counts[Certainty.SUSPECTED]} suspected"
        f" faults; --repair can do something about {remedies}."
    )
    if again := _to_extract_again(report):
        lines.append(f"Extract these again: {runs_of(again)}.")
    return "\n".join(lines) + "\n"


def _to_extract_again(report: Report) -> set[int]:
    """Return the numbers of the samples that no repair makes fit to be trained on."""
    bad = {
        name
        for fault in report.faults
        if fault.certainty is not Certainty.NOTE and fault.remedy is not Remedy.REORDER
        for name in fault.files
        if fault.kind not in (Kind.RECORD, Kind.STRAY, Kind.DUPLICATE)
    }
    return {entry.index for entry in report.entries if entry.name in bad}


def render_repair(result: Repair, form: str = "text") -> str:
    """Return what a repair did as ``text`` for people or as ``json`` for programs."""
    if form == "json":
        record = {"schema_version": SCHEMA_VERSION, **asdict(result)}
        return json.dumps(record, indent=2) + "\n"
    if form != "text":
        raise UsageError(f"There is no form {form!r} of the report: choose text or json.")
    would = "" if result.backup else "would "
    lines = []
    for kind in ("set aside", "reorder"):
        steps = [action for action in result.actions if action.action == kind]
        lines += [f"{would}{kind}: {step.why}" for step in steps[:5]]
        if len(steps) > 5:
            lines.append(f"{would}{kind}: … and {len(steps) - 5} more, all in the JSON report")
    lost = sum(action.lost for action in result.actions)
    if lost:
        lines.append(f"{lost} tokens whose loss mask the extraction had cut away are masked out.")
    if result.backup:
        lines.append(f"The originals are in {result.backup}, the list in its repair.json.")
    if result.left:
        lines.append(f"{len(result.left)} faults have no certain repair and are left as they are.")
    lines.append(result.resume if result.actions else "There is nothing to repair with certainty.")
    return "\n".join(lines) + "\n"
