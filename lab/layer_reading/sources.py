"""Modules that are read and never imported: their classes, functions, and where names come from."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from lab.layer_reading.model import Place

SourceOf = Callable[[str], "str | None"]
"""The source of a module by its dotted name, or None."""


@lru_cache(maxsize=512)
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


@dataclass(frozen=True)
class Import:
    """Where a module takes a name from, and the conditions (`if` tests) around the import."""

    module: str
    name: str
    when: tuple[str, ...] = ()


class Sources:
    """Modules, their classes and functions, and where names come from; parsed once each."""

    def __init__(self, source_of: SourceOf) -> None:
        self._source_of = source_of
        self._modules: dict[str, ast.Module | None] = {}
        self._names: dict[str, dict[str, ast.AST]] = {}
        self._imports: dict[str, dict[str, list[Import]]] = {}
        self._values: dict[Place, Mapping[str, list[ast.expr]]] = {}
        self._mro: dict[Place, tuple[Place, ...]] = {}
        self._attributes: dict[tuple[Place, str], tuple[Place, ast.expr] | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """Return a module's tree, or None where its source is not to be had."""
        if name not in self._modules:
            source = self._source_of(name)
            self._modules[name] = None if source is None else _parsed(source)
        return self._modules[name]

    def names(self, module: str) -> Mapping[str, ast.AST]:
        """Return a module's classes, functions and assigned values by name."""
        if module not in self._names:
            found: dict[str, ast.AST] = {}
            for node in _statements(self.module(module)):
                if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.setdefault(node.name, node)
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    found.setdefault(node.targets[0].id, node.value)
                elif (
                    isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
                ):
                    found.setdefault(node.target.id, node.value)
            self._names[module] = found
        return self._names[module]

    def imports(self, module: str) -> Mapping[str, list[Import]]:
        """Return what a module imports by name, wherever in it the import stands."""
        if module not in self._imports:
            found: dict[str, list[Import]] = {}
            tree = self.module(module)
            for node, when in _imports(tree.body if tree else [], ()):
                base = node.module or ""
                if node.level:
                    parts = module.split(".")
                    drop = node.level - (1 if self.is_package(module) else 0)
                    parts = parts[: len(parts) - drop] if drop else parts
                    base = ".".join([*parts, *([base] if base else [])])
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name, []).append(
                        Import(base, alias.name, when)
                    )
            self._imports[module] = found
        return self._imports[module]

    def is_package(self, module: str) -> bool:
        """Whether a module is a folder with ``__init__``: one that has modules below it."""
        marker = getattr(self._source_of, "is_package", None)
        return bool(marker(module)) if marker else False

    def places(
        self, module: str, name: str, when: tuple[str, ...] = ()
    ) -> list[tuple[Place, tuple[str, ...]]]:
        """Return every class or function that a name of a module may stand for, with conditions."""
        return list(self._places(module, name, when, 0))

    def _places(
        self, module: str, name: str, when: tuple[str, ...], depth: int
    ) -> Iterator[tuple[Place, tuple[str, ...]]]:
        if depth > 6:
            return
        node = self.names(module).get(name)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield Place(module, name), when
            return
        if isinstance(node, ast.Name) and node.id != name:
            yield from self._places(module, node.id, when, depth + 1)
            return
        imports = self.imports(module).get(name, [])
        at_run_time = [one for one in imports if "TYPE_CHECKING" not in one.when]
        for found in at_run_time or imports:
            if found.module.partition(".")[0] == module.partition(".")[0]:
                yield from self._places(found.module, found.name, (*when, *found.when), depth + 1)

    def one(self, module: str, expression: ast.expr) -> Place | None:
        """Return the class or function that a name or dotted name stands for, or None."""
        if isinstance(expression, ast.Subscript):
            expression = expression.value
        if isinstance(expression, ast.Name):
            found = self.places(module, expression.id)
            return found[-1][0] if found else None
        return None

    def cls(self, place: Place) -> ast.ClassDef | None:
        """Return a class's tree."""
        node = self.names(place.module).get(place.name)
        return node if isinstance(node, ast.ClassDef) else None

    def mro(self, place: Place) -> tuple[Place, ...]:
        """Return a class and its base classes as far as sources are to be had, nearest first."""
        if place not in self._mro:
            self._mro[place] = (place,)  # a cycle ends here
            found = [place]
            node = self.cls(place)
            for base in node.bases if node else []:
                at = self.one(place.module, base)
                if at is not None and self.cls(at):
                    found += [one for one in self.mro(at) if one not in found]
            self._mro[place] = tuple(found)
        return self._mro[place]

    def method(
        self, place: Place, name: str, after: Place | None = None
    ) -> tuple[Place, ast.FunctionDef] | None:
        """Return a method and the class that defines it; ``after``: as ``super()`` there."""
        lineage = self.mro(place)
        if after is not None and after in lineage:
            lineage = lineage[lineage.index(after) + 1 :]
        for one in lineage:
            node = self.cls(one)
            for member in node.body if node else []:
                if isinstance(member, ast.FunctionDef) and member.name == name:
                    return one, member
        return None

    def attribute(self, place: Place, name: str) -> tuple[Place, ast.expr] | None:
        """Return what ``self.NAME`` is assigned in a class's methods (the last before ``Missing``)."""
        key = (place, name)
        if key not in self._attributes:
            self._attributes[key] = None
            for one in self.mro(place):
                values = self._assigned_in(one).get(name, [])
                real = [v for v in values if "Missing" not in text_of(v)] or values
                if real:
                    self._attributes[key] = (one, real[0])
                    break
        return self._attributes[key]

    def _assigned_in(self, place: Place) -> Mapping[str, list[ast.expr]]:
        if place not in self._values:
            found: dict[str, list[ast.expr]] = {}
            for name, value in _assigned(self.cls(place)):
                found.setdefault(name, []).append(value)
            self._values[place] = found
        return self._values[place]

    def text(self, place: Place) -> str:
        """Return the text of a class as the parser prints it (no comments)."""
        node = self.cls(place)
        return ast.unparse(node) if node else ""


