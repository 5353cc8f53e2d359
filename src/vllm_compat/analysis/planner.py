"""contract, surface, environment → the ordered adapters, each with its reason. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from vllm_compat.analysis.contract import CallSite, Contract
from vllm_compat.analysis.drift import Finding, FindingKind, find_drifts
from vllm_compat.analysis.environment import ALONE, PUBLIC, STOCK, Environment
from vllm_compat.analysis.plan import Plan, Roles, Step
from vllm_compat.analysis.surface.model import Surface
from vllm_compat.errors import IncompatibleError, UsageError

_GUARDED = frozenset({FindingKind.ARGUMENT_TYPE})
_NOT_FATAL = frozenset({FindingKind.BEHAVIOUR}) | _GUARDED


@dataclass(frozen=True)
class Case:
    """One (contract, surface, environment) with the findings between the first two.

    ``engine`` is the engine that is planned for, ``stock`` or ``public``; ``unmet`` is what no adapter
    repairs for the first, where that is why the second is planned for.
    """

    contract: Contract
    surface: Surface
    environment: Environment
    findings: tuple[Finding, ...]
    roles: Roles
    engine: str = STOCK
    unmet: tuple[Finding, ...] = ()

    def found(self, kind: FindingKind, symbol: str, name: str | None = None) -> tuple[Finding, ...]:
        """Return the findings of that kind about that symbol (and parameter)."""
        return tuple(
            f
            for f in self.findings
            if f.kind is kind and f.symbol == symbol and (name is None or f.name == name)
        )

    def calls(self, symbol: str) -> tuple[CallSite, ...]:
        """Return the downstream's calls of a vLLM symbol."""
        return self.contract.calls(symbol)


@dataclass(frozen=True)
class Need:
    """Why an adapter is in a plan: one sentence, and the findings that it repairs.

    ``targets`` are given where the place of the patch depends on the case.
    """

    reason: str
    findings: tuple[Finding, ...] = field(default=())
    targets: tuple[str, ...] = ()


def roles_of(contract: Contract) -> Roles:
    """Read the names that adapters patch out of the contract.

    The generator is the class that makes a ``Scheduler``; the worker extension is the class that
    it names in ``worker_extension_cls``.
    """
    generator = extension = ""
    for site in contract.calls("vllm.v1.core.sched.scheduler.Scheduler"):
        cls, _, _ = site.within.partition(".")
        generator = f"{site.module}:{cls}"
    for site in contract.calls("vllm.config.ParallelConfig"):
        given = (site.keyword("worker_extension_cls") or "").strip("'\"")
        module, _, cls = given.rpartition(".")
        if module:
            extension = f"{module}:{cls}"
    return Roles(package=contract.package, generator=generator, extension=extension)


class Candidate(Protocol):
    """What the planner needs to know of an adapter (`vllm_compat.adapters.base.Adapter`)."""

    name: ClassVar[str]
    order: ClassVar[int]
    processes: ClassVar[frozenset[str]]
    excluded_by: ClassVar[tuple[str, ...]]
    serves: ClassVar[str]

    def need(self, case: Case) -> Need | None:
        """Return why this case needs the adapter, or None."""


def make_plan(
    contract: Contract,
    surface: Surface,
    environment: Environment,
    adapters: Sequence[Candidate],
    *,
    switched_off: Collection[str] = (),
    features: Collection[str] = (),
) -> Plan:
    """Return the plan of one (contract, surface, environment) from these adapters, by their ``order``.

    ``switched_off`` names adapters that are left out although needed (ablation); what they would
    repair does not count as unmet, since the caller wants to see the run fail. It may also name
    ``features``, which no plan asks for and every process leaves out that finds them there.

    With the engine ``auto`` the plan is for the engine that the downstream builds; only where something
    stays unmet for that, and nothing for the second engine, it is for the second.

    Raises:
        IncompatibleError: The second engine is asked for, and this vLLM's public interface does not fit.
    """
    refuse_unknown(switched_off, adapters, features)
    case = Case(contract, surface, environment, find_drifts(contract, surface), roles_of(contract))
    if environment.engine in (PUBLIC, ALONE):
        plan = _plan(replace(case, engine=PUBLIC), adapters, switched_off)
        if not plan.is_public:
            raise IncompatibleError(
                f"The second engine does not fit vLLM {surface.version}: LLM, LLM.generate,"
                " LLM.collective_rpc or SamplingParams are not what it relies on. Use engine='stock', or"
                " another release of vLLM."
            )
        return replace(plan, engine=environment.engine)
    plan = _plan(case, adapters, switched_off)
    if environment.engine == STOCK or environment.capture == "stock" or not plan.unmet:
        return plan
    second = _plan(replace(case, engine=PUBLIC, unmet=plan.unmet), adapters, switched_off)
    return second if second.is_public and not second.unmet else plan


def _plan(case: Case, adapters: Sequence[Candidate], switched_off: Collection[str]) -> Plan:
    """Return the plan of a case, for the engine that it is about."""
    contract, findings = case.contract, case.findings
    steps = []
    repaired: set[Finding] = set()
    engine = STOCK
    for adapter, need in _needed(adapters, case):
        engine = adapter.serves or engine
        repaired.update(need.findings)
        if adapter.name in switched_off:
            continue
        steps.append(
            Step(
                adapter.name,
                need.reason,
                tuple(sorted(adapter.processes)),
                tuple(dict.fromkeys(s.where for f in need.findings for s in f.sites)),
                need.targets,
                need.findings,
            )
        )
    open_findings = [f for f in findings if f not in repaired]
    unmet = tuple(f for f in open_findings if f.fatal and f.kind not in _NOT_FATAL)
    guarded = dict.fromkeys(f.symbol for f in open_findings if f.kind in _GUARDED)
    return Plan(
        downstream=contract.name,
        downstream_version=contract.version,
        vllm=case.surface.version,
        roles=case.roles,
        environment=case.environment,
        steps=tuple(steps),
        unmet=unmet,
        guarded=tuple(guarded),
        switched_off=tuple(sorted(switched_off)),
        engine=engine,
        findings=findings,
    )


def refuse_unknown(
    names: Collection[str], adapters: Sequence[Candidate], features: Collection[str]
) -> None:
    """Raise where one of these names is neither an adapter's nor a feature's.

    Raises:
        UsageError: With the names that there are.
    """
    known = {adapter.name for adapter in adapters}
    for name in names:
        if name not in known and name not in features:
            also = (
                f" There is no feature of that name either: {', '.join(features)}." if features else ""
            )
            raise UsageError(
                f"There is no adapter {name!r}; `vllm-compat adapters` lists {', '.join(sorted(known))}."
                f"{also}"
            )


def _needed(adapters: Sequence[Candidate], case: Case) -> list[tuple[Candidate, Need]]:
    """Return the adapters that a case needs, in order, but for those that another one excludes."""
    needs = {adapter.name: need for adapter in adapters if (need := adapter.need(case)) is not None}
    return [
        (adapter, needs[adapter.name])
        for adapter in sorted(adapters, key=lambda adapter: adapter.order)
        if adapter.name in needs and needs.keys().isdisjoint(adapter.excluded_by)
    ]
