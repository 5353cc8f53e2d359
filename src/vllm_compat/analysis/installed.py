"""Find what is installed: the downstream's contract, vLLM's surface, the environment."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from vllm_compat.analysis.contract import Contract
from vllm_compat.analysis.downstream import read_contract
from vllm_compat.analysis.environment import MAX_LOSS, Environment, read_environment
from vllm_compat.analysis.fact_reading import read_features
from vllm_compat.analysis.planner import roles_of
from vllm_compat.analysis.server_flow import IN_PROCESS, UNSERVED, in_server_flow, release_of
from vllm_compat.analysis.surface import open_surface
from vllm_compat.analysis.surface.model import Surface
from vllm_compat.errors import IncompatibleError, UsageError

OLDEST = "0.11.0"
"""The oldest vLLM served; speculators 0.3.0 was written for it."""


def installed_pair(
    downstream: str,
    *,
    capture: str = "auto",
    transfer: str = "auto",
    canary: bool = False,
    max_loss: float = MAX_LOSS,
    engine: str = "auto",
) -> tuple[Contract, Surface, Environment]:
    """Read contract, surface and environment of this interpreter, importing none of them.

    Raises:
        UsageError: vLLM or the downstream is not installed.
        IncompatibleError: The downstream has no in-process generator, or vLLM is too old.
    """
    if downstream == "speculators":
        require_installed("nothing is adapted")
    contract = read_contract(downstream)
    surface = open_surface(None)
    refuse_unserved(contract, surface)
    environment = read_environment(
        surface.version,
        surface.distribution,
        capture=capture,
        transfer=transfer,
        canary=canary,
        max_loss=max_loss,
        engine=engine,
        features=read_features(Path(contract.root), _package_folder("transformers")),
    )
    return contract, surface, environment


def require_installed(consequence: str) -> None:
    """Raise where this interpreter has no vLLM or no speculators, importing neither.

    Args:
        consequence: What did not happen, as the sentence's second half: ``"nothing was measured"``.

    Raises:
        UsageError: One sentence says which is missing, and how to install a pair.
    """
    missing = [name for name in ("vllm", "speculators") if importlib.util.find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise UsageError(
            f"{' and '.join(missing)} {are} not installed in {sys.prefix}: {consequence}; install vLLM,"
            " then `pip install --no-deps speculators==0.4.0.1` and what `vllm-compat check` names."
        )


def _package_folder(name: str) -> Path | None:
    """Return the folder of an installed top-level package without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def refuse_unserved(contract: Contract, surface: Surface) -> None:
    """Raise where no plan can help: no in-process generator, or a vLLM that is too old."""
    from packaging.version import Version

    if in_server_flow(contract):
        raise IncompatibleError(
            f"{contract.name} {contract.version} has no in-process generator: it takes hidden states"
            f" from a vLLM server (`vllm serve` with the extract_hidden_states method). {UNSERVED};"
            f" `vllm-compat check` lists the hazards that are known of this pair. {IN_PROCESS}"
        )
    if not roles_of(contract).generator:
        raise IncompatibleError(
            f"{contract.name} {contract.version} has no in-process generator of hidden states, which"
            f" is what vllm_compat serves. {IN_PROCESS}"
        )
    if release_of(surface.version) and Version(surface.version) < Version(OLDEST):
        raise IncompatibleError(
            f"vLLM {surface.version} is older than {OLDEST}, the oldest release that"
            f" {contract.name}'s generator can be adapted to: install vllm>={OLDEST}."
        )
