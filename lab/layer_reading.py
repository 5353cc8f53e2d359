"""What a decoder layer hands on, read from its source and from the source of the model that calls it.

What the values mean that a layer's ``forward`` returns is not said by the layer: it is said by whoever
reads them. So this module follows a model's ``forward`` symbolically, through two turns of its loop over
the layers and behind it, and looks at what the norms read: the next layer's first norm, and the model's
final norm. Both see the residual stream, whatever the layer calls it::

    hidden_states, residual = layer(positions, hidden_states, residual)      # 1st, 2nd
    hidden_states, residual = self.input_layernorm(hidden_states, residual)  # next layer: 1st + 2nd
    hidden_states, _ = fused_allreduce_rms_norm(h, residual, self.norm)      # the end: reduce(1st) + 2nd

Methods, base classes and helper functions are followed; branches that lead to different readings become
cases of their own, with their conditions. Where the two norms do not agree, or nothing proves a reading,
the case is ``unknown`` and says why. Nothing is imported or run: a source tree serves as well as the
modules of a live process (``source_of``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import TypeAlias

SourceOf = Callable[[str], "str | None"]
"""The source of a module by its dotted name, or None."""


class Kind(str, Enum):
    """What the values that a layer returns have to do with the residual stream."""

    STREAM = "stream"
    """One tensor, which is the stream."""
    FIRST = "first"
    """Several values; the first is the stream, the others are no part of it."""
    SUM = "sum"
    """The stream is the sum of the first two."""
    OTHER = "other sum"
    """The stream is another one, or another sum, of the returned values (`Case.stream` says which)."""
    PARTIAL = "partial"
    """As `SUM` (`Case.stream`), but one part is a rank's partial sum, which the next norm reduces."""
    SEVERAL = "several"
    """Several streams a token (hyper-connections, AltUp, residuals of earlier blocks)."""
    UNKNOWN = "unknown"
    """Not proven."""


@dataclass(frozen=True)
class Place:
    """A class: its module and its name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Case:
    """What a layer hands on under some conditions.

    ``stream`` is the residual stream in terms of the returned values, as ``1st + 2nd``,
    ``reduce(1st) + 2nd``; ``when`` are conditions from the source, true or negated with ``not``;
    ``next_norm`` and ``final_norm`` are the places (``module:line``) whose reading proves it.
    """

    kind: Kind
    stream: str = ""
    when: tuple[str, ...] = ()
    next_norm: str = ""
    final_norm: str = ""
    reason: str = ""
    returned: tuple[str, ...] = ()
    """What stands at each place of the returned value: ``tensor``, ``None``, ``tuple``, ``?``."""

    @property
    def proven(self) -> bool:
        """Whether at least one norm says so, and none says otherwise."""
        return self.kind not in (Kind.UNKNOWN, Kind.SEVERAL)


@dataclass(frozen=True)
class Handed:
    """What one decoder layer class hands on in one model: one case, or one a condition."""

    layer: Place
    model: Place
    cases: tuple[Case, ...]
    called: bool = True
    """Whether the model calls the layer itself (its ``forward``, so that a hook on it fires)."""
    keeps: bool = False
    """Whether what the layer hands on visibly contains the stream that it received."""

    @property
    def kind(self) -> Kind:
        """The worst case's kind."""
        order = list(Kind)
        return max((case.kind for case in self.cases), key=order.index, default=Kind.UNKNOWN)

    @property
    def proven(self) -> bool:
        """Whether every case is proven."""
        return bool(self.cases) and all(case.proven for case in self.cases)


# --- modules and classes ---------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


@dataclass(frozen=True)
class Import:
    """Where a module takes a name from, and the conditions (`if` tests) around the import."""

    module: str
    name: str
    when: tuple[str, ...] = ()


class Sources:
    """Modules, their classes and functions, and where names come from; parsed once each."""

    def __init__(self, source_of: SourceOf) -> None:
        self._source_of = source_of
        self._modules: dict[str, ast.Module | None] = {}
        self._names: dict[str, dict[str, ast.AST]] = {}
        self._imports: dict[str, dict[str, list[Import]]] = {}
        self._values: dict[Place, Mapping[str, list[ast.expr]]] = {}
        self._mro: dict[Place, tuple[Place, ...]] = {}
        self._attributes: dict[tuple[Place, str], tuple[Place, ast.expr] | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """Return a module's tree, or None where its source is not to be had."""
        if name not in self._modules:
            source = self._source_of(name)
            self._modules[name] = None if source is None else _parsed(source)
        return self._modules[name]

    def names(self, module: str) -> Mapping[str, ast.AST]:
        """Return a module's classes, functions and assigned values by name."""
        if module not in self._names:
            found: dict[str, ast.AST] = {}
            for node in _statements(self.module(module)):
                if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.setdefault(node.name, node)
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    found.setdefault(node.targets[0].id, node.value)
                elif (
                    isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
                ):
                    found.setdefault(node.target.id, node.value)
            self._names[module] = found
        return self._names[module]

    def imports(self, module: str) -> Mapping[str, list[Import]]:
        """Return what a module imports by name, wherever in it the import stands."""
        if module not in self._imports:
            found: dict[str, list[Import]] = {}
            tree = self.module(module)
            for node, when in _imports(tree.body if tree else [], ()):
                base = node.module or ""
                if node.level:
                    parts = module.split(".")
                    drop = node.level - (1 if self.is_package(module) else 0)
                    parts = parts[: len(parts) - drop] if drop else parts
                    base = ".".join([*parts, *([base] if base else [])])
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name, []).append(
                        Import(base, alias.name, when)
                    )
            self._imports[module] = found
        return self._imports[module]

    def is_package(self, module: str) -> bool:
        """Whether a module is a folder with ``__init__``: one that has modules below it."""
        marker = getattr(self._source_of, "is_package", None)
        return bool(marker(module)) if marker else False

    def places(
        self, module: str, name: str, when: tuple[str, ...] = ()
    ) -> list[tuple[Place, tuple[str, ...]]]:
        """Return every class or function that a name of a module may stand for, with conditions."""
        return list(self._places(module, name, when, 0))

    def _places(
        self, module: str, name: str, when: tuple[str, ...], depth: int
    ) -> Iterator[tuple[Place, tuple[str, ...]]]:
        if depth > 6:
            return
        node = self.names(module).get(name)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield Place(module, name), when
            return
        if isinstance(node, ast.Name) and node.id != name:
            yield from self._places(module, node.id, when, depth + 1)
            return
        imports = self.imports(module).get(name, [])
        at_run_time = [one for one in imports if "TYPE_CHECKING" not in one.when]
        for found in at_run_time or imports:
            if found.module.partition(".")[0] == module.partition(".")[0]:
                yield from self._places(found.module, found.name, (*when, *found.when), depth + 1)

    def one(self, module: str, expression: ast.expr) -> Place | None:
        """Return the class or function that a name or dotted name stands for, or None."""
        if isinstance(expression, ast.Subscript):
            expression = expression.value
        if isinstance(expression, ast.Name):
            found = self.places(module, expression.id)
            return found[-1][0] if found else None
        return None

    def cls(self, place: Place) -> ast.ClassDef | None:
        """Return a class's tree."""
        node = self.names(place.module).get(place.name)
        return node if isinstance(node, ast.ClassDef) else None

    def mro(self, place: Place) -> tuple[Place, ...]:
        """Return a class and its base classes as far as sources are to be had, nearest first."""
        if place not in self._mro:
            self._mro[place] = (place,)  # a cycle ends here
            found = [place]
            node = self.cls(place)
            for base in node.bases if node else []:
                at = self.one(place.module, base)
                if at is not None and self.cls(at):
                    found += [one for one in self.mro(at) if one not in found]
            self._mro[place] = tuple(found)
        return self._mro[place]

    def method(
        self, place: Place, name: str, after: Place | None = None
    ) -> tuple[Place, ast.FunctionDef] | None:
        """Return a method and the class that defines it; ``after``: as ``super()`` there."""
        lineage = self.mro(place)
        if after is not None and after in lineage:
            lineage = lineage[lineage.index(after) + 1 :]
        for one in lineage:
            node = self.cls(one)
            for member in node.body if node else []:
                if isinstance(member, ast.FunctionDef) and member.name == name:
                    return one, member
        return None

    def attribute(self, place: Place, name: str) -> tuple[Place, ast.expr] | None:
        """Return what ``self.NAME`` is assigned in a class's methods (the last before ``Missing``)."""
        key = (place, name)
        if key not in self._attributes:
            self._attributes[key] = None
            for one in self.mro(place):
                values = self._assigned_in(one).get(name, [])
                real = [v for v in values if "Missing" not in _text(v)] or values
                if real:
                    self._attributes[key] = (one, real[0])
                    break
        return self._attributes[key]

    def _assigned_in(self, place: Place) -> Mapping[str, list[ast.expr]]:
        if place not in self._values:
            found: dict[str, list[ast.expr]] = {}
            for name, value in _assigned(self.cls(place)):
                found.setdefault(name, []).append(value)
            self._values[place] = found
        return self._values[place]

    def text(self, place: Place) -> str:
        """Return the text of a class as the parser prints it (no comments)."""
        node = self.cls(place)
        return ast.unparse(node) if node else ""


