"""How fast ``vllm-compat check`` is, and how much memory it takes, next to ``import vllm``.

    python benchmarks/check.py --python ENV/bin/python --downstream PATH [--downstream PATH]...

``ENV`` has vLLM and vllm_compat. One pair is the first downstream on the vLLM installed there;
without one there, on the newest recorded release. ``--all`` is every downstream given on every
recorded release. Figures are of fresh processes, interpreter start included; *cold* is the first
one, without any bytecode on disk, the others are medians with it. Exit status 1 where a figure
misses its goal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """The first of some runs, and the medians of the later ones."""

    cold: Measured
    warm: Measured


def repeat(
    command: Sequence[str], environ: Mapping[str, str], expected: Sequence[int], times: int
) -> Runs:
    """Run a command some times, the first time without bytecode."""
    with tempfile.TemporaryDirectory() as bytecode:
        fresh = {k: v for k, v in environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        fresh["PYTHONPYCACHEPREFIX"] = bytecode
        cold, *later = (measure(command, fresh, expected) for _ in range(times + 1))
    seconds = statistics.median(run.seconds for run in later)
    return Runs(cold, Measured(seconds, max(run.memory for run in later)))


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, metavar="INTERPRETER")
    parser.add_argument("--downstream", action="append", default=[], metavar="PATH")
    parser.add_argument("--repeat", type=int, default=5, help="processes per figure")
    options = parser.parse_args()

    find = "import importlib.util as u, sys; sys.exit(not u.find_spec('vllm'))"
    has_vllm = subprocess.run([options.python, "-c", find], check=False).returncode == 0
    given = [word for path in options.downstream for word in ("--downstream", path)]
    check = [options.python, "-m", "vllm_compat", "check"]
    newest = "from vllm_compat.surface.recorded import recorded_versions as r; print(r()[-1])"
    release = subprocess.check_output([options.python, "-c", newest], text=True).strip()
    where = [] if has_vllm else ["--vllm", release]
    done = (0, 1, 3)  # whatever the verdict
    misses = 0

    def tell(what: str, value: float, unit: str, bound: str = "", goal: float = 0.0) -> None:
        nonlocal misses
        missed = bool(bound) and (value > goal if bound == "at most" else value < goal)
        misses += missed
        wanted = f"(goal: {bound} {goal:g}){'  MISSED' if missed else ''}" if bound else ""
        print(f"{what:40}{value:9.2f} {unit:5} {wanted}".rstrip(), flush=True)

    print(f"One pair, on {'the installed vLLM' if has_vllm else f'vLLM {release} as recorded'}")
    pair = repeat([*check, *given[:2], *where], os.environ, done, options.repeat)
    tell("  cold", pair.cold.seconds, "s")
    tell("  again", pair.warm.seconds, "s", "at most", PAIR_SECONDS)
    tell("  peak memory", pair.warm.memory, "MiB", "at most", MEBIBYTES)
    if has_vllm:
        imported = repeat([options.python, "-c", "import vllm"], os.environ, (0,), 1)
        print("import vllm")
        tell("  cold", imported.cold.seconds, "s")
        tell("  again", imported.warm.seconds, "s")
        times = imported.cold.seconds / pair.cold.seconds
        tell("  as many times the pair, cold", times, "", "at least", TIMES_FASTER)
        tell("  as many times the pair, again", imported.warm.seconds / pair.warm.seconds, "")
    print(f"--all, downstreams: {len(options.downstream) or 1}")
    matrix = repeat([*check, *given, "--all"], os.environ, done, options.repeat)
    tell("  cold", matrix.cold.seconds, "s")
    tell("  again", matrix.warm.seconds, "s", "at most", ALL_SECONDS)
    tell("  peak memory", matrix.warm.memory, "MiB", "at most", MEBIBYTES)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
