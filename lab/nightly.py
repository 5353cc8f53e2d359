"""The nightly job: judge a vLLM that is not released yet, run it, and say what is new.

``python3 -m lab nightly SOURCE --state FOLDER`` takes a wheel, an sdist or a source folder, and

1. checks every downstream on it, importing nothing;
2. compares the symbols that the downstreams use with the last nightly's, kept in the state folder
   (at first with the newest recorded release);
3. lays it over the newest CPU build and runs stock speculators on it (`lab.matrix`);
4. writes a summary, and, where something fails that did not fail last time, an issue's text.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab import environments, matrix
from lab.matrix_report import Outcome, summary_table

if TYPE_CHECKING:
    from vllm_compat.commands.report.model import Report

TITLE = "vLLM nightly: something does not fit any more"
LABEL = "nightly"


@dataclass(frozen=True)
class Night:
    """What one night has found.

    ``troubles`` maps a stable key to a sentence; ``new`` are the keys that the last night had not.
    """

    version: str
    report: Report
    difference: str
    since: str
    records: tuple[dict[str, Any], ...] = ()
    troubles: dict[str, str] = field(default_factory=dict)
    new: tuple[str, ...] = ()


def look(
    source: Path,
    state: Path,
    *,
    speculators: Sequence[str] = matrix.SPECULATORS,
    run: bool = True,
    out: Path | None = None,
    root: Path | None = None,
    base: str | None = None,
    limit: float = matrix.LIMIT,
) -> Night:
    """Judge a source, run it, compare with the state folder; the state is not changed.

    Raises:
        UsageError: The source holds no vLLM, or the environment cannot be made.
    """
    from vllm_compat.commands.check import check, diff
    from vllm_compat.commands.report.difference import render_difference
    from vllm_compat.commands.report.model import Standing

    def tell(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    folders = [environments.speculators_folder(s, root, progress=tell) for s in speculators]
    report = check(folders, [source], device="cpu")
    tell(f"Check, from source alone: {report.verdict.value}.")
    version = report.pairs[0].surface.version
    troubles: dict[str, str] = {}
    for pair in report.pairs:
        for judged in pair.standing(Standing.UNMET, Standing.POSSIBLE):
            finding = judged.finding
            key = f"{pair.downstream}: {finding.kind.value}: {finding.symbol}"
            troubles[key] = f"{judged.standing.value}: {finding.detail}"
    last = state / "sources.zip"
    before = last if last.exists() else matrix.known_releases()[-1]
    old = json.loads((state / "state.json").read_text("utf-8")) if last.exists() else {}
    changes = diff(before, source, folders)
    records: list[dict[str, Any]] = []
    if run:
        options = matrix.Options(
            (version,), out or state / "records", root=root, speculators=tuple(speculators),
            again=True, source=source, base=base, limit=limit,
        )  # fmt: skip
        with matrix.cores(2):
            records = matrix.Matrix(options, tell).run()
        for record in records:
            # An overlay over old kernels: what vLLM alone cannot run is noted, and no finding.
            if record["outcome"] in (Outcome.FAILED, Outcome.REFUSED):
                key = f"speculators {record['versions']['speculators']}: run: {record['model']}"
                troubles[key] = f"{record['outcome']}: {record.get('error')}"
    new = tuple(key for key in troubles if key not in old.get("troubles", {}))
    return Night(
        version,
        report,
        render_difference(changes, "markdown"),
        str(old.get("version", before)),
        tuple(records),
        troubles,
        new,
    )


def keep(night: Night, source: Path, state: Path) -> None:
    """Make this night the last one: its Python sources and its troubles go into the state folder."""
    from vllm_compat.analysis.surface.files import package_at

    state.mkdir(parents=True, exist_ok=True)
    package = package_at(source, "vllm")
    inside = package.folder
    temporary = state / "sources.tmp"
    public = night.version.partition("+")[0]
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in package.tree.files(inside):
            if path.endswith(".py"):
                name = path[len(inside) :].lstrip("/") if inside else path
                archive.writestr(f"vllm/{name}", package.tree.read(path) or b"")
        archive.writestr(
            f"vllm-{public}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {night.version}\n",
        )
    temporary.replace(state / "sources.zip")
    text = json.dumps({"version": night.version, "troubles": night.troubles}, indent=1)
    (state / "state.json").write_text(text + "\n", encoding="utf-8")


def summary(night: Night) -> str:
    """Return a night as Markdown: verdicts, run, what is new, what changed since last time."""
    from vllm_compat.commands.report import render

    lines = [f"# vLLM {night.version}", ""]
    lines += [f"- {pair.downstream}: {pair.verdict.value}" for pair in night.report.pairs]
    if night.records:
        lines += ["", "## Run: its sources over the kernels of the newest CPU build", ""]
        lines += summary_table(night.records)
    lines += ["", "## What does not fit", ""]
    lines += [
        f"- {'**new** ' if key in night.new else ''}{key}: {text}"
        for key, text in night.troubles.items()
    ] or ["Nothing."]
    lines += ["", f"## Symbols in use, since {night.since}", "", night.difference]
    lines += ["", "<details><summary>The whole check</summary>", ""]
    lines += [render(night.report, "markdown"), "", "</details>", ""]
    return "\n".join(lines)


def issue(night: Night) -> str:
    """Return the text of the issue that a night with new troubles opens or updates."""
    lines = [f"vLLM {night.version} does not fit; new since {night.since}:", ""]
    lines += [f"- {key}: {night.troubles[key]}" for key in night.new]
    rest = [key for key in night.troubles if key not in night.new]
    if rest:
        lines += ["", "Known before:", "", *[f"- {key}: {night.troubles[key]}" for key in rest]]
    for record in night.records:
        if record.get("log"):
            lines += ["", f"`{record['cell']}`:", "", "```", *record["log"], "```"]
    lines += ["", f"Symbols in use, since {night.since}:", "", night.difference, ""]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python3 -m lab nightly``."""
    parser.add_argument("source", help="a wheel, an sdist or a folder that holds vLLM")
    parser.add_argument("--state", required=True, metavar="FOLDER", help="what the last night left")
    parser.add_argument("--speculators", nargs="+", default=list(matrix.SPECULATORS), metavar="V")
    parser.add_argument("--no-run", action="store_true", help="only check, without vLLM")
    parser.add_argument("--base", metavar="RELEASE", help="the CPU build whose kernels are used")
    parser.add_argument("--root", metavar="FOLDER", help="where environments lie")
    parser.add_argument("--summary", metavar="FILE", help="append the summary there, not to stdout")
    parser.add_argument(
        "--issue", metavar="FILE", help="write an issue's text there where something new is wrong"
    )
    parser.add_argument("--dry-run", action="store_true", help="leave the state folder as it is")
    parser.add_argument("--limit", type=float, default=matrix.LIMIT, metavar="SECONDS")


def run_nightly(options: argparse.Namespace) -> int:
    """Run ``python3 -m lab nightly``; return 0 if nothing is wrong, 1 if something is."""
    source, state = Path(options.source), Path(options.state)
    night = look(
        source,
        state,
        speculators=options.speculators,
        run=not options.no_run,
        root=Path(options.root) if options.root else None,
        base=options.base,
        limit=options.limit,
    )
    if options.summary:
        with Path(options.summary).open("a", encoding="utf-8") as stream:
            stream.write(summary(night))
    else:
        print(summary(night), end="")
    if options.issue and night.new:
        Path(options.issue).write_text(issue(night), encoding="utf-8")
    if not options.dry_run:
        keep(night, source, state)
    return 1 if night.troubles else 0
