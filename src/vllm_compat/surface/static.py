"""Dotted names → symbols, from the entries of modules that were read and never imported.

Source trees and recorded releases share this resolver, so that they can't disagree.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

from vllm_compat.surface.model import (
    Parameter,
    ParameterKind,
    Signature,
    Surface,
    Symbol,
    SymbolKind,
)
from vllm_compat.surface.syntax import Entry

KINDS = (
    ParameterKind.POSITIONAL_ONLY,
    ParameterKind.POSITIONAL_OR_KEYWORD,
    ParameterKind.VAR_POSITIONAL,
    ParameterKind.KEYWORD_ONLY,
    ParameterKind.VAR_KEYWORD,
)

# Bases from outside vLLM that add nothing a downstream would ask a vLLM class for.
_CLOSED_BASES = frozenset(
    {
        "builtins.object",
        "abc.ABC",
        "enum.Enum",
        "enum.IntEnum",
        "enum.StrEnum",
        "enum.Flag",
        "enum.IntFlag",
        "typing.Generic",
        "typing.Protocol",
        "typing_extensions.Protocol",
        "typing_extensions.Generic",
        "typing.NamedTuple",
        "msgspec.Struct",
    }
)
_ENUMS = frozenset({"enum.Enum", "enum.IntEnum", "enum.StrEnum", "enum.Flag", "enum.IntFlag"})
# What these bases from outside give their classes.
_INHERITED = {
    **dict.fromkeys(_ENUMS, ("name", "value")),
    "typing.NamedTuple": ("_asdict", "_field_defaults", "_fields", "_make", "_replace"),
}
_TRANSPARENT = frozenset(
    {"Annotated", "ClassVar", "Final", "InitVar", "SkipValidation", "Required", "NotRequired"}
)
_ITEM_CONTAINERS = frozenset(
    {"list", "List", "Sequence", "MutableSequence", "deque", "Deque", "tuple", "Tuple"}
)
_VALUE_CONTAINERS = frozenset(
    {"dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "DefaultDict", "OrderedDict"}
)
_BUILTIN_TYPES = frozenset(
    {"list", "dict", "tuple", "set", "frozenset", "str", "bytes", "int", "float", "bool"}
)
_TYPING_BUILTINS = {"List": "list", "Dict": "dict", "Tuple": "tuple", "Set": "set"}


class Body(Protocol):
    """What is known of one module."""

    @property
    def dynamic(self) -> bool:
        """Whether the module may have names that can't be read: ``__getattr__``."""

    @property
    def stars(self) -> Sequence[str]:
        """The modules of ``from … import *``."""

    @property
    def exported(self) -> list[str] | None:
        """``__all__``, where it is a plain list."""

    def may_have(self, name: str) -> bool:
        """Whether the module may have a name that could not be read."""

    def names(self) -> list[str]:
        """Names that exist at run time."""

    def typing_names(self) -> list[str]:
        """Names that only type checkers see."""

    def entry(self, name: str) -> Entry | None:
        """The entry of a run-time name."""

    def typing_entry(self, name: str) -> Entry | None:
        """The entry of a name that only type checkers see."""


@dataclass(frozen=True)
class Thing:
    """What a name was resolved to.

    ``kind`` is ``module``, ``class``, ``function``, ``attribute``, ``external`` (outside vLLM,
    known by its dotted name), ``container`` (a builtin container of ``items``), ``union`` (one of
    ``items``) or ``unknown``.
    ``module`` and ``path`` say where it is defined; ``owner`` is the class it was found in.
    """

    kind: str
    module: str = ""
    path: str = ""
    entry: Entry = field(default_factory=list, compare=False, hash=False, repr=False)
    owner: Thing | None = None
    items: tuple[Thing, ...] = ()
    lacking: tuple[str, ...] = ()


UNKNOWN = Thing("unknown")

_ANYTHING = Signature(
    (
        Parameter("args", ParameterKind.VAR_POSITIONAL),
        Parameter("kwargs", ParameterKind.VAR_KEYWORD),
    )
)


