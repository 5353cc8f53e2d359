"""One way through a model's forward: statements, branches, and two turns of the loop over the layers."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from lab.layer_reading.expressions import Expressions
from lab.layer_reading.following import Dead, Env, Fork, TooMuch, condition_of
from lab.layer_reading.model import Place
from lab.layer_reading.sources import text_of
from lab.layer_reading.values import (
    NONE,
    Constant,
    Instance,
    Layers,
    Tuple,
    Value,
    deps_of,
    items_of,
    joined_in,
    opaque,
)

Done = tuple[str, Value]
"""How a block ended before its last statement: ``return`` with a value, or ``next``."""

_DEPTH = 7
_STEPS = 6000


class Run(Expressions):
    """Follow statements."""

    def go(self) -> Value | None:
        """Follow the model's forward."""
        found = self.sources.method(self.model, "forward")
        if found is None:
            raise TooMuch("the model has no forward")
        return self._call(Instance(self.model), found, [], {}, 0)

    def _call(
        self,
        own: Instance | None,
        found: tuple[Place, ast.FunctionDef],
        positional: Sequence[Value],
        named: Mapping[str, Value],
        depth: int,
    ) -> Value:
        if depth > _DEPTH:
            raise TooMuch("calls nest too deeply")
        place, function = found
        arguments = function.args
        names = [a.arg for a in [*arguments.posonlyargs, *arguments.args]]
        env: Env = {"": Instance(place)}
        if own is not None and names and not _is_static(function):
            env[names.pop(0)] = own
        defaults: list[ast.expr | None] = [None] * (len(names) - len(arguments.defaults))
        defaults = [*defaults, *arguments.defaults][-len(names) :] if names else []
        keywords = [a.arg for a in arguments.kwonlyargs]
        for name, default in zip((*names, *keywords), (*defaults, *arguments.kw_defaults), strict=False):
            given = isinstance(default, ast.Constant) and depth > 0
            env[name] = Constant(default.value) if given else opaque()  # type: ignore[union-attr]
        env.update(zip(names, positional, strict=False))
        rest = {k: v for k, v in named.items() if k not in env}
        env.update({k: v for k, v in named.items() if k in env})
        if arguments.kwarg:
            env[arguments.kwarg.arg] = opaque(frozenset().union(*map(deps_of, rest.values())))
        if arguments.vararg:
            env[arguments.vararg.arg] = Tuple(tuple(positional[len(names) :]))
        done = self._block(function.body, env, depth)
        return done[1] if done and done[0] == "return" else NONE

    def _block(self, body: Sequence[ast.stmt], env: Env, depth: int) -> Done | None:
        for statement in body:
            self.steps += 1
            if self.steps > _STEPS:
                raise TooMuch("the source is too long to follow")
            done = self._statement(statement, env, depth)
            if done:
                return done
        return None

    def _statement(self, node: ast.stmt, env: Env, depth: int) -> Done | None:
        if isinstance(node, ast.Return):
            return "return", self._value(node.value, env, depth) if node.value else NONE
        if isinstance(node, ast.Raise):
            raise Dead
        if isinstance(node, (ast.Continue, ast.Break)):
            return "next", NONE
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
            return self._if(node, env, depth)
        elif isinstance(node, (ast.For, ast.While)):
            return self._loop(node, env, depth)
        elif isinstance(node, ast.With):
            return self._block(node.body, env, depth)
        elif isinstance(node, ast.Try):
            return self._block([*node.body, *node.orelse, *node.finalbody], env, depth)
        return None

    def _in_place(self, node: ast.expr, env: Env, depth: int) -> None:
        """Follow ``x.add_(y)``."""
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.attr.endswith("_")
            and node.func.value.id in env
        ):
            env[node.func.value.id] = self._value(node, env, depth)

    def _bind(self, target: ast.expr, value: Value, env: Env, depth: int) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for one, item in zip(target.elts, items_of(value, len(target.elts)), strict=False):
                self._bind(one.value if isinstance(one, ast.Starred) else one, item, env, depth)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            name = target.value.id
            if name in env:
                env[name] = opaque(deps_of(env[name]) | deps_of(value))

    # Branches.

    def _if(self, node: ast.If, env: Env, depth: int) -> Done | None:
        truth = self._truth(node.test, env, depth)
        text = condition_of(node.test)
        if truth is None:
            truth = self._decided(text)
        if truth is not None:
            return self._block(node.body if truth else node.orelse, env, depth)
        ways = []
        before = (list(self.reads), list(self.handed), self.turn, self.stage)
        for statements in (node.body, node.orelse):
            here = dict(env)
            self.reads, self.handed = list(before[0]), list(before[1])
            self.turn, self.stage = before[2], before[3]
            try:
                done = self._block(statements, here, depth)
            except Dead:
                continue
            ways.append((here, done, list(self.reads), list(self.handed), self.turn, self.stage))
        if not ways:
            raise Dead
        here, done, self.reads, self.handed, self.turn, self.stage = ways[0]
        if len(ways) == 2:
            joined = joined_in(here, ways[1][0])
            if joined is None or ways[0][1:] != ways[1][1:]:
                raise Fork(text)
            here = joined
        env.clear()
        env.update(here)
        return done

    # Loops.

    def _loop(self, node: ast.For | ast.While, env: Env, depth: int) -> Done | None:
        whole = text_of(node)
        over = isinstance(node, ast.For) and self._is_over_layers(node, env)
        inside = not over and re.search(rf"self\.{re.escape(self.layers)}\[", whole) is not None
        if isinstance(node, ast.For) and not over:
            self._value(node.iter, env, depth)
            self._bind(node.target, opaque(), env, depth)
        for _ in range(2 if over or inside else 1):
            if over and isinstance(node, ast.For):
                self._bind_layer(node.target, node.iter, env)
            done = self._block(node.body, env, depth)
            if done and done[0] == "return":
                return done
        return None

    def _is_over_layers(self, node: ast.For, env: Env) -> bool:
        for inner in ast.walk(node.iter):
            if isinstance(inner, ast.Attribute) and inner.attr == self.layers:
                return "range(" not in text_of(node.iter)
            if isinstance(inner, ast.Name) and isinstance(env.get(inner.id), Layers):
                return True
        return False

    def _bind_layer(self, target: ast.expr, over: ast.expr, env: Env) -> None:
        layer = Instance(self.layer, "layer")
        if isinstance(target, ast.Name):
            env[target.id] = layer
            return
        names = [n for n in ast.walk(target) if isinstance(n, ast.Name)]
        chosen = names[-1]
        if isinstance(over, ast.Call) and text_of(over.func) == "zip" and isinstance(target, ast.Tuple):
            for one, argument in zip(target.elts, over.args, strict=False):
                if self.layers in text_of(argument) and isinstance(one, ast.Name):
                    chosen = one
        for name in names:
            if re.search(r"layer$|block$", name.id) and name.id not in ("i_layer", "num_layer"):
                chosen = name
        for name in names:
            env[name.id] = layer if name is chosen else opaque()


def _is_static(function: ast.FunctionDef) -> bool:
    return any(text_of(one) == "staticmethod" for one in function.decorator_list)
