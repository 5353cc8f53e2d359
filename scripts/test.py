#!/usr/bin/env python3
"""Everything for the tests: linters, the fast layer, tensors, then real vLLM end to end.

usage: python3 scripts/test.py [--help] [--fast | --torch] [--all] [PYTEST_ARGS…]

--fast stops after the fast layer. --torch runs only tests/with_torch, on the Python that runs this, in
an environment with torch of its own (made once; UV_TORCH_BACKEND=cpu takes the small builds). --all adds
what is marked `beyond` (more pairs, families and ablations) and the coverage of the fast layer, which on
Python 3.12 and later is always measured: there it costs next to nothing. PYTEST_ARGS go to every run of
pytest (-k WORD, -x, …). What was not run is named at the end.
Needs Python 3.10 to 3.13 and PyPI; the end-to-end layer takes x86-64 Linux and 8 GB of disk per vLLM.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("src", "lab", "tests", "scripts", "benchmarks")
TENSORS = ("tests/with_torch", "tests/commands/test_verify.py")
REQUIREMENTS = ("pytest>=8", "hypothesis>=6")
WITH_TORCH = ("torch>=2.8,<2.11", "transformers>=4.56,<5", "safetensors", "datasets", "numpy")
PROJECT = ("wrapt>=1.16", "packaging>=23")
sys.path[:0] = [str(ROOT), str(ROOT / "src")]


@dataclass(frozen=True)
class Step:
    """One layer: a command, and the environment that it runs in."""

    title: str
    command: list[str]
    variables: dict[str, str]


def main(arguments: list[str]) -> int:
    """Run the layers one after another; stop at the first that fails."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__, end="")
        return 0
    own = {"--fast", "--torch", "--all"}
    chosen, rest = own & set(arguments), [argument for argument in arguments if argument not in own]
    left_out: list[str] = []
    began = time.monotonic()
    for step in only_torch(rest) if "--torch" in chosen else layers(chosen, rest, left_out):
        begin = time.monotonic()
        print(f"== {step.title}", flush=True)
        status = subprocess.call(step.command, cwd=ROOT, env=step.variables)
        print(f"== {step.title}: {time.monotonic() - begin:.0f} s, exit status {status}", flush=True)
        if status:
            return status
    for sentence in left_out:
        print(f"== not run: {sentence}")
    print(f"== all of it: {(time.monotonic() - began) / 60:.0f} min")
    return 0


def layers(chosen: set[str], rest: list[str], left_out: list[str]) -> Iterator[Step]:
    """Give one layer after another; say in `left_out` what is not among them."""
    from lab.environments import find_uv

    everything = "--all" in chosen
    rest = ["--beyond", *rest] if everything else rest
    variables = environment()
    # In the checkout: another checkout's run would lead a shared one to its own source.
    python, uv = str(ROOT / ".dev" / "bin" / "python"), find_uv()
    if not Path(python).exists():
        run(*uv, "venv", "--quiet", "--python", sys.executable, str(ROOT / ".dev"))
    groups = ["--group", "dev", "--group", "docs", "-e", str(ROOT)]
    run(*uv, "pip", "install", "--quiet", "--python", python, *groups)
    linter = "import sys; from importlinter.cli import lint_imports_command as lint; lint()"
    for title, words in (
        ("ruff", ["-m", "ruff", "check", *SOURCES]),
        ("ruff format", ["-m", "ruff", "format", "--check", *SOURCES]),
        ("layers", ["-c", linter]),
        ("mypy", ["-m", "mypy"]),
        ("docs site", ["-m", "mkdocs", "build", "--quiet", "--strict"]),
    ):
        yield Step(title, [python, *words], variables)

    measured = everything or minor(python) >= (3, 12)
    fast = ["-m", "pytest", "-m", "not e2e", "--ignore=tests/with_torch", *rest]
    if measured:
        fast = ["-m", "coverage", "run", "--source=src/vllm_compat", *fast]
    else:
        left_out.append(
            "the coverage of the fast layer, which doubles its time before Python 3.12 (--all)"
        )
    yield Step("fast tests", [python, *fast], variables)
    if measured:
        print_coverage(python, variables)
    if "--fast" in chosen:
        left_out.append("tests with torch and with real vLLM (--fast)")
        return

    for version in claimed():
        found, why = with_torch(uv, version)
        if found is None:
            left_out.append(f"{TENSORS[0]} on Python {version}: {why}")
            continue
        command = [found[0], "-m", "pytest", *TENSORS, *rest]
        yield Step(f"with torch, Python {version}", command, variables | found[1])
    end_to_end = ["-m", "pytest", "-m", "e2e", "-v", "--durations=20", "tests/e2e", "tests/lab"]
    yield Step("end to end", [python, *end_to_end, *rest], variables)
    if not everything:
        left_out.append("what is marked `beyond`; --all runs it, and the workflow `matrix` every week")


