"""Find a downstream (installed, a folder, a wheel, an sdist) and read its contract from its source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_compat.analysis.contract import Contract
from vllm_compat.errors import UsageError

if TYPE_CHECKING:
    from vllm_compat.analysis.surface.files import PackageFiles


def read_contract(target: str | Path | None = None, *, python: str | None = None) -> Contract:
    """Read a downstream's call sites of vLLM from its source, without importing it.

    ``target`` is a path (the package's folder, one that holds it, a wheel or an sdist) or the name
    of an installed distribution; by default ``speculators``. ``python`` names another interpreter
    whose environment is looked in. Raises :class:`~vllm_compat.errors.UsageError` in one sentence.
    """
    return contract_of(find_downstream(target, python=python))


def find_downstream(target: str | Path | None = None, *, python: str | None = None) -> PackageFiles:
    """Find the source that :func:`read_contract` reads."""
    from vllm_compat.analysis.surface.files import package_at

    if target is None:
        return _installed("speculators", python)
    if not str(target):
        raise UsageError("The name of a downstream is empty: name a distribution, a folder or a file.")
    path = Path(target).expanduser()
    looks_like_path = isinstance(target, Path) or "/" in str(target) or "\\" in str(target)
    if looks_like_path or str(target).endswith((".whl", ".gz", ".zip")):
        return package_at(path)
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", str(target)) and not path.exists():
        raise UsageError(
            f"There is no downstream {str(target)!r}: name an installed distribution without a version"
            " (speculators), a folder, a wheel or an sdist (`pip download --no-deps` fetches one)."
        )
    try:
        return _installed(str(target), python)
    except UsageError:
        if path.exists():
            return package_at(path)
        raise


def read_installed(
    name: str = "speculators", path: str | Path | None = None, *, python: str | None = None
) -> Contract:
    """Read the contract of a distribution that is installed, or lies in the folder ``path``.

    Raises :class:`~vllm_compat.errors.UsageError` where it isn't there.
    """
    from vllm_compat.analysis.surface.files import import_name, package_at

    if path is not None:
        return contract_of(package_at(Path(path), import_name(name)))
    return contract_of(_installed(name, python))


def _installed(name: str, python: str | None) -> PackageFiles:
    from vllm_compat.analysis.surface.files import import_name, installed_package

    return installed_package(import_name(name), distribution=name, python=python)


def contract_of(files: PackageFiles) -> Contract:
    """Read the contract of a package's source."""
    from vllm_compat.analysis.callsites import read_package

    return read_package(files)