def text_of(node: ast.AST) -> str:
    """Return a node's source as the parser prints it, once a node."""
    text = node.__dict__.get("_text")
    if text is None:
        text = node.__dict__["_text"] = ast.unparse(node)
    return str(text)


def _statements(tree: ast.Module | None) -> Iterator[ast.stmt]:
    pending: list[ast.stmt] = list(tree.body) if tree else []
    for node in pending:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _nested(node)


def _nested(node: ast.stmt) -> Iterator[ast.stmt]:
    for block in ("body", "orelse", "handlers", "finalbody"):
        for inner in getattr(node, block, []):
            if isinstance(inner, ast.ExceptHandler):
                yield from inner.body
                continue
            yield inner
            if isinstance(inner, (ast.If, ast.Try)):
                yield from _nested(inner)


def _imports(
    body: Iterable[ast.AST], when: tuple[str, ...]
) -> Iterator[tuple[ast.ImportFrom, tuple[str, ...]]]:
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield node, when
        elif isinstance(node, ast.If):
            test = text_of(node.test)
            yield from _imports(node.body, (*when, test))
            yield from _imports(
                node.orelse, when if test == "TYPE_CHECKING" else (*when, f"not ({test})")
            )
        else:
            inner = [
                n for n in ast.iter_child_nodes(node) if isinstance(n, (ast.stmt, ast.ExceptHandler))
            ]
            yield from _imports(inner, when)


def _assigned(node: ast.ClassDef | None) -> Iterator[tuple[str, ast.expr]]:
    for member in node.body if node else []:
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name) and member.value:
            yield member.target.id, member.value
        elif isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name):
            yield member.targets[0].id, member.value
    for inner in ast.walk(node) if node else []:
        if isinstance(inner, ast.Assign):
            for target in inner.targets:
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(one, ast.Attribute) and text_of(one.value) == "self":
                        yield one.attr, inner.value
        elif (
            isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Attribute) and inner.value
        ):
            yield inner.target.attr, inner.value
