"""What a value is made of, as far as a layer's outputs are in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from lab.layer_reading.model import Place


@dataclass(frozen=True)
class Slot:
    """One value that the layer handed on in one turn of the loop; -1: what it returned as a whole."""

    turn: int
    index: int


@dataclass(frozen=True)
class Opaque:
    """Something made from slots in a way that is not followed: a block, a normed value, a product."""

    deps: frozenset[Slot] = frozenset()
    product: bool = False
    """Whether it is an arithmetic product of a slot, and no block's output."""


@dataclass(frozen=True)
class Reduced:
    """A value summed over the tensor-parallel ranks."""

    inner: Sum


@dataclass(frozen=True)
class Sum:
    """A sum of the above, each with how often it is in it (what is opaque counts once)."""

    terms: frozenset[tuple[Slot | Opaque | Reduced, int]]


@dataclass(frozen=True)
class Tuple:
    items: tuple[Value, ...]


@dataclass(frozen=True)
class Constant:
    value: object


@dataclass(frozen=True)
class Instance:
    """``self``, a layer, or a sub-module whose class is known."""

    cls: Place
    role: str = ""


@dataclass(frozen=True)
class Layers:
    """The list of layers."""


Value: TypeAlias = "Sum | Tuple | Constant | Instance | Layers"

NONE = Constant(None)


def sum_of(*terms: Slot | Opaque | Reduced) -> Sum:
    """Return a sum of terms, each once."""
    return Sum(frozenset((term, 1) for term in terms))


def opaque(deps: Iterable[Slot] = ()) -> Sum:
    """Return something made from slots in a way that is not followed."""
    return sum_of(Opaque(frozenset(deps)))


def added(left: Sum, right: Sum) -> Sum:
    """Return the sum of two sums."""
    counts: dict[Slot | Opaque | Reduced, int] = dict(left.terms)
    for term, count in right.terms:
        counts[term] = 1 if isinstance(term, Opaque) else counts.get(term, 0) + count
    return Sum(frozenset((term, count) for term, count in counts.items() if count))


def deps_of(value: object) -> frozenset[Slot]:
    """Return all slots that a value depends on."""
    if isinstance(value, Slot):
        return frozenset([value])
    if isinstance(value, Opaque):
        return value.deps
    if isinstance(value, Reduced):
        return deps_of(value.inner)
    if isinstance(value, Sum):
        return frozenset().union(*(deps_of(term) for term, _ in value.terms))
    if isinstance(value, Tuple):
        return frozenset().union(*(deps_of(item) for item in value.items))
    return frozenset()


def slots_in(value: object) -> frozenset[Slot]:
    """Return the slots that are terms of a sum, as they are or reduced."""
    if isinstance(value, Reduced):
        return slots_in(value.inner)
    if isinstance(value, Sum):
        return frozenset().union(
            *(frozenset([t]) if isinstance(t, Slot) else slots_in(t) for t, _ in value.terms)
        )
    return frozenset()


def products_in(value: object) -> frozenset[Slot]:
    """Return the slots whose products are terms of a sum."""
    if isinstance(value, Sum):
        return frozenset().union(
            *(t.deps for t, _ in value.terms if isinstance(t, Opaque) and t.product)
        )
    return frozenset()


_ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")


def in_words(value: Sum) -> str:
    """Return a sum in words; what does not depend on the layer is left out, the rest is ``?``."""
    parts = []
    for term, count in value.terms:
        times = "" if count == 1 else f"{count} x "
        if isinstance(term, Slot):
            name = "the output" if term.index < 0 else _ORDINALS[min(term.index, 7)]
            parts.append((term.index, f"{times}{name}"))
        elif isinstance(term, Reduced):
            inner = in_words(term.inner)
            first = min((slot.index for slot in slots_in(term.inner)), default=98)
            parts.append((first, f"{times}reduce({inner})"))
        elif term.deps:
            parts.append((99, "?"))
    return " + ".join(text for _, text in sorted(parts))


def bare(value: Sum) -> Sum:
    """Leave out what does not depend on any layer (vision inputs added on the way, say)."""
    return Sum(frozenset((t, n) for t, n in value.terms if not (isinstance(t, Opaque) and not t.deps)))


def fresh(value: Value, turn: int) -> Value:
    """Return what a layer hands on in a turn, in place of what it made it from."""
    if isinstance(value, Tuple):
        return Tuple(
            tuple(
                item if isinstance(item, Constant) else sum_of(Slot(turn, index))
                for index, item in enumerate(value.items)
            )
        )
    return sum_of(Slot(turn, -1))


def joined_in(one: dict[str, Value], two: dict[str, Value]) -> dict[str, Value] | None:
    """Return what holds after either of two branches, or None where they must be told apart."""
    joined = {**two, **one}
    for name in set(one) & set(two):
        left, right = one[name], two[name]
        if left == right:
            continue
        if not all(
            isinstance(value, (Sum, Constant)) and not slots_in(value) for value in (left, right)
        ):
            return None
        joined[name] = opaque(deps_of(left) | deps_of(right))
    return joined


def items_of(value: Value, count: int) -> list[Value]:
    """Return the parts of a value that is taken apart into so many."""
    if isinstance(value, Tuple) and len(value.items) == count:
        return list(value.items)
    if isinstance(value, Sum) and len(value.terms) == 1:
        ((term, _),) = value.terms
        if isinstance(term, Slot) and term.index < 0:
            return [sum_of(Slot(term.turn, index)) for index in range(count)]
    return [opaque(deps_of(value))] * count


def reduced(value: Value) -> Sum:
    """Return a value summed over the ranks."""
    if isinstance(value, Sum):
        return sum_of(Reduced(value)) if slots_in(value) else value
    return opaque(deps_of(value))
