"""Neighbours: whatever else may want a process to itself, and a judge of what came of it.

Each case runs a program that builds the FAKE downstream's generator with two workers, beside one
neighbour: a launcher, a tracer, somebody's `sitecustomize`, a wrapper over a method that we wrap as
well. Afterwards every process must hold the very patches that it holds without the neighbour, and the
neighbour must have done what it does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import SOURCE, Site

RIGHT, REFUSED, WRONG, LOST = "right", "refused in words", "wrong", "lost"

PROBE = '''
import functools, json, os, sys

def ours(value):
    """Tell whether a wrapper of vllm_compat is somewhere in the chain of wrappers."""
    seen = set()
    todo = [value]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value).__name__ in ("FunctionWrapper", "BoundFunctionWrapper"):
            if str(getattr(value._self_wrapper, "__module__", "")).startswith("vllm_compat"):
                on = value._self_enabled  # off where a worker has taken back what is the driver's alone
                return on() if callable(on) else on is not False
        if isinstance(value, functools.partial):
            todo.append(value.func)
        for name in ("__wrapped__", "__func__"):
            if (inner := getattr(value, name, None)) is not None:
                todo.append(inner)
        for cell in getattr(value, "__closure__", None) or ():
            try:
                todo.append(cell.cell_contents)
            except ValueError:
                pass
    return False

def probe(worker=None):
    found = set()
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in ("vllm", "speculators", "torch", "transformers"):
            for key, value in list(vars(module).items()):
                own = isinstance(value, type) and value.__module__ == name
                for k, v in list(vars(value).items()) if own else [(None, value)]:
                    if callable(v) and not isinstance(v, type) and ours(v):
                        found.add(f"{name}:{key}" if k is None else f"{name}:{key}.{k}")
    packages = ("vllm.", "speculators.", "transformers.")
    imported = [name for name in sys.modules if name.startswith(packages)]
    return {"pid": os.getpid(), "patched": sorted(found), "imported": imported}
'''
"""Looks by itself which functions are wrapped; what `status()` says is not asked."""

BODY = """
import json
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
from probe import probe

if __name__ == "__main__":
    generator = VllmHiddenStatesGenerator("model", [0], tensor_parallel_size=2)
    ranks = generator.executor.collective_rpc(probe)
    print("PROBE " + json.dumps([probe(), *ranks]), flush=True)
    generator.executor.shutdown()
"""
CHILD = """
import subprocess, sys
if __name__ == "__main__":
    sys.exit(subprocess.call([sys.executable, "program.py"]))
"""
PROGRAMS = ("script", "child", "apply")
METHODS = ("fork", "spawn")
LIMIT = 90.0
INTERNAL = "An internal error"
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
GENERATE = f"{GENERATOR}:VllmHiddenStatesGenerator.generate"
SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
CAPTURED = "speculators.data_generation.custom_worker:HiddenStatesWorkerExtension._get_captured_states"


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """What stands beside us in one case.

    Attributes:
        name: What it is.
        kind: The row of the table that it is counted in.
        outer: The words in front of the launcher, in place of the interpreter.
        inner: The words between the launcher and the program.
        before: Code at the top of the program; in front of `apply()` where the program calls it.
        after: Code behind `apply()`, or behind `before`.
        files: Further files, by their path in the folder; `{packages}` is the environment's.
        environ: Further variables; `{folder}` is the case's.
        seen: What the output holds where the neighbour has done its work.
        own_environment: Whether the case has an environment of its own.
        refused: A part of the sentence with which it is refused, if that is right.
        programs: With which programs it is tried.
        methods: With which ways to start workers it is tried.
        tool: The module that must be installed for it.
        prepare: What else is done to the folder.
        program: The program's name, where it is not `program.py`.
    """

    name: str
    kind: str
    outer: tuple[str, ...] = ("{python}",)
    inner: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    seen: str = ""
    own_environment: bool = False
    refused: str = ""
    programs: tuple[str, ...] = PROGRAMS
    methods: tuple[str, ...] = METHODS
    tool: str = ""
    prepare: Callable[[Path], None] | None = None
    program: str = "program.py"


@dataclass(frozen=True)
class Outcome:
    """What came of one case, and why it is not right."""

    outcome: str
    why: str = ""


def make_folder(site: Site, neighbour: Neighbour, program: str) -> None:
    """Write a case's files beside the fakes."""
    folder = site.folder
    apply = "import vllm_compat\nvllm_compat.apply()\n" if program == "apply" else ""
    (folder / "probe.py").write_text(PROBE)
    (folder / "program.py").write_text(neighbour.before + "\n" + apply + neighbour.after + "\n" + BODY)
    (folder / "wrapper.py").write_text(CHILD)
    if neighbour.own_environment:
        make_environment(folder / "environment", folder, SOURCE)
    for name, text in neighbour.files.items():
        path = folder / name.replace("{packages}", str(packages_of(folder / "environment")))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{folder}", str(folder)))
    if neighbour.prepare is not None:
        neighbour.prepare(folder)


