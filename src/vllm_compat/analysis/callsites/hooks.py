"""Worker extensions of the downstream → call sites: what they define, and what is called in workers."""

from __future__ import annotations

import ast

from vllm_compat.analysis.callsites.names import is_dunder
from vllm_compat.analysis.callsites.notes import Notes
from vllm_compat.analysis.callsites.package import WORKER, Function, Module, Package
from vllm_compat.analysis.callsites.reading import Context, Reading
from vllm_compat.analysis.contract import SiteKind


def note_hooks(package: Package, notes: Notes) -> None:
    """Note what worker extensions define, and what is called in workers by name."""
    defined: set[str] = set()
    all_known = bool(package.hooks)
    for path in sorted(package.hooks):
        found = _methods(package, path)
        if found is None:
            all_known = False
            continue
        module, methods = found
        reading = Reading(package, module, notes, Context(within=(path[len(module.name) + 1 :],)))
        for name, method in methods.items():
            defined.add(name)
            if not is_dunder(name):
                reading.emit(SiteKind.HOOK, f"{WORKER}.{name}", method)
    for remote in notes.remote if all_known else ():
        if remote.method in defined:
            continue
        call, node = remote.call, remote.node
        call.lineno, call.end_lineno = node.lineno, -1
        call.end_col_offset = node.end_col_offset
        reading = Reading(package, remote.module, notes, Context(within=remote.within))
        reading.emit(SiteKind.CALL, f"{WORKER}.{remote.method}", node, call=call)


def _methods(package: Package, path: str) -> tuple[Module, dict[str, Function]] | None:
    """Return the module and the methods of a worker extension; None where it isn't found."""
    known = package.classes.get(path)
    if known is not None and known.module is not None:
        return known.module, known.methods
    where, _, name = path.rpartition(".")
    module = package.parse(where) if package.ours(where) else None
    if module is None:
        return None
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            functions = (n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
            return module, {function.name: function for function in functions}
    return None
