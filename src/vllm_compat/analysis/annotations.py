"""The text or syntax of a type annotation → its form, for all that ask what an annotation means.

Quotes of forward references, ``Optional``, ``Union`` and ``|`` are taken apart here, once. What a name
stands for, and what a generic's arguments say of it, is for the reader to decide: it knows the module.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import NamedTuple

TRANSPARENT = frozenset(
    {"Annotated", "ClassVar", "Final", "InitVar", "SkipValidation", "Required", "NotRequired"}
)
"""Generics that say of a value just what their first argument says."""


class Named(NamedTuple):
    """A name: ``int``, ``torch.Tensor``. ``node`` is its expression, ``dotted`` its text."""

    node: ast.expr
    dotted: str

    @property
    def last(self) -> str:
        """The last part of the name."""
        return last(self.dotted)


class Either(NamedTuple):
    """One of several: ``a | b``, ``Union[a, b]``, ``Optional[a]``."""

    parts: tuple[Form, ...]


class Generic(NamedTuple):
    """A generic with its arguments: ``list[int]``. ``dotted`` names it, ``node`` is all of it.

    Of ``Literal`` the parts mean nothing: its arguments are values.
    """

    node: ast.expr
    dotted: str
    parts: tuple[Form, ...]

    @property
    def last(self) -> str:
        """The last part of the generic's name."""
        return last(self.dotted)


class Listed(NamedTuple):
    """A list of types: ``[int, str]``, as in ``Callable[[int, str], None]``."""

    parts: tuple[Form, ...]


class Nothing:
    """``None``."""


class Dots:
    """``...``, as in ``tuple[int, ...]``."""


class Unreadable(NamedTuple):
    """What is no annotation that can be read: a number, a call, a text that is no expression."""

    said: ast.expr | str

    @property
    def text(self) -> str:
        """Its source text."""
        return self.said if isinstance(self.said, str) else ast.unparse(self.said)


Form = Named | Either | Generic | Listed | Nothing | Dots | Unreadable


def last(dotted: str) -> str:
    """Return the last part of a dotted name."""
    return dotted.rsplit(".", 1)[-1]


@lru_cache(maxsize=8192)
def expression(text: str) -> ast.expr | None:
    """Return the syntax of an expression's text, or None where it is none."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None


@lru_cache(maxsize=8192)
def form_of(text: str) -> Form:
    """Return the form of an annotation's text."""
    node = expression(text)
    return form_of_node(node) if node is not None else Unreadable(text)


def form_of_node(node: ast.expr) -> Form:
    """Return the form of an annotation's syntax."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        return Named(node, _text(node))
    if isinstance(node, ast.Constant):
        return _constant(node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return Either((form_of_node(node.left), form_of_node(node.right)))
    if isinstance(node, ast.Subscript):
        return _subscript(node)
    if isinstance(node, (ast.List, ast.Tuple)):
        return Listed(tuple(map(form_of_node, node.elts)))
    return Unreadable(node)


def _constant(node: ast.Constant) -> Form:
    if node.value is None:
        return Nothing()
    if node.value is Ellipsis:
        return Dots()
    return form_of(node.value) if isinstance(node.value, str) else Unreadable(node)


def _subscript(node: ast.Subscript) -> Form:
    inner = node.slice
    parts = tuple(map(form_of_node, inner.elts if isinstance(inner, ast.Tuple) else [inner]))
    dotted = _text(node.value)
    name = last(dotted)
    if name == "Optional":
        return Either((*parts, Nothing()))
    if name == "Union":
        return Either(parts)
    return Generic(node, dotted, parts)


def _text(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ast.unparse(node)
