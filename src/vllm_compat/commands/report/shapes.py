"""How the shape of a name differs: its kind, bases and annotation, and its signature by parameter."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from vllm_compat.analysis.annotations import (
    Either,
    Form,
    Generic,
    Listed,
    Named,
    Nothing,
    Unreadable,
    form_of,
)
from vllm_compat.analysis.surface.model import (
    Parameter,
    ParameterKind,
    Signature,
    Symbol,
    SymbolKind,
)

_PLACED = (ParameterKind.POSITIONAL_ONLY, ParameterKind.POSITIONAL_OR_KEYWORD)


class DetailKind(str, Enum):
    """What became of a part of a name's shape."""

    KIND = "kind"
    BASES = "bases"
    PARAMETER_REMOVED = "parameter removed"
    PARAMETER_ADDED = "parameter added"
    PARAMETER_RENAMED = "parameter renamed"
    PARAMETER_CHANGED = "parameter changed"
    PARAMETER_ORDER = "parameter order"
    RETURNS = "returns"
    ANNOTATION = "annotation"


@dataclass(frozen=True)
class Detail:
    """One difference of shape; ``before`` and ``after`` are source text.

    ``concerns`` says that a call site is concerned: it gives the parameter, or a new one that it
    does not give is required.
    """

    kind: DetailKind
    name: str | None = None
    before: str | None = None
    after: str | None = None
    concerns: bool = False

    @property
    def is_required(self) -> bool:
        """Whether the parameter has no default now."""
        text = (self.after or "").split(" (")[0]
        return "=" not in text and not text.startswith("*")


def shape_changes(old: Symbol, new: Symbol) -> tuple[Detail, ...]:
    """Return how a name's shape differs; where it is defined does not count."""
    if old.kind is not new.kind:
        if old.open_ended or new.open_ended:
            return ()  # nothing is known of one of them
        return (Detail(DetailKind.KIND, None, old.kind.value, new.kind.value),)
    details: list[Detail] = []
    if old.kind is SymbolKind.CLASS and old.bases != new.bases:
        details.append(Detail(DetailKind.BASES, None, ", ".join(old.bases), ", ".join(new.bases)))
    if old.kind is SymbolKind.ATTRIBUTE and not same_annotation(old.annotation, new.annotation):
        details.append(Detail(DetailKind.ANNOTATION, None, old.annotation, new.annotation))
    if old.signature and new.signature:
        details += signature_changes(old.signature, new.signature)
    return tuple(details)


def signature_changes(old: Signature, new: Signature) -> Iterator[Detail]:
    """Iterate over the differences of two signatures, parameter by parameter."""
    left = {p.name: p for p in old.parameters}
    right = {p.name: p for p in new.parameters}
    come = [p for p in new.parameters if p.name not in left]
    for parameter in (p for p in old.parameters if p.name not in right):
        renamed = _renamed_to(parameter, old, new, come)
        if renamed is not None:
            come.remove(renamed)
            yield Detail(
                DetailKind.PARAMETER_RENAMED, parameter.name, written(parameter), written(renamed)
            )
        else:
            yield Detail(DetailKind.PARAMETER_REMOVED, parameter.name, written(parameter), None)
    for parameter in come:
        yield Detail(DetailKind.PARAMETER_ADDED, parameter.name, None, written(parameter))
    for name, parameter in left.items():
        other = right.get(name)
        if other is not None and not _same_parameter(parameter, other):
            yield Detail(DetailKind.PARAMETER_CHANGED, name, written(parameter), written(other))
    before, after = _in_order(old, right), _in_order(new, left)
    if before != after:
        yield Detail(DetailKind.PARAMETER_ORDER, None, ", ".join(before), ", ".join(after))
    if not same_annotation(old.returns, new.returns):
        yield Detail(DetailKind.RETURNS, None, old.returns, new.returns)


def _renamed_to(
    gone: Parameter, old: Signature, new: Signature, come: Sequence[Parameter]
) -> Parameter | None:
    """Return the new parameter that stands where a gone one stood, and takes the same; or None."""
    index = old.parameters.index(gone)
    other = new.parameters[index] if index < len(new.parameters) else None
    if other is None or other not in come or other.annotation is None:
        return None
    same = other.kind is gone.kind and same_annotation(gone.annotation, other.annotation)
    return other if same else None


def _in_order(signature: Signature, other: Mapping[str, Parameter]) -> list[str]:
    """Return the names that both signatures take by position, in the order of one of them."""
    return [
        p.name
        for p in signature.parameters
        if p.name in other and p.kind in _PLACED and other[p.name].kind in _PLACED
    ]


def _same_parameter(old: Parameter, new: Parameter) -> bool:
    return (
        old.kind is new.kind
        and old.default == new.default
        and same_annotation(old.annotation, new.annotation)
    )


def written(parameter: Parameter) -> str:
    """Return a parameter as it stands in a signature, its kind marked where it is not the usual."""
    stars = {ParameterKind.VAR_POSITIONAL: "*", ParameterKind.VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    if parameter.annotation:
        text += f": {parameter.annotation}"
    if parameter.default is not None:
        text += f" = {parameter.default}" if parameter.annotation else f"={parameter.default}"
    marks = {
        ParameterKind.KEYWORD_ONLY: " (keyword only)",
        ParameterKind.POSITIONAL_ONLY: " (by position only)",
    }
    return text + marks.get(parameter.kind, "")


def same_annotation(one: str | None, other: str | None) -> bool:
    """Whether two annotations say the same: ``Optional[int]`` and ``int | None``, for instance."""
    return one == other or _canonical(one) == _canonical(other)


@lru_cache(maxsize=4096)
def _canonical(text: str | None) -> object:
    return None if text is None else _canonical_form(form_of(text))


_ALIASES = {"List": "list", "Dict": "dict", "Tuple": "tuple", "Set": "set", "Type": "type"}


def _canonical_form(form: Form) -> object:
    """Return what is equal for two forms that say the same."""
    if isinstance(form, Named):
        return _ALIASES.get(form.last, form.last)
    if isinstance(form, Either):
        return _canonical_choice(form)
    if isinstance(form, Generic):
        if form.last == "Literal":
            return ast.unparse(form.node)
        return (_ALIASES.get(form.last, form.last), *map(_canonical_form, form.parts))
    if isinstance(form, Listed):
        return tuple(map(_canonical_form, form.parts))
    if isinstance(form, Unreadable):
        return form.text
    return "None" if isinstance(form, Nothing) else "Ellipsis"


def _canonical_choice(form: Either) -> object:
    found: set[object] = set()
    for part in form.parts:
        inner = _canonical_form(part)
        found |= inner if isinstance(inner, frozenset) else {inner}
    return frozenset(found) if len(found) > 1 else next(iter(found))
