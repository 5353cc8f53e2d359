"""Find a downstream (installed, a folder, a wheel, an sdist) and read its contract from its source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_compat.analysis.contract import Contract
from vllm_compat.errors import UsageError

if TYPE_CHECKING:
    from vllm_compat.analysis.surface.files import PackageFiles


_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"


def read_contract(target: str | Path | None = None, *, python: str | None = None) -> Contract:
    """Read a downstream's call sites of vLLM from its source, without importing it.

    ``target`` is a path (the package's folder, one that holds it, a wheel or an sdist) or the name
    of an installed distribution; by default ``speculators``. ``NAME==VERSION`` is that release, if it
    is installed, or if its wheel or sdist lies in the working folder. ``python`` names another
    interpreter whose environment is looked in. Raises :class:`~vllm_compat.errors.UsageError` in one
    sentence.
    """
    return contract_of(find_downstream(target, python=python))


def find_downstream(target: str | Path | None = None, *, python: str | None = None) -> PackageFiles:
    """Find the source that :func:`read_contract` reads."""
    from vllm_compat.analysis.surface.files import package_at

    if target is None:
        try:
            return _installed("speculators", python)
        except UsageError as error:
            if "is not installed" not in str(error):
                raise
            raise UsageError(
                f"{str(error).rstrip('.')}: install it, name the Python of another environment"
                " (--python), or a release (--downstream speculators==0.4.0.1), a folder or a file."
            ) from error
    if not str(target):
        raise UsageError("The name of a downstream is empty: name a distribution, a folder or a file.")
    path = Path(target).expanduser()
    looks_like_path = isinstance(target, Path) or "/" in str(target) or "\\" in str(target)
    if looks_like_path or str(target).endswith((".whl", ".gz", ".zip")):
        return package_at(path)
    if pinned := re.fullmatch(rf"({_NAME})==([A-Za-z0-9.!+_-]+)", str(target).replace(" ", "")):
        return _release(pinned[1], pinned[3], python)
    if not re.fullmatch(_NAME, str(target)) and not path.exists():
        raise UsageError(
            f"There is no downstream {str(target)!r}: name an installed distribution (speculators, or"
            " NAME==VERSION), a folder, a wheel or an sdist (`pip download --no-deps` fetches one)."
        )
    try:
        return _installed(str(target), python)
    except UsageError:
        if path.exists():
            return package_at(path)
        raise


def _release(name: str, version: str, python: str | None) -> PackageFiles:
    """Find one release: what is installed, or the file that ``pip download`` leaves here."""
    from vllm_compat.analysis.environment import normal_name
    from vllm_compat.analysis.surface.files import package_at

    there = ""
    try:
        files = _installed(name, python)
    except UsageError:
        pass
    else:
        if files.version == version:
            return files
        there = f" ({files.version} is)"
    wanted = normal_name(name), version
    for path in sorted(Path().iterdir()):
        stem, _, rest = path.name.partition("-")
        if (normal_name(stem), re.split(r"-|\.tar\.|\.zip$", rest)[0]) == wanted and path.is_file():
            return package_at(path)
    raise UsageError(
        f"{name} {version} is not installed{there}, and no file of it lies in this folder: run"
        f" `python -m pip download --no-deps {name}=={version}` here, then this again."
    )


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
