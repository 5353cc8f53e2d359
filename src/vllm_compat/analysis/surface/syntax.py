"""What all that read syntax trees ask of them. Trees are read, and never run."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

_LONG_DEFAULT = 80


@contextmanager
def uncollected() -> Iterator[None]:
    """Hold the garbage collector off while syntax trees grow.

    It would walk them again and again, for a third of the time, and find nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def unparse(node: ast.expr | None) -> str | None:
    """Return an expression's source text, or None where there is none."""
    if node is None:
        return None
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, type(None))):
        return repr(node.value)
    return ast.unparse(node)


def annotation_text(node: ast.expr | None) -> str | None:
    """Return an annotation's text, quotes of forward references taken off."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return unparse(node)


def default_text(node: ast.expr | None) -> str | None:
    """Return a default's source text, a long one cut."""
    text = unparse(node)
    if text is not None and len(text) > _LONG_DEFAULT:
        return text[: _LONG_DEFAULT - 1] + "…"
    return text


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for names and attributes (calls looked through), else an empty string."""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def is_type_checking(test: ast.expr) -> bool:
    """Whether a condition is ``TYPE_CHECKING``."""
    return dotted(test).rsplit(".", 1)[-1] == "TYPE_CHECKING"


def _is_true(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) and bool(test.value)


def blocks(statements: Iterable[ast.stmt], typing: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Iterate over simple statements, conditions and ``try`` looked into, in order of preference.

    The flag says whether a statement is seen by type checkers only.
    """
    for node in statements:
        if isinstance(node, ast.If):
            if is_type_checking(node.test):
                yield from blocks(node.body, True)
                yield from blocks(node.orelse, typing)
            elif (
                isinstance(node.test, ast.UnaryOp)
                and isinstance(node.test.op, ast.Not)
                and is_type_checking(node.test.operand)
            ):
                yield from blocks(node.body, typing)
                yield from blocks(node.orelse, True)
            else:
                yield from blocks(node.body, typing)
                yield from blocks(node.orelse, typing)
        elif isinstance(node, ast.Try):
            yield from blocks(node.body, typing)
            yield from blocks(node.orelse, typing)
            for handler in node.handlers:
                yield from blocks(handler.body, typing)
            yield from blocks(node.finalbody, typing)
        elif isinstance(node, (ast.With, ast.For, ast.While)):
            yield from blocks(node.body, typing)
        elif isinstance(node, ast.Match):
            for case in node.cases:
                yield from blocks(case.body, typing)
        else:
            yield node, typing


def resolve_relative(module: str, is_package: bool, name: str | None, level: int) -> str:
    """Return the absolute name that ``from <dots><name> import`` means inside ``module``."""
    if not level:
        return name or ""
    parts = module.split(".")
    if not is_package:
        parts.pop()
    if level > 1:
        parts = parts[: len(parts) - (level - 1)]
    return ".".join([*parts, name] if name else parts)


def statements_in(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Iterate over statements and all that stand inside them; expressions are not entered."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            inner = getattr(node, part, None)
            if inner:
                yield from statements_in(inner)
        for branch in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from statements_in(branch.body)


def import_aliases(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Iterate over (name, dotted name meant) of what an absolute ``from … import`` brings."""
    if isinstance(node, ast.ImportFrom) and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def sketch(node: ast.expr | None, aliases: Mapping[str, str]) -> str | None:
    """Return ``Foo()`` for a constructor-like call, a dotted name, or None for all else."""
    if isinstance(node, ast.Await):
        node = node.value
    if isinstance(node, ast.IfExp):
        return _either(sketch(node.body, aliases), sketch(node.orelse, aliases))
    if isinstance(node, ast.Constant):
        return "None" if node.value is None else None
    if not isinstance(node, (ast.Call, ast.Name, ast.Attribute)):
        return None
    call = isinstance(node, ast.Call)
    name = dotted(node)
    if not name or (call and name.rsplit(".", 1)[-1] == "cast"):
        return None
    head, _, rest = name.partition(".")
    if head in aliases:
        name = f"{aliases[head]}.{rest}" if rest else aliases[head]
    return f"{name}()" if call else name


def _either(left: str | None, right: str | None) -> str | None:
    """Return the sketch of what is one or the other, where one of them is None."""
    if left == right:
        return left
    known = [text for text in (left, right) if text and text != "None"]
    return known[0] if len(known) == 1 and "None" in (left, right) else None
