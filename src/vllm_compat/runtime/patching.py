"""The only room that changes a process: wrap, wait for an import, supply a module, take back.

A :class:`Transaction` holds every change made for one plan in one process: what is wrapped in modules,
and what is changed on live objects (a worker's model runner, hooks on its layers). Targets are written
``package.module:Class.attribute``. Where the module is imported already the patch goes in at once,
otherwise in the moment its import ends; a patch that fails then takes back everything and turns
that import into our error.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NoReturn

from vllm_compat.errors import PatchError

Wrapper = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""wrapt's wrapper: ``(wrapped, instance, args, kwargs)``."""

_MISSING: Any = object()


@dataclass
class Patch:
    """One change in this process.

    ``owner`` is the adapter, feature or check (``check: NAME``) that it belongs to, ``target`` what it
    changes, ``state`` one of ``waiting`` (for the import of its module), ``going in``, ``in force``,
    ``reverted``, ``absent`` (an optional target that is not there), ``inert`` (someone wrapped over it,
    so it stays in the chain but does nothing).
    """

    owner: str
    target: str
    state: str = "waiting"
    undo: Callable[[], str] | None = None
    on: bool = True
    """Off once it has been taken back, for what had to stay in the chain."""


@dataclass(eq=False)
class _Held:
    """What all views of one transaction share."""

    on_failure: Callable[[], None] | None
    patches: list[Patch] = field(default_factory=list)
    active: bool = True
    failure: str | None = None
    lock: Any = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        _held.add(self)


_held: weakref.WeakSet[_Held] = weakref.WeakSet()
"""What the transactions of this process share, as long as one of them is there."""


def _in_child() -> None:
    """Give each transaction a lock that nobody holds: a thread that did is not in this process."""
    for each in list(_held):
        each.lock = threading.RLock()


os.register_at_fork(after_in_child=_in_child)


