"""Syntax trees of a downstream → call sites: which names, objects and results come from vLLM.

The reader follows names through imports (those of the package's own modules included),
assignments, ``self`` attributes, annotations, parameters and branches, as far as they carry, and
notes what is done with each call's result. It evaluates nothing and guesses nothing: what it cannot
follow is simply not a call site.

One class a concern, each on top of the one before: :mod:`reading` (where the reader stands, how call
sites are noted), :mod:`guards` (tests of versions and features), :mod:`names` (what names and attributes
stand for), :mod:`expressions`, :mod:`calls`, :mod:`statements`, :mod:`definitions` (a whole module).
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_compat.analysis.callsites.definitions import ModuleReader
from vllm_compat.analysis.callsites.hooks import note_hooks
from vllm_compat.analysis.callsites.imports import imports_of, modules_using_vllm
from vllm_compat.analysis.callsites.notes import Notes
from vllm_compat.analysis.callsites.package import Module, Package
from vllm_compat.analysis.contract import Contract
from vllm_compat.analysis.surface.files import PackageFiles
from vllm_compat.analysis.surface.syntax import uncollected

__all__ = ["read_package"]


def read_package(files: PackageFiles) -> Contract:
    """Return the contract of a package: all its call sites of vLLM, and what it is asked for beside.

    Raises :class:`~vllm_compat.errors.UsageError` where a module that names vLLM can't be parsed.
    """
    with uncollected():
        package = Package(files, _learn)
        using = modules_using_vllm(package)
        notes = _noted(package, using)
        note_hooks(package, notes)
        return Contract(
            name=files.distribution,
            version=files.version,
            package=files.package,
            root=files.origin,
            sites=notes.finished(True),
            other_calls=notes.finished(False),
            modules=imports_of(package, using),
            written=tuple(sorted(package.written)),
        )


def _learn(package: Package, module: Module) -> None:
    """Learn a module's names and its classes' attributes, without noting call sites."""
    ModuleReader(package, module, None).read()


def _noted(package: Package, modules: Sequence[Module]) -> Notes:
    """Return what is noted of modules.

    They are learned twice before that, so that a method sees what a later one assigns to ``self``, and
    a module what another one learns.
    """
    for _ in range(2):
        for module in modules:
            _learn(package, module)
    notes = Notes()
    for module in modules:
        ModuleReader(package, module, notes).read()
    return notes
