"""Make one verdict of findings and plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from vllm_compat.analysis.codec import Planned
from vllm_compat.analysis.contract import Contract
from vllm_compat.analysis.drift import Finding, FindingKind, find_drifts, untold
from vllm_compat.analysis.environment import Environment, compute_capabilities
from vllm_compat.analysis.installed import refuse_unserved
from vllm_compat.analysis.knowledge import Knowledge, knowledge_of
from vllm_compat.analysis.plan import Plan
from vllm_compat.analysis.planner import roles_of
from vllm_compat.analysis.server_flow import (
    FIRST,
    IN_PROCESS,
    UNSERVED,
    Hazard,
    hazards_of,
    in_server_flow,
    release_of,
)
from vllm_compat.analysis.serving.comparing import SETTLED
from vllm_compat.analysis.serving.model import Ask
from vllm_compat.analysis.surface.model import Surface, SymbolKind
from vllm_compat.commands.checking.dating import History
from vllm_compat.commands.checking.server import across, model_findings, offers_of
from vllm_compat.commands.report.model import Dating, Judged, Pair, Standing, Verdict
from vllm_compat.commands.report.words import count
from vllm_compat.errors import IncompatibleError

_NO_MODELS = (
    "What the model's class offers is in vLLM's source: name the installed vLLM, a folder, a wheel or an"
    " sdist for it (--vllm)."
)
DEFAULT = "speculators"
"""The downstream that adapters are made for."""

_PARAMETERS = (
    FindingKind.PARAMETER_REMOVED,
    FindingKind.PARAMETER_REQUIRED,
    FindingKind.PARAMETER_RENAMED,
    FindingKind.PARAMETER_REORDERED,
)
_IMPORTS = (FindingKind.MODULE_MISSING, FindingKind.NAME_MOVED, FindingKind.NAME_MISSING)


def find_and_plan(contract: Contract, surface: Surface, environment: Environment) -> Planned:
    """Return the findings, and the plan that ``apply()`` makes where the downstream has one."""
    from vllm_compat.adapters import make_plan

    if not roles_of(contract).generator:
        return find_drifts(contract, surface), None
    plan = make_plan(contract, surface, environment)
    return plan.findings, plan


def judge(
    contract: Contract,
    surface: Surface,
    environment: Environment,
    environment_known: bool,
    history: History | None = None,
    planned: Planned | None = None,
    described: bool = True,
    asks: Sequence[Ask] = (),
    architectures: Sequence[str] = (),
) -> Pair:
    """Judge one pair.

    A downstream with an in-process generator is judged by the plan that ``apply()`` would put in
    force; any other by its findings alone, since no adapter is made for it. One that takes hidden
    states from a server is never usable, since that flow is not served, and gets the hazards that are
    known of the pair. ``history`` dates the findings; without it they stay undated. ``planned`` are
    findings and plan where they are known; ``described`` says whether metadata gives the downstream's
    version; ``asks`` are what it asks of a server, ``architectures`` the models that are to be
    served. Where both sides could be read, what does not fit is
    found there, and hazards that say the same by date are left out.
    """
    findings, plan = planned or find_and_plan(contract, surface, environment)
    judged = _judged(findings, plan, surface, history)
    if in_server_flow(contract):
        hazards: tuple[Hazard, ...] = hazards_of(contract.version if described else "", surface.version)
        found = across(asks, surface)
        if found is not None:
            judged += tuple(Judged(f, Standing.UNMET if f.fatal else Standing.POSSIBLE) for f in found)
            hazards = tuple(h for h in hazards if h.key not in SETTLED)
        offers = offers_of(architectures, surface)
        judged += tuple(Judged(f, Standing.UNMET) for f in model_findings(offers, asks))
        verdict, reason = _server_flow_verdict(judged, hazards)
        notes = (*_server_flow_notes(contract, surface, described), IN_PROCESS)
        notes += tuple(offer.sentence for offer in offers if not offer.lacks)
        if architectures and not offers:
            notes += (_NO_MODELS,)
    else:
        silent = history.untold(surface) if history else len(untold(contract, surface))
        refused = _refusal(contract, surface)
        case = _Case(contract, surface, environment, environment_known, plan, refused, silent)
        hazards = ()
        verdict, reason = case.verdict(judged)
        notes = tuple(case.notes())
    return Pair(
        contract,
        surface,
        environment,
        environment_known,
        verdict,
        reason,
        plan,
        judged,
        notes,
        hazards,
        len(asks),
        _knowledge(contract, surface, environment, environment_known, architectures, verdict),
    )


def _knowledge(
    contract: Contract,
    surface: Surface,
    environment: Environment,
    environment_known: bool,
    architectures: Sequence[str],
    verdict: Verdict,
) -> Knowledge:
    """Return whether a pair has been run on such a device, with such layers."""
    gpus = environment_known and environment.device == "cuda"
    return knowledge_of(
        contract.name,
        contract.version,
        surface.version,
        environment.device,
        capabilities=compute_capabilities() if gpus else (),
        architectures=architectures,
        can_tell=verdict is not Verdict.UNKNOWN,
    )


def _refusal(contract: Contract, surface: Surface) -> str:
    """Return why vllm_compat does not serve a pair; empty where it does."""
    try:
        refuse_unserved(contract, surface)
    except IncompatibleError as error:
        return str(error)
    return ""


# Findings.


def _judged(
    findings: Sequence[Finding], plan: Plan | None, surface: Surface, history: History | None
) -> tuple[Judged, ...]:
    """Say of each finding what becomes of it, and since when it is there."""
    repairs = _repairs(plan)
    dates = history.dates(findings, surface) if history else [Dating() for _ in findings]
    judged = tuple(
        Judged(
            finding,
            _standing(finding, plan, finding in repairs, _excused(finding, date, surface)),
            repairs.get(finding, ()),
            date,
        )
        for finding, date in zip(findings, dates, strict=True)
    )
    if history:
        changed = history.changed_defaults(findings, dates, surface)
        judged += tuple(Judged(f, Standing.POSSIBLE, (), date) for f, date in changed)
    return judged


def _repairs(plan: Plan | None) -> Mapping[Finding, tuple[str, ...]]:
    """Return which adapters repair a finding."""
    repairs: dict[Finding, tuple[str, ...]] = {}
    for step in plan.steps if plan else ():
        for finding in step.findings:
            repairs[finding] = (*repairs.get(finding, ()), step.adapter)
    return repairs


def _standing(finding: Finding, plan: Plan | None, repaired: bool, excused: bool) -> Standing:
    if repaired:
        return Standing.REPAIRED
    if plan is not None:
        if finding in plan.unmet:
            return Standing.UNMET
        return Standing.GUARDED if finding.symbol in plan.guarded else Standing.POSSIBLE
    if not finding.fatal or finding.kind is FindingKind.BEHAVIOUR:
        return Standing.POSSIBLE
    return Standing.POSSIBLE if excused else Standing.UNMET


def _excused(finding: Finding, date: Dating, surface: Surface) -> bool:
    """Tell whether the downstream may well do something about a finding that was not seen.

    What fits no release is rarely drift: the downstream sets the attribute itself, or puts a class of
    its own in the place of vLLM's, whose methods then take what it gives. An import has no such excuse,
    nor has a call of a class or function by the name under which vLLM has it.
    """
    if not date.fits_nowhere or finding.kind in _IMPORTS:
        return False
    if finding.kind not in _PARAMETERS:
        return True
    called = surface.resolve(finding.symbol)
    if called is None or called.kind is SymbolKind.CLASS:
        return called is None
    owner = surface.resolve(finding.symbol.rpartition(".")[0])
    return owner is None or owner.kind is not SymbolKind.MODULE


# A pair whose hidden states come from a server.


def _server_flow_verdict(judged: Sequence[Judged], hazards: Sequence[Hazard]) -> tuple[Verdict, str]:
    unmet = sum(j.standing is Standing.UNMET for j in judged)
    if unmet:
        return Verdict.INCOMPATIBLE, _sure_to_fail(unmet)
    possible = sum(j.standing is Standing.POSSIBLE and not j.finding.home for j in judged)
    more = f" and {count(possible, 'finding')}" if possible else ""
    return Verdict.UNKNOWN, f"{UNSERVED}. Known of this pair: {count(len(hazards), 'hazard')}{more}."


def _server_flow_notes(contract: Contract, surface: Surface, described: bool) -> Iterator[str]:
    """Say what the hazards of a pair rest on."""
    from packaging.version import Version

    yield (
        f"{contract.name} {contract.version} takes hidden states from a vLLM server (`vllm serve` with"
        " the extract_hidden_states method); flags are as its own launcher, scripts/launch_vllm.py,"
        " gives them."
    )
    version = release_of(contract.version) if described else None
    if version is None or version < Version(FIRST):
        yield (
            "No metadata says which release of the downstream this is, and what its source says can be"
            " wrong: hazards of all its releases are listed. An installed distribution or a wheel says"
            " it."
        )
    elif version >= Version("0.8"):
        yield (
            "The launcher is in no wheel; for 0.8 and later what it asks is inferred from the one in"
            " speculators' repository of August 2026."
        )
    if release_of(surface.version) is None:
        yield "This vLLM does not say its release: hazards of all releases are listed."


def _sure_to_fail(unmet: int) -> str:
    return f"{count(unmet, 'finding')} at call sites that are sure to fail."


def _second_engine(plan: Plan) -> str:
    """Say that a plan does without the engine that the downstream builds, where it does."""
    if not plan.is_public:
        return ""
    return ", and the generator is served by the second engine, on vLLM's public interface"


# Any other pair.


@dataclass(frozen=True)
class _Case:
    """One pair on its way to a verdict; ``refused`` says why vllm_compat does not serve it.

    ``silent`` is the number of call sites of which the surface can't tell.
    """

    contract: Contract
    surface: Surface
    environment: Environment
    environment_known: bool
    plan: Plan | None
    refused: str
    silent: int

    def verdict(self, judged: Sequence[Judged]) -> tuple[Verdict, str]:
        """Return the verdict, and the sentence that gives its reason."""
        unmet = sum(j.standing is Standing.UNMET for j in judged)
        possible = sum(j.standing is Standing.POSSIBLE and not j.finding.home for j in judged)
        if not self.contract.sites:
            name = self.contract.name
            return (
                Verdict.UNKNOWN,
                f"{name} does not use vLLM, as far as its source can be followed.",
            )
        if unmet or (self.plan and self.refused):
            return Verdict.INCOMPATIBLE, self._obstacle(unmet)
        if self.silent:
            return (
                Verdict.UNKNOWN,
                f"{count(self.silent, 'call site')} of {len(self.contract.sites)} of which the record"
                " can't tell: it has only the names there. Ask an installed vLLM, a wheel or a source"
                " tree.",
            )
        if self.plan and self.plan.steps:
            return Verdict.WITH_SHIM, (
                f"{count(len(self.plan.steps), 'adapter')} will be in force{_second_engine(self.plan)}."
            )
        if possible:
            return (
                Verdict.UNKNOWN,
                f"{count(possible, 'finding')} at call sites of which source alone can't tell.",
            )
        return Verdict.USABLE, f"All {len(self.contract.sites)} call sites fit."

    def _obstacle(self, unmet: int) -> str:
        if self.plan is None:
            return _sure_to_fail(unmet)
        return self.refused or f"{count(unmet, 'finding')} that no adapter repairs."

    def notes(self) -> Iterator[str]:
        """Say what was not known, and what therefore is not listed."""
        if not self.plan:
            yield self._why_no_plan()
        elif not self.environment_known:
            yield (
                "The environment is not known: adapters that depend on it (transformers, the device)"
                " are not listed."
                if self.environment.device == "unknown"
                else "The environment is not known, but for the device as given: adapters that depend"
                " on the rest (transformers) are not listed."
            )
        elif self.environment.device == "unknown":
            yield ("No device was found: adapters that depend on it are not listed; --device names one.")
        if self.surface.version == "unknown":
            yield "This vLLM does not say its version; it is judged by its source alone."

    def _why_no_plan(self) -> str:
        if self.contract.package == DEFAULT:
            return self.refused
        return (
            f"{self.contract.name} {self.contract.version} is not speculators: vllm_compat finds its"
            " drifts, and has no adapters for them."
        )
