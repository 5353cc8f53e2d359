"""The server flow's contract across the process boundary, for one pair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_compat.analysis.drift import Finding, FindingKind
from vllm_compat.analysis.server_flow import release_of
from vllm_compat.analysis.serving.asked import find_launcher, read_clients, read_launcher
from vllm_compat.analysis.serving.comparing import find_across
from vllm_compat.analysis.serving.launchers import launcher_of
from vllm_compat.analysis.serving.model import Ask, AskKind, Offered
from vllm_compat.analysis.serving.models import ModelOffer, named_in, read_model
from vllm_compat.analysis.serving.modules import Modules
from vllm_compat.analysis.serving.offered import read_offered
from vllm_compat.analysis.serving.recorded import recorded_models, recorded_offer
from vllm_compat.analysis.surface.source import SourceSurface
from vllm_compat.errors import UsageError

if TYPE_CHECKING:
    from vllm_compat.analysis.surface.files import PackageFiles
    from vllm_compat.analysis.surface.model import Surface


def asks_of(files: PackageFiles) -> tuple[Ask, ...]:
    """Return what a downstream's launcher and clients ask of a vLLM server.

    The launcher is the one in the checkout or sdist that the package lies in, else that of the release
    that metadata names; where there is neither, the launcher's part is missing.
    """
    beside = find_launcher(files)
    release = release_of(files.version) if files.described else None
    if beside is not None:
        launcher = read_launcher(beside[1], beside[0])
    else:
        launcher = launcher_of(release) if release is not None else ()
    return (*launcher, *read_clients(files))


def offer_of(surface: Surface) -> Offered | None:
    """Return what the server of a vLLM offers, read or recorded; None where it is not known whole."""
    if isinstance(surface, SourceSurface):
        offered: Offered | None = read_offered(surface.files)
    else:
        offered = recorded_offer(surface.version)
    if offered is None or not (
        offered.flags and offered.methods and offered.routes and offered.requests
    ):
        return None
    return offered


def across(asks: Sequence[Ask], surface: Surface) -> tuple[Finding, ...] | None:
    """Return what is asked and not there; None where one of both sides is not known whole."""
    if not any(a.kind is AskKind.METHOD for a in asks):
        return None
    offered = offer_of(surface)
    return None if offered is None else find_across(asks, offered)


def architectures_of(model: str) -> tuple[str, ...]:
    """Return the architectures of a model's folder, its language model's included, or the name itself.

    Raises :class:`~vllm_compat.errors.UsageError` where a folder has no readable ``config.json``.
    """
    folder = Path(model).expanduser()
    if not folder.exists() and "/" not in model:
        return (model,)
    file = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"The configuration of the model {model} cannot be read: {error}.") from error
    found = named_in(config)
    if not found:
        raise UsageError(f"{file} names no architectures: give the architecture's name itself.")
    return found


def offers_of(architectures: Sequence[str], surface: Surface) -> tuple[ModelOffer, ...]:
    """Return what the model classes offer on a vLLM; nothing where it has neither source nor record."""
    if isinstance(surface, SourceSurface):
        modules = Modules(surface.files)
        return tuple(read_model(modules, name) for name in architectures)
    models = recorded_models(surface.version)
    if models is None:
        return ()
    return tuple(models.get(name, ModelOffer(name)) for name in architectures)


def model_findings(offers: Sequence[ModelOffer], asks: Sequence[Ask]) -> tuple[Finding, ...]:
    """Return what the launcher asks of a model that its class does not offer."""
    sites = tuple(ask.site for ask in asks if ask.kind is AskKind.METHOD)
    return tuple(
        Finding(
            FindingKind.BEHAVIOUR,
            f"vllm.model_executor.models.{offer.architecture}",
            "hidden states",
            sites,
            seen=offer.where,
            detail=offer.sentence,
        )
        for offer in offers
        if offer.lacks
    )
