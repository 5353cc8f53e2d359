"""What does not fit: records only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from vllm_compat.analysis.contract import CallSite


class FindingKind(str, Enum):
    """What does not fit."""

    MODULE_MISSING = "module missing"
    NAME_MOVED = "name moved"
    NAME_MISSING = "name missing"
    ATTRIBUTE_MISSING = "attribute missing"
    PARAMETER_REMOVED = "parameter removed"
    PARAMETER_REQUIRED = "parameter required"
    PARAMETER_RENAMED = "parameter renamed"
    PARAMETER_REORDERED = "parameter reordered"
    RETURN_SHAPE = "return shape"
    ARGUMENT_TYPE = "argument type"
    BEHAVIOUR = "behaviour"
    NAME_TAKEN = "name taken"


@dataclass(frozen=True)
class Finding:
    """One drift: a call site that does not fit, or a behaviour that differs.

    ``symbol`` is vLLM's dotted name as the downstream knows it (the module's for a missing module),
    ``name`` the parameter, attribute or imported name concerned, ``seen`` the signature or
    statement that was read, ``detail`` one sentence for people, ``moved_to`` the new dotted name of
    a moved one, ``renamed_to`` the new name of a renamed parameter. ``fatal`` says that the call
    site is sure to fail or to give wrong data; otherwise it depends on the run. ``home`` is the
    release that the downstream fits, where only comparison with it shows the finding.
    """

    kind: FindingKind
    symbol: str
    name: str | None = None
    sites: tuple[CallSite, ...] = ()
    seen: str | None = None
    detail: str = ""
    moved_to: str | None = None
    renamed_to: str | None = None
    fatal: bool = True
    home: str | None = None

    @property
    def key(self) -> tuple[str, str, str | None, bool]:
        """What makes two findings the same on different releases: what may be is not what is sure."""
        return (self.kind.value, self.symbol, self.name, self.fatal)


class Findings:
    """The findings of one comparison, each once with all its sites, in the order of the first."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Finding] = {}

    def add(self, finding: Finding) -> None:
        """Take a finding in, or its sites where it is known."""
        key = (*finding.key, finding.seen, finding.detail)
        known = self._found.get(key)
        if known is None:
            self._found[key] = finding
        else:
            sites = known.sites + tuple(s for s in finding.sites if s not in known.sites)
            self._found[key] = replace(known, sites=sites)

    def all(self) -> tuple[Finding, ...]:
        """Return what was found."""
        return tuple(self._found.values())
