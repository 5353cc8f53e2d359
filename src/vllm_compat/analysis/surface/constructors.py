"""Classes that were read → their constructors, also those that a library writes from fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from vllm_compat.analysis.annotations import expression
from vllm_compat.analysis.surface.classes import CLOSED_BASES, without_arguments
from vllm_compat.analysis.surface.entries import (
    AttributeEntry,
    ClassEntry,
    FunctionEntry,
    Several,
    field_order,
)
from vllm_compat.analysis.surface.model import Parameter, ParameterKind, Signature
from vllm_compat.analysis.surface.things import Thing
from vllm_compat.analysis.surface.values import Values

_ANYTHING = Signature(
    (
        Parameter("args", ParameterKind.VAR_POSITIONAL),
        Parameter("kwargs", ParameterKind.VAR_KEYWORD),
    )
)
_ATTRS = frozenset({"attr.s", "attr.define", "attrs.define", "attrs.frozen"})


class Constructors(Values):
    """Say what making an instance takes."""

    def constructor(self, thing: Thing) -> Signature | None:
        """Return the signature of a class's constructor; None where it can't be known."""
        if self._is_enum(thing):
            return Signature((Parameter("value", ParameterKind.POSITIONAL_OR_KEYWORD),))
        for base, entry in self._class_line(thing):
            if entry is None:
                if base.path.endswith(".Protocol"):
                    return _ANYTHING
                if base.path in CLOSED_BASES:
                    continue
                return None
            written = self._written(base, entry)
            if written is not None:
                return written
            family = self._family(base)
            if family == "dict":
                return None
            if family is not None and (family != "dataclass" or self._has_init(base, entry)):
                return self._fields(base, family)
            made = entry.members.get("__new__")
            if isinstance(made, FunctionEntry):
                return replace(made.signature, returns=None)
        return Signature()

    def _written(self, thing: Thing, entry: ClassEntry) -> Signature | None:
        """Return the signature of a class's own ``__init__``."""
        own = entry.members.get("__init__")
        if not isinstance(own, (FunctionEntry, Several)):
            return None
        function = self._enter_member(thing, "__init__", own).entry
        return replace(function.signature, returns=None) if isinstance(function, FunctionEntry) else None

    def _has_init(self, thing: Thing, entry: ClassEntry) -> bool:
        """Whether a dataclass's decorators leave ``__init__`` to be written."""
        return not any(
            _keywords_of(text).get("init") is False
            for text in entry.decorators
            if self._is_dataclass_decorator(thing.module, text)
        )

    # Libraries that write constructors.

    def _family(self, thing: Thing) -> str | None:
        """Say which of the libraries that write constructors made this class, if any.

        ``dataclass``, ``model`` (pydantic), ``struct`` (msgspec), ``tuple`` (NamedTuple), ``dict``
        (TypedDict).
        """
        entry = thing.as_class
        if entry is None:
            return None
        if any(self._is_dataclass_decorator(thing.module, text) for text in entry.decorators):
            return "dataclass"
        families = (_family_of_base(base.path) for base in self._mro(thing)[1:])
        return next(filter(None, families), None)

    def _is_dataclass_decorator(self, module: str, text: str) -> bool:
        name = text.partition("(")[0].strip()
        if name.rsplit(".", 1)[-1] in ("dataclass", "pydantic_dataclass"):
            return True
        thing = self._name_in(module, name)
        if thing is None:
            return False
        if thing.kind == "external":
            return thing.path.endswith(".dataclass") or thing.path in _ATTRS
        # vLLM's own decorators that wrap pydantic's say so to type checkers.
        return isinstance(thing.entry, FunctionEntry) and thing.entry.transforms_dataclasses

    def _fields(self, thing: Thing, family: str) -> Signature:
        """Return the constructor that a library writes from annotated fields."""
        fields: dict[str, Parameter] = {}
        for base in reversed(self._mro(thing)):
            entry = base.as_class
            if entry is None or (base is not thing and self._family(base) != family):
                continue
            keyword_only = _keyword_only(entry, family)
            for name, field in _declared(entry):
                if family == "model" and (name.startswith("_") or name == "model_config"):
                    continue
                if field.in_constructor:
                    fields[name] = _as_parameter(name, field, keyword_only)
                else:
                    fields.pop(name, None)
        plain = [p for p in fields.values() if p.kind is not ParameterKind.KEYWORD_ONLY]
        last = [p for p in fields.values() if p.kind is ParameterKind.KEYWORD_ONLY]
        if family == "model" and self._allows_extra(thing):
            last.append(Parameter("extra_data", ParameterKind.VAR_KEYWORD))
        return Signature((*plain, *last))

    def _allows_extra(self, thing: Thing) -> bool:
        """Whether a pydantic model keeps keywords that are no fields."""
        for _, entry in self._class_line(thing):
            config = entry.members.get("model_config") if entry is not None else None
            text = config.value if isinstance(config, AttributeEntry) else None
            if text and "extra" in text:
                return "allow" in text
        return False


def _family_of_base(path: str) -> str | None:
    last = path.rsplit(".", 1)[-1]
    if path == "msgspec.Struct":
        return "struct"
    if last == "BaseSettings" or (last == "BaseModel" and path.startswith("pydantic")):
        return "model"
    return {"NamedTuple": "tuple", "TypedDict": "dict"}.get(last)


def _keyword_only(entry: ClassEntry, family: str) -> bool:
    """Whether all fields that a class declares are taken by keyword only."""
    if family == "dataclass":
        return any(_keywords_of(text).get("kw_only") is True for text in entry.decorators)
    if family == "struct":
        return entry.keywords.get("kw_only") == "True"
    return family == "model"


def _declared(entry: ClassEntry) -> Iterator[tuple[str, AttributeEntry]]:
    """Iterate over what a class's body declares with an annotation and without ``ClassVar``.

    ``name = value`` without annotation only gives an inherited field a new default. A record knows
    which they are without reading the other members.
    """
    order: Sequence[str] | None = getattr(entry.members, "annotated", None)
    for name in field_order(entry) if order is None else order:
        field = entry.members[name]
        if isinstance(field, AttributeEntry) and _is_field(field):
            yield name, field


@lru_cache(maxsize=8192)
def _is_field(entry: AttributeEntry) -> bool:
    """Whether an attribute is declared as a field. Kept, as the next: releases share their entries."""
    if entry.annotation is None or entry.is_plain or entry.on_instances:
        return False
    return not without_arguments(entry.annotation).endswith("ClassVar")


@lru_cache(maxsize=8192)
def _as_parameter(name: str, field: AttributeEntry, keyword_only: bool) -> Parameter:
    only = keyword_only or field.keyword_only
    kind = ParameterKind.KEYWORD_ONLY if only else ParameterKind.POSITIONAL_OR_KEYWORD
    return Parameter(name, kind, field.default, field.annotation)


def _keywords_of(decorator: str) -> dict[str, Any]:
    """Return the keywords that a decorator is given as plain values."""
    node = expression(decorator)
    if not isinstance(node, ast.Call):
        return {}
    return {k.arg: k.value.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)}
