"""Small packages called ``vllm``, written into a folder, an sdist or a wheel."""

from __future__ import annotations

import io
import tarfile
import textwrap
import zipfile
from pathlib import Path


def write(folder: Path, files: dict[str, str], version: str = "9.0.0") -> Path:
    """Write a package ``vllm`` below a folder, metadata beside it, and return the folder."""
    told = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n\nText\n"
    for name, text in {
        "vllm/__init__.py": "",
        f"vllm-{version}.dist-info/METADATA": told,
        **{f"vllm/{name}": text for name, text in files.items()},
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def sdist(folder: Path, files: dict[str, str], version: str = "9.0.0") -> Path:
    """Write an sdist of a package ``vllm`` and return its path."""
    path = folder / f"vllm-{version}.tar.gz"
    top = f"vllm-{version}"
    told = {f"{top}/PKG-INFO": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"}
    inside = {f"{top}/vllm/{n}": textwrap.dedent(t) for n, t in {"__init__.py": "", **files}.items()}
    with tarfile.open(path, "w:gz") as tar:
        for name, text in {**told, f"{top}/tests/__init__.py": "", **inside}.items():
            member = tarfile.TarInfo(name)
            data = text.encode()
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def wheel(folder: Path, files: dict[str, str], version: str = "9.0.0") -> Path:
    """Write a wheel of a package ``vllm`` and return its path."""
    path = folder / f"vllm-{version}-py3-none-any.whl"
    told = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"vllm-{version}.dist-info/METADATA", told)
        for name, text in {"__init__.py": "", **files}.items():
            packed.writestr(f"vllm/{name}", textwrap.dedent(text))
    return path
