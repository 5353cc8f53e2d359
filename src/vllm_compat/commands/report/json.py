"""A report as JSON, in the form that ``schemas/report.schema.json`` describes."""

from __future__ import annotations

import json
from typing import Any

import vllm_compat
from vllm_compat.commands.report.model import Judged, Pair, Report

SCHEMA_VERSION = 1


def render(report: Report) -> str:
    """Return the report as JSON text."""
    return json.dumps(as_record(report), indent=1, ensure_ascii=False) + "\n"


def as_record(report: Report) -> dict[str, Any]:
    """Return the report as plain mappings and lists.

    The headers of the adapters that stand in a plan are given once, beside the pairs.
    """
    from vllm_compat.commands.register import as_records

    used = {name for pair in report.pairs if pair.plan for name in pair.plan.adapters}
    return {
        "schema_version": SCHEMA_VERSION,
        "vllm_compat": vllm_compat.__version__,
        "verdict": report.verdict.value,
        "exit_status": report.exit_status,
        "pairs": [_pair(pair) for pair in report.pairs],
        "adapters": {
            record["name"]: {key: value for key, value in record.items() if key != "name"}
            for record in as_records()
            if record["name"] in used
        },
    }


def _pair(pair: Pair) -> dict[str, Any]:
    from vllm_compat.adapters import by_name

    plan = pair.plan
    return {
        "downstream": {
            "name": pair.contract.name,
            "version": pair.contract.version,
            "package": pair.contract.package,
            "origin": pair.contract.root,
            "call_sites": len(pair.contract.sites),
            "asks_of_server": pair.asks,
        },
        "vllm": {
            "version": pair.surface.version,
            "distribution": pair.surface.distribution,
            "origin": pair.surface.origin,
        },
        "environment": {
            "known": pair.environment_known,
            "python": pair.environment.python or None,
            "device": pair.environment.device,
            "versions": dict(pair.environment.versions),
            "features": list(pair.environment.features),
        },
        "verdict": pair.verdict.value,
        "reason": pair.reason,
        "knowledge": pair.knowledge.as_record(),
        "notes": list(pair.notes),
        "hazards": [
            {
                "key": hazard.key,
                "harm": hazard.harm.value,
                "vllm": hazard.vllm,
                "downstream": hazard.downstream,
                "sentence": hazard.sentence,
                "remedy": hazard.remedy,
                "source": hazard.source,
            }
            for hazard in pair.hazards
        ],
        "findings": [_finding(judged) for judged in pair.findings],
        "plan": None
        if plan is None
        else {
            # Other processes compare this digest, so it is said only where it is apply()'s own.
            "digest": plan.digest if pair.environment_known else None,
            "steps": [
                {
                    "adapter": step.adapter,
                    "reason": step.reason,
                    "processes": list(step.processes),
                    "sites": list(step.sites),
                    "targets": list(step.targets),
                    "derived": by_name(step.adapter).derived,
                }
                for step in plan.steps
            ],
            "guarded": list(plan.guarded),
        },
    }


def _finding(judged: Judged) -> dict[str, Any]:
    from vllm_compat.adapters import by_name

    finding, dating = judged.finding, judged.dating
    return {
        "kind": finding.kind.value,
        "symbol": finding.symbol,
        "name": finding.name,
        "detail": finding.detail,
        "seen": finding.seen,
        "moved_to": finding.moved_to,
        "renamed_to": finding.renamed_to,
        "home": finding.home,
        "standing": judged.standing.value,
        "adapters": list(judged.adapters),
        "derived": any(by_name(name).derived for name in judged.adapters),
        "since": dating.since,
        "fitted_last": dating.fitted_last,
        "fits_from": dating.fits_from,
        "sites": [
            {
                "kind": site.kind.value,
                "file": site.file,
                "line": site.line,
                "module": site.module,
                "within": site.within,
            }
            for site in finding.sites
        ],
    }
