"""What vLLM's servers offer and what released downstreams ask → the records beside the surfaces.

``python3 -m lab record`` writes the servers' side with each surface; ``python3 -m lab serving`` writes
it alone, and ``python3 -m lab downstreams`` the other side. Only source is read, and the same files
give the same bytes, in whatever order they are recorded.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from vllm_compat.analysis import recorded_downstreams
from vllm_compat.analysis.cache import Memory
from vllm_compat.analysis.codec import pack_contract
from vllm_compat.analysis.serving import recorded
from vllm_compat.analysis.serving.asked import read_clients
from vllm_compat.analysis.serving.models import architectures_in, read_model
from vllm_compat.analysis.serving.modules import Modules
from vllm_compat.analysis.serving.offered import read_offered
from vllm_compat.analysis.serving.rows import rows_of
from vllm_compat.analysis.surface.files import package_at
from vllm_compat.analysis.surface.recorded import DATA, mask_of, ranges_of
from vllm_compat.commands.checking.downstream import Source
from vllm_compat.errors import UsageError

if TYPE_CHECKING:
    from vllm_compat.analysis.surface.files import PackageFiles

_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]


def order(version: str) -> tuple[int, Version | str]:
    """Return what releases are sorted by; what is no version comes last."""
    try:
        return (0, Version(version))
    except InvalidVersion:
        return (1, version)


class ServingTable:
    """What the servers of releases offer, on its way into the record."""

    def __init__(self, data: Path = DATA) -> None:
        self.path = data / recorded.FILE
        self._rows: dict[str, set[str]] = {}
        record = recorded.read_record(self.path, recorded.FORMAT) or {"releases": [], "rows": []}
        self._versions: set[str] = set(record["releases"])
        for ranges, *row in record["rows"]:
            mask = mask_of(ranges)
            self._rows[json.dumps(row)] = {
                v for number, v in enumerate(record["releases"]) if mask >> number & 1
            }

    def add(self, files: PackageFiles, version: str) -> None:
        """Read a vLLM's source and put it in the place of what the table had of that version."""
        for releases in self._rows.values():
            releases.discard(version)
        self._versions.add(version)
        modules = Modules(files)
        models = [read_model(modules, name) for name in architectures_in(modules)]
        for row in rows_of(read_offered(files), models):
            self._rows.setdefault(json.dumps(row), set()).add(version)

    def write(self) -> None:
        """Write the file, at once."""
        releases = sorted(self._versions, key=order)
        number = {version: i for i, version in enumerate(releases)}
        rows = [
            [ranges_of(sum(1 << number[v] for v in versions)), *json.loads(row)]
            for row, versions in sorted(self._rows.items())
            if versions
        ]
        write_record(self.path, {"format": recorded.FORMAT, "releases": releases, "rows": rows})
        for known in (recorded._read, recorded.recorded_offer, recorded.recorded_models):
            known.cache_clear()


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a packed JSON record, at once; nothing where it would be the same."""
    text = json.dumps(record, separators=(",", ":")).encode("utf-8")
    packed = lzma.compress(text, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=_FILTERS)
    if path.exists() and path.read_bytes() == packed:
        return
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(packed)
    os.replace(partial, path)


def record_serving(sources: Iterable[str | Path], *, data: Path = DATA) -> list[dict[str, Any]]:
    """Record what the servers of vLLM sources offer; return one line a source.

    Raises :class:`~vllm_compat.errors.UsageError` where a source can't be read or has no version.
    """
    table = ServingTable(data)
    made = []
    for source in sources:
        files = package_at(Path(source), "vllm")
        if files.version == "unknown":
            raise UsageError(f"{source} does not say which version it is.")
        table.add(files, files.version)
        made.append({"version": files.version, "file": Path(source).name})
    table.write()
    return made


def record_downstreams(sources: Iterable[str | Path], *, data: Path = DATA) -> list[dict[str, Any]]:
    """Record released downstreams from their wheels or sdists; return one line a source.

    Raises :class:`~vllm_compat.errors.UsageError` where a source can't be read, or is no single file
    whose metadata says which release it is.
    """
    path = data / recorded_downstreams.FILE
    known = recorded_downstreams.FORMAT
    record = recorded_downstreams_of(path)
    made = []
    for source in map(Path, sources):
        files = package_at(source)
        if not files.described or not source.is_file():
            raise UsageError(f"{source} is no wheel or sdist whose metadata says its release.")
        read = Source(files, Memory(None))
        contract = pack_contract(read.contract)
        contract["head"][-1] = recorded_downstreams.ROOT
        asks = [recorded_downstreams.pack_ask(ask) for ask in read_clients(files)]
        line = {"file": source.name, "sha256": files.tree.digest()}
        record[(files.distribution, files.version)] = {
            **line,
            "contract": contract,
            "own": list(read.own()),
            "names": read.names(),
            "asks": asks,
        }
        made.append({"version": files.version, **line})
    releases = [record[key] for key in sorted(record, key=lambda k: (k[0], order(k[1])))]
    write_record(path, {"format": known, "releases": releases})
    recorded_downstreams._read.cache_clear()
    return made


def recorded_downstreams_of(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the releases in a record of downstreams, by name and version."""
    record = recorded.read_record(path, recorded_downstreams.FORMAT) or {"releases": []}
    return {tuple(release["contract"]["head"][:2]): release for release in record["releases"]}
