"""What changed from one vLLM to another: names, and signatures parameter by parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from vllm_compat.analysis.contract import CallSite, Contract, SiteKind
from vllm_compat.analysis.drift import shared_prefix
from vllm_compat.analysis.surface.entries import (
    AttributeEntry,
    ClassEntry,
    Entry,
    FunctionEntry,
    ImportEntry,
    definitions,
)
from vllm_compat.analysis.surface.model import Surface, Symbol, SymbolKind
from vllm_compat.analysis.surface.static import StaticSurface
from vllm_compat.commands.report.shapes import Detail, DetailKind, shape_changes

ALL = ("vllm.v1", "vllm.config")
"""What ``--all-symbols`` looks at."""


class ChangeKind(str, Enum):
    """What became of a name."""

    REMOVED = "removed"
    MOVED = "moved"
    CHANGED = "changed"
    ADDED = "added"


@dataclass(frozen=True)
class Change:
    """One name that is not what it was.

    ``symbol`` is its dotted name in the first surface (in the second for an added one), ``what``
    its kind; ``moved_to`` is where it is now. ``sites`` are the call sites that use it.
    """

    kind: ChangeKind
    symbol: str
    what: SymbolKind
    moved_to: str | None = None
    details: tuple[Detail, ...] = ()
    sites: tuple[CallSite, ...] = ()


@dataclass(frozen=True)
class Difference:
    """What changed between two surfaces, for the symbols that were looked at.

    ``scope`` says in words which, ``looked_at`` how many. ``unknown`` are those that could not be
    compared, since a record holds only their names.
    """

    before: Surface
    after: Surface
    scope: str
    looked_at: int
    changes: tuple[Change, ...] = ()
    unknown: tuple[str, ...] = ()

    def of(self, kind: ChangeKind) -> tuple[Change, ...]:
        """Return the changes of a kind."""
        return tuple(change for change in self.changes if change.kind is kind)


# Comparing by use.


def compare_used(before: Surface, after: Surface, contracts: Sequence[Contract]) -> Difference:
    """Compare two surfaces by the symbols that contracts use."""
    sites: dict[str, list[CallSite]] = {}
    for contract in contracts:
        for site in contract.sites:
            if site.kind is not SiteKind.HOOK:
                sites.setdefault(site.symbol, []).append(site)
    places: dict[str, str | None] = {}
    unknown = tuple(
        sorted(symbol for symbol in sites if not (before.tells(symbol) and after.tells(symbol)))
    )
    found = (
        _compare_use(symbol, tuple(used), before, after, places)
        for symbol, used in sorted(sites.items())
    )
    changes = tuple(change for change in found if change is not None)
    names = ", ".join(f"{contract.name} {contract.version}" for contract in contracts)
    verb = "uses" if len(contracts) == 1 else "use"
    return Difference(before, after, f"that {names} {verb}", len(sites), changes, unknown)


def _compare_use(
    symbol: str,
    sites: tuple[CallSite, ...],
    before: Surface,
    after: Surface,
    places: dict[str, str | None],
) -> Change | None:
    """Return what became of a symbol; ``places`` collects where names that are gone are now."""
    place, told = _followed(symbol, places)
    if told:
        return None
    old, new = before.resolve(symbol), after.resolve(place)
    if (old and new and not (before.tells(symbol) and after.tells(place))) or any(
        found and not surface.tells(path, by_name=True)
        for found, surface, path in ((old, before, symbol), (new, after, place))
    ):
        return None
    kind = ChangeKind.CHANGED
    if old is None:
        return Change(ChangeKind.ADDED, symbol, new.kind, sites=sites) if new else None
    moved_to = place if place != symbol else None
    if new is None:
        moved_to = places[symbol] = _moved(symbol, old, before, after)
        new = after.resolve(moved_to) if moved_to else None
        kind = ChangeKind.MOVED if new else ChangeKind.REMOVED
    details = tuple(
        replace(detail, concerns=_concerns(detail, sites))
        for detail in (shape_changes(old, new) if new else ())
    )
    if kind is ChangeKind.CHANGED and not details:
        return None
    return Change(kind, symbol, old.kind, moved_to, details, sites)


def _followed(symbol: str, places: Mapping[str, str | None]) -> tuple[str, bool]:
    """Return where to look for a symbol now, and whether it is gone with what holds it."""
    prefix = next((n for n in places if symbol.startswith((f"{n}.", f"{n}()"))), None)
    if prefix is None:
        return symbol, False
    new_prefix = places[prefix]
    return (new_prefix or prefix) + symbol[len(prefix) :], new_prefix is None


def _concerns(detail: Detail, sites: Sequence[CallSite]) -> bool:
    calls = [site for site in sites if site.kind is SiteKind.CALL]
    given = any(site.keyword(detail.name) is not None for site in calls if detail.name)
    if detail.kind is DetailKind.PARAMETER_ADDED:
        return bool(calls) and (given or detail.is_required)
    return given


def _moved(symbol: str, old: Symbol, before: Surface, after: Surface) -> str | None:
    """Return the one place that a module's name has moved to, or None."""
    parent, _, name = symbol.rpartition(".")
    owner = before.resolve(parent) if "()" not in parent else None
    if owner is None or owner.kind is not SymbolKind.MODULE:
        return None
    found = []
    for path in after.find(name):
        there = after.resolve(path)
        # A namesake that stood there before is another thing.
        if there is not None and there.kind is old.kind and before.resolve(path) is None:
            found.append(path)
    if len(found) > 1:
        found.sort(key=lambda path: -shared_prefix(symbol, path))
        if shared_prefix(symbol, found[0]) == shared_prefix(symbol, found[1]):
            return None
    return found[0] if found else None


