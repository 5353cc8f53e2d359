"""What changed from one vLLM to another: names, and signatures parameter by parameter."""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any

import vllm_compat
from vllm_compat.analysis.contract import CallSite, Contract, SiteKind
from vllm_compat.analysis.drift import shared_prefix
from vllm_compat.analysis.surface.model import (
    Parameter,
    ParameterKind,
    Signature,
    Surface,
    Symbol,
    SymbolKind,
)
from vllm_compat.analysis.surface.static import StaticSurface
from vllm_compat.analysis.surface.syntax import Entry
from vllm_compat.commands.report import words

SCHEMA_VERSION = 1
ALL = ("vllm.v1", "vllm.config")
"""What ``--all-symbols`` looks at."""


class ChangeKind(str, Enum):
    """What became of a name."""

    REMOVED = "removed"
    MOVED = "moved"
    CHANGED = "changed"
    ADDED = "added"


class DetailKind(str, Enum):
    """What became of a part of a name's shape."""

    KIND = "kind"
    BASES = "bases"
    PARAMETER_REMOVED = "parameter removed"
    PARAMETER_ADDED = "parameter added"
    PARAMETER_RENAMED = "parameter renamed"
    PARAMETER_CHANGED = "parameter changed"
    PARAMETER_ORDER = "parameter order"
    RETURNS = "returns"
    ANNOTATION = "annotation"


