"""Know before anything loads: whether a downstream runs on a vLLM, and what would make it run.

:func:`check` reads source only: it imports neither vLLM, torch nor the downstream, and needs no
GPU. The plan that it judges by is the one that :func:`vllm_compat.apply` makes, by the same code. Its
steps are in :mod:`vllm_compat.commands.checking`, what :func:`diff` compares in
:mod:`vllm_compat.commands.report.changes`. Nothing of them is imported before it is needed: the options
alone have to be quick.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_compat.analysis.cache import Memory
    from vllm_compat.analysis.surface.model import Surface
    from vllm_compat.commands.report.changes import Difference
    from vllm_compat.commands.report.model import Report

FORMATS = ("text", "json", "markdown", "junit", "github")
DIFF_FORMATS = ("text", "json", "markdown")
DEVICES = ("cpu", "cuda", "rocm")

# The command line.


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``vllm-compat check``."""
    parser.description = (
        "Say whether speculators, or another library that uses vLLM's internals, runs on a vLLM, as it"
        " is or with vllm_compat, before anything is loaded. Only source is read. Exit status: 0 usable,"
        " 1 incompatible, 2 usage error, 3 unknown; of several pairs, that of the worst. speculators 0.5"
        " and later take hidden states from a vLLM server, which is not served yet: unknown, with the"
        " hazards that are known."
    )
    parser.add_argument(
        "--downstream",
        action="append",
        default=[],
        metavar="NAME|PATH|WHEEL",
        help="the library that uses vLLM: the name of an installed distribution, a release"
        " (NAME==VERSION, installed, downloaded to this folder or recorded), a folder, a wheel or an"
        " sdist (default: the installed speculators); may be given more than once",
    )
    parser.add_argument(
        "--speculators",
        action="append",
        dest="downstream",
        type="speculators=={}".format,
        metavar="VERSION",
        help="a released speculators, which need not be installed: --downstream speculators==VERSION",
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
        "--model",
        metavar="FOLDER|ARCHITECTURE",
        help="for the server flow, the model that is to be served: say from vLLM's source whether its"
        " class offers hidden states, and the last layer's",
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
    parser.add_argument(
        "--format", default="text", choices=FORMATS, help="the form of the report (default: text)"
    )
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
    parser.add_argument("b", metavar="B", help="the vLLM to compare it with, named in the same way")
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
    parser.add_argument(
        "--format", default="text", choices=DIFF_FORMATS, help="the form of the list (default: text)"
    )
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
            model=options.model,
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
    from vllm_compat.commands.report.difference import render_difference

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
    model: str | Path | None = None,
) -> Report:
    """Say whether each downstream runs on each vLLM, before anything is loaded.

    Only source is read: nothing of vLLM, torch or the downstream is imported, and no GPU is needed.
    One pair takes about a second.

    Args:
        downstreams: Distribution names, folders, wheels or sdists, one or several, or released
            speculators, which need not be installed (``"speculators==0.9.0"``); by default the
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
        model: For the server flow, the folder or the architecture of the model that is to be served:
            what its class in vLLM's source does not offer is a finding.

    Returns:
        The pairs in ``pairs``, each with ``verdict`` (``"usable"``, ``"usable with vllm_compat"``,
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
            _several(downstreams), _several(vllms), all_releases, python, device, strict, memory, model
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
    model: str | Path | None,
) -> Report:
    from vllm_compat.analysis.surface.files import need_interpreter
    from vllm_compat.commands.checking.dating import History, Releases
    from vllm_compat.commands.checking.downstream import source_of
    from vllm_compat.commands.checking.judging import judge
    from vllm_compat.commands.checking.server import architectures_of
    from vllm_compat.commands.checking.surroundings import environment_of
    from vllm_compat.commands.report.model import Report

    need_interpreter(python)
    releases = Releases()
    named = [*releases.versions, *vllms] if all_releases else vllms
    whats = _once(_release(what, releases.versions) for what in named) or [None]
    sources = [source_of(what, python, memory) for what in _once(downstreams) or [None]]
    surfaces = [
        releases.get(str(what)) if what in releases.versions else _opened(what, python) for what in whats
    ]
    architectures = architectures_of(str(model)) if model else ()
    pairs = []
    for source in sources:
        contract = source.contract
        asks = source.asks()
        history = History(contract, releases, whole=len(surfaces) > 3, memory=memory)
        for what, surface in zip(whats, surfaces, strict=True):
            installed = what is None or what == "installed"
            environment = environment_of(source, surface, installed, python, device)
            planned = source.planned(surface, environment, keep=not history.whole)
            pairs.append(
                judge(
                    contract,
                    surface,
                    environment,
                    installed,
                    history,
                    planned,
                    source.described,
                    asks,
                    architectures,
                )
            )
    return Report(tuple(pairs), strict)


def _release(what: str | Path, versions: Sequence[str]) -> str | Path:
    """Return a recorded release by its version alone, and all else as it was named."""
    if isinstance(what, Path) or Path(what).expanduser().exists():
        return what
    version = what.removeprefix("vllm==").removeprefix("v")
    return version if version in versions else what


def _once(named: Iterable[str | Path]) -> list[str | Path | None]:
    """Return what was named, in order, each file, folder, release or name once."""
    found: dict[str, str | Path | None] = {}
    for what in named:
        path = Path(what).expanduser()
        found.setdefault(str(path.resolve()) if what and path.exists() else str(what), what)
    return list(found.values())


def _opened(what: str | Path | None, python: str | None) -> Surface:
    from vllm_compat.analysis.surface import open_surface
    from vllm_compat.errors import UsageError

    try:
        return open_surface(what, python=python)
    except UsageError as error:
        if what is not None or "is not installed" not in str(error):
            raise
        raise UsageError(
            f"{str(error).rstrip('.')}: install it, name the Python of another environment (--python),"
            " or a release, a folder or a file (--vllm)."
        ) from error


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
    from vllm_compat.analysis.cache import Memory
    from vllm_compat.analysis.server_flow import in_server_flow
    from vllm_compat.analysis.surface import open_surface
    from vllm_compat.analysis.surface.files import need_interpreter
    from vllm_compat.commands.checking.downstream import source_of
    from vllm_compat.commands.report.changes import compare_all, compare_used
    from vllm_compat.errors import UsageError

    need_interpreter(python)
    before, after = open_surface(a, python=python), open_surface(b, python=python)
    if all_symbols:
        return compare_all(before, after)
    none = Memory(None)
    contracts = [source_of(what, python, none).contract for what in _several(downstreams) or (None,)]
    for contract in contracts:
        if in_server_flow(contract) and not contract.sites:
            name, version = contract.name, contract.version
            raise UsageError(
                f"{name} {version} calls nothing of vLLM in its own process: it asks a server, whose"
                f" flags and routes diff does not compare. Ask `vllm-compat check --downstream"
                f" {name}=={version}` with --vllm {a} and with --vllm {b}."
            )
    return compare_used(before, after, contracts)
