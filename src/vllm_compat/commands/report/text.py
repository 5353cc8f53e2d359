"""A report as plain text, for pipes, files and terminals without ``rich``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from vllm_compat.commands.report import words
from vllm_compat.commands.report.model import Judged, Pair, Report, Standing

WIDTH = 100


def render(report: Report) -> str:
    """Return one pair in full; of several, the matrix and what stands in the way."""
    lines = _pair(report.pairs[0]) if len(report.pairs) == 1 else _matrix(report)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _wrap(text: str, first: str, other: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=first if other is None else other,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _field(name: str, text: str, indent: str = "") -> list[str]:
    width = 13
    return _wrap(text, f"{indent}{name:{width}}", indent + " " * width) if text else []


def _pair(pair: Pair) -> Iterator[str]:
    yield from _wrap(f"{pair.title}: {pair.verdict.value}. {pair.reason}", "", "  ")
    yield ""
    sites = words.uses_of_vllm(pair)
    yield from _field("downstream", f"{pair.downstream}, {sites}, {pair.contract.root}")
    vllm = f"{pair.surface.distribution} {pair.surface.version}, {pair.surface.origin}"
    yield from _field("vLLM", vllm)
    yield from _field("environment", words.environment(pair))
    yield from _field("knowledge", words.knowledge(pair))
    for note in pair.notes:
        yield from _field("note", note)
    if pair.hazards:
        yield ""
        yield words.hazards_title(pair)
    for hazard in pair.hazards:
        yield ""
        yield from _wrap(f"{hazard.harm.value}: {hazard.sentence}", "  ", "    ")
        yield from _field("by hand", hazard.remedy, "    ")
        yield from _field("known of", hazard.ranges, "    ")
        yield from _field("source", hazard.source, "    ")
    yield from _findings(pair)
    if pair.changed_defaults:
        yield ""
        yield from _wrap(words.defaults_title(pair.changed_defaults), "", "  ")
        yield ""
        for judged in pair.changed_defaults:
            yield from _wrap(words.changed_default(judged), "  ", "    ")
    if pair.plan and pair.plan.steps:
        yield ""
        yield words.adapters_title(pair)
        yield ""
        for step in pair.plan.steps:
            yield from _wrap(f"{words.labelled(step.adapter)}: {step.reason}.", "  ", "    ")
    for tool, lines in words.install_lines(pair).items():
        yield ""
        yield f"install this pair with {tool}:"
        yield ""
        for line in lines:
            parts = textwrap.wrap(line, WIDTH - 8, break_long_words=False, break_on_hyphens=False)
            yield "  " + " \\\n      ".join(parts)
    if following := words.next_steps(pair):
        yield ""
        yield from _wrap(following, "")


def _findings(pair: Pair) -> Iterator[str]:
    """Yield a pair's findings, the gravest first; changed defaults aside."""
    number = len(pair.findings) - len(pair.changed_defaults)
    if number:
        counted = (
            f"{len(found)} {standing.value}"
            for standing in Standing
            if (found := pair.standing(standing))
        )
        yield ""
        yield f"{words.count(number, 'finding')}: {', '.join(counted)}"
        for standing in reversed(Standing):
            for judged in pair.standing(standing):
                yield ""
                yield from _finding(judged)


def _finding(judged: Judged) -> Iterator[str]:
    finding = judged.finding
    yield from _wrap(f"{words.heading(finding)}  {words.sites(finding)}", "  ", "    ")
    yield from _wrap(finding.detail, "    ")
    yield from _field("seen", words.abridged(finding, WIDTH - 17), "    ")
    yield from _field("since", words.dated(judged), "    ")
    yield from _field("repair", words.repair(judged), "    ")
    for change in words.changes(judged):
        yield from _field("changed", change, "    ")


def _matrix(report: Report) -> Iterator[str]:
    yield from _cells(report)
    for note in dict.fromkeys(note for pair in report.pairs for note in pair.notes):
        yield ""
        yield from _wrap(note, "")
    obstacles = words.obstacles(report)
    if obstacles:
        yield ""
        yield "What stands in the way"
        for downstream, reasons in obstacles:
            yield ""
            yield f"  {downstream}"
            for reason, releases in reasons:
                yield from _wrap(f"{releases}: {reason}", "    - ", "      ")
    yield ""
    yield words.KNOWLEDGE_TITLE
    for downstream, by_word in words.knowledges(report):
        yield ""
        yield f"  {downstream}"
        for word, releases in by_word.items():
            yield from _wrap(f"{word}: {releases}", "    - ", "      ")
    yield from _uses(report)


def _cells(report: Report) -> Iterator[str]:
    """Yield the table of verdicts."""
    columns = report.downstreams
    cells = {
        (pair.downstream, pair.surface.version): f"{words.MARKS[pair.verdict]} {words.cell(pair)}"
        for pair in report.pairs
    }
    widths = [
        max(len(column), *(len(cells.get((column, r), "")) for r in report.releases))
        for column in columns
    ]
    first = max(4, *map(len, report.releases))
    yield "  ".join(["vLLM".ljust(first), *(c.ljust(w) for c, w in zip(columns, widths, strict=True))])
    yield "  ".join("-" * width for width in (first, *widths))
    for release in report.releases:
        shown = (
            cells.get((column, release), "").ljust(width)
            for column, width in zip(columns, widths, strict=True)
        )
        yield "  ".join([release.ljust(first), *shown])


def _uses(report: Report) -> Iterator[str]:
    """Yield the adapters, and the releases on which each is in force."""
    uses = words.uses(report)
    if uses:
        yield ""
        yield "Adapters, and where they are in force"
        for adapter, where in uses:
            yield ""
            yield f"  {adapter}"
            for span in dict.fromkeys(where.values()):
                names = ", ".join(name for name, same in where.items() if same == span)
                yield from _wrap(f"{names}: {span}", "    ", "      ")
