"""A report as GitHub workflow commands, which annotate the downstream's lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vllm_compat.commands.report import words
from vllm_compat.commands.report.model import Judged, Pair, Report, Standing, Verdict

_LEVELS = {
    Standing.UNMET: "error",
    Standing.POSSIBLE: "warning",
    Standing.GUARDED: "notice",
    Standing.REPAIRED: "notice",
}
_VERDICTS = {Verdict.INCOMPATIBLE: "error", Verdict.UNKNOWN: "warning"}


def render(report: Report) -> str:
    """Return one command for each pair's verdict, finding and hazard, the gravest first.

    GitHub shows only the first ten of each level in a step.
    """
    lines: list[tuple[str, str]] = []
    for pair in report.pairs:
        level = _VERDICTS.get(pair.verdict, "notice")
        said = f"{pair.verdict.value}. {pair.reason} Knowledge: {words.knowledge(pair)}"
        lines.append((level, _command(level, said, pair.title)))
    for pair in report.pairs:
        lines += [(_level(j), _annotation(pair, j)) for j in pair.findings]
        # No line of the downstream shows a hazard.
        lines += [
            ("warning", _command("warning", words.hazard(h), f"{pair.title}: {h.key}"))
            for h in pair.hazards
        ]
    order = ("error", "warning", "notice")
    return "".join(f"{text}\n" for _, text in sorted(lines, key=lambda item: order.index(item[0])))


def _level(judged: Judged) -> str:
    return "notice" if judged.finding.home else _LEVELS[judged.standing]


def _annotation(pair: Pair, judged: Judged) -> str:
    finding = judged.finding
    message = " ".join(_sentences(judged))
    title = f"{pair.title}: {finding.kind.value}"
    site = finding.sites[0] if finding.sites else None
    place = {"file": _place(pair, site.file), "line": str(site.line)} if site else {}
    return _command(_level(judged), message, title, **place)


def _sentences(judged: Judged) -> Iterator[str]:
    yield judged.finding.detail
    since = words.dated(judged)
    if since:
        yield f"Since {since}." if since[0].isdigit() else f"{since[0].upper()}{since[1:]}."
    yield f"Repair: {words.repair(judged)}."


def _place(pair: Pair, file: str) -> str:
    """Return the file's path as the repository has it, where the downstream lies in it."""
    path = Path(pair.contract.root).parent / file
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix() if path.is_file() else file
    except ValueError:
        return file


def _command(level: str, message: str, title: str, **place: str) -> str:
    properties = {**place, "title": title}
    given = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{level} {given}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
