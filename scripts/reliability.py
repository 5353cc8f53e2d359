"""The page on what was tried to break a run: campaigns, and what came of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

HEAD = """# What was tried to break it

Generated from `records/reliability/` by `scripts/render_records.py`; do not edit.
"""

NOT_TRIED = """## What has not been tried

Kills were tried on vLLM's CPU build, one machine, one rank. Disks (full, read-only, slow, vanished) have
tests for single cases, and no campaign. Neighbours were tried with a fake vLLM whose processes are real,
not with vLLM itself; shiv, pex, conda, gevent and other tracers were not tried, nor was a neighbour that
puts a method of vLLM's own back over ours without calling it: nothing notices that.
What is *left* was there 40 seconds after the kill. It was seen after SIGKILL of the launcher alone, and
has not been explained. *Other* are processes whose command line does not tell a worker.
200 rounds are meant to be run, and the table says how many have been.
"""


def page(records: Callable[[str, str], Iterator[tuple[str, dict[str, Any]]]]) -> str:
    """Return the page."""
    parts = [HEAD]
    for name, record in records("kills", "reliability"):
        parts.append(_kills(name, record))
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
        for role in ("launcher", "program", "worker", "other")
    }
    rows = [
        ("rounds in which something was killed", len(entries)),
        ("processes that were hit: launcher, program, worker, other",
         ", ".join(str(count) for count in by_role.values())),
        ("rounds with two at once", sum(len(entry["hit"]) > 1 for entry in entries)),
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
        ]
    )


def _equal(series: dict[str, Any]) -> bool:
    return bool(series.get("same")) and not series.get("wrong") and series.get("worst", 1.0) < 0.02


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
