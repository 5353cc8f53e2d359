"""Which advice our messages give: found in the source, each with a key."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import vllm_compat

SOURCE = Path(vllm_compat.__file__).parent
VERBS = (
    "install|set|take|give|name|call|start|use|leave|run|make|mend|add|remove|delete|upgrade|pass|choose|put|try"
    "|ask|move|free|lower|raise|let|see|train|update|unset|report|extract|convert|repeat|drop|keep"
    "|wait|point|switch|split|prepare|turn|rename|write|build|restore|look|empty"
)
TABLES = ("analysis/misread.py", "analysis/server_flow.py", "checks/losses.py")
"""Files in which an advice is a text of its own, in a table."""
CLAUSE = re.compile(rf"(?:(?<=[:;.] )|(?<=\), ))(?:{VERBS})\b", re.IGNORECASE)
ALONE = re.compile(rf"(?:{VERBS})\b", re.IGNORECASE)
LONGEST = 110


def advices() -> Iterator[str]:
    """Give each advice once: its file, and the words from the verb on that it begins with."""
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        if "trial" in path.parts:
            continue
        name = path.relative_to(SOURCE).as_posix()
        for text in _shown(ast.parse(path.read_text(encoding="utf-8"))):
            flat = " ".join(text.split())
            match = CLAUSE.search(flat) or (ALONE.match(flat) if name in TABLES else None)
            if " = m.distribution" in flat:  # a program that another interpreter runs
                continue
            if match is not None and " " in flat[match.start() :].strip():
                found.add(f"{name}: {flat[match.start() :][:LONGEST].rstrip()}")
    yield from sorted(found)


def _shown(node: ast.AST) -> Iterator[str]:
    """Give the texts below a node that may be shown, no help text and no docstring among them."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)  # type: ignore[misc]
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
        return
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.keyword) and node.arg in ("help", "description", "epilog"):
            return
        for child in value if isinstance(value, list) else [value]:
            is_doc = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not is_doc and name != "annotation":
                yield from _shown(child)