class Transaction:
    """All changes for one plan in one process; all of them or none.

    ``on_failure`` is called after a patch that failed, at once or with a later import, has taken
    everything back.
    """

    def __init__(self, on_failure: Callable[[], None] | None = None) -> None:
        self._held = _Held(on_failure)
        self._owner = "?"

    def owned_by(self, owner: str) -> Transaction:
        """Return the same transaction for the patches of one owner; it may be kept for later ones."""
        view = Transaction.__new__(Transaction)
        view._held, view._owner = self._held, owner
        return view

    @property
    def patches(self) -> list[Patch]:
        """All patches, in the order in which they were enlisted."""
        return self._held.patches

    @property
    def active(self) -> bool:
        """Whether nothing has taken everything back."""
        return self._held.active

    @property
    def failure(self) -> str | None:
        """Whose patch failed, and why; None where none did."""
        return self._held.failure

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
                raise PatchError(
                    f"{target} is not what the plan read from source: {disagreement}.{_whose(live)}"
                )
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

    def set_attribute(self, obj: Any, name: str, value: Any, target: str = "") -> Patch:
        """Give a live object an attribute of its own, until it is taken back.

        In the object's own namespace, whatever its class does on assignment: a module of torch would
        register a second submodule. Where somebody has put something else there since, it is left
        alone (``inert``), so a function that is put there must look at :attr:`active` itself.
        """
        place = obj if isinstance(obj, type | ModuleType) else None
        before = vars(obj).get(name, _MISSING)

        def put(what: Any) -> None:
            if place is not None:
                delattr(place, name) if what is _MISSING else setattr(place, name, what)
            elif what is _MISSING:
                del vars(obj)[name]
            else:
                vars(obj)[name] = what

        def undo() -> str:
            if vars(obj).get(name, _MISSING) is not value:
                return "inert"
            put(before)
            return "reverted"

        put(value)
        return self.did(target or f"{_kind(obj)}.{name} of one object", undo)

    def hook(self, module: Any, hook: Callable[[Any, Any, Any], Any], target: str = "") -> Patch:
        """Add a forward hook to a live module of torch, until it is taken back."""
        handle = module.register_forward_hook(hook)
        return self.did(target or f"forward hook of one {_kind(module)}", _then(handle.remove))

    def at_exit(self, function: Callable[[], None], target: str) -> Patch:
        """Let a function be called when the interpreter ends, unless it is taken back before."""
        atexit.register(function)
        return self.did(target, _then(lambda: atexit.unregister(function)))

    def did(self, target: str, undo: Callable[[], str]) -> Patch:
        """Enlist a change that has been made already; ``undo`` takes it back and returns the state.

        After a revert there is nothing to hold it any more, so it is taken back at once.
        """
        patch = Patch(self._owner, target, "in force", undo)
        with self._held.lock:
            if not self.active:
                patch.state = undo()
            self.patches.append(patch)
        return patch

    @contextmanager
    def watched(self, obj: Any) -> Iterator[None]:
        """Enlist what a block, somebody else's code, changes among a live object's own attributes."""
        before = dict(vars(obj))
        try:
            yield
        finally:
            now = dict(vars(obj))
            for name in before.keys() | now.keys():
                was, value = before.get(name, _MISSING), now.get(name, _MISSING)
                if was is not value:
                    self.did(f"{_kind(obj)}.{name} of one object", _put_back(obj, name, was, value))

    @contextmanager
    def lent(self, obj: Any, name: str, value: Any) -> Iterator[None]:
        """Give a live object an attribute of its own for the length of a block."""
        patch = self.set_attribute(obj, name, value)
        try:
            yield
        finally:
            self.take_back([patch])

    def take_back(self, patches: Collection[Patch]) -> list[Patch]:
        """Take back some patches for good, last first, and leave the others in force.

        They are in the list no more, but for those that had to stay, inert: these are returned.
        """
        with self._held.lock:
            chosen = {id(patch) for patch in patches}
            _undo([patch for patch in self.patches if id(patch) in chosen])
            self.patches[:] = [p for p in self.patches if id(p) not in chosen or p.state == "inert"]
            return [patch for patch in patches if patch.state == "inert"]

    def revert(self) -> list[Patch]:
        """Take everything back, last patch first; return those that had to stay, inert."""
        with self._held.lock:
            # A patch that another thread is putting in sees it, and goes again.
            self._held.active = False
            _undo(self.patches)
            return [p for p in self.patches if p.state == "inert"]

    def _replace(self, patch: Patch, parent: Any, name: str, raw: Any, wrapper: Wrapper) -> None:
        import wrapt

        local = name in vars(parent)
        ours = wrapt.FunctionWrapper(raw, wrapper, enabled=lambda: self.active and patch.on)
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
            with self._held.lock:
                if not (self.active and patch.on) or patch.state != "waiting":
                    return
                patch.state = "going in"
            try:
                # Without our lock: it may import, and another thread may be waiting for our lock
                # in the middle of that very import.
                install(module)
            except Exception as error:
                patch.state = "reverted"
                self._fail(patch, error)
            with self._held.lock:
                if not (self.active and patch.on) and patch.state == "in force" and patch.undo:
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
        self._held.failure = f"{patch.owner}: {error}"
        self.revert()
        if self._held.on_failure:
            self._held.on_failure()
        raise PatchError(
            f"The patch of {patch.owner} does not fit this process, so every patch has been taken back:"
            f" {error}"
        ) from error


def _whose(live: Any) -> str:
    """Return where a function stands, which may be somebody's wrapper, and what to do then."""
    code = getattr(live, "__code__", None)
    if code is None:
        return ""
    return (
        f" It stands in {code.co_filename}:{code.co_firstlineno}; a wrapper of yours can be put on after"
        " vllm_compat.apply(), or say what it takes by functools.wraps."
    )


def _undo(patches: Sequence[Patch]) -> None:
    """Take patches back, the last one first."""
    for patch in reversed(patches):
        patch.on = False
        if patch.state == "in force" and patch.undo:
            patch.state = patch.undo()
        elif patch.state == "waiting":
            patch.state = "reverted"


def _then(function: Callable[[], object]) -> Callable[[], str]:
    def undo() -> str:
        function()
        return "reverted"

    return undo


def _put_back(obj: Any, name: str, was: Any, value: Any) -> Callable[[], str]:
    """Return what gives an object its own attribute back, unless somebody has changed it since."""

    def undo() -> str:
        if vars(obj).get(name, _MISSING) is not value:
            return "inert"
        if was is _MISSING:
            del vars(obj)[name]
        else:
            vars(obj)[name] = was
        return "reverted"

    return undo


def _kind(obj: Any) -> str:
    if isinstance(obj, ModuleType):
        return obj.__name__
    cls = obj if isinstance(obj, type) else type(obj)
    return f"{cls.__module__}:{cls.__qualname__}"


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
