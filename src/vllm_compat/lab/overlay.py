"""The Python sources of one vLLM over the compiled kernels of another: a release without a CPU build.

A nightly, and the newest release for a while, have no CPU build on PyPI. Their Python sources run
over the kernels of the nearest CPU build for what the tests do. `make_overlay` puts together a
folder that stands before that build's environment on ``PYTHONPATH``::

    ROOT/overlays/0.33.0-over-0.32.0-1a2b3c4d/
        vllm/                      the sources; compiled modules are links into the CPU build
        vllm-0.33.0.dist-info/     by whose ``+cpu`` version vLLM finds its platform

Records of such runs are marked ``overlay``: they show the Python side, not the release's kernels.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_compat.errors import UsageError
from vllm_compat.lab.environments import EnvironmentPaths

_COMPILED = (".so", ".pyd")
_NOT_NEEDED = (*_COMPILED, ".cu", ".cuh", ".cpp", ".pyc")


@dataclass(frozen=True)
class Overlay:
    """An overlay on disk: ``version`` of its sources, ``base`` whose kernels it uses."""

    folder: Path
    version: str
    base: str


def fetch_sources(version: str, folder: Path) -> Path:
    """Return the sdist (or smallest wheel) of a release, downloaded from the package index once.

    Raises:
        UsageError: The index has no such release, or does not answer.
    """
    from vllm_compat.record import fetch, published

    kept = sorted(folder.glob(f"vllm-{version}[.-]*")) if folder.is_dir() else []
    if kept:
        return kept[0]
    found = published("vllm").get(version)
    if not found:
        raise UsageError(f"The package index has no final release {version} of vllm.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        path = fetch(found[0], Path(work))
        return path.replace(folder / path.name)


def make_overlay(
    source: Path, base: EnvironmentPaths, *, progress: Callable[[str], None] | None = None
) -> Overlay:
    """Return the overlay of a source (wheel, sdist or folder) over an environment's kernels.

    One that is there already is used again where source and base are the same.

    Raises:
        UsageError: The source holds no vLLM.
    """
    from vllm_compat.surface.files import package_at

    package = package_at(source, "vllm")
    version = package.version or "0.0.0"
    digest = hashlib.sha256(
        f"1 {package.tree.digest()} {base.vllm_version} {base.site_packages}".encode()
    ).hexdigest()
    public = version.partition("+")[0]
    folder = base.root / "overlays" / f"{public}-over-{base.vllm_version}-{digest[:8]}"
    overlay = Overlay(folder, version, base.vllm_version)
    if (folder / "overlay.json").exists():
        return overlay
    if progress:
        progress(f"Laying the sources of vLLM {version} over the kernels of {base.vllm_version}.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / "overlay"
        inside = package.folder
        for path in package.tree.files(inside):
            if path.endswith(_NOT_NEEDED):
                continue
            content = package.tree.read(path)
            target = made / "vllm" / (path[len(inside) :].lstrip("/") if inside else path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content or b"")
        _link_kernels(base.site_packages / "vllm", made / "vllm")
        _write_version(made, version)
        details = {"version": version, "base": base.vllm_version, "source": source.name}
        (made / "overlay.json").write_text(json.dumps(details) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        made.replace(folder)
    return overlay


def _link_kernels(base: Path, target: Path) -> None:
    """Link every compiled module of the CPU build to its place among the sources."""
    for path in sorted(base.rglob("*")):
        if path.name.endswith(_COMPILED):
            link = target / path.relative_to(base)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)


def _write_version(made: Path, version: str) -> None:
    """Write the distribution record, and the version module that a build would have written."""
    local = f"{version}.cpu" if "+" in version else f"{version}+cpu"
    info = made / f"vllm-{version.partition('+')[0]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {local}\n")
    (info / "INSTALLER").write_text("vllm_compat\n")
    (info / "RECORD").write_text("")
    module = made / "vllm" / "_version.py"
    if not module.exists():
        numbers = tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])
        module.write_text(
            f"__version__ = version = {version!r}\n__version_tuple__ = version_tuple = {numbers!r}\n"
        )