# Comparing everything.


def compare_all(before: Surface, after: Surface, prefixes: Sequence[str] = ALL) -> Difference:
    """Compare two surfaces by all that some packages of vLLM define.

    Names that a module only imports are told where they are defined.
    """
    old_modules, new_modules = _modules(before, prefixes), _modules(after, prefixes)
    changes: list[Change] = []
    gone: _Places = {}
    come: _Places = {}
    looked_at = 0
    for module in sorted(old_modules | new_modules):
        old = _defined(before, module) if module in old_modules else {}
        new = _defined(after, module) if module in new_modules else {}
        looked_at += len(old.keys() | new.keys())
        if module not in new_modules:
            changes.append(Change(ChangeKind.REMOVED, module, SymbolKind.MODULE))
        elif module not in old_modules:
            changes.append(Change(ChangeKind.ADDED, module, SymbolKind.MODULE))
        for name in sorted(old.keys() | new.keys()):
            path = f"{module}.{name}"
            if name not in new:
                gone.setdefault((name, _kind(old[name])), []).append(path)
            elif name not in old:
                come.setdefault((name, _kind(new[name])), []).append(path)
            elif old[name] != new[name]:
                changes += _compare_name(before, after, path, path, old[name], new[name])
    moves = _moves(gone, come)
    for path, place in moves.items():
        changes += _move(before, after, path, place)
    # With a module that is gone or new as a whole all its names are told.
    changes += _apart(ChangeKind.REMOVED, gone, moves.keys(), new_modules)
    changes += _apart(ChangeKind.ADDED, come, set(moves.values()), old_modules)
    changes.sort(key=lambda change: (change.symbol, change.kind.value))
    return Difference(before, after, f"that {' and '.join(prefixes)} define", looked_at, tuple(changes))


_Places = dict[tuple[str, SymbolKind], list[str]]
"""Where names of a kind stand."""


def _moves(gone: _Places, come: _Places) -> dict[str, str]:
    """Return which names have moved, and where to: those of one place before and one after."""
    return {
        paths[0]: come[key][0]
        for key, paths in gone.items()
        if len(paths) == len(come.get(key, ())) == 1 and key[1] is not SymbolKind.ATTRIBUTE
    }


