"""What calls give: of modules and their methods, of tensors' methods, of functions."""

from __future__ import annotations

import ast
import re

from lab.layer_reading.following import (
    NO_STREAM_NORM,
    NORM,
    REDUCES,
    Call,
    Env,
    TooMuch,
    is_models,
    is_norm,
)
from lab.layer_reading.model import Place
from lab.layer_reading.norms import Norms
from lab.layer_reading.sources import text_of
from lab.layer_reading.values import (
    Instance,
    Layers,
    Sum,
    Tuple,
    Value,
    added,
    deps_of,
    fresh,
    opaque,
    reduced,
)

SAME = {"clone", "contiguous", "to", "float", "type_as", "view", "reshape", "squeeze", "flatten"}
SAME |= {"half", "bfloat16", "detach", "view_as", "wait"}
SAME_CALLS = re.compile(
    r"(^|_)(sp_)?(all_gather|reduce_scatter|shard|sequence_parallel_chunk)|maybe_.*(gather|scatter|chunk)"
    r"|maybe_calc_kv|mark_dynamic|record_stream"
)


class Calls(Norms):
    """Follow calls."""

    def _called(self, node: ast.Call, env: Env, depth: int) -> Value:
        func = node.func
        where = env.get("")
        place = where.cls if isinstance(where, Instance) else self.model
        if isinstance(func, ast.Attribute):
            if text_of(func.value).startswith("super("):
                return self._inherited(self._met(node, place, env, depth), func.attr, env.get("self"))
            base = self._value(func.value, env, depth)
            return self._method(self._met(node, place, env, depth), base, func.attr)
        call = self._met(node, place, env, depth)
        if isinstance(func, ast.Name):
            value = env.get(func.id)
            if isinstance(value, Instance):
                return self._module_call(call, value)
            return self._function(call, func.id)
        base = self._value(func, env, depth)
        if isinstance(base, Instance):
            return self._module_call(call, base)
        return opaque(call.deps | deps_of(base))

    def _met(self, node: ast.Call, place: Place, env: Env, depth: int) -> Call:
        """Return a call with its arguments' values."""
        positional = self._values(node.args, env, depth)
        named = {k.arg: self._value(k.value, env, depth) for k in node.keywords if k.arg}
        return Call(node, place, positional, named, depth)

    def _values(self, nodes: list[ast.expr], env: Env, depth: int) -> list[Value]:
        """Return the values of arguments or elements, those of a starred tuple one by one."""
        values: list[Value] = []
        for node in nodes:
            value = self._value(node, env, depth)
            if isinstance(node, ast.Starred) and isinstance(value, Tuple):
                values += value.items
            else:
                values.append(value)
        return values

    def _inherited(self, call: Call, name: str, own: Value | None) -> Value:
        """Follow ``super().NAME(…)``."""
        if not isinstance(own, Instance):
            return opaque(call.deps)
        found = self.sources.method(own.cls, name, after=call.place)
        unknown = found is None or not is_models(found[0].module)
        if own.role and is_norm(own) and name == "forward" and unknown:
            return self._norm(call)
        if found is None:
            return opaque(call.deps)
        return self._call(own, found, call.positional, call.named, call.depth + 1)

    # Modules.

    def _method(self, call: Call, base: Value, name: str) -> Value:
        if isinstance(base, Layers):
            return opaque(call.deps)
        if isinstance(base, Instance):
            return self._modules_method(call, base, name)
        return self._tensors_method(call, base, name)

    def _modules_method(self, call: Call, base: Instance, name: str) -> Value:
        if base.role == "layer" and not self.inside and not self.in_layer:
            self.methods.append(name)
        if base.role == "layer" and name in ("forward", "__call__"):
            return self._module_call(call, base)
        member = self._member(base, name)
        method = self.sources.method(base.cls, name)
        if method and (not base.role or base.role == "layer" or is_norm(base)):
            if not call.deps and not base.role and self.layers not in text_of(method[1]):
                return opaque()
            self.in_layer += base.role == "layer"
            try:
                return self._followed(call, base, method)
            finally:
                self.in_layer -= base.role == "layer"
        if isinstance(member, Instance):
            return self._module_call(call, member)
        if NORM.search(name) and not NO_STREAM_NORM.search(name):
            return self._unresolved_norm(call, base, name)
        return opaque(call.deps)

    def _member(self, base: Instance, name: str) -> Value:
        if name == self.layers and base.cls == self.model:
            return Layers()
        found = self.sources.attribute(base.cls, name)
        if found is None:
            return opaque()
        owner, value = found
        for call in ast.walk(value):
            if isinstance(call, ast.Call):
                place = self.sources.one(owner.module, call.func)
                if place and self.sources.cls(place):
                    return Instance(place, name)
        return opaque()

    def _module_call(self, call: Call, module: Instance) -> Value:
        if module.role == "layer" and not self.inside:
            return self._layer_call(call, module)
        if not module.role:  # self(...) or a plain instance
            found = self.sources.method(module.cls, "forward")
            return self._followed(call, module, found) if found else opaque()
        if is_norm(module):
            return self._norm_module(call, module)
        self._block_read(call)
        return opaque(call.deps)

    def _layer_call(self, call: Call, layer: Instance) -> Value:
        found = self.sources.method(layer.cls, "forward")
        if found is None:
            raise TooMuch("the layer has no forward")
        self.turn += 1
        self.inside += 1
        try:
            value = self._call(layer, found, call.positional, call.named, call.depth + 1)
        finally:
            self.inside -= 1
        self.handed.append(value)
        return fresh(value, self.turn)

    # Tensors and functions.

    def _tensors_method(self, call: Call, base: Value, name: str) -> Value:
        """Return what a method of a tensor gives, or a function of a module such as ``torch``."""
        first = call.positional[0] if call.positional else None
        if isinstance(base, Sum):
            if name in ("add", "add_") and len(call.positional) == 1 and isinstance(first, Sum):
                return added(base, first)
            if name in SAME:
                return base
        if isinstance(base, Tuple) and name in ("split", "chunk"):
            return base
        if name == "cat" and isinstance(first, Tuple) and call.deps:
            return first  # followed as what it is made of, until it is split again
        if isinstance(first, Sum):
            if REDUCES.search(name):
                return reduced(first)
            second = call.positional[1] if len(call.positional) == 2 else None
            if name == "add" and isinstance(second, Sum):
                return added(first, second)
        if NORM.search(name) and "norm(" in f"{name}(" and call.deps:
            return self._norm(call, reduces=bool(REDUCES.search(name)))
        return opaque(call.deps | deps_of(base))

    def _function(self, call: Call, name: str) -> Value:
        if name == "IntermediateTensors":
            self.stage = True
        if NORM.search(name) and call.deps:
            return self._norm(call, reduces=bool(REDUCES.search(name)))
        if REDUCES.search(name):
            return reduced(call.arguments[0] if call.arguments else opaque())
        first = call.positional[0] if call.positional else None
        if SAME_CALLS.search(name) and isinstance(first, (Sum, Tuple)):
            return first
        if name == "getattr":
            return opaque(call.deps)
        if name == "cast" and len(call.positional) == 2:
            return call.positional[1]
        target = self.sources.one(call.place.module, ast.Name(name))
        if target and call.deps:
            function = self.sources.names(target.module).get(target.name)
            if isinstance(function, ast.FunctionDef) and _is_worth_following(function):
                return self._followed(call, None, (target, function))
        return opaque(call.deps)


def _is_worth_following(function: ast.FunctionDef) -> bool:
    text = text_of(function)
    return len(text) < 4000 and bool(NORM.search(text) or REDUCES.search(text) or "return" in text)
