"""What changed from one vLLM to another, in words: as text, JSON or Markdown."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from typing import Any

import vllm_compat
from vllm_compat.analysis.surface.model import Surface
from vllm_compat.commands.report import words
from vllm_compat.commands.report.changes import Change, ChangeKind, Difference
from vllm_compat.commands.report.shapes import Detail, DetailKind

SCHEMA_VERSION = 1


def render_difference(difference: Difference, form: str) -> str:
    """Return a difference as ``text``, ``json`` or ``markdown``."""
    forms: dict[str, Callable[[Difference], str]] = {
        "text": _as_text,
        "json": _as_json,
        "markdown": _as_markdown,
    }
    return forms[form](difference)


def summary(difference: Difference) -> str:
    """Say in one sentence what was looked at and how much of it changed."""
    counted = [f"{len(found)} {kind.value}" for kind in ChangeKind if (found := difference.of(kind))]
    looked_at = words.count(difference.looked_at, "symbol")
    silent = len(difference.unknown)
    verdict = ", ".join(counted) or ("none known to have changed" if silent else "none changed")
    unknown = f"; of {silent} a record has only the name, and can't tell" if silent else ""
    return (
        f"vLLM {difference.before.version} → {difference.after.version}: of {looked_at}"
        f" {difference.scope}, {verdict}{unknown}."
    )


def _lines(detail: Detail) -> list[str]:
    """Return a detail as lines of a patch."""
    kind, before, after = detail.kind, detail.before, detail.after
    if kind in (DetailKind.RETURNS, DetailKind.ANNOTATION):
        name = "-> " if kind is DetailKind.RETURNS else ": "
        before, after = f"{name}{before or 'unknown'}", f"{name}{after or 'unknown'}"
    elif kind in (DetailKind.KIND, DetailKind.BASES, DetailKind.PARAMETER_ORDER):
        before, after = f"{kind.value}: {before}", f"{kind.value}: {after}"
    elif kind is DetailKind.PARAMETER_ADDED and detail.is_required:
        after = f"{after}, required"
    elif kind is DetailKind.PARAMETER_RENAMED:
        after = f"{after}, renamed"
    given = kind is not DetailKind.PARAMETER_ADDED or not detail.is_required
    mark = "" if not detail.concerns else ", given here" if given else ", not given here"
    lines = [f"- {before}"] if before is not None else []
    lines += [f"+ {after}"] if after is not None else []
    return [*lines[:-1], f"{lines[-1]}{mark}"]


def _where(change: Change) -> str:
    return words.sites_of(change.sites) if change.sites else ""


def _as_text(difference: Difference) -> str:
    lines = textwrap.wrap(summary(difference), 100)
    for change in difference.changes:
        lines.append("")
        place = f" → {change.moved_to}" if change.moved_to else ""
        lines.append(f"{change.kind.value} {change.what.value} {change.symbol}{place}")
        if change.sites:
            lines += textwrap.wrap(
                f"used at {_where(change)}", 100, initial_indent="    ", subsequent_indent="      "
            )
        lines += [f"    {line}" for detail in change.details for line in _lines(detail)]
    return "\n".join(lines) + "\n"


def _as_markdown(difference: Difference) -> str:
    lines = [f"## vLLM {difference.before.version} → {difference.after.version}", ""]
    lines.append(summary(difference))
    for kind in ChangeKind:
        found = difference.of(kind)
        if not found:
            continue
        lines += ["", f"### {kind.value.capitalize()}", ""]
        for change in found:
            place = f" → `{change.moved_to}`" if change.moved_to else ""
            used = f", used at `{_where(change)}`" if change.sites else ""
            lines.append(f"- {change.what.value} `{change.symbol}`{place}{used}")
            if change.details:
                lines += ["  ```diff"]
                lines += [f"  {line}" for detail in change.details for line in _lines(detail)]
                lines += ["  ```"]
    return "\n".join(lines) + "\n"


def _as_json(difference: Difference) -> str:
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "vllm_compat": vllm_compat.__version__,
        "before": _side(difference.before),
        "after": _side(difference.after),
        "scope": difference.scope,
        "looked_at": difference.looked_at,
        "unknown": list(difference.unknown),
        "changes": [
            {
                "kind": change.kind.value,
                "symbol": change.symbol,
                "what": change.what.value,
                "moved_to": change.moved_to,
                "details": [
                    {
                        "kind": detail.kind.value,
                        "name": detail.name,
                        "before": detail.before,
                        "after": detail.after,
                        "concerns": detail.concerns,
                    }
                    for detail in change.details
                ],
                "sites": [{"file": site.file, "line": site.line} for site in change.sites],
            }
            for change in difference.changes
        ],
    }
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def _side(surface: Surface) -> dict[str, str]:
    return {
        "version": surface.version,
        "distribution": surface.distribution,
        "origin": surface.origin,
    }
