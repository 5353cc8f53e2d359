"""contract, surface, environment → the ordered adapters, each with its reason. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field

from vllm_compat.adapters.base import Case, Roles
from vllm_compat.contract import Contract
from vllm_compat.drift import Finding, FindingKind
from vllm_compat.environment import Environment
from vllm_compat.errors import IncompatibleError, UsageError
from vllm_compat.surface.model import Surface

SCHEMA_VERSION = 1

_GUARDED = frozenset({FindingKind.ARGUMENT_TYPE})
_NOT_FATAL = frozenset({FindingKind.BEHAVIOUR}) | _GUARDED


@dataclass(frozen=True)
class Step:
    """One adapter of a plan: its name, why it is there, where it is in force.

    ``findings`` are those that it repairs; they do not cross into other processes.
    """

    adapter: str
    reason: str
    processes: tuple[str, ...]
    sites: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = field(default=(), compare=False, repr=False)

    @property
    def derived(self) -> bool:
        """Whether the adapter follows from the surface alone, for any release."""
        from vllm_compat.adapters import by_name

        return by_name(self.adapter).derived

    def as_record(self) -> dict[str, object]:
        """Return what processes must agree on."""
        return {
            "adapter": self.adapter,
            "reason": self.reason,
            "processes": list(self.processes),
            "sites": list(self.sites),
            "targets": list(self.targets),
        }


@dataclass(frozen=True)
class Plan:
    """What is done for one (contract, surface, environment), and what stays unmet.

    The part that crosses into other processes is text (:meth:`dumps`); ``digest`` names it, so that
    ranks can be compared. ``guarded`` are the vLLM symbols whose call sites fit only for some of
    the values that may come, so that a guard looks at each value. ``findings`` are all that were
    found, in the process that made the plan.
    """

    downstream: str
    downstream_version: str
    vllm: str
    roles: Roles
    environment: Environment
    steps: tuple[Step, ...] = ()
    unmet: tuple[Finding, ...] = ()
    guarded: tuple[str, ...] = ()
    switched_off: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = field(default=(), compare=False, repr=False)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters, in order."""
        return tuple(step.adapter for step in self.steps)

    def step(self, adapter: str) -> Step:
        """Return the step of that adapter."""
        return next(step for step in self.steps if step.adapter == adapter)

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits over all that processes must agree on."""
        import hashlib

        return hashlib.sha256(self.dumps().encode()).hexdigest()[:12]

    def dumps(self) -> str:
        """Return the plan as JSON text; :func:`loads` is its inverse (``unmet`` left out)."""
        record = {
            "schema": SCHEMA_VERSION,
            "downstream": self.downstream,
            "downstream_version": self.downstream_version,
            "vllm": self.vllm,
            "roles": asdict(self.roles),
            "environment": asdict(self.environment),
            "steps": [step.as_record() for step in self.steps],
            "guarded": list(self.guarded),
            "switched_off": list(self.switched_off),
        }
        return json.dumps(record, sort_keys=True, separators=(",", ":"))

    def refuse(self) -> None:
        """Raise where something stays unmet.

        Raises:
            IncompatibleError: Names each call site, what was seen, and what to do.
        """
        if not self.unmet:
            return
        lines = [
            f"{self.downstream} {self.downstream_version} cannot run on vLLM {self.vllm}:"
            f" {len(self.unmet)} call site(s) do not fit and no adapter repairs them."
        ]
        for finding in self.unmet:
            where = f" ({finding.sites[0].where})" if finding.sites else ""
            lines.append(f"  {finding.kind.value}: {finding.detail}{where}")
        lines.append(
            "  Use a vLLM release that `vllm-compat check --all` shows as usable, or a newer"
            " vllm_compat."
        )
        raise IncompatibleError("\n".join(lines))


def loads(text: str) -> Plan:
    """Return the plan that :meth:`Plan.dumps` wrote.

    Raises:
        UsageError: The text is no plan of this version of vllm_compat.
    """
    try:
        record = json.loads(text)
        if record["schema"] != SCHEMA_VERSION:
            raise UsageError(
                f"The plan in VLLM_COMPAT_PLAN has schema {record['schema']}, this vllm_compat"
                f" reads {SCHEMA_VERSION}: driver and worker must run the same vllm_compat."
            )
        environment = dict(record["environment"])
        environment["versions"] = tuple(tuple(pair) for pair in environment["versions"])
        environment["features"] = tuple(environment["features"])
        return Plan(
            downstream=record["downstream"],
            downstream_version=record["downstream_version"],
            vllm=record["vllm"],
            roles=Roles(**record["roles"]),
            environment=Environment(**environment),
            steps=tuple(
                Step(
                    s["adapter"],
                    s["reason"],
                    tuple(s["processes"]),
                    tuple(s["sites"]),
                    tuple(s["targets"]),
                )
                for s in record["steps"]
            ),
            guarded=tuple(record["guarded"]),
            switched_off=tuple(record["switched_off"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"VLLM_COMPAT_PLAN holds no readable plan ({error}).") from error


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


def make_plan(
    contract: Contract,
    surface: Surface,
    environment: Environment,
    *,
    switched_off: Collection[str] = (),
) -> Plan:
    """Return the plan of one (contract, surface, environment).

    ``switched_off`` names adapters that are left out although needed (ablation); what they would
    repair does not count as unmet, since the caller wants to see the run fail.
    """
    from vllm_compat.adapters import registry
    from vllm_compat.drift import find_drifts

    known = {adapter.name for adapter in registry()}
    for name in switched_off:
        if name not in known:
            raise UsageError(
                f"There is no adapter {name!r}; `vllm-compat adapters` lists {', '.join(sorted(known))}."
            )
    findings = find_drifts(contract, surface)
    case = Case(contract, surface, environment, findings, roles_of(contract))
    steps = []
    repaired: set[Finding] = set()
    for adapter in registry():
        need = adapter.need(case)
        if need is None:
            continue
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
        vllm=surface.version,
        roles=case.roles,
        environment=environment,
        steps=tuple(steps),
        unmet=unmet,
        guarded=tuple(guarded),
        switched_off=tuple(sorted(switched_off)),
        findings=findings,
    )
