"""What names and attributes of the downstream stand for, where they are read, written or annotated."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from vllm_compat.analysis.annotations import Dots, Either, Form, Generic, Named, form_of_node
from vllm_compat.analysis.callsites.guards import Guards, conjuncts
from vllm_compat.analysis.callsites.values import NOTHING, Value, is_class_name, is_vllm
from vllm_compat.analysis.contract import SiteKind

HOOK = "worker_extension_cls"
"""The keyword that names the class which vLLM mixes into its worker."""

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")
# What a test's outcome is assigned from.
_TESTING = (ast.Compare, ast.Call, ast.BoolOp, ast.UnaryOp, ast.Attribute, ast.IfExp)

_FIRST = frozenset({"Annotated", "ClassVar", "Final"})
_ITERABLES = frozenset({"list", "List", "Sequence", "Iterable", "set", "Iterator", "deque"})


class Names(Guards):
    """Follow names and attributes to what they stand for."""

    # Reading.

    def attribute(
        self, value: Value, name: str, node: ast.AST, *, optional: bool = False, read: bool = True
    ) -> Value:
        """Return what is known of ``value.name``; ``read`` notes it as a call site."""
        self.use(value, "attribute", name)
        found = NOTHING
        symbols: list[str] = []
        unbound = False
        for path in value.paths:
            if is_vllm(path):
                inexact = value.instance and not value.exact
                if inexact and self.package.own_heir_defines(path, name):
                    continue  # annotated as vLLM's class, and may be the downstream's own
                symbols.append(f"{path}.{name}")
                unbound |= not value.instance and is_class_name(path)
            elif path in self.package.classes:
                known, inherited = self._of_own_class(path, name)
                found = found | known
                symbols += inherited
            elif self._is_own_module(path) and not value.instance:
                found = found | self.package.name_in(path, name)
            else:
                found = found | Value((f"{path}.{name}",))
        if read:
            uncertain = optional or value.uncertain
            for symbol in symbols:
                self.emit(SiteKind.ATTRIBUTE, symbol, node, optional=uncertain, any_of=symbols)
        return found | Value(tuple(dict.fromkeys(symbols)), unbound=unbound)

    def _of_own_class(self, path: str, name: str) -> tuple[Value, list[str]]:
        """Return what an attribute of a class of the package is, and the vLLM symbols it may be."""
        known = self.package.attribute(path, name)
        if known is not None:
            return known, []
        bases = self.package.vllm_bases(path)
        if self.package.defines(path, name) or is_dunder(name) or not bases:
            return Value((f"{path}.{name}",)), []
        if self.package.has_other_bases(path):
            return NOTHING, []
        return NOTHING, [f"{base}.{name}" for base in bases]

    def _is_own_module(self, path: str) -> bool:
        return self.package.ours(path) and bool(self.package.files.locate(path))

    def class_names(self, node: ast.expr) -> Iterator[str]:
        """Name the classes that an expression names, as strings or by their ``__name__``."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                if _DOTTED.match(inner.value):
                    yield inner.value
            elif isinstance(inner, ast.Attribute) and inner.attr in ("__name__", "__qualname__"):
                yield from self.glance(inner.value).paths

    # Writing.

    def assign(self, target: ast.expr, value: Value, node: ast.expr | None) -> None:
        """Take into account that a target gets a value; ``node`` is the value's expression, if any."""
        if isinstance(target, ast.Name):
            self.use(value, "assigned", target.id)
            self.env[target.id] = value
            if isinstance(node, _TESTING) and self.is_test(node):
                self.package.tests.add(target.id)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._assign_parts(target, value, node)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, NOTHING, None)
        elif isinstance(target, ast.Attribute):
            self._assign_attribute(target, value)
        elif isinstance(target, ast.Subscript):
            self.evaluate(target.value)
            self.evaluate(target.slice)
            if node is not None and is_hook(target.slice):
                self.package.hooks.update(self.class_names(node))

    def _assign_parts(self, target: ast.Tuple | ast.List, value: Value, node: ast.expr | None) -> None:
        self.use(value, "iterate", target)
        parts: list[ast.expr | None] = [None] * len(target.elts)
        if isinstance(node, (ast.Tuple, ast.List)) and len(node.elts) == len(target.elts):
            parts = list(node.elts)
        for item, part in zip(target.elts, parts, strict=True):
            self.assign(item, self.glance(part) if part is not None else NOTHING, None)

    def _assign_attribute(self, target: ast.Attribute, value: Value) -> None:
        base = self.evaluate(target.value)
        self.use(value, "assigned", target)
        cls, me = self.context.cls, self.context.me
        if cls is not None and isinstance(target.value, ast.Name) and target.value.id == me:
            before = cls.attributes.get(target.attr)
            cls.attributes[target.attr] = value if before is None else before | value
            cls.names.add(target.attr)
        else:
            self.package.written.add(target.attr)
            self.store(base, target.attr, target)

    def store(self, base: Value, name: str, node: ast.AST) -> None:
        """Note a write to a name of a vLLM module or class; one to an instance is free."""
        if base.instance:
            return
        for path in base.paths:
            inside = path.split(".")[:-1]
            if is_vllm(path) and "()" not in path and not any(map(is_class_name, inside)):
                self.emit(SiteKind.ATTRIBUTE, f"{path}.{name}", node, store=True)

    # Annotations.

    def annotated(self, node: ast.expr | None) -> Value:
        """Return the value that an annotation promises."""
        return self._promised(form_of_node(node)) if node is not None else NOTHING

    def _promised(self, form: Form) -> Value:
        if isinstance(form, Either):
            value = NOTHING
            for part in form.parts:
                value = value | self._promised(part)
            return value
        if isinstance(form, Generic):
            return self._promised_by_generic(form)
        if isinstance(form, Named):
            paths = tuple(p for p in self.glance(form.node).paths if self._may_be_class(p))
            return Value(paths, True) if paths else NOTHING
        return NOTHING

    def _promised_by_generic(self, form: Generic) -> Value:
        name, parts = form.last, form.parts
        if name in _FIRST:
            return self._promised(parts[0])
        if name in ("type", "Type"):
            return Value(self._promised(parts[0]).paths)
        many = name in ("tuple", "Tuple") and len(parts) == 2 and isinstance(parts[1], Dots)
        if many or name in _ITERABLES:
            return Value(items=self._promised(parts[0]).paths)
        return NOTHING

    def _may_be_class(self, path: str) -> bool:
        return path in self.package.classes or (is_vllm(path) and is_class_name(path))

    # Tests of a value's class.

    def narrowed(self, node: ast.expr) -> Value | None:
        """Return what an ``isinstance`` test says of an attribute or item."""
        if self.package.narrows and any("." in name or "[" in name for name in self.env):
            return self.env.get(self.source(node))
        return None

    def narrow(self, test: ast.expr, holds: bool = True) -> None:
        """Take ``isinstance(x, C)`` into account, where it holds or where it doesn't."""
        for part in conjuncts(test):
            if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
                self.narrow(part.operand, not holds)
            elif (
                isinstance(part, ast.Call)
                and isinstance(part.func, ast.Name)
                and part.func.id == "isinstance"
                and len(part.args) == 2
            ):
                subject, classes = part.args
                self._narrow_to(subject, self._any_of(classes) if holds else NOTHING)

    def _any_of(self, classes: ast.expr) -> Value:
        value = NOTHING
        for node in classes.elts if isinstance(classes, ast.Tuple) else [classes]:
            value = value | self.annotated(node)
        return value

    def _narrow_to(self, subject: ast.expr, value: Value) -> None:
        if isinstance(subject, ast.Name):
            self.env[subject.id] = value
        while isinstance(subject, (ast.Subscript, ast.Attribute)):
            self.package.narrows = True
            self.env[self.source(subject)] = value
            if isinstance(subject, ast.Attribute):
                break
            value = NOTHING
            subject = subject.value

    def forget_narrowed(self, *envs: dict[str, Value]) -> None:
        """Drop what tests said of attributes and items, where the tests hold no longer."""
        for name in [n for env in envs for n in env if "." in n or "[" in n]:
            for env in envs:
                env.pop(name, None)


def is_dunder(name: str) -> bool:
    """Whether a name is one of Python's own: ``__name__``."""
    return name.startswith("__") and name.endswith("__")


def is_hook(node: ast.expr) -> bool:
    """Whether an expression is the keyword of a worker extension, as a string."""
    return isinstance(node, ast.Constant) and node.value == HOOK
