"""Dotted names → things, in modules that were read and never imported: imports, aliases, attributes."""

from __future__ import annotations

import builtins
from dataclasses import replace

from vllm_compat.analysis.surface.entries import (
    AttributeEntry,
    ClassEntry,
    Entry,
    FunctionEntry,
    ImportEntry,
    Several,
)
from vllm_compat.analysis.surface.model import Surface
from vllm_compat.analysis.surface.things import UNKNOWN, Body, Thing, Types

BUILTIN_TYPES = frozenset(
    {"list", "dict", "tuple", "set", "frozenset", "str", "bytes", "int", "float", "bool"}
)


class Names(Surface):
    """Follow names through modules. What classes and values hold is said by those who derive."""

    package = "vllm"

    def __init__(self) -> None:
        self._lookups: dict[tuple[str, str, bool], Thing | None] = {}

    def _body(self, module: str) -> Body | None:
        """Return the module's body, or None where there is none to be read."""
        raise NotImplementedError

    def _is_opaque(self, module: str) -> bool:
        """Whether a module without source may hold any name."""
        return False

    def _of_class(self, thing: Thing, name: str) -> Thing | None:
        """Return a class's attribute; None where it surely lacks it."""
        raise NotImplementedError

    def types_of(self, thing: Thing) -> Types:
        """Return what a value behind a name may be."""
        raise NotImplementedError

    def _ours(self, dotted: str) -> bool:
        return dotted == self.package or dotted.startswith(self.package + ".")

    # Names of modules.

    def _lookup(self, module: str, name: str, typing: bool = False) -> Thing | None:
        """Return what ``module.name`` is; ``typing`` also sees names of ``TYPE_CHECKING``."""
        key = (module, name, typing)
        if key in self._lookups:
            return self._lookups[key]
        self._lookups[key] = None  # an import that leads back here finds nothing
        found = self._find_name(module, name, typing)
        self._lookups[key] = found
        return found

    def _find_name(self, module: str, name: str, typing: bool) -> Thing | None:
        body = self._body(module)
        if body is None:
            # A folder without __init__.py holds modules only; a compiled module, anything.
            return self._module_at(f"{module}.{name}") or (UNKNOWN if self._is_opaque(module) else None)
        entry = body.entry(name)
        found = self._enter(module, name, entry) if entry is not None else None
        found = found or self._from_star(body, name) or self._module_at(f"{module}.{name}")
        if found is not None:
            return found
        if typing or body.dynamic:
            entry = body.typing_entry(name)
            if entry is not None:
                return self._enter(module, name, entry)
        if body.may_have(name) or any(not self._ours(star) for star in body.stars):
            return UNKNOWN
        return None

    def _module_at(self, path: str) -> Thing | None:
        return Thing("module", path, path) if self.has_module(path) else None

    def _from_star(self, body: Body, name: str) -> Thing | None:
        """Return what ``from … import *`` brings under a name."""
        for star in filter(self._ours, body.stars):
            other = self._body(star)
            if other is None:
                continue
            exported = other.exported
            visible = name in exported if exported is not None else not name.startswith("_")
            thing = self._lookup(star, name) if visible else None
            # A module of the package behind the star is not imported by it.
            if thing is not None and (thing.path != f"{star}.{name}" or other.entry(name) is not None):
                return thing
        return None

    def _enter(self, module: str, name: str, entry: Entry) -> Thing | None:
        """Turn a module-level entry into a thing, imports followed."""
        if isinstance(entry, Several):
            return self._enter_first(module, name, entry)
        if isinstance(entry, ClassEntry):
            return Thing("class", module, f"{module}.{name}", entry)
        if isinstance(entry, FunctionEntry):
            return Thing("function", module, f"{module}.{name}", entry)
        if isinstance(entry, AttributeEntry):
            if entry.annotation is None and entry.value and not entry.value.endswith("()"):
                # ``Old = New``: an alias of another name in sight.
                thing = self._name_in(module, entry.value, seen=name)
                if thing is not None and thing.kind in ("class", "function", "module"):
                    return thing
            return Thing("attribute", module, f"{module}.{name}", entry)
        return self._imported(module, name, entry)

    def _enter_first(self, module: str, name: str, several: Several) -> Thing | None:
        """Return the first of several definitions that vLLM has."""
        found: Thing | None = None
        for alternative in several.entries:
            thing = self._enter(module, name, alternative)
            if thing is not None and thing.kind not in ("external", "unknown"):
                return thing
            found = found or thing
        return found

    def _imported(self, module: str, name: str, entry: ImportEntry) -> Thing | None:
        origin, target = entry.module, entry.name
        if not self._ours(origin):
            return Thing("external", module, f"{origin}.{target}" if target else origin)
        if target is None:
            return self._module_at(origin) or UNKNOWN
        if origin == module and target == name:
            return None
        found = self._lookup(origin, target)
        return found if found is not None else UNKNOWN

    # Dotted names.

    def _name_in(self, module: str, dotted: str, seen: str | None = None) -> Thing | None:
        """Return what a dotted name means inside a module."""
        head, *rest = dotted.split(".")
        if not head.isidentifier() or (seen == head and not rest):
            return None
        if head == self.package:
            return self._walk_names(dotted)
        thing = self._lookup(module, head, typing=True)
        if thing is None:
            if hasattr(builtins, head):
                return Thing("external", path=f"builtins.{dotted}")
            return None
        for part in rest:
            if thing is None:
                return None
            thing = self._step(thing, part)
        return thing

    def _walk_names(self, dotted: str) -> Thing | None:
        head, *rest = dotted.split(".")
        thing: Thing | None = Thing("module", head, head) if head == self.package else None
        for part in rest:
            if thing is None:
                return None
            thing = self._step(thing, part)
        return thing

    def _step(self, thing: Thing, name: str) -> Thing | None:
        """Return the attribute ``name`` of a thing; None where it surely lacks it."""
        if thing.kind == "module":
            return self._lookup(thing.module, name)
        if thing.kind == "class":
            return self._of_class(thing, name)
        if thing.kind == "external":
            if thing.builtin in BUILTIN_TYPES:
                return _of_builtin(thing.builtin, name)
            return Thing("external", thing.module, f"{thing.path}.{name}")
        if thing.kind == "container":
            return _of_builtin(thing.path, name)
        if thing.kind == "union":
            return self._through(Types(thing.items), name)
        if thing.kind == "attribute" or thing.as_property is not None:
            return self._through(self.types_of(thing), name)
        return UNKNOWN

    def _through(self, types: Types, name: str) -> Thing | None:
        """Look a name up in every type that a value may have."""
        found: Thing | None = None
        lacking: list[str] = []
        for thing in types.things:
            other = self._step(thing, name)
            if other is None:
                lacking.append(thing.path)
            elif found is None or found.kind == "unknown":
                found = other
        if found is None:
            return UNKNOWN if types.open or not types.things else None
        if lacking and found.kind != "unknown":
            return replace(found, lacking=tuple(sorted(lacking)))
        return found


def _of_builtin(builtin: str, name: str) -> Thing | None:
    return UNKNOWN if hasattr(getattr(builtins, builtin), name) else None
