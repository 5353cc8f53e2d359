"""Where the names that a downstream uses are on a surface, also those that have moved."""

from __future__ import annotations

import re

from vllm_compat.analysis.contract import CallSite, Contract, SiteKind
from vllm_compat.analysis.drift.binding import unfilled
from vllm_compat.analysis.drift.words import last, prefixes, shared_prefix
from vllm_compat.analysis.surface.model import Signature, Surface, SymbolKind


class Places:
    """Look up what a contract names on a surface, moved names followed.

    ``home`` is the surface of a release that the downstream was written for, where one is known.
    """

    def __init__(self, contract: Contract, surface: Surface, home: Surface | None) -> None:
        self.contract = contract
        self.surface = surface
        self.home = home
        self._moved: list[tuple[str, str]] = []
        self._known: dict[str, str | None] = {}

    def here(self, symbol: str) -> str:
        """Return a symbol's path on this surface, moved names followed."""
        for old, new in self._moved:
            if symbol == old or symbol.startswith((old + ".", old + "()", old + "[]")):
                return new + symbol[len(old) :]
        return symbol

    def note_moved(self, old: str, new: str) -> None:
        """Note where a name is on this surface; the longest old name counts."""
        moved = {**dict(self._moved), old: new}
        self._moved = sorted(moved.items(), key=lambda names: len(names[0]), reverse=True)

    def missing(self, symbol: str) -> str | None:
        """Return the shortest prefix of a symbol that is not there, or None."""
        path = self.here(symbol)
        if path not in self._known:
            self._known[path] = self._missing(path)
        answer = self._known[path]
        return None if answer is None else symbol[: len(symbol) - (len(path) - len(answer))] or symbol

    def _missing(self, path: str) -> str | None:
        if self.surface.resolve(path) is not None:
            return None
        for prefix in prefixes(path):
            if self.surface.resolve(prefix) is None:
                return prefix
        return path

    def imported(self, site: CallSite, missing: str) -> str:
        """Return the imported name that a missing prefix belongs to."""
        names = [
            s.symbol
            for s in self.contract.sites
            if s.kind is SiteKind.IMPORT
            and (site.symbol + ".").startswith((s.symbol + ".", s.symbol + "()"))
            and len(s.symbol) >= len(missing)
        ]
        return max(names, key=len) if names else missing

    def is_module_import(self, symbol: str) -> bool:
        """Whether the downstream uses an imported name as a module."""
        if self.home is not None:
            known = self.home.resolve(symbol)
            if known is not None:
                return known.kind is SymbolKind.MODULE
        return any(s.is_module and s.symbol == symbol for s in self.contract.sites)

    def moved_module(self, symbol: str) -> str | None:
        """Return the one module that defines all that the downstream uses of a missing module."""
        start = len(symbol) + 1
        used = {
            re.split(r"\W", s.symbol[start:], maxsplit=1)[0]
            for s in self.contract.sites
            if s.symbol.startswith(symbol + ".")
        }
        places = [
            {path.rpartition(".")[0] for path in self.surface.find(name)} - {symbol} for name in used
        ]
        common = set.intersection(*places) if places else set()
        shared = {module: shared_prefix(symbol, module) for module in common}
        best = [module for module, n in shared.items() if n == max(shared.values())]
        return best[0] if len(best) == 1 else None

    def find_moved(self, symbol: str) -> str | None:
        """Return the one other place that defines a name which fits the downstream's use of it."""
        name = last(symbol)
        before = self.home.resolve(symbol) if self.home is not None else None
        fitting = []
        for path in self.surface.find(name):
            if path == symbol:
                continue
            there = self.surface.resolve(path)
            if there is None or (before is not None and there.kind is not before.kind):
                continue
            if self._fits(symbol, path):
                fitting.append(path)
        if len(fitting) > 1:
            # The nearest of several: a module is usually split, or moves within its package.
            shared = [shared_prefix(symbol, path) for path in fitting]
            best = max(shared)
            fitting = [p for p, n in zip(fitting, shared, strict=True) if n == best]
        return fitting[0] if len(fitting) == 1 else None

    def _fits(self, symbol: str, path: str) -> bool:
        """Whether a definition elsewhere can be what the downstream means by a name."""
        there = self.surface.resolve(path)
        if there is None:
            return False
        for site in self.contract.sites:
            inside = site.symbol[len(symbol) :]
            if (
                site.symbol.startswith(symbol + ".")
                and "()" not in inside
                and "[]" not in inside
                and self.surface.resolve(path + inside) is None
            ):
                return False
        calls = self.contract.calls(symbol)
        if not calls:
            return True
        if there.signature is None:
            return there.kind is not SymbolKind.ATTRIBUTE
        return all(_is_called_alike(call, there.signature) for call in calls)


def _is_called_alike(call: CallSite, signature: Signature) -> bool:
    """Whether a signature is called in much the same way: a namesake's is not, a drifted one's is."""
    given = [keyword for keyword, _ in call.keywords]
    known = sum(signature.accepts(keyword) for keyword in given)
    lacking = [] if call.star else list(unfilled(call, signature))
    return len(given) - known <= known and len(lacking) <= len(given) + len(call.positional)
