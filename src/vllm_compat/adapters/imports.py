"""Names that vLLM has moved to another module."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_compat.adapters.base import Adapter, Case, Need
from vllm_compat.analysis.drift import FindingKind

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction


class MovedNames(Adapter):
    """Let a moved name be imported from where it was."""

    name = "imports.moved_names"
    derived = True
    order = 510
    targets = ("{old_module}:{name}",)
    vllm = ">=0.33.0"
    downstream = "<0.5"
    changed = (
        "0.33.0 moved get_kv_cache_config_from_groups and two more from v1/core/kv_cache_utils.py to"
        " v1/core/kv_cache_planning.py."
    )
    relies = "Imports them from the old module."
    does = (
        "Derived from the surface, not from a table: a name that is now defined in exactly one other"
        " module, with a signature that the call sites fit, is also found in the old module."
    )
    until = "the downstream imports from the new place."
    processes = frozenset({"driver", "worker"})
    shown_by = (
        "llama, speculators 0.4.0.1, vLLM 0.33.0 (its sources over the kernels of 0.32.0): cannot"
        " import name 'get_kv_cache_config_from_groups'"
    )

    def need(self, case: Case) -> Need | None:
        found = tuple(
            finding
            for finding in case.findings
            if finding.kind is FindingKind.NAME_MOVED and finding.moved_to
        )
        if not found:
            return None
        moves = tuple(sorted({f"{f.symbol}={f.moved_to}" for f in found}))
        return Need(
            f"{len(moves)} names that the downstream imports have moved, such as"
            f" {moves[0].replace('=', ' to ')}",
            found,
            targets=moves,
        )

    def told(self, plan: Plan) -> tuple[str, ...]:
        return tuple(_moves(plan.step(self.name).targets))

    def install(self, transaction: Transaction, plan: Plan) -> None:
        for target, new in _moves(plan.step(self.name).targets).items():
            transaction.set(target, _from(new))


def _moves(steps: tuple[str, ...]) -> dict[str, str]:
    """Return where each moved name was, ``module:name``, and where it is now."""
    moves = {}
    for step in steps:
        old, _, new = step.partition("=")
        module, _, name = old.rpartition(".")
        moves[f"{module}:{name}"] = new
    return moves


def _from(path: str) -> Any:
    def get(module: ModuleType) -> Any:
        home, _, name = path.rpartition(".")
        return getattr(importlib.import_module(home), name)

    return get