@dataclass(frozen=True)
class Detail:
    """One difference of shape; ``before`` and ``after`` are source text.

    ``concerns`` says that a call site is concerned: it gives the parameter, or a new one that it
    does not give is required.
    """

    kind: DetailKind
    name: str | None = None
    before: str | None = None
    after: str | None = None
    concerns: bool = False


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

    ``scope`` says in words which, ``looked_at`` how many.
    """

    before: Surface
    after: Surface
    scope: str
    looked_at: int
    changes: tuple[Change, ...] = ()

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
    found = (
        _compare_use(symbol, tuple(used), before, after, places)
        for symbol, used in sorted(sites.items())
    )
    changes = tuple(change for change in found if change is not None)
    names = ", ".join(f"{contract.name} {contract.version}" for contract in contracts)
    verb = "uses" if len(contracts) == 1 else "use"
    return Difference(before, after, f"that {names} {verb}", len(sites), changes)


def _compare_use(
    symbol: str,
    sites: tuple[CallSite, ...],
    before: Surface,
    after: Surface,
    places: dict[str, str | None],
) -> Change | None:
    """Return what became of a symbol; ``places`` collects where names that are gone are now."""
    place: str | None = symbol
    prefix = next((n for n in places if symbol.startswith((f"{n}.", f"{n}()"))), None)
    if prefix is not None:
        new_prefix = places[prefix]
        if new_prefix is None:
            return None  # told at the prefix
        place = new_prefix + symbol[len(prefix) :]
    old, new = before.resolve(symbol), after.resolve(place or symbol)
    kind = ChangeKind.CHANGED
    if old is None:
        return Change(ChangeKind.ADDED, symbol, new.kind, sites=sites) if new else None
    if new is None:
        place = places[symbol] = _moved(symbol, old, before, after)
        new = after.resolve(place) if place else None
        kind = ChangeKind.MOVED if new else ChangeKind.REMOVED
    details = tuple(
        replace(detail, concerns=_concerns(detail, sites))
        for detail in (shape_changes(old, new) if new else ())
    )
    if kind is ChangeKind.CHANGED and not details:
        return None
    moved_to = place if place != symbol else None
    return Change(kind, symbol, old.kind, moved_to, details, sites)


def _concerns(detail: Detail, sites: Sequence[CallSite]) -> bool:
    calls = [site for site in sites if site.kind is SiteKind.CALL]
    given = any(site.keyword(detail.name) is not None for site in calls if detail.name)
    if detail.kind is DetailKind.PARAMETER_ADDED:
        return bool(calls) and (given or _is_required(detail))
    return given


def _is_required(detail: Detail) -> bool:
    text = (detail.after or "").split(" (")[0]
    return "=" not in text and not text.startswith("*")


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
    gone: dict[tuple[str, SymbolKind], list[str]] = {}
    come: dict[tuple[str, SymbolKind], list[str]] = {}
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
    for key, paths in gone.items():
        places = come.get(key, [])
        for path in paths:
            if len(paths) == len(places) == 1 and key[1] is not SymbolKind.ATTRIBUTE:
                place = places[0]
                come.pop(key)
                there = _entry(before, path), _entry(after, place)
                shape = tuple(_compare_name(before, after, path, place, *there))
                top = next((c.details for c in shape if c.symbol == path), ())
                changes.append(Change(ChangeKind.MOVED, path, key[1], place, top))
                changes += [c for c in shape if c.symbol != path]
            elif path.rpartition(".")[0] in new_modules:
                changes.append(Change(ChangeKind.REMOVED, path, key[1]))
    for (_, kind), paths in come.items():
        changes += [
            Change(ChangeKind.ADDED, path, kind)
            for path in paths
            if path.rpartition(".")[0] in old_modules
        ]
    changes.sort(key=lambda change: (change.symbol, change.kind.value))
    return Difference(before, after, f"that {' and '.join(prefixes)} define", looked_at, tuple(changes))


def _modules(surface: Surface, prefixes: Sequence[str]) -> set[str]:
    return {
        module
        for module in surface.modules()
        if any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)
    }


def _defined(surface: Surface, module: str) -> dict[str, Entry]:
    """Return what a module defines itself, as the entries that surfaces are resolved from."""
    body = surface._body(module) if isinstance(surface, StaticSurface) else None
    found = {}
    for name in body.names() if body is not None else ():
        entry = body.entry(name) if body is not None else None
        entries = entry[1] if entry and entry[0] == "u" else [entry]
        own = [e for e in entries if e and e[0] != "i"]
        if own and not name.startswith("__") and not _is_logger(name, own[0]):
            found[name] = own[0]
    return found


def _is_logger(name: str, entry: Entry) -> bool:
    return name == "logger" and entry[0] == "a"


def _entry(surface: Surface, path: str) -> Entry:
    module, _, name = path.rpartition(".")
    return _defined(surface, module)[name]


def _kind(entry: Entry) -> SymbolKind:
    return {"c": SymbolKind.CLASS, "f": SymbolKind.FUNCTION}.get(entry[0], SymbolKind.ATTRIBUTE)


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
    if old[0] != "c" or new[0] != "c":
        return
    # The constructor's parameters have been told.
    told = {p.name for s in (was, now) if s.signature for p in s.signature.parameters}
    for name in sorted(old[4].keys() | new[4].keys()):
        if name in told or (name.startswith("__") and name.endswith("__")):
            continue
        one, other = old[4].get(name), new[4].get(name)
        if one == other:
            continue
        member = f"{path}.{name}"
        if other is None:
            # A method that a base class has now is still there.
            if after.resolve(f"{place}.{name}") is None:
                yield Change(ChangeKind.REMOVED, member, _member_kind(one))
        elif one is None:
            if before.resolve(member) is None:
                yield Change(ChangeKind.ADDED, member, _member_kind(other))
        else:
            left, right = before.resolve(member), after.resolve(f"{place}.{name}")
            found = shape_changes(left, right) if left and right else ()
            if found:
                yield Change(ChangeKind.CHANGED, member, _member_kind(one), None, found)


def _member_kind(entry: Entry | None) -> SymbolKind:
    if entry and entry[0] == "u":
        entry = entry[1][0]
    if entry and entry[0] == "f" and "p" in entry[3]:
        return SymbolKind.ATTRIBUTE
    return _kind(entry) if entry else SymbolKind.ATTRIBUTE


# Shapes.


def shape_changes(old: Symbol, new: Symbol) -> tuple[Detail, ...]:
    """Return how a name's shape differs; where it is defined does not count."""
    if old.kind is not new.kind:
        if old.open_ended or new.open_ended:
            return ()  # nothing is known of one of them
        return (Detail(DetailKind.KIND, None, old.kind.value, new.kind.value),)
    details: list[Detail] = []
    if old.kind is SymbolKind.CLASS and old.bases != new.bases:
        details.append(Detail(DetailKind.BASES, None, ", ".join(old.bases), ", ".join(new.bases)))
    if old.kind is SymbolKind.ATTRIBUTE and not same_annotation(old.annotation, new.annotation):
        details.append(Detail(DetailKind.ANNOTATION, None, old.annotation, new.annotation))
    if old.signature and new.signature:
        details += signature_changes(old.signature, new.signature)
    return tuple(details)