def _text(node: ast.AST) -> str:
    """Return a node's source as the parser prints it, once a node."""
    text = node.__dict__.get("_text")
    if text is None:
        text = node.__dict__["_text"] = ast.unparse(node)
    return str(text)


def _statements(tree: ast.Module | None) -> Iterator[ast.stmt]:
    pending: list[ast.stmt] = list(tree.body) if tree else []
    for node in pending:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _nested(node)


def _nested(node: ast.stmt) -> Iterator[ast.stmt]:
    for block in ("body", "orelse", "handlers", "finalbody"):
        for inner in getattr(node, block, []):
            if isinstance(inner, ast.ExceptHandler):
                yield from inner.body
                continue
            yield inner
            if isinstance(inner, (ast.If, ast.Try)):
                yield from _nested(inner)


def _imports(
    body: Iterable[ast.AST], when: tuple[str, ...]
) -> Iterator[tuple[ast.ImportFrom, tuple[str, ...]]]:
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield node, when
        elif isinstance(node, ast.If):
            test = _text(node.test)
            yield from _imports(node.body, (*when, test))
            yield from _imports(
                node.orelse, when if test == "TYPE_CHECKING" else (*when, f"not ({test})")
            )
        else:
            inner = [
                n for n in ast.iter_child_nodes(node) if isinstance(n, (ast.stmt, ast.ExceptHandler))
            ]
            yield from _imports(inner, when)


def _assigned(node: ast.ClassDef | None) -> Iterator[tuple[str, ast.expr]]:
    for member in node.body if node else []:
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name) and member.value:
            yield member.target.id, member.value
        elif isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name):
            yield member.targets[0].id, member.value
    for inner in ast.walk(node) if node else []:
        if isinstance(inner, ast.Assign):
            for target in inner.targets:
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(one, ast.Attribute) and _text(one.value) == "self":
                        yield one.attr, inner.value
        elif (
            isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Attribute) and inner.value
        ):
            yield inner.target.attr, inner.value


# --- values ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slot:
    """One value that the layer handed on in one turn of the loop; -1: what it returned as a whole."""

    turn: int
    index: int


@dataclass(frozen=True)
class _Opaque:
    """Something made from slots in a way that is not followed: a block, a normed value, a product."""

    deps: frozenset[_Slot] = frozenset()
    product: bool = False
    """Whether it is an arithmetic product of a slot, and no block's output."""


@dataclass(frozen=True)
class _Reduced:
    """A value summed over the tensor-parallel ranks."""

    inner: _Sum


@dataclass(frozen=True)
class _Sum:
    """A sum of the above, each with how often it is in it (what is opaque counts once)."""

    terms: frozenset[tuple[_Slot | _Opaque | _Reduced, int]]


@dataclass(frozen=True)
class _Tuple:
    items: tuple[_Value, ...]


@dataclass(frozen=True)
class _Constant:
    value: object


@dataclass(frozen=True)
class _Instance:
    """``self``, a layer, or a sub-module whose class is known."""

    cls: Place
    role: str = ""


@dataclass(frozen=True)
class _Layers:
    """The list of layers."""


_Value: TypeAlias = "_Sum | _Tuple | _Constant | _Instance | _Layers"

_NONE = _Constant(None)


def _sum(*terms: _Slot | _Opaque | _Reduced) -> _Sum:
    return _Sum(frozenset((term, 1) for term in terms))


def _opaque(deps: Iterable[_Slot] = ()) -> _Sum:
    return _sum(_Opaque(frozenset(deps)))


def _add(left: _Sum, right: _Sum) -> _Sum:
    counts: dict[_Slot | _Opaque | _Reduced, int] = dict(left.terms)
    for term, count in right.terms:
        counts[term] = 1 if isinstance(term, _Opaque) else counts.get(term, 0) + count
    return _Sum(frozenset((term, count) for term, count in counts.items() if count))


def _deps(value: object) -> frozenset[_Slot]:
    if isinstance(value, _Slot):
        return frozenset([value])
    if isinstance(value, _Opaque):
        return value.deps
    if isinstance(value, _Reduced):
        return _deps(value.inner)
    if isinstance(value, _Sum):
        return frozenset().union(*(_deps(term) for term, _ in value.terms))
    if isinstance(value, _Tuple):
        return frozenset().union(*(_deps(item) for item in value.items))
    return frozenset()


