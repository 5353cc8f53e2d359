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
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab import environments, matrix
from lab.matrix_report import Fault, Outcome, cause, causes, fault_of, summary_table
from vllm_compat.errors import UsageError, VllmCompatError

if TYPE_CHECKING:
    from vllm_compat.commands.report.changes import Difference
    from vllm_compat.commands.report.model import Report

TITLE = "vLLM nightly: something does not fit any more"
LABEL = "nightly"
NOTHING_RAN = "run"
"""The trouble of a night on which no cell ran right."""


@dataclass(frozen=True)
class Night:
    """What one night has found.

    ``troubles`` maps a stable key to a sentence; ``new`` are the keys that the last night had not.
    ``ran`` names the cells that have run right, on this night or one before.
    """

    version: str
    report: Report
    difference: str
    since: str
    records: tuple[dict[str, Any], ...] = ()
    troubles: dict[str, str] = field(default_factory=dict)
    new: tuple[str, ...] = ()
    ran: tuple[str, ...] = ()


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

    The run's records are kept in ``out``, if it is given.

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
    troubles |= gone_troubles(changes, report)
    records: list[dict[str, Any]] = []
    ran: list[str] = list(old.get("ran", ()))
    if run:
        with tempfile.TemporaryDirectory(prefix="vllm-compat-nightly-") as folder:
            options = matrix.Options(
                (version,), out or Path(folder), root=root, speculators=tuple(speculators),
                again=True, source=source, base=base, limit=limit,
            )  # fmt: skip
            broke = ""
            try:
                with matrix.cores(2):
                    records = matrix.Matrix(options, tell).run()
            except UsageError:
                raise
            except VllmCompatError as error:  # what the check has found is told all the same
                broke = f"the run broke off: {error}"
        last_version = str(old.get("version", before))
        troubles |= run_troubles(records, speculators, ran, last_version, broke)
        troubles |= old_records(records, matrix.digest_of(source))
        ran += [name for name in map(_name, records) if name not in ran and name in _right(records)]
    new = tuple(key for key in troubles if key not in old.get("troubles", {}))
    return Night(
        version,
        report,
        render_difference(changes, "markdown"),
        str(old.get("version", before)),
        tuple(records),
        troubles,
        new,
        tuple(ran),
    )


def gone_troubles(changes: Difference, report: Report) -> dict[str, str]:
    """Return the symbols in use that went away, whether an adapter repairs that or not."""
    from vllm_compat.commands.report.changes import ChangeKind
    from vllm_compat.commands.report.words import sites_of

    repairs: dict[str, list[str]] = {}
    for pair in report.pairs:
        for judged in pair.findings:
            finding = judged.finding
            for symbol in (finding.symbol, f"{finding.symbol}.{finding.name}"):
                repairs.setdefault(symbol, []).extend(judged.adapters)
    troubles = {}
    for change in changes.of(ChangeKind.REMOVED):
        known = ", ".join(dict.fromkeys(repairs.get(change.symbol, ())))
        means = f"repaired by {known}" if known else "nothing repairs it"
        troubles[f"gone: {change.symbol}"] = (
            f"vLLM {changes.after.version} has it no more; {means}; used in {sites_of(change.sites)}"
        )
    return troubles


def old_records(records: Sequence[dict[str, Any]], digest: str | None) -> dict[str, str]:
    """Return the records that are of other sources than this night's: older, and no news of it."""
    return {
        f"{_name(record)} is old": (
            "its record is of other sources than this night's, so it shows nothing of them, and should"
            f" have been run again ({Fault.OURS})"
        )
        for record in records
        if record.get("overlay_digest") != digest
    }


def run_troubles(
    records: Sequence[dict[str, Any]],
    speculators: Sequence[str],
    ran: Sequence[str],
    since: str,
    broke: str = "",
) -> dict[str, str]:
    """Return what is wrong with a night's run, each under a stable key.

    What vLLM alone cannot run over old kernels is no fault of a downstream's: it is noted, and is a
    trouble only where it has run right before (``ran``, until the night of version ``since``), or where
    nothing ran right at all, which shows nothing. ``broke`` says why a run came to no end.
    """
    before = f"it has run right before ({since} or older); now"
    troubles: dict[str, str] = {}
    right = _right(records)
    if not right:
        why = f"{causes(records)} ({faults_in(records)})"
        if broke:
            why = f"{broke} ({Fault.ENVIRONMENT})"
        elif not records:
            why = f"the run left no record of any ({Fault.OURS})"
        troubles[NOTHING_RAN] = f"none of {len(records)} cells has run right, so nothing is shown: {why}"
    for record in records:
        if record["outcome"] in (Outcome.FAILED, Outcome.REFUSED):
            said = f"{record['outcome']}: {record.get('error')} ({fault_of(record)})"
            troubles[_trouble(record)] = said
        elif record["outcome"] != Outcome.RIGHT and _name(record) in ran:
            troubles[_trouble(record)] = f"{before} {cause(record)} ({fault_of(record)})"
    shown = {name.partition(":")[0] for name in right}
    there = set(map(_name, records))
    for name in ran:
        downstream = name.partition(":")[0]
        asked = downstream.removeprefix("speculators ") in speculators
        if asked and name not in there and downstream not in shown:
            troubles[f"{name} is missing"] = f"{before} it did not run"
    return troubles


