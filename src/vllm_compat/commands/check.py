"""Know before anything loads: whether a downstream runs on a vLLM, and what would make it run.

:func:`check` reads source only: it imports neither vLLM, torch nor the downstream, and needs no
GPU. The plan that it judges by is the one that :func:`vllm_compat.apply` makes, by the same code.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_compat.analysis.cache import Memory
    from vllm_compat.analysis.codec import Planned
    from vllm_compat.analysis.contract import CallSite, Contract
    from vllm_compat.analysis.drift import Finding
    from vllm_compat.analysis.environment import Environment
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.analysis.surface.files import PackageFiles
    from vllm_compat.analysis.surface.model import Surface
    from vllm_compat.analysis.surface.recorded import RecordedSurface
    from vllm_compat.commands.report.changes import Difference
    from vllm_compat.commands.report.model import Dating, Pair, Report, Standing

FORMATS = ("text", "json", "markdown", "junit", "github")
DIFF_FORMATS = ("text", "json", "markdown")
DEVICES = ("cpu", "cuda", "rocm")
DEFAULT = "speculators"

# The command line.


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``vllm-compat check``."""
    parser.description = (
        "Say whether a downstream runs on a vLLM, as it is or with vllm_compat, before anything is"
        " loaded. Only source is read. Exit status: 0 usable, 1 incompatible, 2 usage error, 3"
        " unknown; of several pairs, that of the one worst off. speculators 0.5 and later take hidden"
        " states from a vLLM server, which is not served yet: unknown, with the hazards that are known."
    )
    parser.add_argument(
        "--downstream",
        action="append",
        default=[],
        metavar="NAME|PATH|WHEEL",
        help="the library that uses vLLM: the name of an installed distribution (no version), a folder,"
        " a wheel or an sdist (default: the installed speculators); may be given more than once",
    )
    parser.add_argument(
        "--vllm",
        action="append",
        default=[],
        metavar="VERSION|PATH|FILE",
        help="a recorded release, a source tree, a wheel or an sdist (default: the installed vLLM);"
        " may be given more than once",
    )
    parser.add_argument(
        "--all", action="store_true", help="check all recorded releases of vLLM (a matrix)"
    )
    parser.add_argument(
        "--python",
        metavar="INTERPRETER",
        help="look in the environment of this interpreter for what is installed",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        help="where vLLM computes (default: as the environment shows, else unknown)",
    )
    parser.add_argument("--format", default="text", choices=FORMATS)
    parser.add_argument("--output", metavar="FILE", help="write the report there, not to stdout")
    parser.add_argument("--strict", action="store_true", help="exit with 1, not 3, where unknown")
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="read everything anew, and keep nothing in the cache folder",
    )


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``vllm-compat diff``."""
    parser.description = (
        "Show what changed from one vLLM to another, parameter by parameter, for the symbols that a"
        " downstream uses."
    )
    what = "a recorded release, a source tree, a wheel, an sdist, or the word installed"
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument("b", metavar="B", help="likewise")
    parser.add_argument(
        "--downstream",
        action="append",
        default=[],
        metavar="NAME|PATH|WHEEL",
        help="whose symbols to look at (default: the installed speculators)",
    )
    parser.add_argument(
        "--all-symbols",
        action="store_true",
        help="look at everything that vllm.v1 and vllm.config define, whoever uses it",
    )
    parser.add_argument(
        "--python",
        metavar="INTERPRETER",
        help="look in the environment of this interpreter for what is installed",
    )
    parser.add_argument("--format", default="text", choices=DIFF_FORMATS)
    parser.add_argument("--output", metavar="FILE", help="write it there, not to stdout")


def run_check(options: argparse.Namespace) -> int:
    """Run ``vllm-compat check``; return its exit status.

    Raises :class:`~vllm_compat.errors.UsageError` where something can't be read.
    """
    import gc

    from vllm_compat.analysis.surface.syntax import uncollected
    from vllm_compat.commands.report import render, show

    with uncollected():
        report = check(
            options.downstream,
            options.vllm,
            all_releases=options.all,
            python=options.python,
            device=options.device,
            strict=options.strict,
            cache=not options.no_cache,
        )
        gc.freeze()  # all that was read stays in use to the end: don't walk it then
    if options.output:
        _write(options.output, render(report, options.format))
    elif options.format == "text":
        show(report)
    else:
        sys.stdout.write(render(report, options.format))
    return report.exit_status


def run_diff(options: argparse.Namespace) -> int:
    """Run ``vllm-compat diff``; return 0.

    Raises :class:`~vllm_compat.errors.UsageError` where something can't be read.
    """
    from vllm_compat.commands.report.changes import render_difference

    found = diff(
        options.a,
        options.b,
        options.downstream,
        all_symbols=options.all_symbols,
        python=options.python,
    )
    text = render_difference(found, options.format)
    if options.output:
        _write(options.output, text)
    else:
        sys.stdout.write(text)
    return 0


def _write(path: str, text: str) -> None:
    from vllm_compat.errors import UsageError

    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror}.") from error


# Checking.


def check(
    downstreams: str | Path | Sequence[str | Path] = (),
    vllms: str | Path | Sequence[str | Path] = (),
    *,
    all_releases: bool = False,
    python: str | None = None,
    device: str | None = None,
    strict: bool = False,
    cache: bool | str | Path = False,
) -> Report:
    """Say whether each downstream runs on each vLLM, before anything is loaded.

    Only source is read: nothing of vLLM, torch or the downstream is imported, and no GPU is needed.
    One pair takes about a second.

    Args:
        downstreams: Distribution names, folders, wheels or sdists, one or several; by default the
            installed ``speculators``.
        vllms: Versions of recorded releases (``"0.33.0"``), source trees, wheels or sdists, one or
            several; by default the installed vLLM, or none more where ``all_releases`` is given.
        all_releases: Also judge every recorded release.
        python: Another interpreter, in whose environment installed packages are looked for.
        device: Where vLLM computes, ``"cpu"``, ``"cuda"`` or ``"rocm"``; by default what the
            environment shows.
        strict: Let an unknown verdict count as incompatible in ``exit_status``.
        cache: A folder to keep what was read in, and to take it from; True for the user's cache
            folder, where ``vllm-compat check`` keeps it.

    Returns:
        The pairs in ``pairs``, each with ``verdict`` (``"usable"``, ``"usable with the shim"``,
        ``"unknown"`` or ``"incompatible"``), the sentence ``reason``, ``findings``, ``hazards`` and
        ``plan``; ``verdict`` of the pair that is worst off; ``exit_status``, 0 usable, 1
        incompatible, 3 unknown.

    Raises:
        UsageError: Something can't be read, or ``device`` is none; one sentence says what.

    Example:
        >>> report = vllm_compat.check("speculators", "0.33.0")
        >>> for pair in report.pairs:
        ...     print(pair.title, pair.verdict.value, pair.reason)
    """
    from vllm_compat.analysis.cache import Memory, cache_folder
    from vllm_compat.analysis.surface.syntax import uncollected
    from vllm_compat.errors import UsageError

    if device not in (None, *DEVICES):
        raise UsageError(f"device is {device!r}; it must be one of {', '.join(DEVICES)}.")
    folder = cache_folder() if cache is True else Path(cache) if cache else None
    memory = Memory(folder)
    with uncollected():
        return _check(
            _several(downstreams), _several(vllms), all_releases, python, device, strict, memory
        )


def _several(given: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    """Return what was given as a sequence: a string is one name, not its characters."""
    return (given,) if isinstance(given, (str, Path)) else given


def _check(
    downstreams: Sequence[str | Path],
    vllms: Sequence[str | Path],
    all_releases: bool,
    python: str | None,
    device: str | None,
    strict: bool,
    memory: Memory,
) -> Report:
    from vllm_compat.analysis.downstream import find_downstream
    from vllm_compat.analysis.surface import open_surface
    from vllm_compat.commands.report.model import Report

    releases = _Releases()
    whats: list[str | Path | None] = list(vllms)
    if all_releases:
        whats = [*releases.versions, *whats]
    elif not whats:
        whats = [None]
    sources = [_Source(find_downstream(what, python=python), memory) for what in downstreams or (None,)]
    surfaces = [
        releases.get(str(what)) if what in releases.versions else open_surface(what, python=python)
        for what in whats
    ]
    pairs = []
    for source in sources:
        contract = source.contract
        history = _History(contract, releases, whole=len(surfaces) > 3, memory=memory)
        for what, surface in zip(whats, surfaces, strict=True):
            installed = what is None or what == "installed"
            environment = _environment(source, surface, installed, python, device)
            planned = source.planned(surface, environment, keep=not history.whole)
            described = source.files.described
            pairs.append(judge(contract, surface, environment, installed, history, planned, described))
    return Report(tuple(pairs), strict)


def judge(
    contract: Contract,
    surface: Surface,
    environment: Environment,
    environment_known: bool,
    history: _History | None = None,
    planned: Planned | None = None,
    described: bool = True,
) -> Pair:
    """Judge one pair.

    A downstream with an in-process generator is judged by the plan that ``apply()`` would put in
    force; any other by its findings alone, since no adapter is made for it. One that takes hidden
    states from a server is never usable, since that flow is not served, and gets the hazards that are
    known of the pair. ``history`` dates the findings; without it they stay undated. ``planned`` are
    findings and plan where they are known; ``described`` says whether metadata gives the downstream's
    version.
    """
    from vllm_compat.analysis.installed import refuse_unserved
    from vllm_compat.analysis.server_flow import IN_PROCESS, UNSERVED, hazards_of, in_server_flow
    from vllm_compat.commands.report.model import Dating, Judged, Pair, Standing, Verdict
    from vllm_compat.errors import IncompatibleError

    findings, plan = planned or _plan(contract, surface, environment)
    refused = ""
    try:
        refuse_unserved(contract, surface)
    except IncompatibleError as error:
        refused = str(error)
    repairs: dict[Finding, tuple[str, ...]] = {}
    for step in plan.steps if plan else ():
        for finding in step.findings:
            repairs[finding] = (*repairs.get(finding, ()), step.adapter)
    dates = history.dates(findings, surface) if history else [Dating() for _ in findings]
    judged = tuple(
        Judged(
            finding,
            _standing(finding, plan, finding in repairs, date),
            repairs.get(finding, ()),
            date,
        )
        for finding, date in zip(findings, dates, strict=True)
    )
    if history:
        changed = history.changed_defaults(findings, dates, surface)
        judged += tuple(Judged(f, Standing.POSSIBLE, (), date) for f, date in changed)

    server_flow = in_server_flow(contract)
    known = contract.version if described else ""
    hazards = hazards_of(known, surface.version) if server_flow else ()
    notes: list[str] = []
    if server_flow:
        notes += _server_flow_notes(contract, surface, described)
        notes.append(IN_PROCESS)
    elif not plan:
        notes.append(
            refused
            if contract.package == DEFAULT
            else f"{contract.name} {contract.version} is not speculators: vllm_compat finds its"
            " drifts, and has no adapters for them."
        )
    elif not environment_known:
        notes.append(
            "The environment is not known: adapters that depend on it (transformers, the device)"
            " are not listed."
            if environment.device == "unknown"
            else "The environment is not known, but for the device as given: adapters that depend"
            " on the rest (transformers) are not listed."
        )
    elif environment.device == "unknown":
        notes.append(
            "No device was found: adapters that depend on it are not listed; --device names one."
        )
    if surface.version == "unknown" and not server_flow:
        notes.append("This vLLM does not say its version; it is judged by its source alone.")

    unmet = sum(j.standing is Standing.UNMET for j in judged)
    possible = sum(j.standing is Standing.POSSIBLE and not j.finding.home for j in judged)
    if server_flow and not unmet:
        verdict = Verdict.UNKNOWN
        reason = f"{UNSERVED}. Known of this pair: {_count(len(hazards), 'hazard')}."
    elif not contract.sites:
        verdict = Verdict.UNKNOWN
        reason = f"{contract.name} does not use vLLM, as far as its source can be followed."
    elif unmet or (plan and refused):
        verdict = Verdict.INCOMPATIBLE
        if plan is None:
            reason = f"{_count(unmet, 'finding')} at call sites that are sure to fail."
        else:
            reason = refused or f"{_count(unmet, 'finding')} that no adapter repairs."
    elif plan and plan.steps:
        verdict = Verdict.WITH_SHIM
        reason = f"{_count(len(plan.steps), 'adapter')} will be in force."
    elif possible:
        verdict = Verdict.UNKNOWN
        reason = f"{_count(possible, 'finding')} at call sites of which source alone can't tell."
    else:
        verdict = Verdict.USABLE
        reason = f"All {len(contract.sites)} call sites fit."
    return Pair(
        contract,
        surface,
        environment,
        environment_known,
        verdict,
        reason,
        plan,
        judged,
        tuple(notes),
        hazards,
    )


def _server_flow_notes(contract: Contract, surface: Surface, described: bool) -> Iterator[str]:
    """Say what the hazards of a pair rest on."""
    from packaging.version import Version

    from vllm_compat.analysis.server_flow import FIRST, release_of

    yield (
        f"{contract.name} {contract.version} takes hidden states from a vLLM server (`vllm serve` with"
        " the extract_hidden_states method); flags are as its own launcher, scripts/launch_vllm.py,"
        " gives them."
    )
    version = release_of(contract.version) if described else None
    if version is None or version < Version(FIRST):
        yield (
            "No metadata says which release of the downstream this is, and what its source says can be"
            " wrong: hazards of all its releases are listed. An installed distribution or a wheel says"
            " it."
        )
    elif version >= Version("0.8"):
        yield (
            "The launcher is in no wheel; for 0.8 and later the one in speculators' repository of August"
            " 2026 is assumed."
        )
    if release_of(surface.version) is None:
        yield "This vLLM does not say its release: hazards of all releases are listed."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _standing(finding: Finding, plan: Plan | None, repaired: bool, date: Dating) -> Standing:
    from vllm_compat.analysis.drift import FindingKind
    from vllm_compat.commands.report.model import Standing

    if repaired:
        return Standing.REPAIRED
    if plan is not None:
        if finding in plan.unmet:
            return Standing.UNMET
        return Standing.GUARDED if finding.symbol in plan.guarded else Standing.POSSIBLE
    if not finding.fatal or finding.kind is FindingKind.BEHAVIOUR:
        return Standing.POSSIBLE
    imported = (FindingKind.MODULE_MISSING, FindingKind.NAME_MOVED, FindingKind.NAME_MISSING)
    # What fits no release is rarely drift: the downstream sets the attribute itself, or puts a
    # class of its own in the place of vLLM's. An import has no such excuse.
    excused = date.fits_nowhere and finding.kind not in imported
    return Standing.POSSIBLE if excused else Standing.UNMET


def _plan(contract: Contract, surface: Surface, environment: Environment) -> Planned:
    """Return the findings, and the plan that ``apply()`` makes where the downstream has one."""
    from vllm_compat.adapters import make_plan
    from vllm_compat.analysis.drift import find_drifts
    from vllm_compat.analysis.planner import roles_of

    if not roles_of(contract).generator:
        return find_drifts(contract, surface), None
    plan = make_plan(contract, surface, environment)
    return plan.findings, plan


# Downstreams.


class _Source:
    """One downstream's source, and what is read from it or remembered of it."""

    def __init__(self, files: PackageFiles, memory: Memory) -> None:
        from vllm_compat.analysis.cache import stamp
        from vllm_compat.analysis.codec import pack_contract, unpack_contract
        from vllm_compat.analysis.downstream import contract_of

        self.files = files
        self.memory = memory
        self.key = [
            files.distribution,
            files.version,
            files.package,
            files.folder,
            files.origin,
            *map(stamp, files.tree.sources(files.folder)),
        ]
        self.contract: Contract = memory.recall(
            "contract",
            self.key,
            lambda: contract_of(files),
            pack=pack_contract,
            unpack=unpack_contract,
        )

    def planned(self, surface: Surface, environment: Environment, *, keep: bool) -> Planned:
        """Find what does not fit, and plan; ``keep``: or remember both."""
        from vllm_compat.analysis.cache import Memory
        from vllm_compat.analysis.codec import pack_planned, unpack_planned

        memory = self.memory if keep else Memory(None)
        return memory.recall(
            "plan",
            (*self.key, *surface.stamps(), environment) if memory.on else (),
            lambda: _plan(self.contract, surface, environment),
            pack=pack_planned,
            unpack=unpack_planned,
        )

    def features(self, transformers: Path) -> tuple[str, ...]:
        """Read what transformers, a package's folder, and the downstream are to each other."""
        from vllm_compat.analysis import environment as e
        from vllm_compat.analysis.cache import stamp
        from vllm_compat.errors import UsageError

        try:
            own: tuple[str, ...] = self.memory.recall(
                "own", self.key, self._own, pack=list, unpack=tuple
            )
            wanted: dict[str, list[str]] = self.memory.recall(
                "names", self.key, self._names, pack=dict, unpack=dict
            )
            typing = self.memory.recall(
                "typing",
                [stamp(transformers / "configuration_utils.py")],
                lambda: e.torch_for_typing(transformers),
                pack=bool,
                unpack=bool,
            )
        except (OSError, SyntaxError, ValueError) as error:
            raise UsageError(
                f"The source of {self.contract.name}, or of the transformers beside it, cannot be"
                f" read: {error}."
            ) from error
        return own + e.features_of(wanted, typing, transformers)

    def _own(self) -> tuple[str, ...]:
        from vllm_compat.analysis.environment import own_features

        with self._folder() as folder:
            return own_features(folder)

    def _names(self) -> dict[str, list[str]]:
        from vllm_compat.analysis.environment import names_from_transformers

        with self._folder() as folder:
            return names_from_transformers(folder)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Give the source as a folder, unpacked for the moment where it is one file."""
        root = Path(self.contract.root)
        if root.is_dir():
            yield root
            return
        import tempfile

        with tempfile.TemporaryDirectory(prefix="vllm-compat-check-") as name:
            modules = tuple(self.files.modules())
            for module in modules:
                parts = module.split(".")
                package = len(parts) == 1 or any(m.startswith(f"{module}.") for m in modules)
                place = Path(name, *parts)
                place = place / "__init__.py" if package else place.with_suffix(".py")
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(self.files.source(module) or b"")
            yield Path(name, self.contract.package)


# Recorded releases.


class _Releases:
    """The recorded releases, each opened once."""

    def __init__(self) -> None:
        from vllm_compat.analysis.surface.recorded import recorded_versions

        self.versions = recorded_versions()
        self._surfaces: dict[str, Surface] = {}

    def get(self, version: str) -> Surface:
        """Return the surface of a recorded release."""
        from vllm_compat.analysis.surface.recorded import RecordedSurface

        if version not in self._surfaces:
            self._surfaces[version] = RecordedSurface(version)
        return self._surfaces[version]

    @staticmethod
    def fresh(version: str) -> RecordedSurface:
        """Return the surface of a recorded release that has not been asked anything yet."""
        from vllm_compat.analysis.surface.recorded import RecordedSurface

        return RecordedSurface(version)

    def around(self, version: str) -> tuple[list[str], list[str]]:
        """Return the recorded versions before and after a version, the version itself left out.

        A version that can't be compared counts as newer than all.
        """
        from packaging.version import InvalidVersion, Version

        try:
            wanted = Version(Version(version).public)
        except InvalidVersion:
            return list(self.versions), []
        known = [(Version(v), v) for v in self.versions]
        return [v for n, v in known if n < wanted], [v for n, v in known if n > wanted]


class _History:
    """What a contract meets on each recorded release, found when it is asked for.

    ``whole``: look at all call sites, so that one look serves many surfaces; otherwise at those
    only that have to do with the findings asked about.
    """

    def __init__(
        self,
        contract: Contract,
        releases: _Releases,
        *,
        whole: bool = True,
        memory: Memory | None = None,
    ) -> None:
        self.contract = contract
        self.releases = releases
        self.whole = whole
        self.memory = memory
        self._known: dict[str, tuple[frozenset[object], frozenset[CallSite]]] = {}

    def dates(self, findings: Sequence[Finding], surface: Surface) -> list[Dating]:
        """Say since when each of a surface's findings is there."""
        if not self.whole:
            return self._dates_of_part(findings, surface)
        before, after = self.releases.around(surface.version)
        return [self._date(finding, surface.version, before, after) for finding in findings]

    def _dates_of_part(self, findings: Sequence[Finding], surface: Surface) -> list[Dating]:
        from vllm_compat.analysis.cache import Memory
        from vllm_compat.commands.report.model import Dating

        sites = _related(self.contract, findings)

        def look() -> list[Dating]:
            part = dataclasses.replace(self.contract, sites=sites)
            return _History(part, self.releases).dates(findings, surface)

        return (self.memory or Memory(None)).recall(
            "dates",
            [surface.version, findings, sites],
            look,
            pack=lambda dates: [[d.since, d.fitted_last, d.fits_from] for d in dates],
            unpack=lambda record: [Dating(*dating) for dating in record],
        )

    def changed_defaults(
        self, findings: Sequence[Finding], dates: Sequence[Dating], surface: Surface
    ) -> list[tuple[Finding, Dating]]:
        """Return which defaults that the downstream relies on changed since it last fitted.

        Nothing where it fits here, where it never fitted, or where a matrix is made.
        """
        from vllm_compat.analysis.cache import Memory
        from vllm_compat.analysis.codec import pack_finding, unpack_finding
        from vllm_compat.analysis.drift import find_drifts
        from vllm_compat.commands.report.model import Dating

        pairs = zip(findings, dates, strict=True)
        fitted = [date.fitted_last for finding, date in pairs if finding.fatal]
        if self.whole or not fitted or None in fitted:
            return []
        order = list(self.releases.versions)
        at = min(order.index(version) for version in fitted if version)
        later = [v for v in self.releases.around(surface.version)[0] if order.index(v) > at]
        calls = dataclasses.replace(self.contract, other_calls=())

        def look() -> list[tuple[Finding, Dating]]:
            home = self.releases.get(order[at])
            found = {f.key: f for f in find_drifts(calls, surface, home) if f.home}
            since = dict.fromkeys(found, surface.version)
            part = dataclasses.replace(calls, sites=_related(calls, list(found.values())))
            known: dict[str, set[tuple[str, str, str | None]]] = {}
            running = set(found)
            for version in reversed(later):
                if running and version not in known:
                    there = self.releases.fresh(version)
                    keys = {f.key for f in find_drifts(part, there, home)}
                    known.update(dict.fromkeys(there.alike, keys))
                running &= known.get(version, set())
                since.update(dict.fromkeys(running, version))
            return [(f, Dating(since[key], order[at])) for key, f in found.items()]

        return (self.memory or Memory(None)).recall(
            "defaults",
            [surface.version, *surface.stamps(), order[at], self.contract.sites],
            look,
            pack=lambda found: [[pack_finding(f), d.since, d.fitted_last] for f, d in found],
            unpack=lambda record: [(unpack_finding(f), Dating(*dating)) for f, *dating in record],
        )

    def _date(self, finding: Finding, since: str, before: Sequence[str], after: Sequence[str]) -> Dating:
        from vllm_compat.commands.report.model import Dating

        fitted_last = next((v for v in reversed(before) if self._fits(finding, v)), None)
        for version in reversed(before):
            if finding.key not in self._found(version)[0]:
                break
            since = version
        fits_from = None
        if fitted_last is None:
            fits_from = next((v for v in after if self._fits(finding, v)), None)
        return Dating(since, fitted_last, fits_from)

    def _fits(self, finding: Finding, version: str) -> bool:
        """Whether a release has nothing grave against any of the call sites of a finding."""
        keys, sites = self._found(version)
        return finding.key not in keys and sites.isdisjoint(finding.sites)

    def _found(self, version: str) -> tuple[frozenset[object], frozenset[CallSite]]:
        """Return a release's findings by what makes them the same, and the fatal ones' sites."""
        from vllm_compat.analysis.drift import find_drifts

        if version not in self._known:
            surface = self.releases.fresh(version)
            found = find_drifts(self.contract, surface)
            answer = (
                frozenset(finding.key for finding in found),
                frozenset(site for finding in found if finding.fatal for site in finding.sites),
            )
            # Most releases change nothing that these call sites look at.
            self._known.update(dict.fromkeys(surface.alike, answer))
        return self._known[version]