def _move(before: Surface, after: Surface, path: str, place: str) -> Iterator[Change]:
    """Iterate over the changes of a name that has moved."""
    old, new = _entry(before, path), _entry(after, place)
    shape = tuple(_compare_name(before, after, path, place, old, new))
    top = next((change.details for change in shape if change.symbol == path), ())
    yield Change(ChangeKind.MOVED, path, _kind(old), place, top)
    yield from (change for change in shape if change.symbol != path)


def _apart(
    kind: ChangeKind, places: _Places, moved: Collection[str], modules: Collection[str]
) -> Iterator[Change]:
    """Iterate over names that only one surface has, in modules that both have."""
    for (_, what), paths in places.items():
        for path in paths:
            if path not in moved and path.rpartition(".")[0] in modules:
                yield Change(kind, path, what)


def _modules(surface: Surface, prefixes: Sequence[str]) -> set[str]:
    return {
        module
        for module in surface.modules()
        if any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)
    }


def _defined(surface: Surface, module: str) -> dict[str, Entry]:
    """Return what a module defines itself, as the entries that surfaces are resolved from."""
    body = surface._body(module) if isinstance(surface, StaticSurface) else None
    found: dict[str, Entry] = {}
    for name in body.names() if body is not None else ():
        entry = body.entry(name) if body is not None else None
        own = [e for e in definitions(entry) if not isinstance(e, ImportEntry)]
        if own and not name.startswith("__") and not _is_logger(name, own[0]):
            found[name] = own[0]
    return found


def _is_logger(name: str, entry: Entry) -> bool:
    return name == "logger" and isinstance(entry, AttributeEntry)


def _entry(surface: Surface, path: str) -> Entry:
    module, _, name = path.rpartition(".")
    return _defined(surface, module)[name]


def _kind(entry: Entry) -> SymbolKind:
    if isinstance(entry, ClassEntry):
        return SymbolKind.CLASS
    return SymbolKind.FUNCTION if isinstance(entry, FunctionEntry) else SymbolKind.ATTRIBUTE


def _compare_name(
    before: Surface, after: Surface, path: str, place: str, old: Entry, new: Entry
) -> Iterator[Change]:
    """Iterate over the changes of a name and, for a class, of its own members."""
    was, now = before.resolve(path), after.resolve(place)
    if was is None or now is None:
        return
    details = shape_changes(was, now)
    if details:
        yield Change(ChangeKind.CHANGED, path, _kind(old), None, details)
    if not isinstance(old, ClassEntry) or not isinstance(new, ClassEntry):
        return
    # The constructor's parameters have been told.
    told = {p.name for s in (was, now) if s.signature for p in s.signature.parameters}
    for name in sorted(old.members.keys() | new.members.keys()):
        one, other = old.members.get(name), new.members.get(name)
        dunder = name.startswith("__") and name.endswith("__")
        if name in told or dunder or one == other:
            continue
        change = _compare_member(before, after, f"{path}.{name}", f"{place}.{name}", one, other)
        if change is not None:
            yield change


def _compare_member(
    before: Surface, after: Surface, path: str, place: str, old: Entry | None, new: Entry | None
) -> Change | None:
    """Return what became of a member of a class, if anything that a user of the class meets."""
    was, now = before.resolve(path), after.resolve(place)
    if new is None:
        # A method that a base class has now is still there.
        return Change(ChangeKind.REMOVED, path, _member_kind(old)) if now is None else None
    if old is None:
        return Change(ChangeKind.ADDED, path, _member_kind(new)) if was is None else None
    details = shape_changes(was, now) if was and now else ()
    return Change(ChangeKind.CHANGED, path, _member_kind(old), None, details) if details else None


def _member_kind(entry: Entry | None) -> SymbolKind:
    first = next(iter(definitions(entry)), None)
    if first is None or (isinstance(first, FunctionEntry) and first.is_property):
        return SymbolKind.ATTRIBUTE
    return _kind(first)