def _slots_in(value: object) -> frozenset[_Slot]:
    """Return the slots that are terms of a sum, as they are or reduced."""
    if isinstance(value, _Reduced):
        return _slots_in(value.inner)
    if isinstance(value, _Sum):
        return frozenset().union(
            *(frozenset([t]) if isinstance(t, _Slot) else _slots_in(t) for t, _ in value.terms)
        )
    return frozenset()


def _products(value: object) -> frozenset[_Slot]:
    if isinstance(value, _Sum):
        return frozenset().union(
            *(t.deps for t, _ in value.terms if isinstance(t, _Opaque) and t.product)
        )
    return frozenset()


_ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")


def _said(value: _Sum) -> str:
    """Return a sum in words; what does not depend on the layer is left out, the rest is ``?``."""
    parts = []
    for term, count in value.terms:
        times = "" if count == 1 else f"{count} x "
        if isinstance(term, _Slot):
            name = "the output" if term.index < 0 else _ORDINALS[min(term.index, 7)]
            parts.append((term.index, f"{times}{name}"))
        elif isinstance(term, _Reduced):
            inner = _said(term.inner)
            first = min((slot.index for slot in _slots_in(term.inner)), default=98)
            parts.append((first, f"{times}reduce({inner})"))
        elif term.deps:
            parts.append((99, "?"))
    return " + ".join(text for _, text in sorted(parts))


# --- following a model's forward ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    """What a norm read, in which turn of the loop, and where."""

    turn: int
    value: _Sum
    where: str = field(compare=False)


class _Fork(Exception):
    def __init__(self, test: str) -> None:
        self.test = test


class _TooMuch(Exception):
    """The source is followed no further."""


class _Dead(Exception):
    """This way ends in an error."""


_NORM = re.compile(r"norm|(^|_)ln(_|\d|$)|layer_norm", re.IGNORECASE)
_NO_STREAM_NORM = re.compile(r"(^|_)(q|k|kv|q_a|kv_a|query|key)_?(layer)?norm", re.IGNORECASE)
_REDUCES = re.compile(r"all_?reduce", re.IGNORECASE)
_FUSED = re.compile(r"all_?reduce|add|fused", re.IGNORECASE)
_SAME = {"clone", "contiguous", "to", "float", "type_as", "view", "reshape", "squeeze", "flatten"}
_SAME |= {"half", "bfloat16", "detach", "view_as", "wait"}
_SAME_CALLS = re.compile(
    r"(^|_)(sp_)?(all_gather|reduce_scatter|shard|sequence_parallel_chunk)|maybe_.*(gather|scatter|chunk)"
    r"|maybe_calc_kv|mark_dynamic|record_stream"
)
_ONE_INPUT = ("rms_norm", "layer_norm")
"""Kernels that norm one input; what stands before it is where they write to."""
_ALWAYS = ("get_pp_group().is_first_rank", "get_pp_group().is_last_rank", "is_pipeline_last_stage()")

_DEPTH = 7
_STEPS = 6000
_WAYS = 200


