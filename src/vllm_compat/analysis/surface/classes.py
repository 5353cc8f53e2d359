"""Classes that were read → their ancestors and members."""

from __future__ import annotations

import builtins
from collections.abc import Iterator

from vllm_compat.analysis.surface.entries import (
    AttributeEntry,
    ClassEntry,
    Entry,
    FunctionEntry,
    Several,
)
from vllm_compat.analysis.surface.model import SymbolKind
from vllm_compat.analysis.surface.resolving import Names
from vllm_compat.analysis.surface.things import UNKNOWN, Thing

# Bases from outside vLLM that add nothing a downstream would ask a vLLM class for.
CLOSED_BASES = frozenset(
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


class Classes(Names):
    """Say what classes derive from, and what they have."""

    def __init__(self) -> None:
        super().__init__()
        self._mros: dict[str, list[Thing]] = {}

    # Ancestors.

    def _bases(self, thing: Thing) -> list[Thing]:
        entry = thing.as_class
        named = (
            self._name_in(thing.module, without_arguments(text))
            for text in (entry.bases if entry else ())
        )
        return [base if base is not None else UNKNOWN for base in named]

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

    def _class_line(self, thing: Thing) -> Iterator[tuple[Thing, ClassEntry | None]]:
        """Iterate over a class and its ancestors; those outside vLLM have no entry."""
        return ((base, base.as_class) for base in self._mro(thing))

    def _open_ended(self, thing: Thing) -> bool:
        """Whether the class may have members that can't be read."""
        for base, entry in self._class_line(thing):
            if entry is not None:
                if entry.hides_members:
                    return True
            elif base.path not in CLOSED_BASES and _builtin_at(base.path) is None:
                return True
        return False

    def _is_protocol(self, thing: Thing) -> bool:
        """Whether the class is a protocol, which promises less than its values have."""
        return any(base.path.endswith(".Protocol") for base in self._mro(thing))

    def _is_enum(self, thing: Thing) -> bool:
        return any(base.path in _ENUMS for base in self._mro(thing))

    # Members.

    def _of_class(self, thing: Thing, name: str) -> Thing | None:
        found = self._member(thing, name)
        if found is None and (self._open_ended(thing) or self._is_protocol(thing)):
            return UNKNOWN
        return found

    def _member(self, thing: Thing, name: str) -> Thing | None:
        """Return a class's own or inherited member."""
        silent: Thing | None = None  # set by a method that doesn't say what it is
        for base, entry in self._class_line(thing):
            found = self._own_member(thing, base, entry, name)
            if found is None:
                continue
            attribute = found.as_attribute if entry is not None else None
            if attribute is not None and attribute.on_instances and not attribute.says_type:
                # A base may say more of it, or define a method of this name.
                silent = silent or found
            elif silent is not None and found.kind not in ("attribute", "unknown"):
                return silent
            else:
                return found
        if silent is not None:
            return silent
        # ``__dict__``, ``__members__``, ``__dataclass_fields__``, …: given by metaclass or decorator.
        return UNKNOWN if name.startswith("__") and name.endswith("__") else None

    def _own_member(
        self, thing: Thing, base: Thing, entry: ClassEntry | None, name: str
    ) -> Thing | None:
        """Return what one class, maybe one from outside vLLM, gives to those that derive from it."""
        if entry is not None:
            member = entry.members.get(name)
            return self._enter_member(base, name, member) if member is not None else None
        if name in _INHERITED.get(base.path, ()):
            return Thing("attribute", thing.module, f"{thing.path}.{name}", AttributeEntry())
        builtin = _builtin_at(base.path)
        return UNKNOWN if builtin is not None and hasattr(builtin, name) else None

    def _enter_member(self, owner: Thing, name: str, entry: Entry) -> Thing:
        """Turn an entry of a class's body into a thing."""
        path = f"{owner.path}.{name}"
        if isinstance(entry, Several):
            entry = _chosen(entry)
        if isinstance(entry, ClassEntry):
            return Thing("class", owner.module, path, entry, owner)
        if isinstance(entry, FunctionEntry):
            return Thing("function", owner.module, path, entry, owner)
        if isinstance(entry, AttributeEntry) and entry.is_plain:
            alias = self._alias(owner, path, entry)
            if alias is not None:
                return alias
        return Thing("attribute", owner.module, path, entry, owner)

    def _alias(self, owner: Thing, path: str, entry: AttributeEntry) -> Thing | None:
        """Return what ``metadata_cls = Metadata`` or ``old = new`` means: a name that is in sight."""
        if not entry.value or entry.value.endswith("()"):
            return None
        cls = owner.as_class
        same = cls.members.get(entry.value) if cls is not None else None
        if isinstance(same, FunctionEntry):
            return Thing("function", owner.module, path, same, owner)
        other = self._name_in(owner.module, entry.value) if same is None else None
        return other if other is not None and other.kind in ("class", "function") else None

    def _member_kinds(self, thing: Thing) -> dict[str, SymbolKind]:
        """Return the kinds of all members, own and inherited, sorted by name."""
        found: dict[str, SymbolKind] = {}
        for base, entry in self._class_line(thing):
            for name, member in entry.members.items() if entry is not None else ():
                if name not in found:
                    found[name] = _kind(self._enter_member(base, name, member))
        for base in self._mro(thing):
            for name in _INHERITED.get(base.path, ()):
                found.setdefault(name, SymbolKind.ATTRIBUTE)
        return dict(sorted(found.items()))


def _chosen(several: Several) -> Entry:
    """Return which of several definitions of a member counts."""
    attributes = tuple(e for e in several.entries if isinstance(e, AttributeEntry))
    if len(attributes) < len(several.entries):
        return next(e for e in several.entries if not isinstance(e, AttributeEntry))
    annotated = next((e for e in attributes if e.annotation), attributes[0])
    flags = "v" if all(e.on_instances for e in attributes) else ""
    return AttributeEntry(annotated.annotation, annotated.value, flags, attributes)


def _kind(thing: Thing) -> SymbolKind:
    if thing.as_function is not None:
        return SymbolKind.FUNCTION
    kinds = {"module": SymbolKind.MODULE, "class": SymbolKind.CLASS}
    return kinds.get(thing.kind, SymbolKind.ATTRIBUTE)


def _builtin_at(path: str) -> object | None:
    """Return the builtin that a dotted path names, or None."""
    head, _, rest = path.partition(".")
    return getattr(builtins, rest, None) if head == "builtins" else None


def without_arguments(text: str) -> str:
    """Return a generic's name without its arguments: ``Generic[T]`` → ``Generic``."""
    return text.partition("[")[0].strip()