def only_torch(rest: list[str]) -> Iterator[Step]:
    """Give the one layer of --torch: on the running Python, in an environment of its own."""
    from lab.environments import find_uv

    version = "{}.{}".format(*sys.version_info)
    python = torch_environment(version)
    uv = find_uv()
    if not python.exists():
        run(*uv, "venv", "--quiet", "--python", sys.executable, str(python.parent.parent))
    install = ["pip", "install", "--quiet", "--python", str(python)]
    run(*uv, *install, *REQUIREMENTS, *PROJECT, *WITH_TORCH)
    variables = environment() | on_path()
    yield Step(
        f"with torch, Python {version}", [str(python), "-m", "pytest", *TENSORS, *rest], variables
    )


def torch_environment(version: str) -> Path:
    """Return the Python of the environment with torch that --torch makes for a Python release."""
    from lab.environments import default_root

    return default_root() / f"torch-{version}" / "bin" / "python"


def with_torch(uv: list[str], version: str) -> tuple[tuple[str, dict[str, str]] | None, str]:
    """Return a Python of this release that has torch, and variables for it; or None, and why."""
    from lab.environments import default_root, ensure

    if (own := torch_environment(version)).exists():
        return (str(own), on_path()), ""
    if version == "3.11":  # that of the environments with vLLM
        paths = ensure("0.16.0", progress=lambda sentence: print(sentence, flush=True))
        if minor(str(paths.python)) == (3, 11):
            target = default_root() / "pytest"
            if not (target / "pytest").exists():
                install = ["pip", "install", "--quiet", "--python", str(paths.python)]
                run(*uv, *install, "--target", str(target), *REQUIREMENTS)
            return (str(paths.python), on_path(target)), ""
    find = [*uv, "python", "find", "--no-python-downloads", "--no-project", version]
    asked = subprocess.run(find, capture_output=True, text=True, check=False)
    if asked.returncode:
        return None, "no interpreter"
    python = asked.stdout.strip()
    return (
        None,
        f"no torch for it; `{python} scripts/test.py --torch` installs one, a few GB, and runs them",
    )


def claimed() -> list[str]:
    """Return the Python releases that the project's metadata claims."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def print_coverage(python: str, variables: dict[str, str]) -> None:
    """Print how much of the package the fast layer ran, and the ten files with the most lines left."""
    command = [python, "-m", "coverage", "json", "--quiet", "-o", "-"]
    report = json.loads(subprocess.check_output(command, cwd=ROOT, env=variables))
    files = {
        name.removeprefix("src/vllm_compat/"): file["summary"] for name, file in report["files"].items()
    }
    total = report["totals"]["percent_covered"]
    print(f"== coverage of the fast layer: {total:.0f} %; the files with most lines not run:")
    for name in sorted(files, key=lambda name: -files[name]["missing_lines"])[:10]:
        summary = files[name]
        print(f"   {summary['missing_lines']:5} of {summary['num_statements']:5}  {name}")
    print("   (what runs only in processes of its own, or only with torch, counts as not run)")


def minor(python: str) -> tuple[int, ...]:
    """Return the release of an interpreter."""
    code = "import sys; print(*sys.version_info[:2])"
    return tuple(map(int, subprocess.check_output([python, "-c", code], text=True).split()))


def run(*command: str) -> None:
    """Run a preparing command; a failure ends everything in its own words."""
    if status := subprocess.call(command, cwd=ROOT):
        sys.exit(f"test: `{' '.join(command)}` ended with exit status {status}")


def environment() -> dict[str, str]:
    """Return the caller's environment without what would change the tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_COMPAT_PLAN", "PYTHON"))}
    kept["NO_MKDOCS_2_WARNING"] = "1"  # its maker's notice about mkdocs
    return {"COVERAGE_CORE": "sysmon"} | kept if sys.version_info >= (3, 12) else kept


def on_path(*folders: Path) -> dict[str, str]:
    """Return the variable by which a Python finds this checkout, and these folders."""
    return {"PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT, ROOT / "src")))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
