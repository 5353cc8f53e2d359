#!/usr/bin/env python3
"""Say which functions and classes are too long, and which files too tangled; keep the exceptions.

usage: lengths.py [--write]

Limits: 70 lines a function, 400 a class, docstrings not counted (src and lab); complexity 15 (ruff's
C901, everywhere). What is over them today stands in tests/lengths.json, name → reason, and, by file, in
pyproject.toml under [tool.ruff.lint.per-file-ignores]. tests/test_lengths.py fails where something else
is over a limit, and where an exception is no longer needed. --write makes both lists anew from the tree
and keeps the reasons that are there: after something was split, moved or renamed. The lists may only get
shorter: a list that has grown wants a reason in its commit.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "tests" / "lengths.json"
PROJECT = ROOT / "pyproject.toml"
FUNCTION, CLASS = 70, 400
SOURCES = ("src", "lab", "tests", "scripts", "benchmarks")
REASON = "to be split"
_TABLE = re.compile(r"^\[tool\.ruff\.lint\.per-file-ignores\]\n((?:(?!\[).*\n)*)", re.MULTILINE)


def main(arguments: list[str]) -> int:
    """Print what is over a limit; with ``--write`` keep it as the exceptions."""
    long, tangled = too_long(), too_tangled()
    for name, lines in long.items():
        print(f"{lines:5} lines  {name}")
    for path in tangled:
        print(f"complexity   {path}")
    if "--write" in arguments:
        kept = exceptions()
        listed = {name: kept.get(name, REASON) for name in long}
        LISTED.write_text(json.dumps(listed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        text = PROJECT.read_text(encoding="utf-8")
        rows = "".join(f'"{path}" = ["C901"]\n' for path in tangled)
        others = "".join(f"{line}\n" for line in ignored() if not line.endswith('= ["C901"]'))
        table = f"[tool.ruff.lint.per-file-ignores]\n{others}{rows}\n"
        PROJECT.write_text(_TABLE.sub(lambda _found: table, text), encoding="utf-8")
    return 0


def too_long(root: Path = ROOT) -> dict[str, int]:
    """Return what is longer than it may be, as ``path:Class.method``, and its lines."""
    return {
        name: lines
        for base in (root / "src", root / "lab")
        for path in sorted(base.rglob("*.py"))
        for name, lines, limit in lengths(path, path.relative_to(root).as_posix())
        if lines > limit
    }


def lengths(path: Path, shown: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, lines and limit of each function and class of a file, nested ones too."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            below = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                limit = CLASS if isinstance(child, ast.ClassDef) else FUNCTION
                assert child.end_lineno is not None
                lines = child.end_lineno - child.lineno + 1 - _documented(child)
                yield f"{shown}:{prefix}{child.name}", lines, limit
                below = f"{prefix}{child.name}."
            yield from visit(child, below)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), "")


def _documented(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Return the lines of a docstring, which nobody is to keep short for this."""
    if ast.get_docstring(node) is None:
        return 0
    first = node.body[0]
    assert first.end_lineno is not None
    return first.end_lineno - first.lineno + 1


def too_tangled() -> list[str]:
    """Return the files that have a function whose complexity is over the limit, as ruff finds it."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "C901", "--output-format", "json"]
    command += ["--exit-zero", "--no-cache", "--config", "lint.per-file-ignores = {}", *SOURCES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = {Path(fault["filename"]).relative_to(ROOT).as_posix() for fault in json.loads(done.stdout)}
    return sorted(found)


def exceptions() -> dict[str, str]:
    """Return the exceptions that are listed, name → reason."""
    if not LISTED.exists():
        return {}
    listed: dict[str, str] = json.loads(LISTED.read_text(encoding="utf-8"))
    return listed


def ignored() -> list[str]:
    """Return the lines of ruff's per-file-ignores."""
    found = _TABLE.search(PROJECT.read_text(encoding="utf-8"))
    assert found is not None, "pyproject.toml has no [tool.ruff.lint.per-file-ignores]"
    return [line for line in found[1].splitlines() if line.strip()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
