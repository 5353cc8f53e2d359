"""Which tests of the downstream ask for a version or a feature of vLLM, and what they guard."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from vllm_compat.analysis.callsites.reading import Reading
from vllm_compat.analysis.callsites.values import is_vllm

# ``hasattr(self, …)`` asks for the downstream's own state.
_OWN_TEST = re.compile(r"hasattr\((self|model|config)\b")
_VERSION_TEST = re.compile(
    r"version|^is_\w*available$|^find_spec$|^signature$|^hasattr$|^getfullargspec$|^__code__$",
    re.IGNORECASE,
)


class Guards(Reading):
    """Tell tests of versions and features from other tests."""

    def test(self, node: ast.expr) -> None:
        """Read an expression whose truth is asked for."""
        self.use(self.evaluate(node), "truth")

    def is_test(self, node: ast.expr) -> bool:
        """Whether an expression asks for a version or a feature, itself or through a name."""
        asked = self.package.questions.get(node)
        if asked is None:
            asked = self.package.questions[node] = _asks(node)
        itself, names = asked
        return itself or not self.package.tests.isdisjoint(names)

    def guards_of(self, node: ast.expr) -> tuple[str, ...]:
        """Return the guards around, and a test's source if it asks for a version or feature of vLLM."""
        outer = self.context.guards
        if not self.is_test(node):
            return outer
        text = self.source(node)
        return outer if _OWN_TEST.search(text) else (*outer, text)

    def tested_in(self, node: ast.expr) -> tuple[str, ...]:
        """Return the attributes asked for around, and those that a test asks for."""
        return (*self.context.tested, *_asked_for(node))

    def needed_by(self, test: ast.expr) -> tuple[str, ...]:
        """Return the vLLM symbols needed around, and those without which a test can't hold."""
        return (*self.context.needs, *self._needed(test))

    def _needed(self, test: ast.expr) -> Iterator[str]:
        for part in conjuncts(test):
            if not isinstance(part, ast.Call):
                continue
            for name in _asked_for(part):
                paths = self.glance(part.args[0]).paths
                if len(paths) == 1 and is_vllm(paths[0]):
                    yield f"{paths[0]}.{name}"


def _asks(node: ast.expr) -> tuple[bool, frozenset[str]]:
    """Return whether an expression asks for a version or a feature itself, and the names in it."""
    inner = list(ast.walk(node))
    names = frozenset(part.id for part in inner if isinstance(part, ast.Name))
    attributes = {part.attr for part in inner if isinstance(part, ast.Attribute)}
    return any(map(_VERSION_TEST.search, names | attributes)), names


def conjuncts(test: ast.expr) -> list[ast.expr]:
    """Return the parts of a test that must all hold."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return test.values
    return [test]


def _asked_for(test: ast.expr) -> Iterator[str]:
    """Name the attributes that ``hasattr`` or ``getattr`` asks for in a test."""
    for node in ast.walk(test):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and (node.func.id, len(node.args)) in (("hasattr", 2), ("getattr", 3))
            and isinstance(node.args[1], ast.Constant)
        ):
            yield str(node.args[1].value)
