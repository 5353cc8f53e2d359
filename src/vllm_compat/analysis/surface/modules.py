"""A module's syntax → the entries of its names."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from vllm_compat.analysis.surface.bodies import class_entry
from vllm_compat.analysis.surface.entries import (
    AttributeEntry,
    Entry,
    FunctionEntry,
    ImportEntry,
    one_of,
)
from vllm_compat.analysis.surface.functions import function_entry
from vllm_compat.analysis.surface.syntax import (
    annotation_text,
    blocks,
    resolve_relative,
    sketch,
    uncollected,
)

Maker = Callable[[], Entry | None]


class ModuleSyntax:
    """A parsed module, whose entries are made when they are asked for."""

    def __init__(self, source: bytes | str, module: str, is_package: bool, file: str) -> None:
        with uncollected():
            tree = ast.parse(source, filename=file)
        self.module = module
        self.is_package = is_package
        self.stars: list[str] = []
        self._nodes: dict[str, list[Maker]] = {}
        self._typing: dict[str, list[Maker]] = {}
        self._made: dict[str, Entry | None] = {}
        self._exported: list[str] | None = None
        getter: ast.FunctionDef | None = None
        tables: dict[str, ast.Dict] = {}
        for node, typing in blocks(tree.body):
            if isinstance(node, ast.FunctionDef) and node.name == "__getattr__" and not typing:
                getter = node
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                tables.update({t.id: node.value for t in targets if isinstance(t, ast.Name)})
            self._take(node, typing)
        served = self._served(getter, tables) if getter is not None else {}
        self.dynamic = getter is not None and not served
        for name, entry in served.items():
            self._serve(name, entry)

    # Reading.

    def _put(self, name: str, make: Maker, typing: bool) -> None:
        (self._typing if typing else self._nodes).setdefault(name, []).append(make)

    def _take(self, node: ast.stmt, typing: bool) -> None:
        """Take in what a statement defines; its entry is made when it is asked for."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._put(node.name, partial(function_entry, node, False), typing)
        elif isinstance(node, ast.ClassDef):
            self._put(node.name, partial(class_entry, node), typing)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                target = alias.name if alias.asname else name
                self._put(name, partial(ImportEntry, target), typing)
        elif isinstance(node, ast.ImportFrom):
            self._take_import(node, typing)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self._put(node.target.id, partial(_attribute, node.annotation, node.value), typing)
        elif isinstance(node, ast.Assign):
            for written in node.targets:
                self._take_assigned(written, node.value, typing)

    def _take_import(self, node: ast.ImportFrom, typing: bool) -> None:
        origin = resolve_relative(self.module, self.is_package, node.module, node.level)
        for alias in node.names:
            if alias.name != "*":
                make = partial(ImportEntry, origin, alias.name)
                self._put(alias.asname or alias.name, make, typing)
            elif not typing:
                self.stars.append(origin)

    def _take_assigned(self, target: ast.expr, value: ast.expr, typing: bool) -> None:
        if isinstance(target, ast.Name):
            if target.id == "__all__":
                self._read_all(value)
            self._put(target.id, partial(_attribute, None, value), typing)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for item in target.elts:
                if isinstance(item, ast.Name):
                    self._put(item.id, AttributeEntry, typing)

    def _read_all(self, value: ast.expr) -> None:
        if isinstance(value, (ast.List, ast.Tuple)):
            names = [e.value for e in value.elts if isinstance(e, ast.Constant)]
            self._exported = [n for n in names if isinstance(n, str)]

    # Names that a module's ``__getattr__`` serves.

    def _served(self, getter: ast.FunctionDef, tables: Mapping[str, ast.Dict]) -> dict[str, Entry]:
        """Return the names that ``__getattr__`` serves: keys of tables, and what it compares with."""
        served: dict[str, Entry] = {}
        for node in ast.walk(getter):
            if isinstance(node, ast.Name) and node.id in tables:
                served.update(self._served_by(tables[node.id]))
            elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Name):
                for item in node.comparators:
                    if isinstance(item, ast.Constant) and isinstance(item.value, str):
                        served.setdefault(item.value, AttributeEntry())
        return served

    def _served_by(self, table: ast.Dict) -> Iterator[tuple[str, Entry]]:
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                text = value.value if isinstance(value, ast.Constant) else None
                place = self._place(text, key.value) if isinstance(text, str) else None
                yield key.value, place or AttributeEntry()

    def _place(self, text: str, name: str) -> ImportEntry | None:
        """Return what ``module:name`` or ``.module`` in a table means, where it means that."""
        where, _, other = text.partition(":")
        if where.startswith("."):
            level = len(where) - len(where.lstrip("."))
            where = resolve_relative(self.module, self.is_package, where.lstrip("."), level)
        if "." in where and where.replace(".", "").isidentifier():
            return ImportEntry(where, other or name)
        return None

    def _serve(self, name: str, entry: Entry) -> None:
        """Take a served name in; where the table does not say what it is, type checkers may know."""
        if name in self._nodes:
            return
        makers = self._typing.get(name) if isinstance(entry, AttributeEntry) else None
        told = makers[0]() if makers else None
        self._nodes[name] = [lambda: told or entry]

    # Asking.

    def may_have(self, name: str) -> bool:
        """Return whether the module may have a name that could not be read."""
        return self.dynamic

    def names(self) -> list[str]:
        """Return the names that exist at run time, in order."""
        return list(self._nodes)

    def typing_names(self) -> list[str]:
        """Return the names that only type checkers see, in order."""
        return [name for name in self._typing if name not in self._nodes]

    @property
    def exported(self) -> list[str] | None:
        """The module's ``__all__`` where it is a plain list, else None."""
        return self._exported

    def _make(self, makers: list[Maker]) -> Entry | None:
        entries: list[Entry] = []
        for make in makers:
            entry = make()
            if entry is not None and entry not in entries:
                entries.append(entry)
        if len(entries) > 1:
            # A name that is first None or a plain value and then defined is the definition.
            entries = [e for e in entries if not isinstance(e, AttributeEntry)] or entries
            # An overload counts where no definition follows.
            entries = [e for e in entries if not _is_overload(e)] or entries[-1:]
        return one_of(entries)

    def entry(self, name: str) -> Entry | None:
        """Return the entry of a name that exists at run time, or None."""
        if name not in self._made:
            makers = self._nodes.get(name)
            self._made[name] = self._make(makers) if makers else None
        return self._made[name]

    def typing_entry(self, name: str) -> Entry | None:
        """Return the entry of a name that only type checkers see, or None."""
        makers = self._typing.get(name)
        return self._make(makers) if makers else None


def _attribute(annotation: ast.expr | None, value: ast.expr | None) -> AttributeEntry:
    return AttributeEntry(annotation_text(annotation), sketch(value, {}))


def _is_overload(entry: Entry) -> bool:
    return isinstance(entry, FunctionEntry) and entry.is_overload
