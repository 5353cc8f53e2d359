"""Since when a finding is there, by what a contract meets on each recorded release."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vllm_compat.analysis.cache import Memory
from vllm_compat.analysis.codec import pack_finding, unpack_finding
from vllm_compat.analysis.contract import CallSite, Contract
from vllm_compat.analysis.drift import Finding, find_drifts, prefixes, untold
from vllm_compat.analysis.surface.model import Surface
from vllm_compat.analysis.surface.recorded import RecordedSurface, recorded_versions
from vllm_compat.commands.report.model import Dating


class Releases:
    """The recorded releases, each opened once."""

    def __init__(self) -> None:
        self.versions = recorded_versions()
        self._surfaces: dict[str, Surface] = {}

    def get(self, version: str) -> Surface:
        """Return the surface of a recorded release."""
        if version not in self._surfaces:
            self._surfaces[version] = RecordedSurface(version)
        return self._surfaces[version]

    @staticmethod
    def fresh(version: str) -> RecordedSurface:
        """Return the surface of a recorded release that has not been asked anything yet."""
        return RecordedSurface(version)

    def around(self, version: str) -> tuple[list[str], list[str]]:
        """Return the recorded versions before and after a version, the version itself left out.

        A version that can't be compared counts as newer than all.
        """
        from packaging.version import InvalidVersion, Version

        try:
            wanted = Version(Version(version).public)
        except InvalidVersion:
            return list(self.versions), []
        known = [(Version(v), v) for v in self.versions]
        return [v for n, v in known if n < wanted], [v for n, v in known if n > wanted]


_Found = tuple[frozenset[object], frozenset[CallSite], frozenset[CallSite]]
"""A release's findings (by their keys), the sites of fatal ones, and those that it can't tell of."""


class History:
    """What a contract meets on each recorded release, found when it is asked for.

    ``whole``: look at all call sites, so that one look serves many surfaces; otherwise at those
    only that have to do with the findings asked about.
    """

    def __init__(
        self,
        contract: Contract,
        releases: Releases,
        *,
        whole: bool = True,
        memory: Memory | None = None,
    ) -> None:
        self.contract = contract
        self.releases = releases
        self.whole = whole
        self.memory = memory
        self._known: dict[str, _Found] = {}

    def dates(self, findings: Sequence[Finding], surface: Surface) -> list[Dating]:
        """Say since when each of a surface's findings is there."""
        if not self.whole:
            return self._dates_of_part(findings, surface)
        before, after = self.releases.around(surface.version)
        return [self._date(finding, surface.version, before, after) for finding in findings]

    def _dates_of_part(self, findings: Sequence[Finding], surface: Surface) -> list[Dating]:
        sites = _related(self.contract, findings)

        def look() -> list[Dating]:
            part = dataclasses.replace(self.contract, sites=sites)
            return History(part, self.releases).dates(findings, surface)

        return (self.memory or Memory(None)).recall(
            "dates",
            [surface.version, findings, sites],
            look,
            pack=lambda dates: [[d.since, d.fitted_last, d.fits_from] for d in dates],
            unpack=lambda record: [Dating(*dating) for dating in record],
        )

    def untold(self, surface: Surface) -> int:
        """Return the number of call sites of which a surface can't tell."""
        return (self.memory or Memory(None)).recall(
            "untold",
            [surface.version, *surface.stamps(), self.contract.sites],
            lambda: len(untold(self.contract, surface)),
            pack=int,
            unpack=int,
        )

    def changed_defaults(
        self, findings: Sequence[Finding], dates: Sequence[Dating], surface: Surface
    ) -> list[tuple[Finding, Dating]]:
        """Return which defaults that the downstream relies on changed since it last fitted.

        Nothing where it fits here, where it never fitted, or where a matrix is made.
        """
        pairs = zip(findings, dates, strict=True)
        fitted = [date.fitted_last for finding, date in pairs if finding.fatal]
        if self.whole or not fitted or None in fitted:
            return []
        order = list(self.releases.versions)
        at = min(order.index(version) for version in fitted if version)
        later = [v for v in self.releases.around(surface.version)[0] if order.index(v) > at]
        calls = dataclasses.replace(self.contract, other_calls=())

        def look() -> list[tuple[Finding, Dating]]:
            home = self.releases.get(order[at])
            found = {f.key: f for f in find_drifts(calls, surface, home) if f.home}
            since = dict.fromkeys(found, surface.version)
            part = dataclasses.replace(calls, sites=_related(calls, list(found.values())))
            known: dict[str, set[tuple[str, str, str | None, bool]]] = {}
            running = set(found)
            for version in reversed(later):
                if running and version not in known:
                    there = self.releases.fresh(version)
                    keys = {f.key for f in find_drifts(part, there, home)}
                    known.update(dict.fromkeys(there.alike, keys))
                running &= known.get(version, set())
                since.update(dict.fromkeys(running, version))
            return [(f, Dating(since[key], order[at])) for key, f in found.items()]

        return (self.memory or Memory(None)).recall(
            "defaults",
            [surface.version, *surface.stamps(), order[at], self.contract.sites],
            look,
            pack=lambda found: [[pack_finding(f), d.since, d.fitted_last] for f, d in found],
            unpack=lambda record: [(unpack_finding(f), Dating(*dating)) for f, *dating in record],
        )

    def _date(self, finding: Finding, since: str, before: Sequence[str], after: Sequence[str]) -> Dating:
        fitted_last = next((v for v in reversed(before) if self._fits(finding, v)), None)
        begun: str | None = since
        for version in reversed(before):
            keys, _, silent = self._found(version)
            if finding.key not in keys:
                if not silent.isdisjoint(finding.sites):
                    begun = None  # it may have been there: the record holds names only
                break
            begun = version
        fits_from = None
        if fitted_last is None:
            fits_from = next((v for v in after if self._fits(finding, v)), None)
        return Dating(begun, fitted_last, fits_from)

    def _fits(self, finding: Finding, version: str) -> bool:
        """Whether a release is known to have nothing grave against the call sites of a finding."""
        keys, sites, silent = self._found(version)
        return finding.key not in keys and (sites | silent).isdisjoint(finding.sites)

    def _found(self, version: str) -> _Found:
        """Return what a release has against the contract."""
        if version not in self._known:
            surface = self.releases.fresh(version)
            found = find_drifts(self.contract, surface)
            answer = (
                frozenset(finding.key for finding in found),
                frozenset(site for finding in found if finding.fatal for site in finding.sites),
                frozenset(untold(self.contract, surface)),
            )
            # Most releases change nothing that these call sites look at.
            self._known.update(dict.fromkeys(surface.alike, answer))
        return self._known[version]


def _related(contract: Contract, findings: Sequence[Finding]) -> tuple[CallSite, ...]:
    """Return the call sites that decide about findings: of their symbols, owners and members."""
    symbols = {f.symbol for f in findings} | {s.symbol for f in findings for s in f.sites}
    owners = {prefix for symbol in symbols for prefix in prefixes(symbol)}
    return tuple(
        site
        for site in contract.sites
        if site.symbol in owners or not symbols.isdisjoint(prefixes(site.symbol))
    )
