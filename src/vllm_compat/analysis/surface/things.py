"""What names of a surface are resolved to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_compat.analysis.surface.entries import AttributeEntry, ClassEntry, Entry, FunctionEntry


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
    entry: Entry | None = field(default=None, compare=False, hash=False, repr=False)
    owner: Thing | None = None
    items: tuple[Thing, ...] = ()
    lacking: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rsplit(".", 1)[-1]

    @property
    def builtin(self) -> str:
        """Its name among Python's builtins; empty where it is none."""
        head, _, rest = self.path.partition(".")
        return rest if self.kind == "external" and head == "builtins" else ""

    @property
    def as_class(self) -> ClassEntry | None:
        """Its entry, where it is a class."""
        return self.entry if isinstance(self.entry, ClassEntry) else None

    @property
    def as_function(self) -> FunctionEntry | None:
        """Its entry, where it is a function that is called, not read like an attribute."""
        entry = self.entry
        return entry if isinstance(entry, FunctionEntry) and not entry.is_property else None

    @property
    def as_property(self) -> FunctionEntry | None:
        """Its entry, where it is a property."""
        entry = self.entry
        return entry if isinstance(entry, FunctionEntry) and entry.is_property else None

    @property
    def as_attribute(self) -> AttributeEntry | None:
        """Its entry, where it is an attribute."""
        return self.entry if isinstance(self.entry, AttributeEntry) else None


UNKNOWN = Thing("unknown")


@dataclass(frozen=True)
class Types:
    """The types that an expression may have: those known, and whether there may be more."""

    things: tuple[Thing, ...] = ()
    open: bool = False
    none: bool = False


OPEN = Types(open=True)
"""Anything."""


def together(several: Iterable[Types]) -> Types:
    """Return the types that one of several expressions may have."""
    things: dict[Thing, None] = {}
    is_open = none = False
    for types in several:
        things.update(dict.fromkeys(types.things))
        is_open |= types.open
        none |= types.none
    return Types(tuple(things), is_open, none)
