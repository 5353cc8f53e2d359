"""The matrix's records: read, judged, and shown as lines, Markdown and JUnit."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Outcome:
    """The outcomes of a cell.

    ``RIGHT``: every row is. ``REFUSED``: vllm_compat said before anything loaded that this pair has
    no plan. ``VLLM``: vLLM alone fails on this model as well. ``SURFACE``: not run, judged by the
    recorded surface. ``FAILED``: everything else; with an adapter switched off that is what shows
    that it is needed.
    """

    RIGHT = "right"
    REFUSED = "refused"
    VLLM = "vllm fails"
    SURFACE = "surface only"
    FAILED = "failed"


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the matrix records of a folder, by release, downstream, model and ablation."""
    from packaging.version import Version

    found = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("kind") == "matrix cell":
            found.append(record)
    return sorted(
        found,
        key=lambda r: (
            Version(release_of(r)).release,
            release_of(r),
            r["versions"]["speculators"],
            r["without"],
            r["cell"],
        ),
    )


def release_of(record: dict[str, Any]) -> str:
    """Return the vLLM release that a record is of, without build labels."""
    return str(re.match(r"vllm-([^_]+)_", record["cell"])[1])  # type: ignore[index]


def line(record: dict[str, Any]) -> str:
    """Return a record as one line for a terminal."""
    cell = record["cell"].partition("_")[2].replace("_", " ")
    if record["outcome"] == Outcome.RIGHT:
        share = record.get("start", {}).get("share")
        start = f", {share:.2%} of the start" if share is not None else ""
        return f"{cell}: right, worst {record['worst']:.1e}{start}"
    return f"{cell}: {record['outcome']}, {' '.join(str(record.get('error')).split())[:160]}"


def as_expected(record: dict[str, Any]) -> bool:
    """Tell whether a record is no fault of ours: right, refused in words, or not ours to repair.

    A cell with an adapter switched off is expected to fail.
    """
    if record["without"]:
        return bool(record["outcome"] != Outcome.RIGHT)
    return bool(record["outcome"] != Outcome.FAILED)


def cause(record: dict[str, Any]) -> str:
    """Return in words why a cell is not right, and, where vLLM alone fails too, whose fault that is."""
    said = _what_failed(record)[:200]
    if record["outcome"] != Outcome.VLLM:
        return f"{record['outcome']}: {said}"
    if not record["overlay"]:
        return f"vLLM alone fails: {said}"
    kernels = record.get("kernels")
    if _KERNELS.search(said):
        return f"the overlay's fault, whose kernels of {kernels} do not fit these sources: {said}"
    return f"vLLM alone fails over the kernels of {kernels}: {said}"


_KERNELS = re.compile(
    r"_OpNamespace|torch\.ops\b|Could not run '_|undefined symbol|shared object|\bvllm\._\w*C\b|\.so\b"
)
"""What an error says where compiled code of another release lacks an operator or a symbol."""


class Fault:
    """Whose fault it is that a cell is not right."""

    VLLM = "vLLM's"
    OURS = "ours"
    ENVIRONMENT = "the environment's"


def fault_of(record: dict[str, Any]) -> str:
    """Return whose fault it is that a cell is not right.

    The environment's, where compiled code of another release does not fit, or the machine lacks a
    package, memory, disk or network; vLLM's, where it fails alone as well; else ours.
    """
    said = _what_failed(record)
    if _KERNELS.search(said) or of_environment(said):
        return Fault.ENVIRONMENT
    return Fault.VLLM if record["outcome"] == Outcome.VLLM else Fault.OURS


def of_environment(said: str) -> bool:
    """Tell whether an error says that the machine or its packages lack something."""
    return _ENVIRONMENT.search(said) is not None


_ENVIRONMENT = re.compile(
    r"No space left|Read-only file system|MemoryError|[Cc]annot allocate memory|out of memory"
    r"|No module named '(?!vllm\b|vllm_compat|speculators)|GLIBC|CXXABI|cannot open shared object"
    r"|name resolution|Connection refused|ConnectionError|EnvironmentBuildError"
)
"""What an error says where the machine or what is installed is at fault."""