def _related(contract: Contract, findings: Sequence[Finding]) -> tuple[CallSite, ...]:
    """Return the call sites that decide about findings: of their symbols, owners and members."""
    from vllm_compat.analysis.drift import prefixes

    symbols = {f.symbol for f in findings} | {s.symbol for f in findings for s in f.sites}
    owners = {prefix for symbol in symbols for prefix in prefixes(symbol)}
    return tuple(
        site
        for site in contract.sites
        if site.symbol in owners or not symbols.isdisjoint(prefixes(site.symbol))
    )


# Environments.

_ASK = """
import dataclasses, importlib.util as u, json, sys
sys.path[:] = [p for p in sys.path if p]
spec = u.spec_from_file_location("vllm_compat_environment", sys.argv[1])
module = sys.modules[spec.name] = u.module_from_spec(spec)
spec.loader.exec_module(module)
found = dataclasses.asdict(module.read_environment(sys.argv[2], sys.argv[3]))
transformers = u.find_spec("transformers")
print(json.dumps([found, transformers and transformers.origin]))
"""


def _environment(
    source: _Source,
    surface: Surface,
    installed: bool,
    python: str | None,
    device: str | None,
) -> Environment:
    """Read what decides besides source, as ``apply()`` reads it.

    For a vLLM that is not installed only the device is known, if it is given or the build has a
    name for it.
    """
    import importlib.util

    from vllm_compat.analysis.environment import Environment, read_environment
    from vllm_compat.analysis.planner import roles_of

    transformers: str | None = None
    if not installed:
        named = read_environment(surface.version, surface.distribution, root=_NOWHERE).device
        environment = Environment("", (), named)
    elif python is None:
        environment = read_environment(surface.version, surface.distribution)
        spec = importlib.util.find_spec("transformers")
        transformers = spec.origin if spec else None
    else:
        environment, transformers = _ask(python, surface)
    if transformers and roles_of(source.contract).generator:
        features = source.features(Path(transformers).parent)
        environment = dataclasses.replace(environment, features=features)
    return dataclasses.replace(environment, device=device) if device else environment


