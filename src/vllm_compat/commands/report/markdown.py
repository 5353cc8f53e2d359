"""A report as Markdown: for pull requests, job summaries and documentation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm_compat.commands.report import words
from vllm_compat.commands.report.model import Pair, Report


def render(report: Report) -> str:
    """Return one pair in full; of several, the matrix and what stands in the way."""
    lines = _pair(report.pairs[0]) if len(report.pairs) == 1 else _matrix(report)
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """Escape what a table cell or a tag would swallow."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{text.replace('|', chr(92) + '|')}{fence}" if text else ""


def _adapter(name: str) -> str:
    return _code(name) + words.labelled(name).removeprefix(name)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    titles = list(titles)
    yield _row(titles)
    yield _row("---" for _ in titles)
    yield from map(_row, rows)


def _pair(pair: Pair) -> Iterator[str]:
    yield f"## {words.MARKS[pair.verdict]} {_text(pair.title)}: {pair.verdict.value}"
    yield ""
    yield _text(pair.reason)
    yield ""
    yield from _table(
        ("", ""),
        (
            ("downstream", f"{_text(pair.downstream)}, {_code(pair.contract.root)}"),
            ("call sites", words.uses_of_vllm(pair) if pair.asks else str(len(pair.contract.sites))),
            (
                "vLLM",
                f"{_text(pair.surface.distribution)} {_text(pair.surface.version)},"
                f" {_code(pair.surface.origin)}",
            ),
            ("environment", _text(words.environment(pair))),
            ("knowledge", _text(words.knowledge(pair))),
            *(("note", _text(note)) for note in pair.notes),
        ),
    )
    if pair.hazards:
        yield ""
        yield f"### {words.hazards_title(pair)}"
        yield ""
        yield from _table(
            ("harm", "hazard", "by hand", "known of", "source"),
            (
                (
                    f"**{hazard.harm.value}**",
                    _text(hazard.sentence),
                    _text(hazard.remedy),
                    _code(hazard.ranges),
                    _text(hazard.source),
                )
                for hazard in pair.hazards
            ),
        )
    yield from _findings(pair)
    if pair.changed_defaults:
        yield ""
        yield f"### {words.defaults_title(pair.changed_defaults)}"
        yield ""
        yield from (f"- {_text(words.changed_default(j))}" for j in pair.changed_defaults)
    if pair.plan and pair.plan.steps:
        yield ""
        yield f"### {words.adapters_title(pair)}"
        yield ""
        yield from _table(
            ("adapter", "why", "in force in"),
            (
                (_adapter(step.adapter), _text(step.reason), ", ".join(step.processes))
                for step in pair.plan.steps
            ),
        )
    for tool, lines in words.install_lines(pair).items():
        yield ""
        yield f"### Install this pair with {tool}"
        yield ""
        yield from (f"    {line}" for line in lines)


def _findings(pair: Pair) -> Iterator[str]:
    """Yield a pair's findings as a table; changed defaults have a list of their own."""
    findings = [judged for judged in pair.findings if not judged.finding.home]
    if findings:
        yield ""
        yield "### Findings"
        yield ""
        yield from _table(
            ("call site", "finding", "signature seen", "since", "repair", "what changed"),
            (
                (
                    _code(words.sites(judged.finding)),
                    f"**{judged.finding.kind.value}**: {_text(judged.finding.detail)}",
                    _code(words.abridged(judged.finding, 200)),
                    _text(words.dated(judged)),
                    ", ".join(map(_adapter, judged.adapters)) or _text(words.repair(judged)),
                    _text(" ".join(words.changes(judged))),
                )
                for judged in findings
            ),
        )


def _matrix(report: Report) -> Iterator[str]:
    cells = {(pair.downstream, pair.surface.version): pair for pair in report.pairs}
    yield from _table(
        ("vLLM", *map(_text, report.downstreams)),
        (
            (
                _text(release),
                *(
                    f"{words.MARKS[pair.verdict]} {words.cell(pair)}"
                    if (pair := cells.get((downstream, release)))
                    else ""
                    for downstream in report.downstreams
                ),
            )
            for release in report.releases
        ),
    )
    for note in dict.fromkeys(note for pair in report.pairs for note in pair.notes):
        yield ""
        yield _text(note)
    obstacles = words.obstacles(report)
    if obstacles:
        yield ""
        yield "### What stands in the way"
        for downstream, reasons in obstacles:
            yield ""
            yield f"**{_text(downstream)}**"
            yield ""
            yield from (f"- {_text(releases)}: {_text(reason)}" for reason, releases in reasons)
    yield ""
    yield f"### {words.KNOWLEDGE_TITLE}"
    yield ""
    yield from _table(
        ("downstream", "", "vLLM"),
        (
            (_text(downstream), word, _text(releases))
            for downstream, by_word in words.knowledges(report)
            for word, releases in by_word.items()
        ),
    )
    uses = words.uses(report)
    if uses:
        yield ""
        yield "### Adapters, and where they are in force"
        yield ""
        yield from _table(
            ("adapter", *map(_text, report.downstreams)),
            (
                (
                    _code(adapter),
                    *(_text(where.get(downstream, "")) for downstream in report.downstreams),
                )
                for adapter, where in uses
            ),
        )
