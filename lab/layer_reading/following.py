"""What all that follow a model's forward share: its state, its calls, and where following ends."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lab.layer_reading.model import Place
from lab.layer_reading.sources import Sources, text_of
from lab.layer_reading.values import Instance, Slot, Sum, Value, deps_of, slots_in

Env = dict[str, Value]
"""What the names in a function stand for; under the empty name, the class that defines it."""

NORM = re.compile(r"norm|(^|_)ln(_|\d|$)|layer_norm", re.IGNORECASE)
NO_STREAM_NORM = re.compile(r"(^|_)(q|k|kv|q_a|kv_a|query|key)_?(layer)?norm", re.IGNORECASE)
REDUCES = re.compile(r"all_?reduce", re.IGNORECASE)


class Fork(Exception):
    """Two branches of a test lead to different readings."""

    def __init__(self, test: str) -> None:
        self.test = test


class TooMuch(Exception):
    """The source is followed no further."""


class Dead(Exception):
    """This way ends in an error."""


@dataclass(frozen=True)
class Read:
    """What a norm read, in which turn of the loop, and where."""

    turn: int
    value: Sum
    where: str = field(compare=False)


@dataclass(frozen=True)
class Call:
    """A call as it is met: the class in whose source it stands, its arguments, and how deep it is."""

    node: ast.Call
    place: Place
    positional: Sequence[Value]
    named: Mapping[str, Value]
    depth: int

    @property
    def arguments(self) -> tuple[Value, ...]:
        """All arguments."""
        return (*self.positional, *self.named.values())

    @cached_property
    def deps(self) -> frozenset[Slot]:
        """The slots that the arguments depend on."""
        return frozenset().union(*map(deps_of, self.arguments))

    @property
    def tensors(self) -> list[Sum]:
        """The arguments that are tensors made from what the layer handed on."""
        return [value for value in self.arguments if isinstance(value, Sum) and deps_of(value)]

    @property
    def where(self) -> str:
        """Its module and line."""
        return f"{self.place.module}:{self.node.lineno}"


class Following:
    """The state of one way through a model's forward, with the decisions taken at its forks."""

    def __init__(
        self, sources: Sources, model: Place, layers: str, layer: Place, decisions: Mapping[str, bool]
    ) -> None:
        self.sources, self.model, self.layers, self.layer = sources, model, layers, layer
        self.decisions = decisions
        self.turn = 0
        self.steps = 0
        self.reads: list[Read] = []
        self.blocks: list[Read] = []
        self.handed: list[Value] = []
        self.used: set[str] = set()
        self.methods: list[str] = []
        self.inside = 0
        self.in_layer = 0
        self.stage = False  # this way ends a pipeline stage that is not the last

    def _call(
        self,
        own: Instance | None,
        found: tuple[Place, ast.FunctionDef],
        positional: Sequence[Value],
        named: Mapping[str, Value],
        depth: int,
    ) -> Value:
        """Follow a function and return what it returns."""
        raise NotImplementedError

    def _value(self, node: ast.expr | None, env: Env, depth: int) -> Value:
        """Return an expression's value."""
        raise NotImplementedError

    def _bind(self, target: ast.expr, value: Value, env: Env, depth: int) -> None:
        """Take into account that a target gets a value."""
        raise NotImplementedError


def is_models(module: str) -> bool:
    """Whether a module is one of models, and none of the layers that all of them share."""
    return ".models." in f".{module}."


def is_norm(module: Instance) -> bool:
    """Whether a sub-module norms what may be the stream."""
    if NO_STREAM_NORM.search(module.role):
        return False
    return bool(NORM.search(module.role) or re.search(r"Norm", module.cls.name))


def condition_of(test: ast.expr) -> str:
    """Return a test's text on one line."""
    return re.sub(r"\s+", " ", text_of(test))


def reads_slots(read: Read) -> bool:
    """Whether what was read has outputs of the layer in it as they are."""
    return bool(slots_in(read.value))
