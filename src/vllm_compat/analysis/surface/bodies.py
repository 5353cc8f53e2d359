"""A class's syntax → its entry: its members, and the attributes that its methods set."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_compat.analysis.surface.entries import AttributeEntry, ClassEntry, Entry, FunctionEntry, one_of
from vllm_compat.analysis.surface.functions import Function, function_entry
from vllm_compat.analysis.surface.syntax import (
    annotation_text,
    blocks,
    default_text,
    dotted,
    import_aliases,
    sketch,
    statements_in,
    unparse,
)

Write = tuple[ast.expr, ast.expr | None, ast.expr | None]
"""A target that is written to, its annotation and its value."""

_NO_DEFAULTS = ("...", "Ellipsis", "MISSING", "dataclasses.MISSING")


def class_entry(node: ast.ClassDef) -> ClassEntry:
    """Return a class's entry, with its own members only."""
    body = _Body()
    for inner, typing in blocks(node.body):
        body.take(inner, body.seen_by_checkers if typing else body.members)
    members = body.members
    for name, kept in body.seen_by_checkers.items():
        members.setdefault(name, kept)
    instances = _Instances()
    for method in node.body:
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            instances.read(method)
    for name, entries in instances.found.items():
        if name not in members and (entry := one_of(entries)) is not None:
            members[name] = entry
    return ClassEntry(
        tuple(text for base in node.bases if (text := unparse(base)) is not None),
        tuple(text for decorator in node.decorator_list if (text := unparse(decorator)) is not None),
        {k.arg: unparse(k.value) for k in node.keywords if k.arg},
        members,
        "g" if instances.hidden else "",
    )


