"""What else decides besides source: versions and the device, read without importing any of them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGES = ("torch", "transformers", "pydantic", "datasets", "huggingface-hub", "triton")
"""Distributions whose version is part of every record."""

CAPTURES = ("auto", "hooks", "auxiliary", "stock")
"""The capture strategies that can be asked for (`vllm_compat.capture.worker.Capture`)."""

STOCK, PUBLIC, ALONE = "stock", "public", "alone"
ENGINES = ("auto", STOCK, PUBLIC, ALONE)
"""The engines that can be asked for: that which the downstream builds, fitted by adapters; one on vLLM's
public interface; the same with one prompt a step, so that no batch has an order. ``auto`` is the first,
and the second where something stays unmet for the first.
"""

MAX_LOSS = 0.01
"""The largest share of conversations, of their turns and of their answers that may be lost, unless the
user sets another: what a few broken rows come to, and less than a source of its own in a mixture."""


@dataclass(frozen=True)
class Environment:
    """Versions and device of one interpreter.

    ``versions`` maps distribution names to version strings (absent where not installed);
    ``device`` is ``cpu``, ``cuda``, ``rocm`` or ``unknown``, where ``cpu`` means that this vLLM
    build computes on the CPU, whatever else the machine has.
    ``capture`` is the capture strategy asked for, one of `CAPTURES`;
    ``transfer`` how rows leave the worker: ``auto`` or ``rpc``; ``canary`` whether the first batch is
    repeated and compared (`vllm_compat.checks.canary`); ``max_loss`` the largest share of conversations,
    turns or answers that may be lost (`vllm_compat.checks.losses`); ``engine`` the engine asked for, one
    of `ENGINES`. ``features`` are facts read from
    installed source, each as its line of text (`vllm_compat.analysis.facts`).
    """

    python: str
    versions: tuple[tuple[str, str], ...]
    device: str
    capture: str = "auto"
    transfer: str = "auto"
    canary: bool = False
    max_loss: float = MAX_LOSS
    engine: str = "auto"
    features: tuple[str, ...] = ()

    def version(self, name: str) -> str | None:
        """Return the version of a distribution, or None."""
        return dict(self.versions).get(name)


def normal_name(distribution: str) -> str:
    """Return a distribution's name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def distributions(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return ``{name: (name as written, version)}`` of those distributions that are installed.

    The first on ``sys.path`` counts, as for :mod:`importlib.metadata`, whose import alone takes as
    long as the rest of a check's start; it is asked where an entry of the path is no folder.
    """
    wanted = {normal_name(name): name for name in names}
    found: dict[str, tuple[str, str]] = {}
    for entry in sys.path:
        try:
            listed = os.listdir(entry or ".")
        except NotADirectoryError:
            found = _in_archives(wanted.values()) | found
            continue
        except OSError:
            continue
        for name in listed:
            stem, dot, kind = name.rpartition(".")
            if not dot or kind not in ("dist-info", "egg-info"):
                continue
            asked = wanted.get(normal_name(stem.partition("-")[0]))
            if asked is None or asked in found:
                continue
            told = _told(Path(entry, name))
            if told is not None:
                found[asked] = told
    return found


def _told(info: Path) -> tuple[str, str] | None:
    """Return name and version from a distribution's metadata, a folder's or (eggs) a file's."""
    for path in (info / "METADATA", info / "PKG-INFO", info):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        # A description of thousands of lines may follow the headers.
        head = re.split(rb"\r?\n\r?\n", text, maxsplit=1)[0].decode("utf-8", "replace")
        told = dict(re.findall(r"^(Name|Version):[ \t]*(\S+)", head, re.MULTILINE))
        if len(told) == 2:
            return told["Name"], told["Version"]
    return None


def _in_archives(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    from importlib import metadata

    found = {}
    for name in names:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = (distribution.metadata["Name"], distribution.version)
    return found


def read_environment(
    vllm_version: str,
    vllm_distribution: str,
    *,
    capture: str = "auto",
    transfer: str = "auto",
    canary: bool = False,
    max_loss: float = MAX_LOSS,
    engine: str = "auto",
    features: tuple[str, ...] = (),
    root: Path = Path("/"),
) -> Environment:
    """Read the running interpreter's environment from distribution records and device files.

    ``root`` is where ``proc`` and ``dev`` are looked for, for tests. torch is not imported.
    """
    found = distributions(PACKAGES)
    return Environment(
        python=sys.version.split()[0],  # as platform.python_version() has it
        versions=tuple((name, found[name][1]) for name in PACKAGES if name in found),
        device=_device(vllm_version, vllm_distribution, os.environ, root),
        capture=capture,
        transfer=transfer,
        canary=canary,
        max_loss=max_loss,
        engine=engine,
        features=features,
    )


def _device(version: str, distribution: str, environ: Mapping[str, str], root: Path) -> str:
    if distribution.endswith("-cpu") or "cpu" in version.partition("+")[2].split("."):
        return "cpu"
    if environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return "cpu"
    if (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidiactl").exists():
        return "cuda"
    if (root / "dev/kfd").exists():
        return "rocm"
    return "unknown"


@cache
def compute_capabilities(library: str = "libnvidia-ml.so.1") -> tuple[str, ...]:
    """Return the compute capabilities of this machine's NVIDIA GPUs, each once: ``("9.0",)``.

    NVML is asked, the driver's library for administration (``library``): that opens no CUDA context, so
    that workers can still be forked. Empty where it is not there or does not answer.
    """
    import ctypes

    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return ()
    found = set()
    try:
        if nvml.nvmlInit_v2():
            return ()
        number, device = ctypes.c_uint(), ctypes.c_void_p()
        major, minor = ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)):
            number.value = 0
        for index in range(number.value):
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                continue
            if not nvml.nvmlDeviceGetCudaComputeCapability(
                device, ctypes.byref(major), ctypes.byref(minor)
            ):
                found.add(f"{major.value}.{minor.value}")
        nvml.nvmlShutdown()
    except AttributeError:  # a driver so old that it lacks one of these
        return ()
    return tuple(sorted(found))
