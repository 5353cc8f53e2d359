"""contract × surface → findings. Pure: neither vLLM nor the downstream is imported."""

from __future__ import annotations

from vllm_compat.analysis.contract import CallSite, Contract, SiteKind
from vllm_compat.analysis.drift.annotated import union
from vllm_compat.analysis.drift.binding import Problem, bind, unfilled
from vllm_compat.analysis.drift.calls import CallChecks
from vllm_compat.analysis.drift.model import Finding, FindingKind, Findings
from vllm_compat.analysis.drift.names import NameChecks
from vllm_compat.analysis.drift.places import Places
from vllm_compat.analysis.drift.words import prefixes, render, shared_prefix
from vllm_compat.analysis.surface.model import Surface
from vllm_compat.analysis.surface.syntax import uncollected

__all__ = [
    "Finding",
    "FindingKind",
    "Problem",
    "bind",
    "find_drifts",
    "prefixes",
    "render",
    "shared_prefix",
    "unfilled",
    "union",
    "untold",
]


def untold(contract: Contract, surface: Surface) -> tuple[CallSite, ...]:
    """Return the call sites of which a surface can't tell whether they fit: a record of names only.

    Left out are those that the downstream copes with, and those whose symbol is surely missing.
    """
    return tuple(
        site
        for site in contract.sites
        if not site.optional and not surface.tells(site.symbol, by_name=site.kind in _PRESENCE)
    )


_PRESENCE = (SiteKind.IMPORT, SiteKind.ATTRIBUTE, SiteKind.SUBCLASS)
"""What is asked of such a site's symbol is that it is there."""


def find_drifts(
    contract: Contract, surface: Surface, home: Surface | None = None
) -> tuple[Finding, ...]:
    """Return every call site of the contract that does not fit the surface.

    ``home`` is the surface of a release that the downstream was written for, where one is known:
    compared with it, positional arguments that now land elsewhere, renamed parameters, and changed
    defaults that the downstream relies on are seen as well. Findings come in the order in which
    their first call site stands in the source, each once with all its sites.
    """
    with uncollected():
        return _compare(Places(contract, surface, home))


def _compare(places: Places) -> tuple[Finding, ...]:
    findings = Findings()
    names, calls = NameChecks(places, findings), CallChecks(places, findings)
    for site in [s for s in places.contract.sites if not s.optional and not _superseded(s, places)]:
        if site.kind is SiteKind.HOOK:
            names.hook(site)
        elif site.store:
            names.patched(site)
        elif names.there(site):
            names.reach(site)
            if site.kind is SiteKind.CALL:
                calls.call(site)
    return findings.all()


def _superseded(site: CallSite, places: Places) -> bool:
    """Whether the downstream's own tests keep it from reaching a site on this surface."""
    if any(places.missing(name) is not None for name in site.needs):
        return True
    return bool(site.unless) and all(places.missing(name) is None for name in site.unless)
