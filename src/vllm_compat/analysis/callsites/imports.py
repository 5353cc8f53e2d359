"""Which modules of the downstream use vLLM, and which of its own they import."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from vllm_compat.analysis.callsites.package import Module, Package
from vllm_compat.analysis.callsites.values import VLLM, is_vllm
from vllm_compat.analysis.surface.syntax import resolve_relative, statements_in


def modules_using_vllm(package: Package) -> list[Module]:
    """Return the package's modules that import vLLM, parsed."""
    using: list[Module] = []
    for name in package.files.modules():
        source = package.files.source(name)
        if source is None or VLLM.encode() not in source or is_vllm(name):
            continue
        module = package.parse(name)
        if module is not None and _imports_vllm(module.tree, source):
            using.append(module)
    return using


def _imports_vllm(tree: ast.Module, source: bytes) -> bool:
    if any(map(_is_import_of_vllm, statements_in(tree.body))):
        return True
    return b"import_module" in source and any(map(_is_call_of_import_module, ast.walk(tree)))


def _is_import_of_vllm(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return not node.level and is_vllm(node.module or "")
    return isinstance(node, ast.Import) and any(is_vllm(alias.name) for alias in node.names)


def _is_call_of_import_module(node: ast.AST) -> bool:
    """Whether a node is ``importlib.import_module("vllm…")``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr != "import_module" or not node.args:
        return False
    first = node.args[0]
    return isinstance(first, ast.Constant) and is_vllm(str(first.value))


def imports_of(package: Package, modules: Iterable[Module]) -> dict[str, tuple[str, ...]]:
    """Return ``{module: those of the package that it imports}`` for modules and all they import."""
    found: dict[str, tuple[str, ...]] = {}
    todo = [module.name for module in modules]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        module = package.parse(name)
        found[name] = _own_imports(package, module) if module is not None else ()
        todo += [other for other in found[name] if other not in found]
    return dict(sorted(found.items()))


def _own_imports(package: Package, module: Module) -> tuple[str, ...]:
    """Return the package's modules that a module imports, parents of both included."""
    found: set[str] = set()
    for name in (module.name, *_imported(package, module)):
        parts = name.split(".")
        above = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        found.update(dotted for dotted in above if package.ours(dotted) and package.files.locate(dotted))
    return tuple(sorted(found - {module.name}))


def _imported(package: Package, module: Module) -> Iterator[str]:
    """Name all of the package that a module's statements import, be it a module or what one holds."""
    for node in statements_in(module.tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if package.ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_relative(module.name, module.is_package, node.module, node.level)
            if package.ours(origin):
                yield origin
                yield from (f"{origin}.{alias.name}" for alias in node.names)
