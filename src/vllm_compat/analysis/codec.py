"""Contracts, findings and plans as what JSON can hold, and back: for what ``check`` remembers."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from vllm_compat.analysis.contract import CallSite, Contract, SiteKind, Use
from vllm_compat.analysis.drift import Finding, FindingKind
from vllm_compat.analysis.plan import Plan, loads

_SITE = tuple(f.name for f in fields(CallSite))
_TUPLES = ("positional", "unless", "any_of", "needs", "arms")
_FINDING = tuple(f.name for f in fields(Finding))


def pack_contract(contract: Contract) -> dict[str, Any]:
    """Take a contract apart."""
    return {
        "head": [contract.name, contract.version, contract.package, contract.root],
        "sites": [_pack_site(site) for site in contract.sites],
        "other_calls": [_pack_site(site) for site in contract.other_calls],
        "modules": dict(contract.modules),
        "written": list(contract.written),
    }


def unpack_contract(record: dict[str, Any]) -> Contract:
    """Put a contract together again."""
    name, version, package, root = record["head"]
    return Contract(
        name=name,
        version=version,
        package=package,
        root=root,
        sites=tuple(map(_unpack_site, record["sites"])),
        other_calls=tuple(map(_unpack_site, record["other_calls"])),
        modules={name: tuple(others) for name, others in record["modules"].items()},
        written=tuple(record["written"]),
    )


def _pack_site(site: CallSite) -> list[Any]:
    values = {name: getattr(site, name) for name in _SITE}
    values["kind"] = site.kind.value
    values["uses"] = [[use.how, use.detail] for use in site.uses]
    return list(values.values())


def _unpack_site(values: list[Any]) -> CallSite:
    named = dict(zip(_SITE, values, strict=True))
    named["kind"] = SiteKind(named["kind"])
    named["uses"] = tuple(Use(how, detail) for how, detail in named["uses"])
    named["keywords"] = tuple((name, text) for name, text in named["keywords"])
    for name in _TUPLES:
        named[name] = tuple(named[name])
    return CallSite(**named)


def pack_finding(finding: Finding) -> list[Any]:
    """Take a finding apart."""
    values = {name: getattr(finding, name) for name in _FINDING}
    values["kind"] = finding.kind.value
    values["sites"] = [_pack_site(site) for site in finding.sites]
    return list(values.values())


def unpack_finding(values: list[Any]) -> Finding:
    """Put a finding together again."""
    named = dict(zip(_FINDING, values, strict=True))
    named["kind"] = FindingKind(named["kind"])
    named["sites"] = tuple(map(_unpack_site, named["sites"]))
    return Finding(**named)


Planned = tuple[tuple[Finding, ...], "Plan | None"]
"""The findings of a pair, and the plan where there is one."""


def pack_planned(planned: Planned) -> dict[str, Any]:
    """Take findings and plan apart."""
    findings, plan = planned
    places = {finding: index for index, finding in enumerate(findings)}
    return {
        "findings": [pack_finding(finding) for finding in findings],
        "plan": plan
        and {
            "text": plan.dumps(),
            "unmet": [places[finding] for finding in plan.unmet],
            "repairs": [[places[finding] for finding in step.findings] for step in plan.steps],
        },
    }


def unpack_planned(record: dict[str, Any]) -> Planned:
    """Put findings and plan together again."""
    findings = tuple(map(unpack_finding, record["findings"]))
    told = record["plan"]
    if told is None:
        return findings, None
    plan = loads(told["text"])
    steps = tuple(
        replace(step, findings=tuple(findings[index] for index in repaired))
        for step, repaired in zip(plan.steps, told["repairs"], strict=True)
    )
    unmet = tuple(findings[index] for index in told["unmet"])
    return findings, replace(plan, steps=steps, unmet=unmet, findings=findings)
