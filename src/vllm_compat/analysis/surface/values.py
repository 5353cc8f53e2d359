"""Values and calls that were read → the types that they may have, as far as annotations tell."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_compat.analysis.annotations import (
    TRANSPARENT,
    Dots,
    Either,
    Form,
    Generic,
    Named,
    Nothing,
    form_of,
)
from vllm_compat.analysis.surface.classes import Classes
from vllm_compat.analysis.surface.entries import AttributeEntry
from vllm_compat.analysis.surface.resolving import BUILTIN_TYPES
from vllm_compat.analysis.surface.things import OPEN, Thing, Types, together

_ITEM_CONTAINERS = frozenset(
    {"list", "List", "Sequence", "MutableSequence", "deque", "Deque", "tuple", "Tuple"}
)
_VALUE_CONTAINERS = frozenset(
    {"dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "DefaultDict", "OrderedDict"}
)
_TYPING_BUILTINS = {"List": "list", "Dict": "dict", "Tuple": "tuple", "Set": "set"}

_DEEPEST = 8
"""How far annotations are looked into."""


class Values(Classes):
    """Say what values may be."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: set[str] = set()

    def types_of(self, thing: Thing) -> Types:
        """Return what a value behind a name may be."""
        if thing.kind in ("class", "container", "external"):
            return Types((thing,))
        if thing.as_property is not None:
            return self._annotated(thing.module, thing.as_property.returns, thing.owner)
        if thing.as_attribute is None or thing.path in self._asked:
            return OPEN  # ``self.x = other.x``: it says nothing but that it is the same
        self._asked.add(thing.path)
        try:
            return self._attribute_types(thing, thing.as_attribute)
        finally:
            self._asked.discard(thing.path)

    def result_of(self, thing: Thing) -> Types:
        """Return what calling a thing gives."""
        if thing.kind == "class":
            return Types((thing,))
        entry = thing.as_function
        if entry is None or entry.is_context_manager:
            return OPEN
        types = self._annotated(thing.module, entry.returns, thing.owner)
        if entry.makes:
            made = [self._name_in(thing.module, text[:-2]) for text in entry.makes]
            types = self._with(types, [t for t in made if t is not None])
        return types

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

    def _derives(self, thing: Thing, types: Types) -> bool:
        return any(base in types.things for base in self._mro(thing))

    # Attributes.

    def _attribute_types(self, thing: Thing, entry: AttributeEntry) -> Types:
        told = (self._value_types(thing, one) or OPEN for one in entry.alternatives)
        types = together(told)
        return Types(types.things, types.open or not types.things, types.none)

    def _value_types(self, thing: Thing, entry: AttributeEntry) -> Types | None:
        """Return what one statement says of an attribute; None where it says nothing."""
        assigned: Types | None = None
        if entry.value and entry.on_instances:
            assigned = self._assigned(thing, entry.value)
        elif entry.value and entry.value.endswith("()") and entry.annotation is None:
            assigned = self._made(thing.module, entry.value)
        if not entry.annotation:
            return assigned
        types = self._annotated(thing.module, entry.annotation, thing.owner)
        if assigned is not None and assigned.things and not assigned.open:
            return self._with(types, assigned.things)
        return types

    def _made(self, module: str, call: str) -> Types | None:
        """Return what ``Foo()`` gives."""
        other = self._name_in(module, call.removesuffix("()"))
        return self.result_of(other) if other is not None else None

    def _assigned(self, thing: Thing, value: str) -> Types | None:
        """Return what the sketch of a value says that a method assigns to an attribute."""
        if value == "None":
            return Types(none=True)
        if value.startswith("@"):
            return self._assigned_from_parameter(thing, value)
        if value.startswith("self."):
            return self._assigned_from_self(thing, thing.owner, value) if thing.owner else OPEN
        if value.endswith("()"):
            return self._made(thing.module, value)
        other = self._name_in(thing.module, value)
        return self.types_of(other) if other is not None and other.kind == "attribute" else None

    def _assigned_from_parameter(self, thing: Thing, value: str) -> Types:
        """Return the types of ``@annotation@.x.y``: of a parameter, or what it has."""
        annotation, _, rest = value[1:].partition("@")
        types = self._annotated(thing.module, annotation, thing.owner)
        for part in rest.lstrip(".").split(".") if rest else []:
            other = self._through(types, part)
            types = self.types_of(other) if other is not None else OPEN
        return types

    def _assigned_from_self(self, thing: Thing, owner: Thing, value: str) -> Types:
        """Return the types of ``self.make()`` or ``self.x.y``."""
        _, *parts = value.split(".")
        if value.endswith("()") and len(parts) == 1:
            method = self._member(owner, parts[0].removesuffix("()"))
            return self.result_of(method) if method is not None else OPEN
        if "()" in value or f"{owner.path}.{parts[0]}" == thing.path:
            return OPEN
        current: Thing | None = owner
        for part in parts:
            current = self._step(current, part) if current is not None else None
        attribute = current.as_attribute if current is not None else None
        if attribute is not None and attribute.on_instances and not attribute.annotation:
            return OPEN  # one step is enough: no chains of guesses
        return self.types_of(current) if current is not None else OPEN

    # Annotations.

    def _annotated(self, module: str, text: str | None, owner: Thing | None) -> Types:
        """Return the types that an annotation's text means in a module, ``Self`` being the owner."""
        return self._meant(module, form_of(text), owner, 0) if text else OPEN

    def _meant(self, module: str, form: Form, owner: Thing | None, depth: int) -> Types:
        if depth > _DEEPEST:
            return OPEN
        if isinstance(form, Named):
            return self._named(module, form, owner)
        if isinstance(form, Either):
            return together(self._meant(module, part, owner, depth + 1) for part in form.parts)
        if isinstance(form, Generic):
            return self._generic(module, form, owner, depth)
        return Types(none=True) if isinstance(form, Nothing) else OPEN

    def _generic(self, module: str, form: Generic, owner: Thing | None, depth: int) -> Types:
        name, parts = form.last, form.parts
        if (name in TRANSPARENT and parts) or name in ("type", "Type"):
            return self._meant(module, parts[0], owner, depth + 1)
        if name in _ITEM_CONTAINERS or name in _VALUE_CONTAINERS:
            item = parts[-1] if name in _VALUE_CONTAINERS else parts[0]
            mixed = name in ("tuple", "Tuple") and len(parts) > 1 and not isinstance(parts[1], Dots)
            items = OPEN if mixed else self._meant(module, item, owner, depth + 1)
            contents = items.things if not items.open else ()
            builtin = _TYPING_BUILTINS.get(name, name)
            if builtin in BUILTIN_TYPES:
                return Types((Thing("container", module, builtin, items=contents),))
            return Types((Thing("unknown", items=contents),), open=True)
        thing = self._name_in(module, form.dotted)
        known = thing is not None and thing.kind in ("class", "external")
        return Types((thing,)) if thing is not None and known else OPEN

    def _named(self, module: str, form: Named, owner: Thing | None) -> Types:
        if owner is not None and form.dotted in ("Self", owner.name):
            return Types((owner,))
        thing = self._name_in(module, form.dotted) if form.last not in ("Any", "object") else None
        if thing is None:
            return OPEN
        if thing.kind == "class":
            return Types((thing,))
        if thing.builtin:
            if thing.builtin in ("list", "dict", "tuple", "set"):
                return Types((Thing("container", module, thing.builtin),))
            return Types((thing,)) if thing.builtin in BUILTIN_TYPES else OPEN
        if thing.kind == "external" and thing.name[:1].isupper():
            return Types((thing,))
        return OPEN