_NOWHERE = Path("/nonexistent")  # no device files, so that only the build's own name is looked at


def _ask(python: str, surface: Surface) -> tuple[Environment, str | None]:
    """Read the environment of another interpreter, and where its transformers lies."""
    import json
    import subprocess

    from vllm_compat.analysis import environment
    from vllm_compat.analysis.surface.files import why
    from vllm_compat.errors import UsageError

    try:
        answer = subprocess.run(
            [python, "-c", _ASK, environment.__file__, surface.version, surface.distribution],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        found, transformers = json.loads(answer.stdout)
        found["versions"] = tuple(tuple(pair) for pair in found["versions"])
        found["features"] = ()
        return environment.Environment(**found), transformers
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"The interpreter {python} does not answer: {why(error)}.") from error


# Comparing.


def diff(
    a: str | Path,
    b: str | Path,
    downstreams: str | Path | Sequence[str | Path] = (),
    *,
    all_symbols: bool = False,
    python: str | None = None,
) -> Difference:
    """Compare two vLLMs, parameter by parameter, by the symbols that downstreams use.

    Args:
        a: A recorded release's version, a source tree, a wheel, an sdist, or ``"installed"``.
        b: Likewise: what to compare it with.
        downstreams: Whose symbols to look at: distribution names, folders, wheels or sdists, one or
            several; by default the installed ``speculators``.
        all_symbols: Look at all that ``vllm.v1`` and ``vllm.config`` define, whoever uses it.
        python: Another interpreter, in whose environment installed packages are looked for.

    Returns:
        The names that changed in ``changes``, each with ``kind``, ``symbol``, its ``details`` and the
        call ``sites`` that use it; ``looked_at`` counts the symbols compared.

    Raises:
        UsageError: Something can't be read; one sentence says what.

    Example:
        >>> found = vllm_compat.diff("0.16.0", "0.33.0", "speculators")
        >>> [change.symbol for change in found.changes if change.kind == "removed"]
    """
    from vllm_compat.analysis.downstream import read_contract
    from vllm_compat.analysis.surface import open_surface
    from vllm_compat.commands.report.changes import compare_all, compare_used

    before, after = open_surface(a, python=python), open_surface(b, python=python)
    if all_symbols:
        return compare_all(before, after)
    contracts = [read_contract(what, python=python) for what in _several(downstreams) or (None,)]
    return compare_used(before, after, contracts)
