"""Our reader of static signatures held against griffe's, symbol by symbol, on the standard library.

griffe is the well-kept library for this. It is not what ``check`` reads with (docs/architecture.md says
why), and so can be asked whether ``check`` reads right.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import griffe
import pytest

from vllm_compat.analysis.surface import Signature, SourceSurface, Surface, SymbolKind

# Where a condition decides between two definitions (multiprocessing), griffe takes the last, and we all.
PACKAGES = ("asyncio", "concurrent", "email", "http", "logging", "wsgiref", "xml")
_KINDS = {
    "positional-only": "positional_only",
    "positional or keyword": "positional_or_keyword",
    "variadic positional": "var_positional",
    "keyword-only": "keyword_only",
    "variadic keyword": "var_keyword",
}

Parameters = list[tuple[str, str, bool]]


def functions(package: str) -> Iterator[tuple[str, Parameters]]:
    """Iterate over (path, parameters) of all functions and methods, as griffe reads them."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent.parent
    todo: list[griffe.Object | griffe.Alias] = [
        griffe.load(package, search_paths=[folder], allow_inspection=False)
    ]
    while todo:
        thing = todo.pop()
        for member in thing.members.values():
            if member.is_alias:
                continue
            if isinstance(member, griffe.Function):
                # Defined once, plainly: of several definitions each may take another one.
                if not member.overloads and "property" not in member.labels and member.runtime:
                    yield member.path, parameters(member)
            elif member.is_module or member.is_class:
                todo.append(member)


def parameters(function: griffe.Function) -> Parameters:
    found = [
        (p.name, _KINDS[p.kind.value] if p.kind else "", p.required and "variadic" not in str(p.kind))
        for p in function.parameters
    ]
    bound = function.parent is not None and function.parent.is_class
    static = "staticmethod" in function.labels
    implicit = bound and not static and found and "variadic" not in str(function.parameters[0].kind)
    return found[1:] if implicit else found


def ours(surface: Surface, path: str) -> Parameters | None:
    if path.endswith(".__init__"):  # of a dataclass, griffe writes it, too
        made = surface.signature(path.removesuffix(".__init__"))
        return None if made is None else _told(made)
    symbol = surface.resolve(path)
    if symbol is None or symbol.kind is not SymbolKind.FUNCTION or symbol.signature is None:
        return None
    return _told(symbol.signature)


def _told(signature: Signature) -> Parameters:
    return [(p.name, p.kind.value, p.required) for p in signature.parameters]


@pytest.mark.parametrize("package", PACKAGES)
def test_both_see_the_same_parameters(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    surface = SourceSurface.at(Path(spec.origin).parent, package)
    surface.package = package
    seen, other = 0, {}
    for path, expected in functions(package):
        found = ours(surface, path)
        seen += 1
        if found != expected:
            other[path] = (found, expected)
    assert seen > 20
    assert other == {}