def signature_changes(old: Signature, new: Signature) -> Iterator[Detail]:
    """Iterate over the differences of two signatures, parameter by parameter."""
    left = {p.name: p for p in old.parameters}
    right = {p.name: p for p in new.parameters}
    gone = [p for p in old.parameters if p.name not in right]
    come = [p for p in new.parameters if p.name not in left]
    for parameter in gone:
        index = old.parameters.index(parameter)
        other = new.parameters[index] if index < len(new.parameters) else None
        if (
            other in come
            and other.annotation is not None
            and other.kind is parameter.kind
            and same_annotation(parameter.annotation, other.annotation)
        ):
            come.remove(other)
            yield Detail(
                DetailKind.PARAMETER_RENAMED, parameter.name, written(parameter), written(other)
            )
        else:
            yield Detail(DetailKind.PARAMETER_REMOVED, parameter.name, written(parameter), None)
    for parameter in come:
        yield Detail(DetailKind.PARAMETER_ADDED, parameter.name, None, written(parameter))
    for name, parameter in left.items():
        other = right.get(name)
        if other is not None and not _same_parameter(parameter, other):
            yield Detail(DetailKind.PARAMETER_CHANGED, name, written(parameter), written(other))
    placed = (ParameterKind.POSITIONAL_ONLY, ParameterKind.POSITIONAL_OR_KEYWORD)
    before = [p.name for p in old.parameters if p.kind in placed and p.name in right]
    after = [p.name for p in new.parameters if p.kind in placed and p.name in left]
    common = set(before) & set(after)
    before, after = [n for n in before if n in common], [n for n in after if n in common]
    if before != after:
        yield Detail(DetailKind.PARAMETER_ORDER, None, ", ".join(before), ", ".join(after))
    if not same_annotation(old.returns, new.returns):
        yield Detail(DetailKind.RETURNS, None, old.returns, new.returns)


def _same_parameter(old: Parameter, new: Parameter) -> bool:
    return (
        old.kind is new.kind
        and old.default == new.default
        and same_annotation(old.annotation, new.annotation)
    )