def _right(records: Sequence[dict[str, Any]]) -> set[str]:
    return {_name(record) for record in records if record["outcome"] == Outcome.RIGHT}


def _name(record: dict[str, Any]) -> str:
    """Return a cell's name from night to night, without vLLM's version."""
    return f"{_trouble(record)} × {record['ranks']}"


def _trouble(record: dict[str, Any]) -> str:
    return f"speculators {record['versions']['speculators']}: run: {record['model']}"


def keep(night: Night, source: Path, state: Path) -> None:
    """Make this night the last one: its Python sources, troubles and right cells go into the state."""
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
    kept = {"version": night.version, "troubles": night.troubles, "ran": list(night.ran)}
    text = json.dumps(kept, indent=1)
    (state / "state.json").write_text(text + "\n", encoding="utf-8")


def summary(night: Night) -> str:
    """Return a night as Markdown: verdicts, run, what is new, what changed since last time."""
    from vllm_compat.commands.report import render

    lines = [f"# vLLM {night.version}", ""]
    lines += [f"- {pair.downstream}: {pair.verdict.value}" for pair in night.report.pairs]
    if night.records:
        lines += ["", "## Run: its sources over the kernels of the newest CPU build", ""]
        lines += summary_table(night.records)
    aside = [r for r in night.records if r["outcome"] == Outcome.VLLM]
    if aside:
        lines += ["", "Not the downstreams' doing:", ""]
        lines += [f"- {_name(record)}: {cause(record)} ({fault_of(record)})" for record in aside]
    if faults := faults_in(night.records):
        lines += ["", f"Cells that are not right, by whose fault it is: {faults}."]
    lines += ["", "## What does not fit", ""]
    lines += [
        f"- {'**new** ' if key in night.new else ''}{key}: {text}"
        for key, text in night.troubles.items()
    ] or ["Nothing." if night.records else "Nothing. Its source was judged; it was not run."]
    lines += ["", f"## Symbols in use, since {night.since}", "", night.difference]
    lines += ["", "<details><summary>The whole check</summary>", ""]
    lines += [render(night.report, "markdown"), "", "</details>", ""]
    return "\n".join(lines)


def faults_in(records: Sequence[dict[str, Any]]) -> str:
    """Count the cells that are not right by whose fault it is: ``2 vLLM's, 1 ours``."""
    found = [fault_of(record) for record in records if record["outcome"] != Outcome.RIGHT]
    return ", ".join(f"{found.count(fault)} {fault}" for fault in dict.fromkeys(found))


def issue(night: Night) -> str:
    """Return the text of the issue that a night with new troubles opens or updates."""
    what = "could not be run" if night.new == (NOTHING_RAN,) else "does not fit"
    lines = [f"vLLM {night.version} {what}; new since {night.since}:", ""]
    lines += [f"- {key}: {night.troubles[key]}" for key in night.new]
    if faults := faults_in(night.records):
        lines += ["", f"Cells that are not right, by whose fault it is: {faults}."]
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
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="keep the run's records there (default: in the state folder; with --dry-run, nowhere)",
    )
    parser.add_argument("--summary", metavar="FILE", help="append the summary there, not to stdout")
    parser.add_argument(
        "--issue", metavar="FILE", help="write an issue's text there where something new is wrong"
    )
    parser.add_argument("--dry-run", action="store_true", help="leave the state folder as it is")
    parser.add_argument("--limit", type=float, default=matrix.LIMIT, metavar="SECONDS")


def run_nightly(options: argparse.Namespace) -> int:
    """Run ``python3 -m lab nightly``; return 0 if nothing is wrong, 1 if something is.

    A run in which no cell was right is wrong too.
    """
    source, state = Path(options.source), Path(options.state)
    out = Path(options.out) if options.out else None
    if out is None and not options.dry_run:
        out = state / "records"
    night = look(
        source,
        state,
        speculators=options.speculators,
        run=not options.no_run,
        out=out,
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
