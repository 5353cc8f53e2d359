"""What norms read, and what blocks read without a norm before them."""

from __future__ import annotations

import ast

from lab.layer_reading.following import (
    REDUCES,
    Call,
    Following,
    Read,
    TooMuch,
    is_models,
    reads_slots,
)
from lab.layer_reading.model import Place
from lab.layer_reading.sources import text_of
from lab.layer_reading.values import (
    Constant,
    Instance,
    Opaque,
    Sum,
    Tuple,
    Value,
    added,
    bare,
    deps_of,
    opaque,
    reduced,
    slots_in,
    sum_of,
)

ONE_INPUT = ("rms_norm", "layer_norm")
"""Kernels that norm one input; what stands before it is where they write to."""


class Norms(Following):
    """Note what norms read."""

    def _norm(self, call: Call, *, reduces: bool = False) -> Value:
        """Note what a norm reads; return the normed value, and the sum where there are two inputs."""
        values = [value for value in call.positional if isinstance(value, Sum)]
        for key in ("x", "input", "hidden_states", "residual"):
            value = call.named.get(key)
            if isinstance(value, Sum):
                values.append(value)
        tensors = [v for v in values[:2] if v != opaque() or deps_of(v)] or values[:1]
        func = call.node.func
        if isinstance(func, ast.Attribute) and func.attr in ONE_INPUT:
            tensors = [v for v in values if slots_in(v)][:1] or tensors[:1]
        if not tensors:
            return opaque()
        first = reduced(tensors[0]) if reduces else tensors[0]
        second = tensors[1] if len(tensors) > 1 else None
        total = first if second is None else added(first, second)
        self.reads.append(Read(self.turn, bare(total), call.where))
        normed = opaque(deps_of(total))
        two = second is not None or "residual" in call.named
        if two and not isinstance(call.named.get("residual"), Constant):
            return Tuple((normed, total))
        return normed

    def _norm_module(self, call: Call, module: Instance) -> Value:
        """Follow a norm that a model defines itself; vLLM's own add their second input to the first."""
        found = self.sources.method(module.cls, "forward")
        if found is None or not is_models(found[0].module):
            found = self.sources.method(module.cls, "forward_native")
        if found is None or not is_models(found[0].module):
            return self._norm(call)
        before, turn = len(self.reads), self.turn
        value = self._followed(call, module, found)
        inner = list(filter(reads_slots, self.reads[before:]))
        del self.reads[before:]
        if inner:
            self.reads.append(Read(turn, inner[0].value, call.where))
            return value
        total = self._read_by(call, value)
        if total is not None:
            total = reduced(total) if REDUCES.search(text_of(found[1])) else total
            self.reads.append(Read(turn, total, call.where))
        return value

    @staticmethod
    def _read_by(call: Call, value: Value) -> Sum | None:
        """Return what a followed norm read: the sum that it returns beside, or its only input."""
        second = value.items[1] if isinstance(value, Tuple) and len(value.items) == 2 else None
        if isinstance(second, Sum) and slots_in(second):
            return bare(second)
        return bare(call.tensors[0]) if len(call.tensors) == 1 else None

    def _unresolved_norm(self, call: Call, base: Instance, name: str) -> Value:
        """Note what a norm reads whose class the constructor does not name by itself.

        With one input it does not matter which it is. With two it does: the classes that the code names
        where it chooses one are followed, and must all read alike.
        """
        if len(call.tensors) < 2:
            return self._norm(call)
        results = []
        for cls in self._choices(base.cls, name):
            before = len(self.reads)
            value = self._norm_module(call, Instance(cls, name))
            results.append((value, self.reads[before:]))
            del self.reads[before:]
        if results and all(result == results[0] for result in results):
            self.reads += results[0][1]
            return results[0][0]
        total = added(call.tensors[0], sum_of(Opaque(call.deps, True)))
        self.reads.append(Read(self.turn, total, call.where))
        return Tuple((opaque(call.deps), opaque(call.deps)))

    def _choices(self, owner: Place, name: str) -> list[Place]:
        """Return the norm classes that the code names where it chooses ``self.NAME``'s."""
        found = self.sources.attribute(owner, name)
        if found is None:
            return []
        module = found[0].module
        classes: list[Place] = []
        pending: list[ast.AST] = [found[1], *self._assigned_for(found)]
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

    def _assigned_for(self, found: tuple[Place, ast.expr]) -> list[ast.expr]:
        """Return what a constructor assigns to the names that an expression in it uses."""
        function = self.sources.method(found[0], "__init__")
        if function is None:
            return []
        called = {n.id for n in ast.walk(found[1]) if isinstance(n, ast.Name)}
        values = []
        for inner in ast.walk(function[1]):
            if isinstance(inner, ast.Assign):
                names = {n.id for t in inner.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                if names & called:
                    values.append(inner.value)
        return values

    def _block_read(self, call: Call) -> None:
        """Note what a block (attention, say) reads as it was handed on, without a norm before it."""
        direct = [v for v in call.arguments if isinstance(v, Sum) and slots_in(v)]
        if len(direct) == 1 and self.inside:
            self.blocks.append(Read(self.turn, bare(direct[0]), call.where))

    def _followed(self, call: Call, own: Instance | None, found: tuple[Place, ast.FunctionDef]) -> Value:
        """Follow what is called; where it is too much, only what goes into it is known."""
        try:
            return self._call(own, found, call.positional, call.named, call.depth + 1)
        except TooMuch:
            if call.depth == 0 and own is not None:
                raise
            return opaque(call.deps)
