"""What a check has found, in one shape for every format: records only, no reading, no words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vllm_compat.analysis.contract import Contract
from vllm_compat.analysis.drift import Finding
from vllm_compat.analysis.environment import Environment
from vllm_compat.analysis.knowledge import Knowledge, Word
from vllm_compat.analysis.plan import Plan
from vllm_compat.analysis.server_flow import Hazard
from vllm_compat.analysis.surface.model import Surface


class Verdict(str, Enum):
    """What can be said of one pair before anything is loaded."""

    USABLE = "usable"
    WITH_SHIM = "usable with vllm_compat"
    UNKNOWN = "unknown"
    INCOMPATIBLE = "incompatible"


EXIT_STATUS = {
    Verdict.USABLE: 0,
    Verdict.WITH_SHIM: 0,
    Verdict.UNKNOWN: 3,
    Verdict.INCOMPATIBLE: 1,
}


class Standing(str, Enum):
    """What becomes of a finding.

    ``repaired``: an adapter of the plan makes it disappear. ``guarded``: it fits for some of the
    values that may come, and a guard looks at each. ``possible``: nothing repairs it, and source
    alone can't tell whether it is met: that depends on the run, or the call site fits no release at
    all, so that the downstream must do something about it that was not seen. ``unmet``: nothing
    repairs it, and it is sure to be met.
    """

    REPAIRED = "repaired"
    GUARDED = "guarded"
    POSSIBLE = "possible"
    UNMET = "unmet"


@dataclass(frozen=True)
class Dating:
    """When a finding came, as far as the recorded releases tell.

    ``since`` is the first release of those that lead up to the checked one and have it;
    ``fitted_last`` the newest release before in which nothing at all was against its call sites,
    None where there is none. ``fits_from`` is then the first later one of that kind: what was
    checked is too old.
    """

    since: str | None = None
    fitted_last: str | None = None
    fits_from: str | None = None

    @property
    def fits_nowhere(self) -> bool:
        """Whether no recorded release fits the call sites."""
        return self.since is not None and self.fitted_last is None and self.fits_from is None


@dataclass(frozen=True)
class Judged:
    """One finding, what becomes of it, which adapters repair it, and since when it is there."""

    finding: Finding
    standing: Standing
    adapters: tuple[str, ...] = ()
    dating: Dating = Dating()


_NOTHING = Knowledge(Word.UNKNOWN)


@dataclass(frozen=True)
class Pair:
    """One downstream on one vLLM.

    ``plan`` is what ``apply()`` would put in force, None where the downstream has no in-process
    generator. ``environment_known`` says whether it was read from an interpreter; otherwise it
    holds what was given and what source alone shows. ``reason`` and ``notes`` are sentences.
    ``knowledge`` says whether the pair has been run, or is judged by its source alone.
    ``hazards`` are what is known of a flow that is not served, the worst first; ``asks`` counts what the
    downstream asks of a vLLM server: flags, JSON, HTTP fields and routes.
    """

    contract: Contract
    surface: Surface
    environment: Environment
    environment_known: bool
    verdict: Verdict
    reason: str
    plan: Plan | None = None
    findings: tuple[Judged, ...] = ()
    notes: tuple[str, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    asks: int = 0
    knowledge: Knowledge = _NOTHING

    @property
    def downstream(self) -> str:
        """Name and version of the downstream, for people."""
        return f"{self.contract.name} {self.contract.version}"

    @property
    def title(self) -> str:
        """Both sides' names and versions, for people."""
        return f"{self.downstream} on vLLM {self.surface.version}"

    def standing(self, *standings: Standing) -> tuple[Judged, ...]:
        """Return the findings of these standings, changed defaults aside."""
        return tuple(j for j in self.findings if j.standing in standings and not j.finding.home)

    @property
    def changed_defaults(self) -> tuple[Judged, ...]:
        """The findings that only a comparison with a release that fits shows."""
        return tuple(j for j in self.findings if j.finding.home)


@dataclass(frozen=True)
class Report:
    """The pairs that were checked, downstream by downstream, releases in order."""

    pairs: tuple[Pair, ...]
    strict: bool = False

    @property
    def verdict(self) -> Verdict:
        """The verdict of the pair that is worst off."""
        return max((pair.verdict for pair in self.pairs), key=list(Verdict).index)

    @property
    def exit_status(self) -> int:
        """0 usable, 1 incompatible, 3 unknown; with ``strict`` unknown is 1 too."""
        status = EXIT_STATUS[self.verdict]
        return 1 if status == 3 and self.strict else status

    @property
    def downstreams(self) -> tuple[str, ...]:
        """Names and versions of the downstreams, each once, in order."""
        return tuple(dict.fromkeys(pair.downstream for pair in self.pairs))

    @property
    def releases(self) -> tuple[str, ...]:
        """The vLLM versions, each once, in order."""
        return tuple(dict.fromkeys(pair.surface.version for pair in self.pairs))


def spans(versions: Sequence[str], order: Sequence[str]) -> str:
    """Return versions as ranges of an order: ``0.11.0, 0.12.0 – 0.16.0``."""
    places = sorted(order.index(version) for version in versions)
    parts: list[list[int]] = []
    for place in places:
        if parts and parts[-1][-1] == place - 1:
            parts[-1].append(place)
        else:
            parts.append([place])
    return ", ".join(
        order[part[0]] if len(part) == 1 else f"{order[part[0]]} – {order[part[-1]]}" for part in parts
    )
