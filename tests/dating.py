"""Since when a finding holds, by the plain way: every release from the newest on, one after another.

`vllm_compat.commands.checking.dating` looks at far fewer; the tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_compat.analysis.contract import Contract
from vllm_compat.analysis.drift import Finding, find_drifts
from vllm_compat.analysis.surface import Surface

Key = tuple[str, str, str | None, bool]


_known: dict[tuple[str, str], frozenset[Key]] = {}


def _keys(contract: Contract, surface: Surface) -> frozenset[Key]:
    pair = contract.version, surface.version
    if pair not in _known:
        _known[pair] = frozenset(finding.key for finding in find_drifts(contract, surface))
    return _known[pair]


def since(finding: Finding, contract: Contract, surfaces: Iterable[Surface]) -> str | None:
    """Return the version from which on all surfaces, given oldest first, show a finding.

    None where the last of them does not: what came, went and came again dates from its last coming.
    """
    first = None
    for surface in reversed(list(surfaces)):
        if finding.key not in _keys(contract, surface):
            break
        first = surface.version
    return first