@dataclass
class _Body:
    """The members that a class's body gives it, and those that only type checkers see."""

    members: dict[str, Entry] = field(default_factory=dict)
    seen_by_checkers: dict[str, Entry] = field(default_factory=dict)
    keyword_only: bool = False  # below ``_: KW_ONLY``

    def take(self, node: ast.stmt, into: dict[str, Entry]) -> None:
        """Take what a statement defines into some of the members."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            entry = function_entry(node, in_class=True)
            known = into.get(node.name)
            overloaded = isinstance(known, FunctionEntry) and known.is_overload
            if entry is not None and (known is None or overloaded):
                into[node.name] = entry
        elif isinstance(node, ast.ClassDef):
            if node.name not in into:
                into[node.name] = class_entry(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self._take_field(node, node.target.id, into)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for name, value in _assigned_names(target, node.value):
                    into.setdefault(name, AttributeEntry(None, value, "x"))

    def _take_field(self, node: ast.AnnAssign, name: str, into: dict[str, Entry]) -> None:
        if dotted(node.annotation).rsplit(".", 1)[-1] == "KW_ONLY":
            self.keyword_only = True
            return
        entry = _field(node.annotation, node.value)
        if self.keyword_only and not entry.keyword_only:
            entry = entry._replace(flags=f"{entry.flags}k")
        into[name] = entry


def _assigned_names(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, str | None]]:
    """Iterate over the names that an assignment in a class makes, and sketches of their values."""
    if isinstance(target, ast.Name):
        yield target.id, default_text(value) if target.id == "model_config" else sketch(value, {})
    elif isinstance(target, (ast.Tuple, ast.List)):
        for name in target.elts:
            if isinstance(name, ast.Name):
                yield name.id, default_text(value) if name.id == "model_config" else None


def _field(annotation: ast.expr | None, value: ast.expr | None) -> AttributeEntry:
    """Return the entry of an annotated name in a class body."""
    text = annotation_text(annotation)
    if isinstance(value, ast.Call):
        called = dotted(value.func).rsplit(".", 1)[-1].lower()
        if called.endswith("field") or called == "privateattr":
            return _described_field(text, value, called == "privateattr")
    if value is None:
        return AttributeEntry(text)
    return AttributeEntry(text, default_text(value), "d")


def _described_field(annotation: str | None, call: ast.Call, private: bool) -> AttributeEntry:
    """Return the entry of ``name: annotation = field(…)``."""
    given = {k.arg: k.value for k in call.keywords if k.arg}
    flags = ""
    default = default_text(given.get("default", call.args[0] if call.args else None))
    if default in _NO_DEFAULTS:
        default = None
    if "default_factory" in given:
        flags += "f"
        default = default_text(given["default_factory"])
    if private or _is_constant(given.get("init"), False):
        flags += "n"
    if _is_constant(given.get("kw_only"), True):
        flags += "k"
    if default is not None:
        flags += "d"
    return AttributeEntry(annotation, default, flags)


def _is_constant(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


# What methods set.


@dataclass
class _Instances:
    """The attributes that methods give to instances: ``self.x = …``.

    ``hidden`` says whether some are added in ways that can't be read off.
    """

    found: dict[str, list[AttributeEntry]] = field(default_factory=dict)
    hidden: bool = False

    def read(self, method: Function) -> None:
        """Take in what a method sets."""
        self.hidden |= method.name in ("__getattr__", "__getattribute__")
        arguments = [*method.args.posonlyargs, *method.args.args]
        if arguments and not any(dotted(d) == "staticmethod" for d in method.decorator_list):
            body = _MethodBody(method, arguments[0].arg)
            self.hidden |= body.hides_attributes
            for name, entry in body.attributes():
                seen = self.found.setdefault(name, [])
                if entry not in seen:
                    seen.append(entry)


class _MethodBody:
    """What a method writes. ``me`` is its name for the instance.

    Names that are local to the method mean nothing elsewhere: imports are written out in full,
    parameters are replaced by their annotation, all others are dropped.
    """

    def __init__(self, method: Function, me: str) -> None:
        self.me = me
        self.making = method.name in ("__init__", "__post_init__", "__new__")
        arguments = [*method.args.posonlyargs, *method.args.args][1:]
        self.typed = {
            a.arg: annotation_text(a.annotation) for a in (*arguments, *method.args.kwonlyargs)
        }
        statements = list(statements_in(method.body))
        self.writes = [write for statement in statements for write in _writes(statement)]
        self.local = {target.id for target, _, _ in self.writes if isinstance(target, ast.Name)}
        self.aliases: dict[str, str] = {}
        self.hides_attributes = False
        for statement in statements:
            self.aliases.update(import_aliases(statement))
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._read_call(statement.value)

    def _read_call(self, call: ast.Call) -> None:
        """Take ``setattr(self, name, value)`` and ``self.__dict__.update(…)`` in."""
        function = dotted(call.func)
        self.hides_attributes |= function.endswith("__dict__.update")
        if function not in ("setattr", "object.__setattr__") or len(call.args) != 3:
            return
        owner, name, value = call.args
        if not (isinstance(owner, ast.Name) and owner.id == self.me):
            return
        if isinstance(name, ast.Constant):
            self.writes.append((ast.Attribute(ast.Name(self.me), str(name.value)), None, value))
        else:
            self.hides_attributes |= self.making

    def attributes(self) -> Iterator[tuple[str, AttributeEntry]]:
        """Iterate over the attributes that are set, in order, and what each statement says of them."""
        for target, annotation, value in self.writes:
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == self.me
            ):
                text = self._seen_from_outside(sketch(value, self.aliases))
                yield target.attr, AttributeEntry(annotation_text(annotation), text, "v")

    def _seen_from_outside(self, text: str | None) -> str | None:
        """Return the sketch of a value in terms that mean something outside the method."""
        if not text:
            return text
        head = text.partition(".")[0].removesuffix("()")
        rest = text[len(head) :]
        if head in self.typed:
            return f"@{self.typed[head]}@{rest}" if self.typed[head] and "(" not in rest else None
        if head in self.local:
            return None
        return f"self{rest}" if head == self.me else text


def _writes(node: ast.stmt) -> Iterator[Write]:
    """Iterate over what a statement writes, tuples taken apart."""
    todo: list[Write] = []
    if isinstance(node, ast.Assign):
        todo = [(target, None, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign):
        todo = [(node.target, node.annotation, node.value)]
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        todo = [(node.target, None, None)]
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        todo = [(i.optional_vars, None, None) for i in node.items if i.optional_vars]
    for target, annotation, value in todo:
        yield from _parts(target, annotation, value)


def _parts(target: ast.expr, annotation: ast.expr | None, value: ast.expr | None) -> Iterator[Write]:
    if isinstance(target, (ast.Tuple, ast.List)):
        values: list[ast.expr | None] = [None] * len(target.elts)
        if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
            values = list(value.elts)
        for part, own in zip(target.elts, values, strict=True):
            yield from _parts(part, None, own)
    elif isinstance(target, ast.Starred):
        yield from _parts(target.value, None, None)
    else:
        yield target, annotation, value
