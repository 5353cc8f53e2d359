"""How fast ``vllm-compat check`` is, and how much memory it takes, next to ``import vllm``.

    python benchmarks/check.py --python ENV/bin/python --downstream PATH [--downstream PATH]...

``ENV`` has vLLM and vllm_compat. One pair is the first downstream on the vLLM installed there;
without one there, on the newest recorded release. ``--all`` is every downstream given on every
recorded release. All figures are of fresh processes, interpreter start included, and what is compared
has run under the same conditions:

*bare*   no bytecode on disk at all, not even of the standard library
*cold*   bytecode of the standard library only, as after an installation that compiles nothing
*again*  the median of later runs: with bytecode, and with what ``check`` keeps in its cache folder

Exit status 1 where a figure misses its goal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PAIR_SECONDS = 1.0
ALL_SECONDS = 5.0
TIMES_FASTER = 20.0
MEBIBYTES = 200.0


@dataclass(frozen=True)
class Measured:
    """Wall-clock seconds and peak resident memory in MiB of one process."""

    seconds: float
    memory: float


def measure(command: Sequence[str], environ: Mapping[str, str], expected: Sequence[int]) -> Measured:
    """Run a command to its end; raise where its exit status is not one of those expected."""
    begin = time.perf_counter()
    with subprocess.Popen(
        command, env=dict(environ), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None
        said = child.stderr.read()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begin
    if child.returncode not in expected:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}: {said.strip()}")
    scale = 1 if sys.platform == "darwin" else 1024
    return Measured(seconds, used.ru_maxrss * scale / 2**20)


@dataclass(frozen=True)
class Runs:
    """One run without bytecode, one with that of the standard library, the medians of later ones."""

    bare: Measured
    cold: Measured
    warm: Measured


def repeat(
    command: Sequence[str], environ: Mapping[str, str], expected: Sequence[int], times: int
) -> Runs:
    """Run a command some times, with folders of its own for bytecode and for check's cache."""
    with tempfile.TemporaryDirectory() as folder:
        bytecode, cache = Path(folder, "bytecode"), Path(folder, "cache")
        fresh = {k: v for k, v in environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        fresh |= {"PYTHONPYCACHEPREFIX": str(bytecode), "VLLM_COMPAT_CACHE": str(cache)}
        bare = measure(command, fresh, expected)
        shutil.rmtree(cache, ignore_errors=True)
        library = subprocess.check_output(
            [command[0], "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"], text=True
        )
        kept = Path(f"{bytecode}{library.strip()}")
        for path in [p for p in bytecode.rglob("*.pyc") if not _of_library(p, kept)]:
            path.unlink()
        cold, *later = (measure(command, fresh, expected) for _ in range(times + 1))
    seconds = statistics.median(run.seconds for run in later)
    return Runs(bare, cold, Measured(seconds, max(run.memory for run in later)))


def _of_library(path: Path, library: Path) -> bool:
    return library in path.parents and "site-packages" not in path.parts


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, metavar="INTERPRETER")
    parser.add_argument("--downstream", action="append", default=[], metavar="PATH")
    parser.add_argument("--repeat", type=int, default=5, help="processes per figure")
    parser.add_argument("--record", metavar="FILE", help="write the figures there, as JSON")
    options = parser.parse_args()

    find = "import importlib.util as u, sys; sys.exit(not u.find_spec('vllm'))"
    has_vllm = subprocess.run([options.python, "-c", find], check=False).returncode == 0
    given = [word for path in options.downstream for word in ("--downstream", path)]
    check = [options.python, "-m", "vllm_compat", "check"]
    newest = "from vllm_compat.analysis.surface.recorded import recorded_versions as r; print(r()[-1])"
    release = subprocess.check_output([options.python, "-c", newest], text=True).strip()
    where = [] if has_vllm else ["--vllm", release]
    done = (0, 1, 3)  # whatever the verdict
    misses = 0
    figures: dict[str, float] = {}
    section = ""

    def title(text: str, key: str) -> None:
        nonlocal section
        section = key
        print(text)

    def tell(what: str, value: float, unit: str, bound: str = "", goal: float = 0.0) -> None:
        nonlocal misses
        figures[f"{section}: {what.strip()}"] = round(value, 3)
        missed = bool(bound) and (value > goal if bound == "at most" else value < goal)
        misses += missed
        wanted = f"(goal: {bound} {goal:g}){'  MISSED' if missed else ''}" if bound else ""
        print(f"{what:40}{value:9.2f} {unit:5} {wanted}".rstrip(), flush=True)

    on = "the installed vLLM" if has_vllm else f"vLLM {release} as recorded"
    title(f"One pair, on {on}", "pair")
    pair = repeat([*check, *given[:2], *where], os.environ, done, options.repeat)
    tell("  bare", pair.bare.seconds, "s")
    tell("  cold", pair.cold.seconds, "s", "at most", PAIR_SECONDS)
    tell("  again", pair.warm.seconds, "s", "at most", PAIR_SECONDS)
    tell("  peak memory", max(pair.cold.memory, pair.warm.memory), "MiB", "at most", MEBIBYTES)
    without = repeat([*check, "--no-cache", *given[:2], *where], os.environ, done, options.repeat)
    tell("  again, without the cache", without.warm.seconds, "s", "at most", PAIR_SECONDS)
    if has_vllm:
        imported = repeat([options.python, "-c", "import vllm"], os.environ, (0,), 3)
        title("import vllm", "import")
        tell("  bare", imported.bare.seconds, "s")
        tell("  cold", imported.cold.seconds, "s")
        tell("  again", imported.warm.seconds, "s")
        title("import vllm takes as many times as long as the pair", "times")
        tell("  bare", imported.bare.seconds / pair.bare.seconds, "")
        cold = imported.cold.seconds / pair.cold.seconds
        tell("  cold", cold, "", "at least", TIMES_FASTER)
        again = imported.warm.seconds / pair.warm.seconds
        tell("  again", again, "", "at least", TIMES_FASTER)
        tell("  again, without the cache", imported.warm.seconds / without.warm.seconds, "")
    title(f"--all, downstreams: {len(options.downstream) or 1}", "all")
    matrix = repeat([*check, *given, "--all"], os.environ, done, options.repeat)
    tell("  bare", matrix.bare.seconds, "s")
    tell("  cold", matrix.cold.seconds, "s", "at most", ALL_SECONDS)
    tell("  again", matrix.warm.seconds, "s", "at most", ALL_SECONDS)
    tell("  peak memory", max(matrix.cold.memory, matrix.warm.memory), "MiB", "at most", MEBIBYTES)
    if options.record:
        read = "import importlib.metadata as m, sys; print(sys.version.split()[0], m.version('vllm'))"
        python, version = subprocess.check_output([options.python, "-c", read], text=True).split()
        record = {
            "kind": "check speed",
            "vllm": version,
            "python": python,
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[2], 1),
            "downstreams": len(options.downstream) or 1,
            "figures": figures,
        }
        Path(options.record).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