def written(parameter: Parameter) -> str:
    """Return a parameter as it stands in a signature, its kind marked where it is not the usual."""
    stars = {ParameterKind.VAR_POSITIONAL: "*", ParameterKind.VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    if parameter.annotation:
        text += f": {parameter.annotation}"
    if parameter.default is not None:
        text += f" = {parameter.default}" if parameter.annotation else f"={parameter.default}"
    marks = {
        ParameterKind.KEYWORD_ONLY: " (keyword only)",
        ParameterKind.POSITIONAL_ONLY: " (by position only)",
    }
    return text + marks.get(parameter.kind, "")


def same_annotation(one: str | None, other: str | None) -> bool:
    """Whether two annotations say the same: ``Optional[int]`` and ``int | None``, for instance."""
    return one == other or _canonical(one) == _canonical(other)


@lru_cache(maxsize=4096)
def _canonical(text: str | None) -> object:
    if text is None:
        return None
    try:
        return _canonical_node(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        return text


_ALIASES = {"List": "list", "Dict": "dict", "Tuple": "tuple", "Set": "set", "Type": "type"}


def _canonical_node(node: ast.expr) -> object:
    if isinstance(node, ast.Constant):
        return _canonical(node.value) if isinstance(node.value, str) else repr(node.value)
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = ast.unparse(node).rpartition(".")[2]
        return _ALIASES.get(name, name)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _either([node.left, node.right])
    if isinstance(node, ast.Subscript):
        name = ast.unparse(node.value).rpartition(".")[2]
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Literal":
            return ast.unparse(node)
        if name == "Optional":
            return _either([*inner, ast.Constant(None)])
        if name == "Union":
            return _either(inner)
        return (_ALIASES.get(name, name), *(_canonical_node(part) for part in inner))
    if isinstance(node, (ast.List, ast.Tuple)):
        return tuple(_canonical_node(part) for part in node.elts)
    return ast.unparse(node)


def _either(parts: Iterable[ast.expr]) -> object:
    found: set[object] = set()
    for part in parts:
        inner = _canonical_node(part)
        found |= inner if isinstance(inner, frozenset) else {inner}
    return frozenset(found) if len(found) > 1 else next(iter(found))


# Words.


def render_difference(difference: Difference, form: str) -> str:
    """Return a difference as ``text``, ``json`` or ``markdown``."""
    forms: dict[str, Callable[[Difference], str]] = {
        "text": _as_text,
        "json": _as_json,
        "markdown": _as_markdown,
    }
    return forms[form](difference)


def summary(difference: Difference) -> str:
    """Say in one sentence what was looked at and how much of it changed."""
    counted = [f"{len(found)} {kind.value}" for kind in ChangeKind if (found := difference.of(kind))]
    looked_at = words.count(difference.looked_at, "symbol")
    return (
        f"vLLM {difference.before.version} → {difference.after.version}: of {looked_at}"
        f" {difference.scope}, {', '.join(counted) or 'none changed'}."
    )


def _lines(detail: Detail) -> list[str]:
    """Return a detail as lines of a patch."""
    kind, before, after = detail.kind, detail.before, detail.after
    if kind in (DetailKind.RETURNS, DetailKind.ANNOTATION):
        name = "-> " if kind is DetailKind.RETURNS else ": "
        before, after = f"{name}{before or 'unknown'}", f"{name}{after or 'unknown'}"
    elif kind in (DetailKind.KIND, DetailKind.BASES, DetailKind.PARAMETER_ORDER):
        before, after = f"{kind.value}: {before}", f"{kind.value}: {after}"
    elif kind is DetailKind.PARAMETER_ADDED and _is_required(detail):
        after = f"{after}, required"
    elif kind is DetailKind.PARAMETER_RENAMED:
        after = f"{after}, renamed"
    given = kind is not DetailKind.PARAMETER_ADDED or not _is_required(detail)
    mark = "" if not detail.concerns else ", given here" if given else ", not given here"
    lines = [f"- {before}"] if before is not None else []
    lines += [f"+ {after}"] if after is not None else []
    return [*lines[:-1], f"{lines[-1]}{mark}"]


def _where(change: Change) -> str:
    return words.sites_of(change.sites) if change.sites else ""


def _as_text(difference: Difference) -> str:
    lines = textwrap.wrap(summary(difference), 100)
    for change in difference.changes:
        lines.append("")
        place = f" → {change.moved_to}" if change.moved_to else ""
        lines.append(f"{change.kind.value} {change.what.value} {change.symbol}{place}")
        if change.sites:
            lines += textwrap.wrap(
                f"used at {_where(change)}", 100, initial_indent="    ", subsequent_indent="      "
            )
        lines += [f"    {line}" for detail in change.details for line in _lines(detail)]
    return "\n".join(lines) + "\n"


def _as_markdown(difference: Difference) -> str:
    lines = [f"## vLLM {difference.before.version} → {difference.after.version}", ""]
    lines.append(summary(difference))
    for kind in ChangeKind:
        found = difference.of(kind)
        if not found:
            continue
        lines += ["", f"### {kind.value.capitalize()}", ""]
        for change in found:
            place = f" → `{change.moved_to}`" if change.moved_to else ""
            used = f", used at `{_where(change)}`" if change.sites else ""
            lines.append(f"- {change.what.value} `{change.symbol}`{place}{used}")
            if change.details:
                lines += ["  ```diff"]
                lines += [f"  {line}" for detail in change.details for line in _lines(detail)]
                lines += ["  ```"]
    return "\n".join(lines) + "\n"


def _as_json(difference: Difference) -> str:
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "vllm_compat": vllm_compat.__version__,
        "before": _side(difference.before),
        "after": _side(difference.after),
        "scope": difference.scope,
        "looked_at": difference.looked_at,
        "changes": [
            {
                "kind": change.kind.value,
                "symbol": change.symbol,
                "what": change.what.value,
                "moved_to": change.moved_to,
                "details": [
                    {
                        "kind": detail.kind.value,
                        "name": detail.name,
                        "before": detail.before,
                        "after": detail.after,
                        "concerns": detail.concerns,
                    }
                    for detail in change.details
                ],
                "sites": [{"file": site.file, "line": site.line} for site in change.sites],
            }
            for change in difference.changes
        ],
    }
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def _side(surface: Surface) -> dict[str, str]:
    return {
        "version": surface.version,
        "distribution": surface.distribution,
        "origin": surface.origin,
    }
