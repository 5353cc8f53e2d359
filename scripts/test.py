#!/usr/bin/env python3
"""Everything for the tests: linters, the fast layer, then real vLLM end to end.

usage: python3 scripts/test.py [--help] [--fast] [PYTEST_ARGS…]

--fast stops after the fast layer; PYTEST_ARGS go to every run of pytest (-k WORD, -x, …).
Needs Python 3.10 to 3.13 and PyPI; the end-to-end layer takes x86-64 Linux and 8 GB of disk per vLLM.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("src", "lab", "tests", "scripts", "benchmarks")
sys.path[:0] = [str(ROOT), str(ROOT / "src")]


def main(arguments: list[str]) -> int:
    """Run the layers one after another; stop at the first that fails."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__, end="")
        return 0
    fast = "--fast" in arguments
    rest = [argument for argument in arguments if argument != "--fast"]
    from lab.environments import default_root, find_uv

    venv = default_root() / "dev"
    uv = find_uv()
    python = venv / "bin" / "python"
    if not python.exists():
        run(*uv, "venv", "--quiet", "--python", sys.executable, str(venv))
    groups = ["--group", "dev", "--group", "docs", "-e", str(ROOT)]
    run(*uv, "pip", "install", "--quiet", "--python", str(python), *groups)
    steps = [
        ("ruff", ["-m", "ruff", "check", *SOURCES]),
        ("ruff format", ["-m", "ruff", "format", "--check", *SOURCES]),
        (
            "layers",
            ["-c", "import sys; from importlinter.cli import lint_imports_command as lint; lint()"],
        ),
        ("mypy", ["-m", "mypy"]),
        ("docs site", ["-m", "mkdocs", "build", "--quiet", "--strict"]),
        ("fast tests", ["-m", "pytest", "-m", "not e2e", "--ignore=tests/with_torch", *rest]),
    ]
    if not fast:
        steps.append(
            ("with torch", ["-m", "pytest", "tests/with_torch", "tests/commands/test_verify.py", *rest])
        )
        command = ["-m", "pytest", "-m", "e2e", "-v", "--durations=10", "tests/e2e", "tests/lab"]
        steps.append(("end to end", [*command, *rest]))
    for title, step in steps:
        begin = time.monotonic()
        print(f"== {title}", flush=True)
        command, variables = [str(python), *step], environment()
        if title == "with torch":
            command[0], variables = with_torch(uv, variables)
        status = subprocess.call(command, cwd=ROOT, env=variables)
        print(f"== {title}: {time.monotonic() - begin:.0f} s, exit status {status}", flush=True)
        if status:
            return status
    return 0


def with_torch(uv: list[str], variables: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return a Python that has torch, and the environment in which it finds pytest too."""
    from lab.environments import default_root, ensure

    paths = ensure("0.16.0", progress=lambda sentence: print(sentence, flush=True))
    target = default_root() / "pytest"
    if not (target / "pytest").exists():
        install = ["pip", "install", "--quiet", "--python", str(paths.python), "--target", str(target)]
        run(*uv, *install, "pytest>=8", "hypothesis>=6")
    return str(paths.python), {
        **variables,
        "PYTHONPATH": os.pathsep.join(map(str, (target, ROOT, ROOT / "src"))),
    }


def run(*command: str) -> None:
    """Run a preparing command; a failure ends everything in its own words."""
    if status := subprocess.call(command, cwd=ROOT):
        sys.exit(f"test: `{' '.join(command)}` ended with exit status {status}")


def environment() -> dict[str, str]:
    """Return the caller's environment without what would change the tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_COMPAT_PLAN", "PYTHON"))}
    return {**kept, "NO_MKDOCS_2_WARNING": "1"}  # its maker's notice about mkdocs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
