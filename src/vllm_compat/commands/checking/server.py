"""The server flow's contract across the process boundary, for one pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_compat.analysis.server_flow import release_of
from vllm_compat.analysis.serving.asked import find_launcher, read_clients, read_launcher
from vllm_compat.analysis.serving.comparing import find_across
from vllm_compat.analysis.serving.launchers import launcher_of
from vllm_compat.analysis.serving.model import Ask, AskKind
from vllm_compat.analysis.serving.offered import read_offered
from vllm_compat.analysis.surface.source import SourceSurface

if TYPE_CHECKING:
    from vllm_compat.analysis.drift import Finding
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


def across(asks: Sequence[Ask], surface: Surface) -> tuple[Finding, ...] | None:
    """Return what is asked and not there; None where one of both sides could not be read whole.

    A recorded release holds no flags, routes or request models.
    """
    if not isinstance(surface, SourceSurface) or not any(a.kind is AskKind.METHOD for a in asks):
        return None
    offered = read_offered(surface.files)
    if not (offered.flags and offered.methods and offered.routes and offered.requests):
        return None
    return find_across(asks, offered)
