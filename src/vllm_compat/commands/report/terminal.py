"""A report as tables on a terminal. Needs ``rich``, which is imported with this module."""

from __future__ import annotations

import re

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vllm_compat.analysis.server_flow import Harm
from vllm_compat.commands.report import words
from vllm_compat.commands.report.model import Judged, Pair, Report, Standing, Verdict

_COLOURS = {
    Verdict.USABLE: "green",
    Verdict.WITH_SHIM: "green",
    Verdict.UNKNOWN: "yellow",
    Verdict.INCOMPATIBLE: "red",
}
_STANDINGS = {
    Standing.REPAIRED: "green",
    Standing.GUARDED: "cyan",
    Standing.POSSIBLE: "yellow",
    Standing.UNMET: "red",
}
_HARMS = {Harm.WRONG: "bold red", Harm.LOST: "red", Harm.FAILURE: "yellow"}


def show(report: Report, console: Console | None = None) -> None:
    """Print one pair in full; of several, the matrix and what stands in the way."""
    console = console or Console(highlight=False)
    if len(report.pairs) == 1:
        _pair(report.pairs[0], console)
    else:
        _matrix(report, console)


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _pair(pair: Pair, console: Console) -> None:
    colour = _COLOURS[pair.verdict]
    head = (f"{words.MARKS[pair.verdict]} {pair.title}: ", "bold")
    verdict = (pair.verdict.value, f"bold {colour}")
    console.print(Text.assemble(head, verdict, f". {pair.reason}"))
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    sites = words.uses_of_vllm(pair)
    facts.add_row("downstream", Text(f"{pair.downstream}, {sites}, {pair.contract.root}"))
    vllm = f"{pair.surface.distribution} {pair.surface.version}, {pair.surface.origin}"
    facts.add_row("vLLM", Text(vllm))
    facts.add_row("environment", Text(words.environment(pair)))
    facts.add_row("knowledge", Text(words.knowledge(pair)))
    for note in pair.notes:
        facts.add_row("note", Text(note, style="yellow"))
    console.print(facts)
    if pair.hazards:
        console.print(Text(words.hazards_title(pair), style="bold"))
        table = _table("harm", "hazard", "by hand")
        table.columns[1].ratio, table.columns[2].ratio = 3, 2
        table.columns[0].no_wrap = table.expand = True
        for hazard in pair.hazards:
            text = Text.assemble(hazard.sentence, (f"\n{hazard.ranges}; {hazard.source}\n", "dim"))
            table.add_row(Text(hazard.harm.value, _HARMS[hazard.harm]), text, Text(hazard.remedy))
        console.print(table)
    if len(pair.findings) > len(pair.changed_defaults):
        table = _table("finding", "since", "repair")
        table.columns[0].ratio, table.columns[2].ratio = 3, 1
        table.columns[1].no_wrap = True
        table.expand = True
        rows = [_finding(judged) for one in reversed(Standing) for judged in pair.standing(one)]
        for row in rows[:-1]:
            row[0].append("\n")  # findings are of several lines: keep them apart
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if pair.changed_defaults:
        console.print(Text(words.defaults_title(pair.changed_defaults), style="bold"))
        for judged in pair.changed_defaults:
            console.print(Padding(Text(words.changed_default(judged)), (0, 0, 0, 2)))
        console.print()
    if pair.plan and pair.plan.steps:
        console.print(Text(words.adapters_title(pair), style="bold"))
        table = _table("adapter", "why", "in")
        for step in pair.plan.steps:
            name = Text(words.labelled(step.adapter), style="bold")
            table.add_row(name, Text(_short(step.reason)), ", ".join(step.processes))
        console.print(table)


def _short(text: str) -> str:
    """Leave folders out of call sites: a column is too narrow for them, and text has them in full."""
    return re.sub(r"(?:[\w.-]+/)+([\w-]+\.py:\d+)", r"…/\1", text)


def _finding(judged: Judged) -> tuple[Text, Text, Text]:
    finding, colour = judged.finding, _STANDINGS[judged.standing]
    text = Text.assemble(
        (words.heading(finding), f"bold {colour}"),
        (f"\n{words.sites(finding)}", "dim"),
        f"\n{finding.detail}",
    )
    if finding.seen:
        text.append(f"\n{words.abridged(finding, 120)}", style="italic")
    dating = judged.dating
    since = Text(f"before {dating.fits_from}" if dating.fits_from else dating.since or "")
    return text, since, Text(words.repair(judged), style=colour)


def _matrix(report: Report, console: Console) -> None:
    pairs = {(pair.downstream, pair.surface.version): pair for pair in report.pairs}
    table = _table("vLLM", *report.downstreams)
    for release in report.releases:
        row = [Text(release)]
        for downstream in report.downstreams:
            pair = pairs.get((downstream, release))
            row.append(
                Text(f"{words.MARKS[pair.verdict]} {words.cell(pair)}", _COLOURS[pair.verdict])
                if pair
                else Text()
            )
        table.add_row(*row)
    console.print(table)
    for note in dict.fromkeys(note for pair in report.pairs for note in pair.notes):
        console.print(Text(note, style="yellow"))
    obstacles = words.obstacles(report)
    if obstacles:
        table = _table("downstream", "on vLLM", "what stands in the way")
        for downstream, reasons in obstacles:
            for index, (reason, releases) in enumerate(reasons):
                name = Text("" if index else downstream)
                table.add_row(name, Text(releases, "red"), Text(reason))
        console.print(table)
    table = _table("downstream", "", words.KNOWLEDGE_TITLE)
    for downstream, by_word in words.knowledges(report):
        for index, (word, releases) in enumerate(by_word.items()):
            table.add_row(Text("" if index else downstream), Text(word), Text(releases))
    console.print(table)
    uses = words.uses(report)
    if uses:
        table = _table("adapter", *report.downstreams)
        for adapter, where in uses:
            table.add_row(
                Text(adapter, style="bold"),
                *(Text(where.get(downstream, "")) for downstream in report.downstreams),
            )
        console.print(table)
