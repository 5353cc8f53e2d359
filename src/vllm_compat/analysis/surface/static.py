"""Dotted names → symbols, from the entries of modules that were read and never imported.

Source trees and recorded releases share this resolver, so that they can't disagree. One class a concern,
each on top of the one before: :mod:`resolving` (names and imports), :mod:`classes` (ancestors and
members), :mod:`values` (types), :mod:`constructors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vllm_compat.analysis.surface.constructors import Constructors
from vllm_compat.analysis.surface.entries import FunctionEntry
from vllm_compat.analysis.surface.model import Symbol, SymbolKind
from vllm_compat.analysis.surface.things import UNKNOWN, Thing, Types


class _Members(Mapping[str, SymbolKind]):
    """A class's members, gathered when they are looked at."""

    def __init__(self, surface: StaticSurface, thing: Thing) -> None:
        self._surface = surface
        self._thing = thing
        self._all: dict[str, SymbolKind] | None = None

    def _table(self) -> dict[str, SymbolKind]:
        if self._all is None:
            self._all = self._surface._member_kinds(self._thing)
        return self._all

    def __getitem__(self, name: str) -> SymbolKind:
        return self._table()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table())

    def __len__(self) -> int:
        return len(self._table())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._table())


class StaticSurface(Constructors):
    """A surface that is read, not imported. Subclasses say how a module's body is got."""

    def __init__(self) -> None:
        super().__init__()
        self._symbols: dict[str, Symbol | None] = {}

    def has_module(self, name: str) -> bool:
        raise NotImplementedError

    def thing(self, path: str) -> Thing | None:
        """Return the thing behind a dotted path (see :meth:`resolve`)."""
        tokens = _tokens(path)
        if not tokens or not self._ours(tokens[0]):
            return None
        names = next((i for i, token in enumerate(tokens) if token in ("()", "[]")), len(tokens))
        start = 1
        while start < names and self.has_module(".".join(tokens[: start + 1])):
            start += 1
        current = self._module_at(".".join(tokens[:start]))
        if current is not None and start == names > 1:
            current = self._hiding(tokens[:start]) or current
        for token in tokens[start:]:
            if current is None:
                return None
            if token == "()":
                current = self._merge(self.result_of(current))
            elif token == "[]":
                current = self._item(current)
            else:
                current = self._step(current, token)
        return current

    def _hiding(self, module: Sequence[str]) -> Thing | None:
        """Return the class or function of a package that hides its module of the same name."""
        parent, name = ".".join(module[:-1]), module[-1]
        body = self._body(parent)
        if body is None or body.entry(name) is None:
            return None
        other = self._lookup(parent, name)
        return other if other is not None and other.kind in ("class", "function") else None

    def _merge(self, types: Types) -> Thing:
        """Make one thing of what a call may give."""
        if len(types.things) == 1 and not types.open:
            return types.things[0]
        if not types.things or types.open:
            return UNKNOWN
        return Thing("union", items=types.things)

    def _item(self, thing: Thing) -> Thing:
        types = Types((thing,)) if thing.kind in ("container", "union") else self.types_of(thing)
        for other in types.things:
            if other.kind == "container" and len(other.items) == 1:
                return other.items[0]
        return UNKNOWN

    def resolve(self, path: str) -> Symbol | None:
        """Return the symbol behind a dotted path, re-exports and inheritance followed.

        Beyond names a path may hold ``()`` and ``[]``: ``f().x`` is the attribute ``x`` of what
        ``f`` is annotated to return. A value of unknown type gives an ``open_ended`` attribute.
        None where the module or the name is missing.
        """
        if path not in self._symbols:
            thing = self.thing(path)
            self._symbols[path] = None if thing is None else self._symbol(path, thing)
        return self._symbols[path]

    def _dotted_types(self, types: Types) -> frozenset[str] | None:
        if types.open or any(t.kind not in ("class", "external") for t in types.things):
            return None
        names = {t.path for t in types.things}
        return frozenset(names | {"None"} if types.none else names)

    def result_types(self, path: str) -> frozenset[str] | None:
        thing = self.thing(path)
        return None if thing is None else self._dotted_types(self.result_of(thing))

    def value_types(self, path: str) -> frozenset[str] | None:
        thing = self.thing(path)
        return None if thing is None else self._dotted_types(self.types_of(thing))

    def parameter_types(self, path: str, name: str) -> frozenset[str] | None:
        thing = self.thing(path)
        if thing is not None and thing.kind == "class":
            thing = self._member(thing, "__init__")
        if thing is None or not isinstance(thing.entry, FunctionEntry):
            return None
        annotation = next((p.annotation for p in thing.entry.parameters if p.name == name), None)
        return self._dotted_types(self._annotated(thing.module, annotation, thing.owner))

    def ancestors(self, path: str) -> frozenset[str]:
        thing = self.thing(path)
        if thing is None or thing.kind != "class":
            return frozenset({path})
        return frozenset(base.path for base in self._mro(thing))

    def _naming(self, name: str) -> Iterator[str]:
        """Iterate over the dotted classes whose bases may mention a name."""
        return iter(())

    def deriving(self, path: str) -> tuple[str, ...]:
        found = [p for p in self._naming(path.rsplit(".", 1)[-1]) if path in self.ancestors(p)]
        return tuple(sorted(p for p in found if p != path))

    def _symbol(self, path: str, thing: Thing) -> Symbol:
        where = thing.path or path
        if thing.kind == "module":
            return Symbol(where, SymbolKind.MODULE)
        if thing.as_property is not None:
            return Symbol(where, SymbolKind.ATTRIBUTE, annotation=thing.as_property.returns)
        if thing.as_function is not None:
            return Symbol(
                where,
                SymbolKind.FUNCTION,
                thing.as_function.signature,
                lacking=thing.lacking,
                plain_method=thing.owner is not None and thing.as_function.takes_instance,
            )
        if thing.as_class is not None:
            return Symbol(
                where,
                SymbolKind.CLASS,
                self.constructor(thing),
                thing.as_class.bases,
                _Members(self, thing),
                self._open_ended(thing),
            )
        if thing.as_attribute is not None:
            return Symbol(
                where,
                SymbolKind.ATTRIBUTE,
                annotation=thing.as_attribute.annotation,
                open_ended=self.types_of(thing).open,
                lacking=thing.lacking,
            )
        if thing.kind == "container":
            return Symbol(path, SymbolKind.ATTRIBUTE, annotation=thing.path)
        return Symbol(path, SymbolKind.ATTRIBUTE, open_ended=True)


def _tokens(path: str) -> list[str]:
    """Split ``a.b().c[].d`` into ``a b () c [] d``."""
    tokens: list[str] = []
    for part in path.split("."):
        suffixes: list[str] = []
        while part.endswith(("()", "[]")):
            suffixes.insert(0, part[-2:])
            part = part[:-2]
        tokens.append(part)
        tokens += suffixes
    return tokens
