"""contract, surface, environment → the ordered adapters, each with its reason. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from vllm_compat.analysis.drift import Finding
from vllm_compat.analysis.environment import ALONE, PUBLIC, STOCK, Environment
from vllm_compat.errors import IncompatibleError, UsageError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Roles:
    """The downstream's own names that adapters patch, read from the contract.

    ``generator`` and ``extension`` are written ``module:Class``; empty where the downstream has
    none.
    """

    package: str
    generator: str = ""
    extension: str = ""

    @property
    def generator_module(self) -> str:
        """The module that holds the generator."""
        return self.generator.partition(":")[0]

    @property
    def extension_module(self) -> str:
        """The module that holds the worker extension."""
        return self.extension.partition(":")[0]


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
    the values that may come, so that a guard looks at each value. ``engine`` is the engine that serves
    the generator: ``stock``, ``public``, or ``alone`` for the latter with one prompt a step.
    ``findings`` are all that were found, in the process that made the plan.
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
    engine: str = STOCK
    findings: tuple[Finding, ...] = field(default=(), compare=False, repr=False)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters, in order."""
        return tuple(step.adapter for step in self.steps)

    def step(self, adapter: str) -> Step:
        """Return the step of that adapter."""
        return next(step for step in self.steps if step.adapter == adapter)

    @property
    def is_public(self) -> bool:
        """Whether the second engine serves the generator, on vLLM's public interface."""
        return self.engine in (PUBLIC, ALONE)

    @property
    def captures_by_request(self) -> bool:
        """Whether rows are captured, and looked at, in the worker by what this library brings."""
        return self.is_public or "worker.capture" in self.adapters

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
            "engine": self.engine,
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
        environment.setdefault("engine", STOCK)  # records from before there was a second one
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
            engine=record.get("engine", STOCK),  # plans in older records do not name it
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"VLLM_COMPAT_PLAN holds no readable plan ({error}).") from error