class _Run:
    """One way through a model's forward, with the decisions taken at its forks."""

    def __init__(
        self, sources: Sources, model: Place, layers: str, layer: Place, decisions: Mapping[str, bool]
    ) -> None:
        self.sources, self.model, self.layers, self.layer = sources, model, layers, layer
        self.decisions = decisions
        self.turn = 0
        self.steps = 0
        self.reads: list[_Read] = []
        self.blocks: list[_Read] = []
        self.handed: list[_Value] = []
        self.used: set[str] = set()
        self.methods: list[str] = []
        self.inside = 0
        self.in_layer = 0
        self.stage = False  # this way ends a pipeline stage that is not the last

    def go(self) -> _Value | None:
        """Follow the model's forward."""
        found = self.sources.method(self.model, "forward")
        if found is None:
            raise _TooMuch("the model has no forward")
        return self._call(_Instance(self.model), found, [], {}, 0)

    # statements

    def _call(
        self,
        own: _Instance | None,
        found: tuple[Place, ast.FunctionDef],
        positional: Sequence[_Value],
        named: Mapping[str, _Value],
        depth: int,
    ) -> _Value:
        if depth > _DEPTH:
            raise _TooMuch("calls nest too deeply")
        place, function = found
        arguments = function.args
        names = [a.arg for a in [*arguments.posonlyargs, *arguments.args]]
        env: dict[str, _Value] = {"": _Instance(place)}
        if own is not None and names and not _is_static(function):
            env[names.pop(0)] = own
        defaults: list[ast.expr | None] = [None] * (len(names) - len(arguments.defaults))
        for name, default in zip(
            names, [*defaults, *arguments.defaults][-len(names) :] if names else [], strict=False
        ):
            given_none = isinstance(default, ast.Constant) and depth > 0
            env[name] = _Constant(default.value) if given_none else _opaque()  # type: ignore[union-attr]
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=False):
            given_none = isinstance(default, ast.Constant) and depth > 0
            env[one.arg] = _Constant(default.value) if given_none else _opaque()  # type: ignore[union-attr]
        env.update(zip(names, positional, strict=False))
        rest = {k: v for k, v in named.items() if k not in env}
        env.update({k: v for k, v in named.items() if k in env})
        if arguments.kwarg:
            env[arguments.kwarg.arg] = _opaque(frozenset().union(*map(_deps, rest.values())))
        if arguments.vararg:
            env[arguments.vararg.arg] = _Tuple(tuple(positional[len(names) :]))
        done = self._block(function.body, env, depth)
        return done[1] if done and done[0] == "return" else _NONE

    def _block(
        self, body: Sequence[ast.stmt], env: dict[str, _Value], depth: int
    ) -> tuple[str, _Value] | None:
        for statement in body:
            self.steps += 1
            if self.steps > _STEPS:
                raise _TooMuch("the source is too long to follow")
            done = self._statement(statement, env, depth)
            if done:
                return done
        return None

    def _statement(
        self, node: ast.stmt, env: dict[str, _Value], depth: int
    ) -> tuple[str, _Value] | None:
        if isinstance(node, ast.Return):
            return "return", self._value(node.value, env, depth) if node.value else _NONE
        if isinstance(node, ast.Raise):
            raise _Dead
        if isinstance(node, (ast.Continue, ast.Break)):
            return "next", _NONE
        if isinstance(node, ast.Assign):
            value = self._value(node.value, env, depth)
            for target in node.targets:
                self._bind(target, value, env, depth)
        elif isinstance(node, ast.AnnAssign) and node.value:
            self._bind(node.target, self._value(node.value, env, depth), env, depth)
        elif isinstance(node, ast.AugAssign):
            value = self._combined(node.op, node.target, node.value, env, depth)
            self._bind(node.target, value, env, depth)
        elif isinstance(node, ast.Expr):
            self._value(node.value, env, depth)
            self._in_place(node.value, env, depth)
        elif isinstance(node, ast.If):
            return self._if(node.test, node.body, node.orelse, env, depth)
        elif isinstance(node, (ast.For, ast.While)):
            return self._loop(node, env, depth)
        elif isinstance(node, ast.With):
            return self._block(node.body, env, depth)
        elif isinstance(node, ast.Try):
            return self._block([*node.body, *node.orelse, *node.finalbody], env, depth)
        return None

    def _in_place(self, node: ast.expr, env: dict[str, _Value], depth: int) -> None:
        """Follow ``x.add_(y)``."""
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.attr.endswith("_")
            and node.func.value.id in env
        ):
            env[node.func.value.id] = self._value(node, env, depth)

    def _bind(self, target: ast.expr, value: _Value, env: dict[str, _Value], depth: int) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for one, item in zip(target.elts, self._items(value, len(target.elts)), strict=False):
                self._bind(one.value if isinstance(one, ast.Starred) else one, item, env, depth)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            name = target.value.id
            if name in env:
                env[name] = _opaque(_deps(env[name]) | _deps(value))

    def _items(self, value: _Value, count: int) -> list[_Value]:
        if isinstance(value, _Tuple) and len(value.items) == count:
            return list(value.items)
        if isinstance(value, _Sum) and len(value.terms) == 1:
            ((term, _),) = value.terms
            if isinstance(term, _Slot) and term.index < 0:
                return [_sum(_Slot(term.turn, index)) for index in range(count)]
        return [_opaque(_deps(value))] * count

    def _if(
        self,
        test: ast.expr,
        body: Sequence[ast.stmt],
        other: Sequence[ast.stmt],
        env: dict[str, _Value],
        depth: int,
    ) -> tuple[str, _Value] | None:
        truth = self._truth(test, env, depth)
        if truth is not None:
            return self._block(body if truth else other, env, depth)
        text = _condition(test)
        if text in self.decisions:
            self.used.add(text)
            return self._block(body if self.decisions[text] else other, env, depth)
        ways = []
        before = (list(self.reads), list(self.handed), self.turn, self.stage)
        for statements in (body, other):
            here = dict(env)
            self.reads, self.handed = list(before[0]), list(before[1])
            self.turn, self.stage = before[2], before[3]
            try:
                done = self._block(statements, here, depth)
            except _Dead:
                continue
            ways.append((here, done, list(self.reads), list(self.handed), self.turn, self.stage))
        if not ways:
            raise _Dead
        here, done, self.reads, self.handed, self.turn, self.stage = ways[0]
        if len(ways) == 2:
            joined = _joined(here, ways[1][0])
            if joined is None or ways[0][1:] != ways[1][1:]:
                raise _Fork(text)
            here = joined
        env.clear()
        env.update(here)
        return done

    def _truth(self, test: ast.expr, env: dict[str, _Value], depth: int) -> bool | None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._truth(test.operand, env, depth)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            parts = [self._truth(value, env, depth) for value in test.values]
            decisive = isinstance(test.op, ast.Or)
            if decisive in parts:
                return decisive
            return None if None in parts else not decisive
        text = _text(test)
        if text in _ALWAYS or text.endswith((".is_last_rank", ".is_first_rank")):
            return True
        if (
            isinstance(test, ast.Compare)
            and len(test.ops) == 1
            and isinstance(test.ops[0], (ast.Is, ast.IsNot))
        ):
            if _text(test.comparators[0]) != "None":
                return None
            value = self._value(test.left, env, depth)
            is_none: bool | None = None
            if isinstance(value, _Constant):
                is_none = value.value is None
            elif isinstance(value, (_Tuple, _Instance, _Layers)) or _deps(value):
                is_none = False
            return is_none if is_none is None or isinstance(test.ops[0], ast.Is) else not is_none
        if isinstance(test, ast.Name):
            value = env.get(test.id, _opaque())
            return bool(value.value) if isinstance(value, _Constant) else None
        if isinstance(test, ast.Constant):
            return bool(test.value)
        if isinstance(test, ast.Call) and _text(test.func) == "isinstance" and len(test.args) == 2:
            value = self._value(test.args[0], env, depth)
            wanted = _text(test.args[1])
            if isinstance(value, _Tuple):
                return "tuple" in wanted
            if isinstance(value, _Instance):
                return any(one.name in wanted for one in self.sources.mro(value.cls)) or None
            if isinstance(value, _Sum) and wanted in ("tuple", "list"):
                return False
            if isinstance(value, _Constant):
                return False
        return None

    def _loop(
        self, node: ast.For | ast.While, env: dict[str, _Value], depth: int
    ) -> tuple[str, _Value] | None:
        whole = _text(node)
        over = isinstance(node, ast.For) and self._is_over_layers(node, env)
        inside = not over and re.search(rf"self\.{re.escape(self.layers)}\[", whole) is not None
        if isinstance(node, ast.For) and not over:
            self._value(node.iter, env, depth)
            self._bind(node.target, _opaque(), env, depth)
        for _ in range(2 if over or inside else 1):
            if over and isinstance(node, ast.For):
                self._bind_layer(node.target, node.iter, env)
            done = self._block(node.body, env, depth)
            if done and done[0] == "return":
                return done
        return None

    def _is_over_layers(self, node: ast.For, env: dict[str, _Value]) -> bool:
        for inner in ast.walk(node.iter):
            if isinstance(inner, ast.Attribute) and inner.attr == self.layers:
                return "range(" not in _text(node.iter)
            if isinstance(inner, ast.Name) and isinstance(env.get(inner.id), _Layers):
                return True
        return False

    def _bind_layer(self, target: ast.expr, over: ast.expr, env: dict[str, _Value]) -> None:
        layer = _Instance(self.layer, "layer")
        if isinstance(target, ast.Name):
            env[target.id] = layer
            return
        names = [n for n in ast.walk(target) if isinstance(n, ast.Name)]
        chosen = names[-1]
        if isinstance(over, ast.Call) and _text(over.func) == "zip" and isinstance(target, ast.Tuple):
            for one, argument in zip(target.elts, over.args, strict=False):
                if self.layers in _text(argument) and isinstance(one, ast.Name):
                    chosen = one
        for one in names:
            if re.search(r"layer$|block$", one.id) and one.id not in ("i_layer", "num_layer"):
                chosen = one
        for one in names:
            env[one.id] = layer if one is chosen else _opaque()

    # expressions

    def _value(self, node: ast.expr | None, env: dict[str, _Value], depth: int) -> _Value:
        if node is None:
            return _NONE
        if isinstance(node, ast.Constant):
            return _Constant(node.value)
        if isinstance(node, ast.Name):
            return env.get(node.id, _opaque())
        if isinstance(node, (ast.Tuple, ast.List)):
            items: list[_Value] = []
            for one in node.elts:
                if isinstance(one, ast.Starred):
                    inner = self._value(one.value, env, depth)
                    items += inner.items if isinstance(inner, _Tuple) else [inner]
                else:
                    items.append(self._value(one, env, depth))
            return _Tuple(tuple(items))
        if isinstance(node, ast.BinOp):
            return self._combined(node.op, node.left, node.right, env, depth)
        if isinstance(node, ast.IfExp):
            return self._choice(node, env, depth)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, env, depth)
        if isinstance(node, ast.Subscript):
            return self._subscript(node, env, depth)
        if isinstance(node, ast.Call):
            return self._called(node, env, depth)
        if isinstance(node, (ast.NamedExpr,)):
            value = self._value(node.value, env, depth)
            self._bind(node.target, value, env, depth)
            return value
        if isinstance(node, (ast.Await, ast.Starred)):
            return self._value(node.value, env, depth)
        return _opaque(self._named(node, env))

    def _named(self, node: ast.AST, env: dict[str, _Value]) -> frozenset[_Slot]:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        return frozenset().union(*(_deps(env[name]) for name in names if name in env))

    def _choice(self, node: ast.IfExp, env: dict[str, _Value], depth: int) -> _Value:
        truth = self._truth(node.test, env, depth)
        if truth is None:
            text = _condition(node.test)
            if text in self.decisions:
                self.used.add(text)
                truth = self.decisions[text]
        if truth is not None:
            return self._value(node.body if truth else node.orelse, env, depth)
        left, right = self._value(node.body, env, depth), self._value(node.orelse, env, depth)
        joined = _joined({"": left}, {"": right})
        if joined is None:
            raise _Fork(_condition(node.test))
        return joined[""]

    def _combined(
        self, op: ast.operator, left: ast.expr, right: ast.expr, env: dict[str, _Value], depth: int
    ) -> _Value:
        one, two = self._value(left, env, depth), self._value(right, env, depth)
        if isinstance(op, ast.Add):
            if isinstance(one, _Sum) and isinstance(two, _Sum):
                return _add(one, two)
            if isinstance(one, _Tuple) and isinstance(two, _Tuple):
                return _Tuple((*one.items, *two.items))
        deps = _deps(one) | _deps(two)
        product = bool(_slots_in(one) | _slots_in(two) | _products(one) | _products(two))
        return _sum(_Opaque(deps, product))

    def _attribute(self, node: ast.Attribute, env: dict[str, _Value], depth: int) -> _Value:
        base = self._value(node.value, env, depth)
        if isinstance(base, _Instance) and base.cls.name:
            return self._member(base, node.attr, depth)
        return _opaque(_deps(base))

    def _member(self, base: _Instance, name: str, depth: int) -> _Value:
        if name == self.layers and base.cls == self.model:
            return _Layers()
        found = self.sources.attribute(base.cls, name)
        if found is None:
            return _opaque()
        owner, value = found
        for call in ast.walk(value):
            if isinstance(call, ast.Call):
                place = self.sources.one(owner.module, call.func)
                if place and self.sources.cls(place):
                    return _Instance(place, name)
        if isinstance(value, ast.Constant):
            return _opaque()
        return _opaque()

    def _subscript(self, node: ast.Subscript, env: dict[str, _Value], depth: int) -> _Value:
        base = self._value(node.value, env, depth)
        if isinstance(base, _Layers):
            return base if isinstance(node.slice, ast.Slice) else _Instance(self.layer, "layer")
        if isinstance(base, _Instance) and base.role:
            return base
        if isinstance(base, _Tuple) and isinstance(node.slice, ast.Constant):
            index = node.slice.value
            if isinstance(index, int) and -len(base.items) <= index < len(base.items):
                return base.items[index]
        if (
            isinstance(base, _Sum)
            and isinstance(node.slice, ast.Constant)
            and isinstance(node.slice.value, int)
        ):
            items = self._items(base, node.slice.value + 1)
            return items[-1] if items and items[-1] != base else _opaque(_deps(base))
        if isinstance(base, _Tuple) and isinstance(node.slice, ast.Slice) and _deps(base):
            return base
        if isinstance(base, _Sum) and isinstance(node.slice, (ast.Slice, ast.Tuple)):
            return base if "None" not in _text(node.slice) else _opaque(_deps(base))
        return _opaque(_deps(base))

    def _called(self, node: ast.Call, env: dict[str, _Value], depth: int) -> _Value:
        func = node.func
        own = env.get("self")
        where = env.get("")
        place = where.cls if isinstance(where, _Instance) else self.model
        # super().method(...)
        if isinstance(func, ast.Attribute) and _text(func.value).startswith("super("):
            positional, named = self._arguments(node, env, depth)
            found = None
            if isinstance(own, _Instance):
                found = self.sources.method(own.cls, func.attr, after=place)
            is_norm = isinstance(own, _Instance) and bool(own.role) and _is_norm(own)
            if is_norm and func.attr == "forward" and (found is None or not _is_models(found[0].module)):
                return self._norm(node, place, positional, named, reduces=False)
            if found is None or not isinstance(own, _Instance):
                return _opaque(self._all(positional, named))
            return self._call(own, found, positional, named, depth + 1)
        if isinstance(func, ast.Attribute):
            base = self._value(func.value, env, depth)
            positional, named = self._arguments(node, env, depth)
            return self._method(node, base, func.attr, place, positional, named, depth)
        positional, named = self._arguments(node, env, depth)
        if isinstance(func, ast.Name):
            value = env.get(func.id)
            if isinstance(value, _Instance):
                return self._module_call(node, value, place, positional, named, depth)
            return self._function(node, func.id, place, positional, named, depth)
        base = self._value(func, env, depth)
        if isinstance(base, _Instance):
            return self._module_call(node, base, place, positional, named, depth)
        return _opaque(self._all(positional, named) | _deps(base))

    def _arguments(
        self, node: ast.Call, env: dict[str, _Value], depth: int
    ) -> tuple[list[_Value], dict[str, _Value]]:
        positional: list[_Value] = []
        for argument in node.args:
            value = self._value(argument, env, depth)
            if isinstance(argument, ast.Starred) and isinstance(value, _Tuple):
                positional += value.items
            else:
                positional.append(value)
        named = {k.arg: self._value(k.value, env, depth) for k in node.keywords if k.arg}
        return positional, named

    @staticmethod
    def _all(positional: Sequence[_Value], named: Mapping[str, _Value]) -> frozenset[_Slot]:
        return frozenset().union(*map(_deps, [*positional, *named.values()]))

    def _method(
        self,
        node: ast.Call,
        base: _Value,
        name: str,
        place: Place,
        positional: list[_Value],
        named: dict[str, _Value],
        depth: int,
    ) -> _Value:
        deps = self._all(positional, named)
        if isinstance(base, _Layers):
            return _opaque(deps)
        if isinstance(base, _Instance):
            if base.role == "layer" and not self.inside and not self.in_layer:
                self.methods.append(name)
            if base.role == "layer" and name in ("forward", "__call__"):
                return self._module_call(node, base, place, positional, named, depth)
            member = self._member(base, name, depth)
            is_method = self.sources.method(base.cls, name)
            if is_method and (not base.role or base.role == "layer" or _is_norm(base)):
                if not deps and not base.role and self.layers not in _text(is_method[1]):
                    return _opaque()
                if base.role != "layer":
                    return self._followed(base, is_method, positional, named, depth)
                self.in_layer += 1
                try:
                    return self._followed(base, is_method, positional, named, depth)
                finally:
                    self.in_layer -= 1
            if isinstance(member, _Instance):
                return self._module_call(node, member, place, positional, named, depth)
            if _NORM.search(name) and not _NO_STREAM_NORM.search(name):
                return self._unresolved_norm(node, base, name, place, positional, named, depth)
            return _opaque(deps)
        if isinstance(base, _Sum):
            if name in ("add", "add_") and len(positional) == 1 and isinstance(positional[0], _Sum):
                return _add(base, positional[0])
            if name in _SAME:
                return base
        if isinstance(base, _Tuple) and name in ("split", "chunk"):
            return base
        if name == "cat" and positional and isinstance(positional[0], _Tuple) and deps:
            return positional[0]  # followed as what it is made of, until it is split again
        if _REDUCES.search(name) and positional and isinstance(positional[0], _Sum):
            return self._reduced(positional[0])
        if name == "add" and len(positional) == 2 and all(isinstance(p, _Sum) for p in positional):
            return _add(positional[0], positional[1])  # type: ignore[arg-type]
        if _NORM.search(name) and "norm(" in f"{name}(" and deps:
            return self._norm(node, place, positional, named, reduces=bool(_REDUCES.search(name)))
        return _opaque(deps | _deps(base))

    def _followed(
        self,
        own: _Instance,
        found: tuple[Place, ast.FunctionDef],
        positional: list[_Value],
        named: dict[str, _Value],
        depth: int,
    ) -> _Value:
        try:
            return self._call(own, found, positional, named, depth + 1)
        except _TooMuch:
            if depth == 0:
                raise
            return _opaque(self._all(positional, named))

    def _module_call(
        self,
        node: ast.Call,
        module: _Instance,
        place: Place,
        positional: list[_Value],
        named: dict[str, _Value],
        depth: int,
    ) -> _Value:
        if module.role == "layer" and not self.inside:
            found = self.sources.method(module.cls, "forward")
            if found is None:
                raise _TooMuch("the layer has no forward")
            self.turn += 1
            self.inside += 1
            try:
                value = self._call(module, found, positional, named, depth + 1)
            finally:
                self.inside -= 1
            self.handed.append(value)
            return _fresh(value, self.turn)
        if not module.role:  # self(...) or a plain instance
            found = self.sources.method(module.cls, "forward")
            return self._followed(module, found, positional, named, depth) if found else _opaque()
        if _is_norm(module):
            return self._norm_module(node, module, place, positional, named, depth)
        self._block_read(node, place, positional, named)
        return _opaque(self._all(positional, named))

    def _block_read(
        self, node: ast.Call, place: Place, positional: list[_Value], named: dict[str, _Value]
    ) -> None:
        """Note what a block (attention, say) reads as it was handed on, without a norm before it."""
        direct = [v for v in (*positional, *named.values()) if isinstance(v, _Sum) and _slots_in(v)]
        if len(direct) == 1 and self.inside:
            self.blocks.append(_Read(self.turn, _bare(direct[0]), f"{place.module}:{node.lineno}"))

    def _unresolved_norm(
        self,
        node: ast.Call,
        base: _Instance,
        name: str,
        place: Place,
        positional: list[_Value],
        named: dict[str, _Value],
        depth: int,
    ) -> _Value:
        """Note what a norm reads whose class the constructor does not name by itself.

        With one input it does not matter which it is. With two it does: the classes that the code names
        where it chooses one are followed, and must all read alike.
        """
        tensors = [v for v in (*positional, *named.values()) if isinstance(v, _Sum) and _deps(v)]
        if len(tensors) < 2:
            return self._norm(node, place, positional, named, reduces=False)
        results = []
        for cls in self._choices(base.cls, name):
            before = len(self.reads)
            value = self._norm_module(node, _Instance(cls, name), place, positional, named, depth)
            results.append((value, self.reads[before:]))
            del self.reads[before:]
        if results and all(result == results[0] for result in results):
            self.reads += results[0][1]
            return results[0][0]
        deps = self._all(positional, named)
        self.reads.append(
            _Read(
                self.turn, _add(tensors[0], _sum(_Opaque(deps, True))), f"{place.module}:{node.lineno}"
            )
        )
        return _Tuple((_opaque(deps), _opaque(deps)))

    def _choices(self, owner: Place, name: str) -> list[Place]:
        """Return the norm classes that the code names where it chooses ``self.NAME``'s."""
        found = self.sources.attribute(owner, name)
        if found is None:
            return []
        module, classes = found[0].module, []
        pending: list[ast.AST] = [found[1]]
        function = self.sources.method(found[0], "__init__")
        if function:
            called = {n.id for n in ast.walk(found[1]) if isinstance(n, ast.Name)}
            for inner in ast.walk(function[1]):
                if isinstance(inner, ast.Assign):
                    names = {n.id for t in inner.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                    if names & called:
                        pending.append(inner.value)
        for node in pending:
            for inner in ast.walk(node):
                at = self.sources.one(module, inner) if isinstance(inner, ast.Name) else None
                if at is None:
                    continue
                there = self.sources.names(at.module).get(at.name)
                if isinstance(there, ast.FunctionDef) and there not in pending:
                    pending.append(there)
                elif isinstance(there, ast.ClassDef) and "Norm" in at.name and at not in classes:
                    classes.append(at)
        return classes

    def _norm_module(
        self,
        node: ast.Call,
        module: _Instance,
        place: Place,
        positional: list[_Value],
        named: dict[str, _Value],
        depth: int,
    ) -> _Value:
        """Follow a norm that a model defines itself; vLLM's own add their second input to the first."""
        found = self.sources.method(module.cls, "forward")
        if found is None or not _is_models(found[0].module):
            found = self.sources.method(module.cls, "forward_native")
        if found is None or not _is_models(found[0].module):
            return self._norm(node, place, positional, named, reduces=False)
        before = len(self.reads)
        turn = self.turn
        value = self._followed(module, found, positional, named, depth)
        where = f"{place.module}:{node.lineno}"
        inner = [read for read in self.reads[before:] if _slots_in(read.value)]
        del self.reads[before:]
        if inner:
            self.reads.append(_Read(turn, inner[0].value, where))
            return value
        second = value.items[1] if isinstance(value, _Tuple) and len(value.items) == 2 else None
        tensors = [v for v in (*positional, *named.values()) if isinstance(v, _Sum) and _deps(v)]
        if isinstance(second, _Sum) and _slots_in(second):
            self.reads.append(_Read(turn, _bare(second), where))
        elif len(tensors) == 1:
            self.reads.append(_Read(turn, _bare(tensors[0]), where))
        if _REDUCES.search(_text(found[1])) and len(self.reads) > before:
            reduced = self._reduced(self.reads[-1].value)
            assert isinstance(reduced, _Sum)
            self.reads[-1] = _Read(turn, reduced, where)
        return value

    def _function(
        self,
        node: ast.Call,
        name: str,
        place: Place,
        positional: list[_Value],
        named: dict[str, _Value],
        depth: int,
    ) -> _Value:
        deps = self._all(positional, named)
        if name == "IntermediateTensors":
            self.stage = True
        if _NORM.search(name) and deps:
            return self._norm(node, place, positional, named, reduces=bool(_REDUCES.search(name)))
        if _REDUCES.search(name):
            first = positional[0] if positional else next(iter(named.values()), _opaque())
            return self._reduced(first)
        if _SAME_CALLS.search(name) and positional and isinstance(positional[0], (_Sum, _Tuple)):
            return positional[0]
        if name == "getattr":
            return _opaque(deps)
        if name in ("cast",) and len(positional) == 2:
            return positional[1]
        target = self.sources.one(place.module, ast.Name(name))
        if target and deps:
            function = self.sources.names(target.module).get(target.name)
            if isinstance(function, ast.FunctionDef) and _worth(function):
                try:
                    return self._call(None, (target, function), positional, named, depth + 1)
                except _TooMuch:
                    return _opaque(deps)
        return _opaque(deps)

    @staticmethod
    def _reduced(value: _Value) -> _Value:
        if isinstance(value, _Sum) and _slots_in(value):
            return _sum(_Reduced(value))
        return value if isinstance(value, _Sum) else _opaque(_deps(value))

    def _norm(
        self,
        node: ast.Call,
        place: Place,
        positional: list[_Value],
        named: dict[str, _Value],
        *,
        reduces: bool,
    ) -> _Value:
        """Note what a norm reads; return the normed value, and the sum where there are two inputs."""
        values = [v for v in positional if isinstance(v, _Sum)]
        for key in ("x", "input", "hidden_states", "residual"):
            if isinstance(named.get(key), _Sum):
                values.append(named[key])  # type: ignore[arg-type]
        tensors = [v for v in values[:2] if v != _opaque() or _deps(v)] or values[:1]
        if isinstance(node.func, ast.Attribute) and node.func.attr in _ONE_INPUT:
            tensors = [v for v in values if _slots_in(v)][:1] or tensors[:1]
        if not tensors:
            return _opaque()
        first = tensors[0]
        if reduces:
            first = self._reduced(first)  # type: ignore[assignment]
        second = tensors[1] if len(tensors) > 1 else None
        total = first if second is None else _add(first, second)
        self.reads.append(_Read(self.turn, _bare(total), f"{place.module}:{node.lineno}"))
        normed = _opaque(_deps(total))
        two = second is not None or "residual" in named
        return (
            _Tuple((normed, total))
            if two and not isinstance(named.get("residual"), _Constant)
            else normed
        )


def _is_models(module: str) -> bool:
    """Whether a module is one of models, and none of the layers that all of them share."""
    return ".models." in f".{module}."


def _is_static(function: ast.FunctionDef) -> bool:
    return any(_text(one) == "staticmethod" for one in function.decorator_list)


def _is_norm(module: _Instance) -> bool:
    if _NO_STREAM_NORM.search(module.role):
        return False
    return bool(_NORM.search(module.role) or re.search(r"Norm", module.cls.name))


def _worth(function: ast.FunctionDef) -> bool:
    text = _text(function)
    return len(text) < 4000 and bool(_NORM.search(text) or _REDUCES.search(text) or "return" in text)


def _bare(value: _Sum) -> _Sum:
    """Leave out what does not depend on any layer (vision inputs added on the way, say)."""
    return _Sum(frozenset((t, n) for t, n in value.terms if not (isinstance(t, _Opaque) and not t.deps)))


def _fresh(value: _Value, turn: int) -> _Value:
    if isinstance(value, _Tuple):
        return _Tuple(
            tuple(
                item if isinstance(item, _Constant) else _sum(_Slot(turn, index))
                for index, item in enumerate(value.items)
            )
        )
    return _sum(_Slot(turn, -1))


def _condition(test: ast.expr) -> str:
    return re.sub(r"\s+", " ", _text(test))


def _joined(one: dict[str, _Value], two: dict[str, _Value]) -> dict[str, _Value] | None:
    """Return what holds after either of two branches, or None where they must be told apart."""
    joined = {**two, **one}
    for name in set(one) & set(two):
        left, right = one[name], two[name]
        if left == right:
            continue
        if not all(
            isinstance(value, (_Sum, _Constant)) and not _slots_in(value) for value in (left, right)
        ):
            return None
        joined[name] = _opaque(_deps(left) | _deps(right))
    return joined


# --- the reader ----------------------------------------------------------------------------------------


_STREAMS = re.compile(
    r"hc_\w+|\w*hyper_?connection\w*|mhc\w*|altup\w*|num_residual_streams$|n_streams$", re.IGNORECASE
)
_EARLIER = re.compile(r"(?P<name>attn_res\w*|block_residual\w*)")


def read_layer(
    layer: Place,
    model: Place,
    layers: str,
    source_of: SourceOf | Sources,
    *,
    others: Iterable[Place] = (),
) -> Handed:
    """Return what a decoder layer hands on in a model.

    ``layers`` is the model's attribute that holds the list; ``others`` the other classes in the same
    list (a hybrid model's), whose first norms read what this one hands on, too. ``source_of`` gives the
    source of a module by its name: from a tree, or by ``inspect.getsource`` in a live process.
    """
    sources = source_of if isinstance(source_of, Sources) else Sources(source_of)
    ways = list(_ways(sources, model, layers, layer))
    ways = [way for way in ways if not way[0].stage] or ways
    ways = [way for way in ways if not _does_nothing(way[0])] or ways
    cases = [_case(sources, run, layer, model, failed) for run, failed in ways]
    called = any(run.handed for run, _ in ways)
    keeps = any(_keeps(run, case) for (run, _), case in zip(ways, cases, strict=False))
    handed = Handed(layer, model, _merged(cases), called, keeps)
    for other in others:
        there = read_layer(other, model, layers, sources)
        if {c.stream for c in there.cases} != {c.stream for c in handed.cases}:
            odd = ", ".join(sorted({c.stream or "nothing" for c in there.cases}))
            here = ", ".join(sorted({c.stream or "nothing" for c in handed.cases}))
            reason = f"{other.name} in the same list reads {odd}, this one {here}"
            return Handed(layer, model, (Case(Kind.UNKNOWN, reason=reason),), called, keeps)
    return handed


def _ways(sources: Sources, model: Place, layers: str, layer: Place) -> Iterator[tuple[_Run, str]]:
    pending: list[dict[str, bool]] = [{}]
    count = 0
    while pending:
        decisions = pending.pop()
        run = _Run(sources, model, layers, layer, decisions)
        failed = ""
        try:
            run.go()
        except _Fork as fork:
            count += 1
            if count > _WAYS or fork.test in decisions:
                yield run, "there are too many ways through its source"
                return
            pending += [{**decisions, fork.test: False}, {**decisions, fork.test: True}]
            continue
        except _Dead:
            continue
        except _TooMuch as error:
            failed = str(error)
        except RecursionError:
            failed = "its source nests too deeply"
        yield run, failed


def _case(sources: Sources, run: _Run, layer: Place, model: Place, failed: str) -> Case:
    when = tuple(
        text if value else f"not ({text})" for text, value in run.decisions.items() if text in run.used
    )
    if streams := _several(sources, layer, model, _STREAMS):
        return Case(Kind.SEVERAL, "", when, reason=streams, returned=_returned(run))
    case = replace(_read_case(run, when, failed), returned=_returned(run))
    if case.proven and case.kind != Kind.PARTIAL and (left_out := _leaves_out(sources, layer)):
        return replace(case, kind=Kind.UNKNOWN, reason=left_out)
    if not case.proven and (streams := _several(sources, layer, model, _EARLIER)):
        return replace(case, kind=Kind.SEVERAL, stream="", reason=streams)
    return case


def _leaves_out(sources: Sources, layer: Place) -> str:
    """Return why a layer may hand on a partial sum though no norm is seen to reduce it."""
    lineage = sources.mro(layer)
    if any(_REDUCES.search(sources.text(place)) for place in lineage):
        return ""
    for place in lineage:
        for node in ast.walk(sources.cls(place) or ast.Module([], [])):
            if (
                isinstance(node, ast.keyword)
                and node.arg == "reduce_results"
                and _text(node.value) == "False"
            ):
                where = f"{place.module}:{node.lineno}"
                return f"reduce_results=False at {where}, and nothing is seen to reduce"
    return ""


def _returned(run: _Run) -> tuple[str, ...]:
    if not run.handed:
        return ()
    value = run.handed[-1]
    if not isinstance(value, _Tuple):
        return ("tensor",) if _slots_in(value) or len(_terms(value)) > 1 else ("?",)
    names = []
    for item in value.items:
        if isinstance(item, _Constant):
            names.append("None" if item.value is None else "?")
        else:
            names.append("tuple" if isinstance(item, _Tuple) else "tensor")
    return tuple(names)


def _terms(value: _Value) -> frozenset[object]:
    return frozenset(value.terms) if isinstance(value, _Sum) else frozenset()


def _read_case(run: _Run, when: tuple[str, ...], failed: str) -> Case:
    if failed:
        return Case(Kind.UNKNOWN, "", when, reason=failed)
    if not run.handed:
        inner = _case_uncalled(run)
        return Case(Kind.UNKNOWN, "", when, reason=inner)
    last = run.turn
    entry = next((r for r in run.reads if _turns(r.value) == {1} and last > 1), None)
    if entry and "?" in _said(entry.value) and not _products(entry.value):
        entry = None  # it reads behind a block: norms stand behind the blocks here
    final = next((r for r in run.reads if _turns(r.value) == {last}), None)
    if entry is None and final is None:
        touched = next((r for r in run.reads if _deps(r.value)), None)
        reason = "no norm is seen to read what it hands on"
        if touched is not None:
            reason = f"the norm at {touched.where} reads something made from it that is not followed"
        return Case(Kind.UNKNOWN, "", when, reason=reason)
    if entry is None:  # norms stand behind the blocks: what the next layer's first block reads
        entry = next((r for r in run.blocks if _turns(r.value) == {1} and last > 1), None)
    said = {_said(read.value) for read in (entry, final) if read is not None}
    places = (entry.where if entry else "", final.where if final else "")
    if len(said) > 1:
        plain = {text.replace("reduce(", "").replace(")", "") for text in said}
        if len(plain) == 1:  # one of the norms reduces under another condition's name
            stream = next(text for text in said if "reduce(" in text)
            return Case(Kind.PARTIAL, stream, when, *places)
        return Case(
            Kind.UNKNOWN,
            "",
            when,
            *places,
            reason=f"the next layer's norm reads {_said(entry.value) if entry else '?'}, the final norm"
            f" {_said(final.value) if final else '?'}",
        )
    (stream,) = said
    return Case(_kind(stream, run.handed[-1]), stream, when, *places, reason="")


def _turns(value: _Sum) -> set[int]:
    return {slot.turn for slot in _slots_in(value)}


def _case_uncalled(run: _Run) -> str:
    names = " and ".join(dict.fromkeys(run.methods))
    if names:
        return f"the model calls its {names}, not its forward: no hook fires"
    return "the model is not seen to call it"


def _kind(stream: str, handed: _Value) -> Kind:
    if "?" in stream:
        return Kind.UNKNOWN
    if "reduce(" in stream:
        return Kind.PARTIAL
    if stream == "the output":
        return Kind.STREAM
    if stream == "1st":
        return Kind.FIRST
    return Kind.SUM if stream == "1st + 2nd" else Kind.OTHER


def _several(sources: Sources, layer: Place, model: Place, names: re.Pattern[str]) -> str:
    for place in (layer, *sources.mro(layer)[1:3], model):
        node = sources.cls(place)
        for inner in ast.walk(node) if node else []:
            name = None
            if isinstance(inner, ast.Attribute):
                name = inner.attr
            elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name):
                name = inner.func.id
            if name and names.match(name):
                line = getattr(inner, "lineno", 0)
                return f"{name} at {place.module}:{line}"
    return ""


def _does_nothing(run: _Run) -> bool:
    """Whether a layer hands on what it received, as a pruned model's layer without any block does."""
    if len(run.handed) < 2:
        return False
    value = run.handed[1]
    items = value.items if isinstance(value, _Tuple) else (value,)
    return all(
        item == _NONE
        or (isinstance(item, _Sum) and all(isinstance(term, _Slot) for term, _ in item.terms))
        for item in items
    )


def _keeps(run: _Run, case: Case) -> bool:
    """Whether the stream that the second turn hands on visibly contains the first turn's."""
    if len(run.handed) < 2 or not case.proven:
        return False
    value = run.handed[1]
    items = value.items if isinstance(value, _Tuple) else (value,)
    return any(slot.turn == 1 for item in items for slot in _slots_in(item))


def _merged(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Put cases that read alike together, and leave out conditions that do not matter."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.kind, case.stream, case.reason, case.returned), []).append(case)
    if len(groups) == 1:
        return (replace(cases[0], when=()),)
    merged = []
    for group in groups.values():
        shared = set(group[0].when).intersection(*(case.when for case in group))
        merged.append(replace(group[0], when=tuple(text for text in group[0].when if text in shared)))
    return tuple(merged)
