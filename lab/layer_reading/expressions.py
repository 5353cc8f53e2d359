"""Expressions that are no calls, and what is known of tests."""

from __future__ import annotations

import ast

from lab.layer_reading.calls import Calls
from lab.layer_reading.following import Env, Fork, condition_of
from lab.layer_reading.sources import text_of
from lab.layer_reading.values import (
    NONE,
    Constant,
    Instance,
    Layers,
    Opaque,
    Slot,
    Sum,
    Tuple,
    Value,
    added,
    deps_of,
    items_of,
    joined_in,
    opaque,
    products_in,
    slots_in,
    sum_of,
)

ALWAYS = ("get_pp_group().is_first_rank", "get_pp_group().is_last_rank", "is_pipeline_last_stage()")


class Expressions(Calls):
    """Follow expressions."""

    def _value(self, node: ast.expr | None, env: Env, depth: int) -> Value:
        if node is None:
            return NONE
        if isinstance(node, ast.Constant):
            return Constant(node.value)
        if isinstance(node, ast.Name):
            return env.get(node.id, opaque())
        if isinstance(node, (ast.Tuple, ast.List)):
            return Tuple(tuple(self._values(node.elts, env, depth)))
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
        if isinstance(node, ast.NamedExpr):
            value = self._value(node.value, env, depth)
            self._bind(node.target, value, env, depth)
            return value
        if isinstance(node, (ast.Await, ast.Starred)):
            return self._value(node.value, env, depth)
        return opaque(self._named(node, env))

    def _named(self, node: ast.AST, env: Env) -> frozenset[Slot]:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        return frozenset().union(*(deps_of(env[name]) for name in names if name in env))

    def _choice(self, node: ast.IfExp, env: Env, depth: int) -> Value:
        truth = self._truth(node.test, env, depth)
        if truth is None:
            truth = self._decided(condition_of(node.test))
        if truth is not None:
            return self._value(node.body if truth else node.orelse, env, depth)
        left, right = self._value(node.body, env, depth), self._value(node.orelse, env, depth)
        joined = joined_in({"": left}, {"": right})
        if joined is None:
            raise Fork(condition_of(node.test))
        return joined[""]

    def _combined(
        self, op: ast.operator, left: ast.expr, right: ast.expr, env: Env, depth: int
    ) -> Value:
        one, two = self._value(left, env, depth), self._value(right, env, depth)
        if isinstance(op, ast.Add):
            if isinstance(one, Sum) and isinstance(two, Sum):
                return added(one, two)
            if isinstance(one, Tuple) and isinstance(two, Tuple):
                return Tuple((*one.items, *two.items))
        deps = deps_of(one) | deps_of(two)
        product = bool(slots_in(one) | slots_in(two) | products_in(one) | products_in(two))
        return sum_of(Opaque(deps, product))

    def _attribute(self, node: ast.Attribute, env: Env, depth: int) -> Value:
        base = self._value(node.value, env, depth)
        if isinstance(base, Instance) and base.cls.name:
            return self._member(base, node.attr)
        return opaque(deps_of(base))

    def _subscript(self, node: ast.Subscript, env: Env, depth: int) -> Value:
        base = self._value(node.value, env, depth)
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(base, Layers):
            return base if isinstance(node.slice, ast.Slice) else Instance(self.layer, "layer")
        if isinstance(base, Instance) and base.role:
            return base
        if isinstance(base, Tuple):
            if isinstance(index, int) and -len(base.items) <= index < len(base.items):
                return base.items[index]
            if isinstance(node.slice, ast.Slice) and deps_of(base):
                return base
        if isinstance(base, Sum):
            if isinstance(index, int):
                items = items_of(base, index + 1)
                return items[-1] if items and items[-1] != base else opaque(deps_of(base))
            if isinstance(node.slice, (ast.Slice, ast.Tuple)) and "None" not in text_of(node.slice):
                return base
        return opaque(deps_of(base))

    # Tests.

    def _decided(self, text: str) -> bool | None:
        """Return how this way goes at a fork; None where it has not been decided."""
        if text not in self.decisions:
            return None
        self.used.add(text)
        return self.decisions[text]

    def _truth(self, test: ast.expr, env: Env, depth: int) -> bool | None:
        """Return whether a test holds; None where that is not known."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._truth(test.operand, env, depth)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            parts = [self._truth(value, env, depth) for value in test.values]
            decisive = isinstance(test.op, ast.Or)
            if decisive in parts:
                return decisive
            return None if None in parts else not decisive
        text = text_of(test)
        if text in ALWAYS or text.endswith((".is_last_rank", ".is_first_rank")):
            return True
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._is_none(test, env, depth)
        if isinstance(test, ast.Name):
            value = env.get(test.id, opaque())
            return bool(value.value) if isinstance(value, Constant) else None
        if isinstance(test, ast.Constant):
            return bool(test.value)
        if isinstance(test, ast.Call) and text_of(test.func) == "isinstance" and len(test.args) == 2:
            return self._is_instance(self._value(test.args[0], env, depth), text_of(test.args[1]))
        return None

    def _is_none(self, test: ast.Compare, env: Env, depth: int) -> bool | None:
        """Return whether ``x is None`` or ``x is not None`` holds."""
        if not isinstance(test.ops[0], (ast.Is, ast.IsNot)) or text_of(test.comparators[0]) != "None":
            return None
        value = self._value(test.left, env, depth)
        is_none: bool | None = None
        if isinstance(value, Constant):
            is_none = value.value is None
        elif isinstance(value, (Tuple, Instance, Layers)) or deps_of(value):
            is_none = False
        return is_none if is_none is None or isinstance(test.ops[0], ast.Is) else not is_none

    def _is_instance(self, value: Value, wanted: str) -> bool | None:
        """Return whether a value is one of the classes of that text."""
        if isinstance(value, Tuple):
            return "tuple" in wanted
        if isinstance(value, Instance):
            return any(one.name in wanted for one in self.sources.mro(value.cls)) or None
        if isinstance(value, Constant) or (isinstance(value, Sum) and wanted in ("tuple", "list")):
            return False
        return None
