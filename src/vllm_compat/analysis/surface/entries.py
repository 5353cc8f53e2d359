"""Entries: the small notes about a module's names that surfaces are resolved from, and their rows.

Strings in them are source text as ``ast.unparse`` writes it. Recorded releases keep an entry as a row of
JSON, a list whose first item says what it is:

``["f", parameters, returns, flags, unwraps, makes]``
    a :class:`FunctionEntry`; each parameter is ``[name, kind, annotation, default]`` with kinds
    numbered as in ``inspect``. ``unwraps`` and ``makes`` are left out where empty.
``["c", bases, decorators, keywords, flags, order]``
    the head of a :class:`ClassEntry`, whose members are rows of their own; ``order`` names its fields.
``["i", module, name]``
    an :class:`ImportEntry`.
``["a", annotation, value, flags]``
    an :class:`AttributeEntry`.
``["u", entries]``
    a :class:`Several`; of those that are more than attributes only the number is in the row.

Entries are named tuples since a check makes thousands of them, and imports this before all else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from vllm_compat.analysis.surface.model import Parameter, ParameterKind, Signature

KINDS = (
    ParameterKind.POSITIONAL_ONLY,
    ParameterKind.POSITIONAL_OR_KEYWORD,
    ParameterKind.VAR_POSITIONAL,
    ParameterKind.KEYWORD_ONLY,
    ParameterKind.VAR_KEYWORD,
)
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class FunctionEntry(NamedTuple):
    """A function.

    Flags: ``p`` property, ``s`` static, ``c`` class method, ``a`` asynchronous, ``g`` context manager,
    ``t`` a ``dataclass_transform``, ``o`` an overload without definition. ``unwraps`` names parameters
    that, when given, make the function hand back one bare item instead of a list; ``makes`` are
    sketches of what a factory (``_make_model_runner``) constructs.
    """

    parameters: tuple[Parameter, ...] = ()
    returns: str | None = None
    flags: str = ""
    unwraps: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()

    @property
    def is_property(self) -> bool:
        """Whether it is read as an attribute."""
        return "p" in self.flags

    @property
    def takes_instance(self) -> bool:
        """Whether it is called on instances: neither static nor a class method."""
        return "s" not in self.flags and "c" not in self.flags

    @property
    def is_context_manager(self) -> bool:
        """Whether a call gives a context manager, not what is annotated."""
        return "g" in self.flags

    @property
    def transforms_dataclasses(self) -> bool:
        """Whether it tells type checkers that what it decorates becomes a dataclass."""
        return "t" in self.flags

    @property
    def is_overload(self) -> bool:
        """Whether it is a signature without definition."""
        return "o" in self.flags

    @property
    def signature(self) -> Signature:
        """The signature, ``self`` and ``cls`` left out."""
        return Signature(self.parameters, self.returns, self.unwraps)


class ClassEntry(NamedTuple):
    """A class, with its own members only. Flag ``g``: it has ``__getattr__``, or fills its ``__dict__``
    by hand.
    """

    bases: tuple[str, ...]
    decorators: tuple[str, ...]
    keywords: Mapping[str, str | None]
    members: Mapping[str, Entry]
    flags: str = ""

    @property
    def hides_members(self) -> bool:
        """Whether it may have members that can't be read off."""
        return "g" in self.flags


class ImportEntry(NamedTuple):
    """An import; ``name`` is None where the module itself is meant."""

    module: str
    name: str | None = None


class AttributeEntry(NamedTuple):
    """An attribute.

    Flags: ``v`` set on instances only, ``f`` the default comes from a factory, ``n`` not a
    constructor's parameter, ``k`` keyword only, ``x`` not annotated, ``d`` has a default. ``value`` is
    the default's source, or a sketch such as ``Foo()`` of what is assigned. ``others`` are all that was
    found, where several statements set it.
    """

    annotation: str | None = None
    value: str | None = None
    flags: str = ""
    others: tuple[AttributeEntry, ...] = ()

    @property
    def on_instances(self) -> bool:
        """Whether a method sets it."""
        return "v" in self.flags

    @property
    def is_plain(self) -> bool:
        """Whether a class's body gives it a value without an annotation."""
        return "x" in self.flags

    @property
    def in_constructor(self) -> bool:
        """Whether a written constructor takes it."""
        return "n" not in self.flags

    @property
    def keyword_only(self) -> bool:
        """Whether a written constructor takes it by keyword only."""
        return "k" in self.flags

    @property
    def default(self) -> str | None:
        """The source of its default; in angle brackets where that is a factory."""
        if "d" not in self.flags:
            return None
        return f"<{self.value}>" if "f" in self.flags else self.value

    @property
    def alternatives(self) -> tuple[AttributeEntry, ...]:
        """All that was found of it."""
        return self.others or (self,)

    @property
    def says_type(self) -> bool:
        """Whether something of it tells its type."""
        return any(e.annotation or e.value not in (None, "None") for e in self.alternatives)


class Several(NamedTuple):
    """Several definitions of one name, in the order in which they are tried."""

    entries: tuple[Entry, ...]

    @property
    def only_attributes(self) -> bool:
        """Whether no function, class or import is among them."""
        return all(isinstance(entry, AttributeEntry) for entry in self.entries)


Entry = FunctionEntry | ClassEntry | ImportEntry | AttributeEntry | Several

E = TypeVar("E", bound=Entry)


def one_of(entries: list[E]) -> E | Several | None:
    """Return what several definitions of a name are together; None where there is none."""
    if not entries:
        return None
    return entries[0] if len(entries) == 1 else Several(tuple(entries))


def definitions(entry: Entry | None) -> tuple[Entry, ...]:
    """Return the definitions of a name, one by one."""
    if entry is None:
        return ()
    return entry.entries if isinstance(entry, Several) else (entry,)


# Rows.


def to_row(entry: Entry) -> list[Any]:
    """Return an entry as its row; a class's members and the parts of several are left out."""
    if isinstance(entry, FunctionEntry):
        parameters = [[p.name, _NUMBERS[p.kind], p.annotation, p.default] for p in entry.parameters]
        row: list[Any] = ["f", parameters, entry.returns, entry.flags]
        if entry.unwraps or entry.makes:
            row.append(list(entry.unwraps))
        if entry.makes:
            row.append(list(entry.makes))
        return row
    if isinstance(entry, ClassEntry):
        head = [list(entry.bases), list(entry.decorators), dict(entry.keywords), entry.flags]
        return ["c", *head, field_order(entry)]
    if isinstance(entry, ImportEntry):
        return ["i", entry.module, entry.name]
    if isinstance(entry, AttributeEntry):
        return ["a", entry.annotation, entry.value, entry.flags]
    return ["u", list(map(to_row, entry.entries)) if entry.only_attributes else len(entry.entries)]


def from_row(row: list[Any]) -> Entry:
    """Return the entry of a row that says all of it: the reverse of :func:`to_row`."""
    kind, *rest = row
    if kind == "f":
        parameters, returns, flags, *more = rest
        return FunctionEntry(
            tuple(Parameter(name, KINDS[k], default, text) for name, k, text, default in parameters),
            returns,
            flags,
            *map(tuple, more),
        )
    if kind == "a":
        return AttributeEntry(*rest)
    if kind == "i":
        return ImportEntry(*rest)
    return Several(tuple(map(from_row, rest[0])))


def field_order(entry: ClassEntry) -> list[str]:
    """Return the members that are declared with an annotation: those that may be fields."""
    return [
        name
        for name, member in entry.members.items()
        if isinstance(member, AttributeEntry) and not member.on_instances and not member.is_plain
    ]
