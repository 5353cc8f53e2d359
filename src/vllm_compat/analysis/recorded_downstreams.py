"""Released downstreams, as recorded in ``vllm_compat/data/downstreams.xz``: judged with none installed.

Of each release of speculators the file holds its contract, the facts that go into an environment, and
what its HTTP clients ask of a vLLM server, all read from the wheel that is named with its SHA-256. What
its launcher asks is in :mod:`vllm_compat.analysis.serving.launchers`. ``python3 -m lab downstreams``
writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_compat.analysis.contract import Contract
    from vllm_compat.analysis.serving.model import Ask

FILE = "downstreams.xz"
FORMAT = 1
ROOT = "recorded"


@dataclass(frozen=True)
class RecordedDownstream:
    """One released downstream as it is recorded.

    ``own`` are facts of :func:`vllm_compat.analysis.fact_reading.own_features`, ``names`` what it
    imports from transformers' modules, ``asks`` what its HTTP clients ask of a server. ``file`` and
    ``sha256`` name the wheel that all was read from.
    """

    contract: Contract
    own: tuple[str, ...]
    names: dict[str, list[str]]
    asks: tuple[Ask, ...]
    file: str
    sha256: str


def recorded_downstream(target: object, data: Path | None = None) -> RecordedDownstream | None:
    """Return the record of ``NAME==VERSION``; None where it names no release that is recorded."""
    pinned = re.fullmatch(r"\s*([\w.-]+)\s*==\s*([\w.!+-]+)\s*", str(target))
    if pinned is None:
        return None
    from vllm_compat.analysis.environment import normal_name

    for release in _releases(data):
        name, version, *_ = release["contract"]["head"]
        if normal_name(name) == normal_name(pinned[1]) and _same(version, pinned[2]):
            return _unpacked(release)
    return None


def recorded_names(data: Path | None = None) -> tuple[str, ...]:
    """Return the recorded releases as ``NAME==VERSION``, in order."""
    return tuple("==".join(release["contract"]["head"][:2]) for release in _releases(data))


def pack_ask(ask: Ask) -> list[Any]:
    """Take an ask apart."""
    site = ask.site
    return [ask.kind.value, ask.name, ask.owner, site.symbol, site.module, site.file, site.line]


def unpack_ask(values: list[Any]) -> Ask:
    """Put an ask together again."""
    from vllm_compat.analysis.contract import CallSite, SiteKind
    from vllm_compat.analysis.serving.model import Ask, AskKind

    kind, name, owner, *site = values
    return Ask(AskKind(kind), name, CallSite(SiteKind.CALL, *site), owner)


def _unpacked(release: dict[str, Any]) -> RecordedDownstream:
    from vllm_compat.analysis.codec import unpack_contract

    return RecordedDownstream(
        unpack_contract(release["contract"]),
        tuple(release["own"]),
        release["names"],
        tuple(map(unpack_ask, release["asks"])),
        release["file"],
        release["sha256"],
    )


def _same(one: str, other: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other


def _releases(data: Path | None) -> Iterator[dict[str, Any]]:
    from vllm_compat.analysis.surface.recorded import DATA

    yield from _read(DATA if data is None else data)


@lru_cache(maxsize=8)
def _read(data: Path) -> tuple[dict[str, Any], ...]:
    from vllm_compat.analysis.serving.recorded import read_record

    record = read_record(data / FILE, FORMAT)
    return () if record is None else tuple(record["releases"])