def packages_of(environment: Path) -> Path:
    """Return the folder of an environment's packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return environment / "lib" / version / "site-packages"


def make_environment(environment: Path, *folders: Path) -> None:
    """Make an environment that sees the packages of this one, of these folders, and of its user."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(environment)],
        check=True,
    )
    base = sysconfig.get_path("purelib")
    lines = [base, *map(str, folders)]
    (packages_of(environment) / "base.pth").write_text("\n".join(lines) + "\n")


def command(folder: Path, neighbour: Neighbour, program: str) -> list[str]:
    """Return the command line of a case."""
    python = str(folder / "environment/bin/python") if neighbour.own_environment else sys.executable
    run = () if program == "apply" else ("-m", "vllm_compat", "run", "--no-canary")
    script = "wrapper.py" if program == "child" else neighbour.program
    words = [*neighbour.outer, *run, *neighbour.inner, *([script] if script else [])]
    places = {"python": python, "bin": str(Path(sys.executable).parent), "folder": str(folder)}
    return [word.format(**places) for word in words]


def started(
    site: Site, neighbour: Neighbour, program: str, method: str
) -> subprocess.CompletedProcess[str]:
    """Run one case."""
    make_folder(site, neighbour, program)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHON"))}
    environ = {
        **clean,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), clean.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(site.folder), str(SOURCE)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_COMPAT_CACHE": "off",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": method,
        **{k: v.replace("{folder}", str(site.folder)) for k, v in neighbour.environ.items()},
    }
    return subprocess.run(
        command(site.folder, neighbour, program),
        env=environ,
        cwd=site.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def looked(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]] | None:
    """Return what the program saw of patches in driver and workers; None if it saw nothing."""
    probes = [line for line in (done.stdout + done.stderr).splitlines() if "PROBE [" in line]
    if not probes:
        return None
    found: list[dict[str, Any]] = json.loads(probes[-1][probes[-1].index("PROBE ") + 6 :])
    return found


def undisturbed(site: Site, program: str, method: str) -> list[set[str]]:
    """Return what driver and workers hold where there is no neighbour."""
    seen = looked(started(site, Neighbour(name="nobody", kind=""), program, method))
    assert seen is not None
    held = [set(each["patched"]) for each in seen]
    assert {GENERATE, SCHEDULE} <= held[0]
    assert all(CAPTURED in each for each in held[1:])
    return held


def tried(
    site: Site, neighbour: Neighbour, program: str, method: str, wanted: list[set[str]]
) -> Outcome:
    """Try one case, and judge it."""
    try:
        done = started(site, neighbour, program, method)
    except subprocess.TimeoutExpired as error:
        return Outcome(WRONG, f"not done after {LIMIT} s: {(error.stderr or b'')[-300:]!r}")
    return judged(done, neighbour, wanted)


def judged(
    done: subprocess.CompletedProcess[str], neighbour: Neighbour, wanted: list[set[str]]
) -> Outcome:
    """Say what came of a case from what it has printed."""
    told = done.stdout + done.stderr
    last = (told.strip().splitlines() or [""])[-1][:300]
    seen = looked(done)
    if neighbour.refused:
        if seen is None and done.returncode and neighbour.refused in told and INTERNAL not in told:
            return Outcome(REFUSED)
        return Outcome(WRONG, f"not refused in words, status {done.returncode}: {last}")
    if seen is None:
        return Outcome(WRONG, f"status {done.returncode}: {last}")
    for name, want, got in zip(("the driver", "rank 0", "rank 1"), wanted, seen, strict=True):
        held = set(got["patched"])
        # What a process has not imported waits to be patched (a worker that imports no main module).
        here = {place for place in want if place.partition(":")[0] in got["imported"]}
        if missing := sorted(here - held):
            return Outcome(LOST, f"{name} lacks {missing[0]}, {len(missing)} in all")
        if name != "the driver" and CAPTURED not in held:
            return Outcome(LOST, f"{name} captures nothing")
        if more := sorted(held - want):
            return Outcome(WRONG, f"{name} has {more[0]} besides")
    if done.returncode:
        return Outcome(WRONG, f"status {done.returncode}: {last}")
    if neighbour.seen not in told:
        return Outcome(WRONG, f"the neighbour has not done its work: no {neighbour.seen!r}")
    return Outcome(RIGHT)