@dataclass(frozen=True)
class Types:
    """The types that an expression may have: those known, and whether there may be more."""

    things: tuple[Thing, ...] = ()
    open: bool = False
    none: bool = False


@lru_cache(maxsize=8192)
def _expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _strip_subscript(text: str) -> str:
    return text.partition("[")[0].strip()


def _decorator_name(text: str) -> str:
    return text.partition("(")[0].strip()


def _decorator_keywords(text: str) -> dict[str, Any]:
    node = _expression(text)
    if not isinstance(node, ast.Call):
        return {}
    return {k.arg: k.value.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)}


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


def _annotated(members: Mapping[str, Entry]) -> Iterator[tuple[str, Entry]]:
    """Iterate over the members that may be fields; a record knows them without reading the others."""
    for name in getattr(members, "annotated", members):
        entry = members[name]
        if entry[0] == "a":
            yield name, entry


class StaticSurface(Surface):
    """A surface that is read, not imported. Subclasses say how a module's body is got."""

    package = "vllm"

    def __init__(self) -> None:
        self._symbols: dict[str, Symbol | None] = {}
        self._lookups: dict[tuple[str, str, bool], Thing | None] = {}
        self._mros: dict[str, list[Thing]] = {}
        self._asked: set[str] = set()

    # What subclasses supply.

    def _body(self, module: str) -> Body | None:
        """Return the module's body, or None where there is none to be read."""
        raise NotImplementedError

    # Names.

    def _ours(self, dotted: str) -> bool:
        return dotted == self.package or dotted.startswith(self.package + ".")

    def _lookup(self, module: str, name: str, typing: bool = False) -> Thing | None:
        """Return what ``module.name`` is; ``typing`` also sees names of ``TYPE_CHECKING``."""
        key = (module, name, typing)
        if key in self._lookups:
            return self._lookups[key]
        self._lookups[key] = None  # an import that leads back here finds nothing
        found = self._find_name(module, name, typing)
        self._lookups[key] = found
        return found

    def _find_name(self, module: str, name: str, typing: bool) -> Thing | None:
        body = self._body(module)
        if body is None:
            if self.has_module(f"{module}.{name}"):
                return Thing("module", f"{module}.{name}", f"{module}.{name}")
            # A folder without __init__.py holds modules only; a compiled module, anything.
            return UNKNOWN if self._is_opaque(module) else None
        entry = body.entry(name)
        if entry is not None:
            thing = self._enter(module, name, entry)
            if thing is not None:
                return thing
        for star in body.stars:
            if not self._ours(star):
                continue
            other = self._body(star)
            if other is not None:
                exported = other.exported
                visible = name in exported if exported is not None else not name.startswith("_")
                thing = self._lookup(star, name) if visible else None
                own = thing is not None and thing.path != f"{star}.{name}"
                if own or (thing is not None and other.entry(name) is not None):
                    return thing
        if self.has_module(f"{module}.{name}"):
            return Thing("module", f"{module}.{name}", f"{module}.{name}")
        if typing or body.dynamic:
            entry = body.typing_entry(name)
            if entry is not None:
                return self._enter(module, name, entry)
        if body.may_have(name) or any(not self._ours(star) for star in body.stars):
            return UNKNOWN
        return None

    def _is_opaque(self, module: str) -> bool:
        """Whether a module without source may hold any name."""
        return False

    def _enter(self, module: str, name: str, entry: Entry) -> Thing | None:
        """Turn a module-level entry into a thing, imports followed."""
        tag = entry[0]
        if tag == "u":
            found: Thing | None = None
            for alternative in entry[1]:
                thing = self._enter(module, name, alternative)
                if thing is None:
                    continue
                if thing.kind not in ("external", "unknown"):
                    return thing
                found = found or thing
            return found
        if tag == "c":
            return Thing("class", module, f"{module}.{name}", entry)
        if tag == "f":
            return Thing("function", module, f"{module}.{name}", entry)
        if tag == "a":
            value = entry[2]
            if entry[1] is None and value and not value.endswith("()"):
                # ``Old = New``: an alias of another name in sight.
                thing = self._name_in(module, value, seen=name)
                if thing is not None and thing.kind in ("class", "function", "module"):
                    return thing
            return Thing("attribute", module, f"{module}.{name}", entry)
        origin, target = entry[1], entry[2]
        if not self._ours(origin):
            return Thing("external", module, f"{origin}.{target}" if target else origin)
        if target is None:
            return Thing("module", origin, origin) if self.has_module(origin) else UNKNOWN
        if origin == module and target == name:
            return None
        found = self._lookup(origin, target)
        return found if found is not None else UNKNOWN

    def _name_in(self, module: str, dotted: str, seen: str | None = None) -> Thing | None:
        """Return what a dotted name means inside a module."""
        head, *rest = dotted.split(".")
        if not head.isidentifier() or (seen == head and not rest):
            return None
        if head == self.package:
            return self._walk_names(dotted)
        thing = self._lookup(module, head, typing=True)
        if thing is None:
            if hasattr(builtins, head):
                return Thing("external", path=f"builtins.{dotted}")
            return None
        for part in rest:
            if thing is None:
                return None
            thing = self._step(thing, part)
        return thing

    def _walk_names(self, dotted: str) -> Thing | None:
        thing: Thing | None = self._start(dotted.split(".")[0])
        for part in dotted.split(".")[1:]:
            if thing is None:
                return None
            thing = self._step(thing, part)
        return thing

    def _start(self, head: str) -> Thing | None:
        return Thing("module", head, head) if head == self.package else None

    def _step(self, thing: Thing, name: str) -> Thing | None:
        """Return the attribute ``name`` of a thing; None where it surely lacks it."""
        if thing.kind == "module":
            return self._lookup(thing.module, name)
        if thing.kind == "class":
            found = self._member(thing, name)
            if found is None and (self._open_ended(thing) or self._is_protocol(thing)):
                return UNKNOWN
            return found
        if thing.kind == "external":
            head, _, rest = thing.path.partition(".")
            if head == "builtins" and rest in _BUILTIN_TYPES:
                return UNKNOWN if hasattr(getattr(builtins, rest), name) else None
            return Thing("external", thing.module, f"{thing.path}.{name}")
        if thing.kind == "container":
            return UNKNOWN if hasattr(getattr(builtins, thing.path), name) else None
        if thing.kind == "union":
            return self._through(Types(thing.items), name)
        if thing.kind in ("attribute", "function"):
            if thing.kind == "function" and "p" not in thing.entry[3]:
                return UNKNOWN
            return self._through(self.types_of(thing), name)
        return UNKNOWN

    def _through(self, types: Types, name: str) -> Thing | None:
        """Look a name up in every type that a value may have."""
        found: Thing | None = None
        lacking: list[str] = []
        for thing in types.things:
            other = self._step(thing, name)
            if other is None:
                lacking.append(thing.path)
            elif found is None or found.kind == "unknown":
                found = other
        if found is None:
            return UNKNOWN if types.open or not types.things else None
        if lacking and found.kind != "unknown":
            return Thing(
                found.kind,
                found.module,
                found.path,
                found.entry,
                found.owner,
                found.items,
                tuple(sorted(lacking)),
            )
        return found

    # Classes.

    def _bases(self, thing: Thing) -> list[Thing]:
        bases = []
        for text in thing.entry[1]:
            base = self._name_in(thing.module, _strip_subscript(text))
            bases.append(base if base is not None else UNKNOWN)
        return bases

    def _mro(self, thing: Thing) -> list[Thing]:
        """Return the class and its ancestors in method resolution order."""
        known = self._mros.get(thing.path)
        if known is not None:
            return known
        self._mros[thing.path] = [thing]  # a cycle ends here
        chains = [
            list(self._mro(base)) if base.kind == "class" else [base] for base in self._bases(thing)
        ]
        chains.append([chain[0] for chain in chains])
        order = [thing]
        while any(chains):
            for chain in chains:
                if chain and not any(chain[0] in other[1:] for other in chains):
                    head = chain[0]
                    break
            else:
                head = next(chain[0] for chain in chains if chain)
            order.append(head)
            chains = [[t for t in chain if t != head] for chain in chains]
        self._mros[thing.path] = order
        return order

    def _open_ended(self, thing: Thing) -> bool:
        """Whether the class may have members that can't be read."""
        for base in self._mro(thing):
            if base.kind == "class":
                if "g" in base.entry[5]:
                    return True
            elif base.path not in _CLOSED_BASES:
                head, _, rest = base.path.partition(".")
                if head != "builtins" or not hasattr(builtins, rest):
                    return True
        return False

    def _is_protocol(self, thing: Thing) -> bool:
        """Whether the class is a protocol, which promises less than its values have."""
        return any(base.path.endswith(".Protocol") for base in self._mro(thing))

    def _member(self, thing: Thing, name: str) -> Thing | None:
        """Return a class's own or inherited member."""
        annotation: Thing | None = None
        for base in self._mro(thing):
            if base.kind == "class":
                entry = base.entry[4].get(name)
                if entry is None:
                    continue
                found = self._enter_member(base, name, entry)
                if found.kind == "attribute" and "v" in found.entry[3] and not _says_type(found):
                    # Set by a method: a base may say more of it, or define a method of this name.
                    annotation = annotation or found
                    continue
                if annotation is not None and found.kind != "attribute":
                    return annotation
                return found
            if name in _INHERITED.get(base.path, ()):
                entry = ["a", None, None, ""]
                return Thing("attribute", thing.module, f"{thing.path}.{name}", entry)
            head, _, rest = base.path.partition(".")
            if head == "builtins" and hasattr(getattr(builtins, rest, None), name):
                return UNKNOWN
        if annotation is not None:
            return annotation
        # ``__dict__``, ``__members__``, ``__dataclass_fields__``, …: given by metaclass or decorator.
        return UNKNOWN if name.startswith("__") and name.endswith("__") else None

    def _enter_member(self, owner: Thing, name: str, entry: Entry) -> Thing:
        path = f"{owner.path}.{name}"
        if entry[0] == "u":
            kinds = {e[0] for e in entry[1]}
            if kinds != {"a"}:
                entry = next(e for e in entry[1] if e[0] != "a")
            else:
                annotated = next((e for e in entry[1] if e[1]), entry[1][0])
                flags = "v" if all("v" in e[3] for e in entry[1]) else ""
                merged = ["a", annotated[1], annotated[2], flags, entry[1]]
                return Thing("attribute", owner.module, path, merged, owner)
        if entry[0] == "c":
            return Thing("class", owner.module, path, entry, owner)
        if entry[0] == "f":
            return Thing("function", owner.module, path, entry, owner)
        if "x" in entry[3] and entry[2] and not entry[2].endswith("()"):
            # ``metadata_cls = Metadata``, ``old = new``: another name for what is in sight.
            same = owner.entry[4].get(entry[2])
            if same is not None and same[0] == "f":
                return Thing("function", owner.module, path, same, owner)
            other = self._name_in(owner.module, entry[2]) if same is None else None
            if other is not None and other.kind in ("class", "function"):
                return other
        return Thing("attribute", owner.module, path, entry, owner)

    def _member_kinds(self, thing: Thing) -> dict[str, SymbolKind]:
        found: dict[str, SymbolKind] = {}
        for base in self._mro(thing):
            if base.kind != "class":
                continue
            for name, entry in base.entry[4].items():
                if name not in found:
                    member = self._enter_member(base, name, entry)
                    found[name] = self._kind(member)
        for base in self._mro(thing):
            for name in _INHERITED.get(base.path, ()):
                found.setdefault(name, SymbolKind.ATTRIBUTE)
        return dict(sorted(found.items()))

    def _is_enum(self, thing: Thing) -> bool:
        return any(base.path in _ENUMS for base in self._mro(thing))

    @staticmethod
    def _kind(thing: Thing) -> SymbolKind:
        if thing.kind == "function":
            return SymbolKind.ATTRIBUTE if "p" in thing.entry[3] else SymbolKind.FUNCTION
        return {
            "module": SymbolKind.MODULE,
            "class": SymbolKind.CLASS,
        }.get(thing.kind, SymbolKind.ATTRIBUTE)

    # Types.

    def types_of(self, thing: Thing) -> Types:
        """Return what a value behind a name may be."""
        if thing.kind == "class":
            return Types((thing,))
        if thing.kind in ("container", "external"):
            return Types((thing,))
        if thing.kind == "function":
            if "p" in thing.entry[3]:
                return self._annotated(thing.module, thing.entry[2], thing.owner)
            return Types(open=True)
        if thing.kind != "attribute":
            return Types(open=True)
        if thing.path in self._asked:
            return Types(open=True)  # ``self.x = other.x``: it says nothing but that it is the same
        self._asked.add(thing.path)
        try:
            return self._attribute_types(thing)
        finally:
            self._asked.discard(thing.path)

    def _attribute_types(self, thing: Thing) -> Types:
        entries = thing.entry[4] if len(thing.entry) > 4 else [thing.entry]
        things: list[Thing] = []
        is_open = none = False
        for entry in entries:
            types = self._value(thing, entry)
            if types is None:
                is_open = True
                continue
            things += [t for t in types.things if t not in things]
            is_open |= types.open
            none |= types.none
        return Types(tuple(things), is_open or not things, none)

    def _value(self, thing: Thing, entry: Entry) -> Types | None:
        annotation, value = entry[1], entry[2]
        assigned: Types | None = None
        if value and "v" in entry[3]:
            if value == "None":
                assigned = Types(none=True)
            elif value.startswith("@"):
                text, _, rest = value[1:].partition("@")
                assigned = self._annotated(thing.module, text, thing.owner)
                for part in rest.lstrip(".").split(".") if rest else []:
                    other = self._through(assigned, part)
                    assigned = self.types_of(other) if other is not None else Types(open=True)
            elif value.startswith("self."):
                assigned = Types(open=True)
                call = value.endswith("()") and value.count(".") == 1
                if thing.owner is not None and call:
                    method = self._member(thing.owner, value[len("self.") : -2])
                    assigned = self.result_of(method) if method is not None else assigned
                elif thing.owner is not None and "()" not in value:
                    current: Thing | None = thing.owner
                    for part in value.split(".")[1:]:
                        if current is thing.owner and f"{thing.owner.path}.{part}" == thing.path:
                            current = None
                        current = self._step(current, part) if current is not None else None
                    if (
                        current is not None
                        and current.kind == "attribute"
                        and "v" in current.entry[3]
                        and not current.entry[1]
                    ):
                        current = None  # one step is enough: no chains of guesses
                    if current is not None:
                        assigned = self.types_of(current)
            else:
                name = value.removesuffix("()")
                other = self._name_in(thing.module, name)
                if other is not None and value.endswith("()"):
                    assigned = self.result_of(other)
                elif other is not None and other.kind in ("class", "attribute"):
                    assigned = self.types_of(other) if other.kind == "attribute" else None
        elif value and value.endswith("()") and annotation is None:
            other = self._name_in(thing.module, value[:-2])
            if other is not None:
                assigned = self.result_of(other)
        if annotation:
            types = self._annotated(thing.module, annotation, thing.owner)
            if assigned is not None and assigned.things and not assigned.open:
                return self._with(types, assigned.things)
            return types
        return assigned

    def _derives(self, thing: Thing, types: Types) -> bool:
        return any(base in types.things for base in self._mro(thing))

    def result_of(self, thing: Thing) -> Types:
        """Return what calling a thing gives."""
        if thing.kind == "class":
            return Types((thing,))
        if thing.kind == "function" and "p" not in thing.entry[3]:
            if "g" in thing.entry[3]:
                return Types(open=True)
            types = self._annotated(thing.module, thing.entry[2], thing.owner)
            if len(thing.entry) > 5:
                made = [self._name_in(thing.module, text[:-2]) for text in thing.entry[5]]
                types = self._with(types, [t for t in made if t is not None])
            return types
        return Types(open=True)

    def _with(self, types: Types, others: Iterable[Thing]) -> Types:
        """Add what is made or assigned to what is annotated.

        It may be another generation of the class than the annotation says.
        """
        extra = [
            t
            for t in others
            if t.kind == "class" and t not in types.things and not self._derives(t, types)
        ]
        return Types((*types.things, *extra), types.open, types.none)

    def _annotated(self, module: str, text: str | None, owner: Thing | None) -> Types:
        if not text:
            return Types(open=True)
        node = _expression(text)
        return self._type(module, node, owner, 0) if node is not None else Types(open=True)

    def _type(self, module: str, node: ast.expr, owner: Thing | None, depth: int) -> Types:
        if depth > 8:
            return Types(open=True)
        if isinstance(node, ast.Constant):
            if node.value is None:
                return Types(none=True)
            if isinstance(node.value, str):
                inner = _expression(node.value)
                if inner is not None:
                    return self._type(module, inner, owner, depth + 1)
            return Types(open=True)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self._union(module, [node.left, node.right], owner, depth)
        if isinstance(node, ast.Subscript):
            name = ast.unparse(node.value).rsplit(".", 1)[-1]
            inner = node.slice
            parts = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
            if name in _TRANSPARENT and parts:
                return self._type(module, parts[0], owner, depth + 1)
            if name == "Optional":
                none = ast.Constant(value=None)
                return self._union(module, [*parts, none], owner, depth)
            if name == "Union":
                return self._union(module, parts, owner, depth)
            if name in ("type", "Type"):
                return self._type(module, parts[0], owner, depth + 1)
            if name in _ITEM_CONTAINERS or name in _VALUE_CONTAINERS:
                item = parts[-1] if name in _VALUE_CONTAINERS else parts[0]
                items = Types(open=True)
                if not (name in ("tuple", "Tuple") and len(parts) > 1 and not _ellipsis(parts[1])):
                    items = self._type(module, item, owner, depth + 1)
                builtin = _TYPING_BUILTINS.get(name, name)
                contents = items.things if not items.open else ()
                if builtin in _BUILTIN_TYPES:
                    return Types((Thing("container", module, builtin, items=contents),))
                return Types((Thing("unknown", items=contents),), open=True)
            thing = self._name_in(module, ast.unparse(node.value))
            known = thing is not None and thing.kind in ("class", "external")
            return Types((thing,)) if thing is not None and known else Types(open=True)
        if isinstance(node, (ast.Name, ast.Attribute)):
            dotted = ast.unparse(node)
            if dotted == "Self" and owner is not None:
                return Types((owner,))
            if dotted.rsplit(".", 1)[-1] in ("Any", "object"):
                return Types(open=True)
            if owner is not None and dotted == owner.path.rsplit(".", 1)[-1]:
                return Types((owner,))
            thing = self._name_in(module, dotted)
            if thing is None:
                return Types(open=True)
            if thing.kind == "class":
                return Types((thing,))
            if thing.kind == "external" and thing.path.startswith("builtins."):
                builtin = thing.path.partition(".")[2]
                if builtin in ("list", "dict", "tuple", "set"):
                    return Types((Thing("container", module, builtin),))
                if builtin in _BUILTIN_TYPES:
                    return Types((thing,))
                return Types(open=True)
            if thing.kind == "external" and thing.path.rsplit(".", 1)[-1][:1].isupper():
                return Types((thing,))
            return Types(open=True)
        return Types(open=True)

    def _union(self, module: str, nodes: list[ast.expr], owner: Thing | None, depth: int) -> Types:
        things: list[Thing] = []
        is_open = none = False
        for node in nodes:
            types = self._type(module, node, owner, depth + 1)
            things += [t for t in types.things if t not in things]
            is_open |= types.open
            none |= types.none
        return Types(tuple(things), is_open, none)

    # Signatures.

    @staticmethod
    def _function_signature(entry: Entry) -> Signature:
        return Signature(
            tuple(
                Parameter(name, KINDS[kind], default, annotation)
                for name, kind, annotation, default in entry[1]
            ),
            entry[2],
            tuple(entry[4]) if len(entry) > 4 else (),
        )

    def _family(self, thing: Thing) -> str | None:
        """Say which of the libraries that write constructors made this class, if any.

        ``dataclass``, ``model`` (pydantic), ``struct`` (msgspec), ``tuple`` (NamedTuple), ``enum``.
        """
        if thing.kind != "class":
            return None
        for text in thing.entry[2]:
            if self._is_dataclass_decorator(thing.module, text):
                return "dataclass"
        for base in self._mro(thing)[1:]:
            last = base.path.rsplit(".", 1)[-1]
            if base.path == "msgspec.Struct":
                return "struct"
            if last == "BaseModel" and base.path.startswith("pydantic"):
                return "model"
            if last == "BaseSettings":
                return "model"
            if last == "NamedTuple":
                return "tuple"
            if last == "TypedDict":
                return "dict"
        return None

    def _is_dataclass_decorator(self, module: str, text: str) -> bool:
        name = _decorator_name(text)
        last = name.rsplit(".", 1)[-1]
        if last in ("dataclass", "pydantic_dataclass"):
            return True
        thing = self._name_in(module, name)
        if thing is None:
            return False
        if thing.kind == "external":
            return thing.path.endswith(".dataclass") or thing.path in (
                "attr.s",
                "attr.define",
                "attrs.define",
                "attrs.frozen",
            )
        # vLLM's own decorators that wrap pydantic's say so to type checkers.
        return thing.kind == "function" and "t" in thing.entry[3]

    def constructor(self, thing: Thing) -> Signature | None:
        """Return the signature of a class's constructor; None where it can't be known."""
        order = self._mro(thing)
        if self._is_enum(thing):
            return Signature((Parameter("value", ParameterKind.POSITIONAL_OR_KEYWORD),))
        for base in order:
            if base.kind != "class":
                if base.path.endswith(".Protocol"):
                    return _ANYTHING
                if base.path in _CLOSED_BASES:
                    continue
                return None
            members = base.entry[4]
            own = members.get("__init__")
            family = self._family(base)
            if own is not None and own[0] in ("f", "u"):
                function = self._enter_member(base, "__init__", own)
                if function.kind == "function":
                    return replace(self._function_signature(function.entry), returns=None)
            if family == "dataclass":
                if not any(
                    _decorator_keywords(text).get("init") is False
                    for text in base.entry[2]
                    if self._is_dataclass_decorator(base.module, text)
                ):
                    return self._fields(base, family)
            elif family == "dict":
                return None
            elif family is not None:
                return self._fields(base, family)
            made = members.get("__new__")
            if made is not None and made[0] == "f":
                return replace(self._function_signature(made), returns=None)
        return Signature()

    def _fields(self, thing: Thing, family: str) -> Signature:
        """Return the constructor that a library writes from annotated fields."""
        fields: dict[str, Parameter] = {}
        for base in reversed(self._mro(thing)):
            if base.kind != "class" or (self._family(base) != family and base is not thing):
                continue
            kw_only = family == "model"
            if family == "dataclass":
                kw_only = any(_decorator_keywords(t).get("kw_only") is True for t in base.entry[2])
            elif family == "struct":
                kw_only = base.entry[3].get("kw_only") == "True"
            for name, entry in _annotated(base.entry[4]):
                annotation, default, flags = entry[1], entry[2], entry[3]
                if "x" in flags:
                    # ``name = value`` without annotation gives an inherited field a new default.
                    continue
                if "v" in flags:
                    continue
                if annotation is None or _strip_subscript(annotation).endswith("ClassVar"):
                    continue
                if family == "model" and (name.startswith("_") or name == "model_config"):
                    continue
                if "n" in flags:
                    fields.pop(name, None)
                    continue
                if "d" not in flags:
                    default = None
                elif "f" in flags:
                    default = f"<{default}>"
                only = kw_only or "k" in flags
                kind = ParameterKind.KEYWORD_ONLY if only else ParameterKind.POSITIONAL_OR_KEYWORD
                fields[name] = Parameter(name, kind, default, annotation)
        plain = [p for p in fields.values() if p.kind is not ParameterKind.KEYWORD_ONLY]
        last = [p for p in fields.values() if p.kind is ParameterKind.KEYWORD_ONLY]
        if family == "model" and self._allows_extra(thing):
            last.append(Parameter("extra_data", ParameterKind.VAR_KEYWORD))
        return Signature((*plain, *last))

    def _allows_extra(self, thing: Thing) -> bool:
        """Whether a pydantic model keeps keywords that are no fields."""
        for base in self._mro(thing):
            if base.kind == "class" and "model_config" in base.entry[4]:
                text = str(base.entry[4]["model_config"][2] or "")
                if "extra" in text:
                    return "allow" in text
        return False

    # The public face.

    def has_module(self, name: str) -> bool:
        raise NotImplementedError

    def thing(self, path: str) -> Thing | None:
        """Return the thing behind a dotted path (see :meth:`resolve`)."""
        tokens = _tokens(path)
        if not tokens or not self._ours(tokens[0]):
            return None
        names = 0
        while names < len(tokens) and tokens[names] not in ("()", "[]"):
            names += 1
        start = 1
        while start < names and self.has_module(".".join(tokens[: start + 1])):
            start += 1
        current: Thing | None
        module = ".".join(tokens[:start])
        if not self.has_module(module):
            return None
        current = Thing("module", module, module)
        if start == names > 1:
            # A name of the package hides a module of the same name.
            parent = ".".join(tokens[: start - 1])
            body = self._body(parent)
            if body is not None and body.entry(tokens[start - 1]) is not None:
                other = self._lookup(parent, tokens[start - 1])
                if other is not None and other.kind in ("class", "function"):
                    current = other
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
        if thing is None or thing.kind != "function":
            return None
        annotation = next((p[2] for p in thing.entry[1] if p[0] == name), None)
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
        if thing.kind == "function":
            entry = thing.entry
            if "p" in entry[3]:
                return Symbol(where, SymbolKind.ATTRIBUTE, annotation=entry[2])
            return Symbol(
                where,
                SymbolKind.FUNCTION,
                self._function_signature(entry),
                lacking=thing.lacking,
                plain_method=thing.owner is not None and not {"s", "c"} & set(entry[3]),
            )
        if thing.kind == "class":
            return Symbol(
                where,
                SymbolKind.CLASS,
                self.constructor(thing),
                tuple(thing.entry[1]),
                _Members(self, thing),
                self._open_ended(thing),
            )
        if thing.kind == "attribute":
            return Symbol(
                where,
                SymbolKind.ATTRIBUTE,
                annotation=thing.entry[1],
                open_ended=self.types_of(thing).open,
                lacking=thing.lacking,
            )
        if thing.kind == "container":
            return Symbol(path, SymbolKind.ATTRIBUTE, annotation=thing.path)
        return Symbol(path, SymbolKind.ATTRIBUTE, open_ended=True)


def _says_type(thing: Thing) -> bool:
    entries = thing.entry[4] if len(thing.entry) > 4 else [thing.entry]
    return any(entry[1] or entry[2] not in (None, "None") for entry in entries)


def _ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


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
