"""The speculators releases that the tests read: wheels from the package index, kept in a cache.

The cache is ``VLLM_COMPAT_TEST_CACHE``, or ``~/.cache/vllm_compat/downstreams``. Only source is
read from the wheels; nothing of them is installed or imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from vllm_compat.contract import Contract, read_contract

VERSIONS = ("0.3.0", "0.4.0", "0.4.0.1")


def cache_folder() -> Path:
    """Return the folder that holds the wheels, made if need be."""
    named = os.environ.get("VLLM_COMPAT_TEST_CACHE")
    folder = Path(named) if named else Path.home() / ".cache" / "vllm_compat" / "downstreams"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _pip() -> list[str]:
    """Return a command that runs pip: this interpreter's, or any other."""
    tried = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if tried.returncode == 0:
        return [sys.executable, "-m", "pip"]
    other = shutil.which("pip") or shutil.which("pip3")
    if other is None:
        raise RuntimeError("The tests need pip, once, to download the speculators wheels.")
    return [other]


@cache
def wheel(version: str, name: str = "speculators") -> Path:
    """Return the wheel of a release, downloaded if the cache has none."""
    folder = cache_folder()
    found = sorted(folder.glob(f"{name}-{version}-*.whl"))
    if found:
        return found[0]
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        subprocess.run(
            [
                *_pip(),
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                "--ignore-requires-python",
                "--dest",
                partial,
                f"{name}=={version}",
            ],
            check=True,
        )
        (arrived,) = Path(partial).glob("*.whl")
        target = folder / arrived.name
        os.replace(arrived, target)
    return target


@cache
def contract(version: str) -> Contract:
    """Return the contract of a speculators release."""
    return read_contract(wheel(version))
