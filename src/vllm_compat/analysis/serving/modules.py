"""Modules of a package by name, parsed once, with names followed through imports. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_compat.errors import UsageError

if TYPE_CHECKING:
    from vllm_compat.analysis.surface.files import PackageFiles


class Modules:
    """The parsed modules of one package."""

    def __init__(self, files: PackageFiles) -> None:
        self.files = files
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        """Return a module's syntax; None where it has no source.

        Raises :class:`~vllm_compat.errors.UsageError` on a syntax error.
        """
        if module not in self._trees:
            source = self.files.source(module)
            try:
                self._trees[module] = None if source is None else ast.parse(source)
            except (SyntaxError, ValueError) as error:
                raise UsageError(
                    f"{self.files.file(module)} in {self.files.origin} is not valid Python: {error}."
                ) from error
        return self._trees[module]

    def imported(self, module: str, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that a ``from`` import names."""
        if not node.level:
            return node.module or ""
        found = self.files.locate(module)
        parts = module.split(".")
        up = node.level - (1 if found and found[1] else 0)
        base = parts[: len(parts) - up] if up else parts
        return ".".join([*base, node.module] if node.module else base)

    def lookup(self, module: str, name: str, depth: int = 8) -> tuple[str, ast.stmt] | None:
        """Return the module and the statement that define a top-level name, imports followed."""
        tree = self.tree(module)
        if tree is None or depth == 0:
            return None
        for node in _top(tree.body):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == name for t in node.targets
            ):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        found = self.lookup(self.imported(module, node), alias.name, depth - 1)
                        if found:
                            return found
        return None

    def lineage(self, module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """Iterate over a class and its bases as far as they are in the package, in order of lookup."""
        seen: set[tuple[str, str]] = set()
        waiting = [(module, name)]
        while waiting:
            where, node = self.lookup(*waiting.pop(0)) or ("", None)
            if not isinstance(node, ast.ClassDef) or (where, node.name) in seen:
                continue
            seen.add((where, node.name))
            yield where, node
            waiting.extend((where, base.id) for base in node.bases if isinstance(base, ast.Name))


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Iterate over the statements of a module that run when it is imported."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _top([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _top([*node.body, *(s for h in node.handlers for s in h.body), *node.orelse])


def fields_of(node: ast.ClassDef) -> frozenset[str]:
    """Return the annotated names of a class."""
    return frozenset(
        n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    )