def _what_failed(record: dict[str, Any]) -> str:
    """Return the error, vLLM's own where it has one; what is in the log, where that says more."""
    found = record.get("plain") if record["outcome"] == Outcome.VLLM else None
    found = found or record
    said = " ".join(str(found.get("error")).split())
    if own := re.search(r"Worker failed with error '(.+?)', please check", said):
        return own[1]
    if "root cause" in said or "left no record" in said:
        told = [row.strip() for row in found.get("log", ()) if re.search(r"\b\w+Error: ", row)]
        deeper = [row for row in told if "root cause" not in row]
        said = deeper[-1] if deeper else said
    return said


def causes(records: Sequence[dict[str, Any]]) -> str:
    """Return why cells are not right, each cause once with the number of its cells."""
    counts = Counter(cause(record) for record in records if record["outcome"] != Outcome.RIGHT)
    return "; ".join(f"{number} × {text}" for text, number in counts.most_common())


def nothing_shown(records: Sequence[dict[str, Any]]) -> str | None:
    """Return a sentence where no cell has shown anything: none was right, or refused in words.

    A cell with an adapter switched off shows something when it fails.
    """
    for record in records:
        if record["outcome"] == Outcome.REFUSED:
            return None
        if record["outcome"] == (Outcome.FAILED if record["without"] else Outcome.RIGHT):
            return None
    if not records:
        return "Nothing was shown: no cell has a record."
    said = causes(records).rstrip(".")
    told = f"Nothing was shown: none of {len(records)} cells has run right: {said}."
    return f"{told} Their records have logs."


def summary_table(
    records: Sequence[dict[str, Any]], releases: Sequence[str] = (), missing: str = ""
) -> list[str]:
    """Return a Markdown table, release × speculators.

    ``releases`` have a row each, in this order, whether they have records or not; ``missing`` stands
    where a pair has none.
    """
    columns = sorted({r["versions"]["speculators"] for r in records})
    rows: dict[str, dict[str, list[str]]] = {release: {} for release in releases}
    overlaid = set()
    for record in records:
        if record["without"]:
            continue
        release = release_of(record)
        if record["overlay"]:
            overlaid.add(release)
        told = rows.setdefault(release, {}).setdefault(record["versions"]["speculators"], [])
        if (brief := _brief(record)) not in told:  # a refusal is the same for every model
            told.append(brief)
    lines = ["| vLLM | " + " | ".join(f"speculators {c}" for c in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for release, cells in rows.items():
        name = release + (" (overlay)" if release in overlaid else "")
        texts = ("<br>".join(cells.get(c, [])) or missing for c in columns)
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return lines


def _brief(record: dict[str, Any]) -> str:
    model = f"{record.get('model')} × {record.get('ranks')}"
    if record["outcome"] == Outcome.RIGHT:
        return f"{model}: {record['worst']:.1e}"
    if record["outcome"] == Outcome.SURFACE:
        return f"not run; by its surface {record['verdict']}"
    if record["outcome"] == Outcome.REFUSED:
        return "refused in words"
    if record["outcome"] == Outcome.VLLM:
        return f"{model}: vLLM alone fails too"
    return f"{model}: **failed**"


def junit(records: Sequence[dict[str, Any]]) -> str:
    """Return the records as a JUnit file's text."""
    from xml.etree import ElementTree as tree

    suite = tree.Element("testsuite", name="lab matrix", tests=str(len(records)))
    for record in records:
        seconds = str(record.get("wall_seconds", 0))
        case = tree.SubElement(
            suite, "testcase", classname=f"vllm {release_of(record)}", name=record["cell"], time=seconds
        )
        if not as_expected(record):
            failure = tree.SubElement(case, "failure", message=str(record.get("error")))
            failure.text = "\n".join(record.get("log", []))
        elif record["outcome"] in (Outcome.SURFACE, Outcome.VLLM, Outcome.REFUSED):
            tree.SubElement(case, "skipped", message=f"{record['outcome']}: {record.get('error')}")
    failures = sum(not as_expected(record) for record in records)
    skipped = len(suite.findall("testcase/skipped"))
    suite.set("failures", str(failures))
    suite.set("skipped", str(skipped))
    tree.indent(suite)
    return tree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def report(records: Sequence[dict[str, Any]], form: str) -> str:
    """Return records as text for a terminal, as Markdown or as JUnit."""
    if form == "junit":
        return junit(records)
    if form == "markdown":
        return "\n".join([*summary_table(records), ""])
    rows = [f"{release_of(r):9} {line(r)}" for r in records]
    wrong = sum(not as_expected(r) for r in records)
    return "\n".join([*rows, f"{len(records)} cells, {wrong} not as expected", ""])
