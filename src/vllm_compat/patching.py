"""The only room that changes a process: wrap, wait for an import, supply a module, take back.

A :class:`Transaction` holds every change made for one plan in one process. Targets are written
``package.module:Class.attribute``. Where the module is imported already the patch goes in at once,
otherwise in the moment its import ends; a patch that fails then takes back everything and turns
that import into our error.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from vllm_compat.errors import PatchError

Wrapper = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""wrapt's wrapper: ``(wrapped, instance, args, kwargs)``."""

_MISSING: Any = object()


@dataclass
class Patch:
    """One change in this process.

    ``owner`` is the adapter or guard it belongs to, ``target`` what it changes, ``state`` one of
    ``waiting`` (for the import of its module), ``going in``, ``in force``, ``reverted``, ``absent``
    (an optional target that is not there), ``inert`` (someone wrapped over it, so it stays in the
    chain but does nothing).
    """

    owner: str
    target: str
    state: str = "waiting"
    undo: Callable[[], str] | None = None


class Transaction:
    """All changes for one plan in one process; all of them or none.

    ``on_failure`` is called after a patch that failed, at once or with a later import, has taken
    everything back.
    """

    def __init__(self, on_failure: Callable[[], None] | None = None) -> None:
        self.on_failure = on_failure
        self.patches: list[Patch] = []
        self.active = True
        self.failure: str | None = None
        self._owner = "?"
        self._lock = threading.RLock()
        self._finders: list[_SuppliedModules] = []

    def owned_by(self, owner: str) -> Transaction:
        """Say whose the next patches are; returns self."""
        self._owner = owner
        return self

    def wrap(
        self,
        target: str,
        wrapper: Wrapper,
        *,
        confirm: Callable[[Any], str | None] | None = None,
        optional: bool = False,
    ) -> None:
        """Wrap the callable behind ``module:dotted.attribute`` in place.

        ``confirm`` gets the live object right before the patch goes in and returns what it found
        to disagree with the plan, or None. With ``optional``, a target that does not exist is a
        state (``absent``) and no error: for what only watches.

        Raises:
            PatchError: The target does not exist, or ``confirm`` disagrees.
        """
        module_name, _, path = target.partition(":")
        patch = Patch(self._owner, target)

        def install(module: ModuleType) -> None:
            parent: Any = module
            *parents, name = path.split(".")
            for part in parents:
                parent = getattr(parent, part, _MISSING)
                if parent is _MISSING and optional:
                    patch.state = "absent"
                    return
                if parent is _MISSING:
                    raise PatchError(f"{target} is not there: {module_name} has no {part}.")
            raw = _raw(parent, name)
            if raw is _MISSING and optional:
                patch.state = "absent"
                return
            if raw is _MISSING:
                raise PatchError(f"{target} is not there, although the plan read it from source.")
            live = parent if name == "__init__" else getattr(parent, name)
            if confirm and (disagreement := confirm(live)):
                raise PatchError(f"{target} is not what the plan read from source: {disagreement}.")
            self._replace(patch, parent, name, raw, wrapper)

        self._enlist(patch, module_name, install)

    def set(self, target: str, make: Callable[[ModuleType], Any]) -> None:
        """Give ``module:name`` a value that the module lacks or that stands in for its own."""
        module_name, _, name = target.partition(":")
        patch = Patch(self._owner, target)

        def install(module: ModuleType) -> None:
            before = vars(module).get(name, _MISSING)
            value = make(module)
            setattr(module, name, value)

            def undo() -> str:
                if vars(module).get(name, _MISSING) is not value:
                    return "inert"
                if before is _MISSING:
                    delattr(module, name)
                else:
                    setattr(module, name, before)
                return "reverted"

            patch.undo = undo
            patch.state = "in force"

        self._enlist(patch, module_name, install)

    def environ(self, name: str, value: str) -> None:
        """Set an environment variable that is not set, for this process and its children."""
        patch = Patch(self._owner, f"environment variable {name}", state="in force")
        if name in os.environ:
            patch.undo = lambda: "reverted"
        else:
            os.environ[name] = value

            def undo() -> str:
                if os.environ.get(name) == value:
                    del os.environ[name]
                return "reverted"

            patch.undo = undo
        self.patches.append(patch)

    def supply_module(self, name: str, make: Callable[[ModuleType], None]) -> None:
        """Make ``name`` importable although this vLLM lacks it; ``make`` fills the new module."""
        patch = Patch(self._owner, f"{name}:*")
        finder = _SuppliedModules(name, make)
        sys.meta_path.append(finder)
        self._finders.append(finder)

        def undo() -> str:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
            module = sys.modules.get(name)
            if module is not None and getattr(module, "__loader__", None) is finder:
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if parent in sys.modules and getattr(sys.modules[parent], child, None) is module:
                    delattr(sys.modules[parent], child)
            return "reverted"

        patch.undo = undo
        patch.state = "in force"
        self.patches.append(patch)

    def revert(self) -> list[Patch]:
        """Take everything back, last patch first; return those that had to stay, inert."""
        with self._lock:
            self.active = False  # a patch that another thread is putting in sees it, and goes again
            for patch in reversed(self.patches):
                if patch.state == "in force" and patch.undo:
                    patch.state = patch.undo()
                elif patch.state == "waiting":
                    patch.state = "reverted"
            return [p for p in self.patches if p.state == "inert"]

    def _replace(self, patch: Patch, parent: Any, name: str, raw: Any, wrapper: Wrapper) -> None:
        import wrapt

        local = name in vars(parent)
        ours = wrapt.FunctionWrapper(raw, wrapper, enabled=lambda: self.active)
        setattr(parent, name, ours)

        def undo() -> str:
            if vars(parent).get(name) is not ours:
                return "inert"
            if local:
                setattr(parent, name, raw)
            else:
                delattr(parent, name)
            return "reverted"

        patch.undo = undo
        patch.state = "in force"

    def _enlist(self, patch: Patch, module_name: str, install: Callable[[ModuleType], None]) -> None:
        self.patches.append(patch)

        def now(module: ModuleType) -> None:
            with self._lock:
                if not self.active or patch.state != "waiting":
                    return
                patch.state = "going in"
            try:
                # Without our lock: it may import, and another thread may be waiting for our lock
                # in the middle of that very import.
                install(module)
            except Exception as error:
                patch.state = "reverted"
                self._fail(patch, error)
            with self._lock:
                if not self.active and patch.state == "in force" and patch.undo:
                    patch.state = patch.undo()

        module = _imported(module_name)
        if module is not None:
            try:
                now(module)
            except PatchError as error:
                if not _unfinished(module):
                    raise
                raise PatchError(
                    f"{module_name} is only half imported, by the code that calls us: call"
                    f" vllm_compat.apply() before that import or after it. {error}"
                ) from error
        else:
            import wrapt

            wrapt.register_post_import_hook(now, module_name)

    def _fail(self, patch: Patch, error: Exception) -> NoReturn:
        self.failure = f"{patch.owner}: {error}"
        self.revert()
        if self.on_failure:
            self.on_failure()
        raise PatchError(
            f"Adapter {patch.owner} does not fit this process, so every patch has been taken back:"
            f" {error}"
        ) from error


def _imported(name: str) -> ModuleType | None:
    """Return a module that is imported; wait for one that another thread is importing."""
    module = sys.modules.get(name)
    if module is not None and _unfinished(module):
        importlib.import_module(name)
        module = sys.modules.get(name)
    return module


def _unfinished(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _raw(parent: Any, name: str) -> Any:
    """Return what ``parent`` holds under ``name`` without binding it (classmethod objects stay)."""
    if isinstance(parent, type):
        for cls in parent.__mro__:
            if name in vars(cls):
                return vars(cls)[name]
        return _MISSING
    return vars(parent).get(name, _MISSING)


class _SuppliedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module that nobody else found."""

    def __init__(self, name: str, make: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.make = make

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self.make(module)
