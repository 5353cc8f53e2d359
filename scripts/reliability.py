"""The page on what was tried to break a run: campaigns, and what came of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

FAULTS = ("full", "out of inodes", "read-only", "vanished", "slow")

HEAD = """# What was tried to break it

Generated from `records/reliability/` by `scripts/render_records.py`; do not edit.
"""

NOT_TRIED = """## What has not been tried

- Kills and disks were tried on vLLM's CPU build, one machine, one rank. Disks were tried without an
  engine: the rows that were saved are made up.
- Neighbours were tried with a fake vLLM whose processes are real, not with vLLM itself; shiv, pex,
  conda, gevent and other tracers were not tried, nor was a neighbour that puts a method of vLLM's own
  back over ours without calling it: nothing notices that.
- A real network file system, a quota, a disk that returns errors or wrong bytes: *vanished* is a folder
  that was moved away, *slow* an ext4 that stands still three times for a second.
- `left_out.json`, and what `rehearse`, `demo`, `bench`, `preflight` and the maintainers' `lab` write, on
  such disks. A disk cannot be made read-only while a file on it is open to be written, so that this was
  not tried where one is open for the whole run.
"""


def page(records: Callable[[str, str], Iterator[tuple[str, dict[str, Any]]]]) -> str:
    """Return the page."""
    parts = [HEAD]
    for name, record in records("kills", "reliability"):
        parts.append(_kills(name, record))
    for name, record in records("disk", "reliability"):
        parts.append(_disk(name, record))
    for name, record in records("fuzz", "reliability"):
        parts.append(_fuzz(name, record))
    for name, record in records("neighbours", "reliability"):
        parts.append(_neighbours(name, record))
    return "\n".join([*parts, NOT_TRIED])


def _kills(name: str, record: dict[str, Any]) -> str:
    entries, series = record["entries"], record["series"]
    launched = [entry for entry in entries if "launcher SIGKILL" not in entry["hit"]]
    hit = [each for entry in entries for each in entry["hit"]]
    by_role = {
        role: sum(each.startswith(role) for each in hit)
        for role in ("launcher", "program", "worker", "tracker", "other")
    }
    rows = [
        ("kills: processes that were hit", sum(by_role.values())),
        ("of them the launcher, the program, a worker, multiprocessing's tracker, others",
         ", ".join(str(count) for count in by_role.values())),
        ("rounds, each with a run that was hit", len(entries)),
        ("rounds with two or three hit at once", sum(len(entry["hit"]) > 1 for entry in entries)),
        ("rounds hit when samples were there", sum(entry["samples"] > 0 for entry in entries)),
        ("rounds that ended with a verdict in words, of those whose launcher was not killed by SIGKILL",
         f"{sum(entry['verdict'] for entry in launched)} of {len(launched)}"),
        ("torn files (wrong)", sum(len(entry["torn"]) for entry in entries)),
        ("rounds that left a gap (lost)", sum(entry["gaps"] for entry in entries)),
        ("processes left", sum(entry["processes_left"] for entry in entries)),
        ("pieces of shared memory left", sum(entry["shared_memory_left"] for entry in entries)),
        ("finished series, each resumed until it was whole", len(series)),
        ("of them equal to an undisturbed run", sum(_equal(each) for each in series)),
    ]  # fmt: skip
    return "\n".join(
        [
            "## Random kills",
            "",
            f"Stock's way of work (`tests/programs/extract.py`), speculators {record['speculators']},"
            f" vLLM {record['vllm']} (CPU), killed by SIGKILL, SIGTERM or SIGINT at random moments and"
            f" started again until it was done: `scripts/campaign_kills.py` (`{name}`). Equal is a"
            " deviation of less than 2 % a row.",
            "",
            "| what | count |",
            "|---|---|",
            *(f"| {what} | {count} |" for what, count in rows),
            "",
            "*Left* is what is there 45 seconds after the kill; *others* are the launcher's witness and"
            " what the program starts for a moment. 200 kills are meant to be tried; the table says how"
            " many have been.",
            *_left(entries),
            "",
        ]
    )


def _left(entries: list[dict[str, Any]]) -> list[str]:
    """Return what was left, round by round."""
    return [
        f"After {', '.join(entry['hit'])}: {', '.join(entry.get('roles_left', ())) or 'no process'} and"
        f" {entry['shared_memory_left']} pieces of shared memory."
        for entry in entries
        if entry["processes_left"] or entry["shared_memory_left"]
    ]


def _equal(series: dict[str, Any]) -> bool:
    return bool(series.get("same")) and not series.get("wrong") and series.get("worst", 1.0) < 0.02


def _disk(name: str, record: dict[str, Any]) -> str:
    targets: dict[str, list[dict[str, Any]]] = {}
    for cell in record["cells"]:
        targets.setdefault(cell["target"], []).append(cell)
    outcomes = ("unharmed", "in words", "wrong", "lost")
    rows = []
    for target, cells in targets.items():
        counts = [sum(cell[outcome] for cell in cells) for outcome in outcomes]
        faults = {cell["fault"] for cell in cells if any(cell[outcome] for outcome in outcomes)}
        named = ", ".join(fault for fault in FAULTS if fault in faults)
        rows.append(f"| {target} | {named} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    return "\n".join(
        [
            "## Disks",
            "",
            f"`scripts/campaign_disk.py` (`{name}`): each place that something is written to, on a real"
            " file system that is full (of bytes or of inodes), read-only, gone or slow, before the"
            " command starts or while it is under way. *Unharmed*: the command did all of its work."
            " *Refused in words*: it ended with a sentence that says why, nothing was torn, and the same"
            " command did all of it once the disk was well. *Wrong*: a traceback, a torn file, a gap, a"
            " success that is none, or work that was ended by what only tells of it. *Lost*: not there"
            " after the same command again.",
            "",
            "| what is written | faults | tried | unharmed | refused in words | wrong | lost |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _fuzz(name: str, record: dict[str, Any]) -> str:
    rows = [
        f"| {target} | {found['tried']} | {found['taken']} | {found['refused_in_words']} |"
        f" {found['wrong']} |"
        for target, found in record["targets"].items()
    ]
    return "\n".join(
        [
            "## Odd inputs",
            "",
            f"`scripts/campaign_fuzz.py` (`{name}`): torn, malicious and senseless inputs, made by"
            " hypothesis. *Wrong* is a traceback, a file that was changed or lost, or code that ran out"
            " of a file that was only read.",
            "",
            "| what was given | tried | taken | refused in words | wrong |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _neighbours(name: str, record: dict[str, Any]) -> str:
    counts: dict[str, Counter[str]] = {}
    for entry in record["entries"].values():
        counts.setdefault(entry["kind"], Counter())[entry["outcome"]] += 1
    outcomes = ("right", "refused in words", "wrong", "lost")
    rows = [
        f"| {kind} | {found.total()} | {' | '.join(str(found[outcome]) for outcome in outcomes)} |"
        for kind, found in sorted(counts.items())
    ]
    bad = [
        f"- {case}: {entry['outcome']}, {entry['why']}"
        for case, entry in sorted(record["entries"].items())
        if entry["outcome"] in ("wrong", "lost")
    ]
    missing = [f"Not tried, since it was not installed: {', '.join(record['not_tried'])}.", ""]
    return "\n".join(
        [
            "## Hostile neighbours",
            "",
            f"`scripts/campaign_neighbours.py` (`{name}`): a program that builds a generator with two"
            " workers, beside one neighbour at a time, as the launcher's program, as a child of it and"
            " with `apply()`, with forked and with spawned workers. *Right*: driver and workers hold the"
            " patches that they hold without it, and it did its work. *Lost*: a process ran without one."
            f" {len(record['entries'])} of {record['planned']} cases have been tried."
            f" Tools: {', '.join(f'{tool} {version}' for tool, version in record['tools'].items())}.",
            "",
            "| neighbour | tried | right | refused in words | wrong | lost |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            *(missing if record["not_tried"] else []),
            *([*bad, ""] if bad else []),
        ]
    )
