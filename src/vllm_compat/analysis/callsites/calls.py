"""Calls of the downstream → call sites, and what is known of their results."""

from __future__ import annotations

import ast

from vllm_compat.analysis.callsites.expressions import Expressions
from vllm_compat.analysis.callsites.names import HOOK, is_hook
from vllm_compat.analysis.callsites.notes import RemoteCall
from vllm_compat.analysis.callsites.values import (
    NOTHING,
    Value,
    called_path,
    is_class_name,
    is_vllm,
    result_path,
)
from vllm_compat.analysis.contract import SiteKind

_ATTRIBUTE_CALLS = frozenset({"getattr", "hasattr", "setattr", "delattr"})


class Calls(Expressions):
    """Read calls."""

    def on_Call(self, node: ast.Call) -> Value:
        special = self._special_call(node)
        if special is not None:
            return special
        self._worker_extension(node)
        # The callee: an attribute is noted as a call, not as a read.
        base = NOTHING
        if isinstance(node.func, ast.Attribute):
            self.package.refer(node.func.attr, self.context.guarded)
            base = self.evaluate(node.func.value)
            value = self.attribute(base, node.func.attr, node.func, read=False)
        else:
            value = self.evaluate(node.func)
        name = self._callee(node.func, value) if self.notes is not None else ""
        self._hand_over(node, name)
        symbols = [called_path(path, value) for path in value.vllm_paths]
        if not symbols:
            # What can't be followed through vLLM's values is named by its text: it is no name of vLLM.
            text = self.source(node.func) if is_vllm(name) else name
            self.emit(SiteKind.CALL, text, node, call=node)
            return self._result_of_own(value)
        uncertain = value.uncertain or base.uncertain
        for symbol in symbols:
            self.emit(
                SiteKind.CALL,
                symbol,
                node,
                call=node,
                optional=uncertain,
                any_of=symbols,
                unbound=value.unbound,
            )
            if symbol.endswith(".collective_rpc"):
                self._remote_call(node)
        return Value(
            tuple(result_path(symbol) for symbol in symbols),
            any(is_class_name(symbol) for symbol in symbols),
            calls=(self.place(node),),
            exact=True,
        )

    def _hand_over(self, node: ast.Call, name: str) -> None:
        """Read a call's arguments, and note which of them are what another call gave."""
        for index, argument in enumerate(node.args):
            self.use(self.evaluate(argument), "argument", f"{name}[{index}]")
        for keyword in node.keywords:
            self.use(self.evaluate(keyword.value), "argument", f"{name}[{keyword.arg or '**'}]")

    def _callee(self, node: ast.expr, value: Value) -> str:
        """Return how a callee is written in ``Use.detail`` and for calls of others."""
        if len(value.paths) == 1 and not (value.instance and not is_vllm(value.paths[0])):
            return value.paths[0]
        root = node
        while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
            root = root.func if isinstance(root, ast.Call) else root.value
        text = self.source(node)
        if isinstance(root, ast.Name):
            known = self.module.names.get(root.id) or self.env.get(root.id)
            if known and len(known.paths) == 1 and not known.instance and not known.calls:
                return known.paths[0] + text[len(root.id) :]
        return text

    def _result_of_own(self, value: Value) -> Value:
        """Return what calling a class or function of the package gives."""
        for path in value.paths:
            if path in self.package.classes:
                return Value((path,), True)
            returned = self.package.functions.get(path)
            if returned is not None:
                return self.annotated(returned)
        return NOTHING

    # Calls that name a module or an attribute in a string, ``super()``, and what tells types.

    def _special_call(self, node: ast.Call) -> Value | None:
        """Return what such a call gives; None where it is a call like any other."""
        function = node.func
        if isinstance(function, ast.Name):
            found = self._builtin_call(function.id, node)
            if found is not None:
                return found
        if not node.args or not isinstance(function, (ast.Name, ast.Attribute)):
            return None
        if isinstance(function, ast.Attribute) and function.attr != "import_module":
            return None
        if "importlib.import_module" in self.glance(function).paths:
            first = node.args[0]
            named = first.value if isinstance(first, ast.Constant) else None
            if isinstance(named, str) and is_vllm(named):
                self.emit(SiteKind.IMPORT, named, node, is_module=True)
                return Value((named,))
        return None

    def _builtin_call(self, name: str, node: ast.Call) -> Value | None:
        if name == "super" and self.context.cls is not None and name not in self.env:
            bases = self.package.vllm_bases(self.context.cls.path)
            others = self.package.has_other_bases(self.context.cls.path)
            return Value(bases, True, exact=True) if bases and not others else NOTHING
        if name in _ATTRIBUTE_CALLS and len(node.args) >= 2:
            second = node.args[1]
            if isinstance(second, ast.Constant) and isinstance(second.value, str):
                return self._attribute_call(name, second.value, node)
        if name == "isinstance" and len(node.args) == 2:
            self.evaluate(node.args[0])
            self.evaluate(node.args[1])
            return NOTHING
        if name == "cast" and len(node.args) == 2:
            self.evaluate(node.args[1])
            return self.annotated(node.args[0])
        return None

    def _attribute_call(self, function: str, attribute: str, node: ast.Call) -> Value:
        """Read ``getattr(x, "name")`` and its like."""
        value = self.evaluate(node.args[0])
        for argument in node.args[2:]:
            self.evaluate(argument)
        if function == "setattr":
            self.package.written.add(attribute)
            self.store(value, attribute, node)
            return NOTHING
        asked = function == "hasattr" or len(node.args) > 2
        return self.attribute(value, attribute, node, optional=asked)

    # Worker extensions.

    def _worker_extension(self, node: ast.Call) -> None:
        """Note the class that ``worker_extension_cls`` names."""
        for keyword in node.keywords:
            if keyword.arg == HOOK:
                self.package.hooks.update(self.class_names(keyword.value))
        if len(node.args) == 2 and is_hook(node.args[0]):  # kwargs.setdefault(…)
            self.package.hooks.update(self.class_names(node.args[1]))

    def _remote_call(self, node: ast.Call) -> None:
        """Note the worker's method that ``collective_rpc("name", args=…)`` calls."""
        given = {k.arg: k.value for k in node.keywords}
        method = node.args[0] if node.args else given.get("method")
        if self.notes is None or not isinstance(method, ast.Constant):
            return
        if not isinstance(method.value, str):
            return
        call = ast.Call(node.func, _spread(given.get("args")), _spread_keywords(given.get("kwargs")))
        within = self.context.within
        self.notes.remote.append(RemoteCall(self.module, within, method.value, node, call))


def _spread(arguments: ast.expr | None) -> list[ast.expr]:
    """Return the arguments that a tuple of them stands for."""
    if arguments is None:
        return []
    if isinstance(arguments, (ast.Tuple, ast.List)):
        return list(arguments.elts)
    return [ast.Starred(arguments)]


def _spread_keywords(keywords: ast.expr | None) -> list[ast.keyword]:
    """Return the keyword arguments that a mapping of them stands for."""
    if keywords is None:
        return []
    if not isinstance(keywords, ast.Dict):
        return [ast.keyword(None, keywords)]
    return [
        ast.keyword(str(key.value) if isinstance(key, ast.Constant) else None, value)
        for key, value in zip(keywords.keys, keywords.values, strict=True)
    ]
