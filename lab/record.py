"""Published files of vLLM → recorded surfaces (``python3 -m lab record``).

Recording reads Python source only and is deterministic: the same files give the same bytes, in
whatever order they are recorded.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from lab.serving import ServingTable, order
from vllm_compat.analysis.surface.entries import Entry, ImportEntry, Several, to_row
from vllm_compat.analysis.surface.modules import ModuleSyntax
from vllm_compat.analysis.surface.recorded import (
    DATA,
    DIGESTS,
    FORMAT,
    MODULES,
    NAMES,
    Store,
    digest_of,
    dump,
    group_of,
    ranges_of,
    split,
    store,
)
from vllm_compat.analysis.surface.source import SourceSurface
from vllm_compat.errors import UsageError

# Recorded in full; all else by its names. Downstreams lean on these, and they are all of what
# ``diff --all-symbols`` compares.
_FULL = (
    "attention",
    "beam_search",
    "compilation",
    "config",
    "connections",
    "core",
    "device_allocator",
    "distributed",
    "engine",
    "entrypoints",
    "envs",
    "exceptions",
    "executor",
    "forward_context",
    "inputs",
    "logger",
    "logits_process",
    "logprobs",
    "lora",
    "model_executor.model_loader",
    "model_executor.models.interfaces",
    "model_executor.models.interfaces_base",
    "model_executor.models.registry",
    "model_executor.models.utils",
    "multimodal",
    "outputs",
    "platforms",
    "plugins",
    "pooling_params",
    "profiler",
    "renderers",
    "sampling_params",
    "scalar_type",
    "sequence",
    "spec_decode",
    "tasks",
    "tokenizers",
    "tracing",
    "transformers_utils",
    "usage",
    "utils",
    "_version",
    "v1",
    "version",
    "worker",
)
_BY_NAME = (
    "compilation.passes",
    "distributed.ec_transfer",
    "distributed.kv_transfer.kv_connector.v1",
    "entrypoints.generate",
    "entrypoints.openai",
    "entrypoints.pooling",
    "entrypoints.serve",
    "lora.layers",
    "lora.ops",
    "transformers_utils.configs",
    "transformers_utils.processors",
)
_BASES = (".base", ".abstract", ".backend")

# Known by their bytes as well: what downstreams that lean on the engine make us read. All modules
# would take 70 KB, which no compression makes less.
_RECOGNIZED = (
    "config",
    "distributed.parallel_state",
    "engine.arg_utils",
    "envs",
    "sampling_params",
    "sequence",
    "utils",
    "v1.core",
    "v1.engine",
    "v1.executor",
    "v1.kv_cache_interface",
    "v1.outputs",
    "v1.request",
    "v1.serial_utils",
    "v1.structured_output",
    "v1.worker",
)

_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 3, "lp": 0, "pb": 0}]


def _within(module: str, parts: Iterable[str]) -> bool:
    return any(module == f"vllm.{p}" or module.startswith(f"vllm.{p}.") for p in parts)


def in_names(module: str) -> bool:
    """Whether at least a module's names are recorded; of all others only that they are there."""
    return not _within(module, ("benchmarks", "grpc", "third_party"))


def in_full(module: str) -> bool:
    """Whether a module is recorded with its signatures, and not by its names only."""
    if module == "vllm":
        return True
    return _within(module, _FULL) and (not _within(module, _BY_NAME) or module.endswith(_BASES))


def in_digests(module: str) -> bool:
    """Whether the bytes of a module's source are recorded by their digest."""
    return module == "vllm" or (_within(module, _RECOGNIZED) and in_full(module))


class _Table:
    """All rows of all releases, on their way into or out of the files."""

    def __init__(self) -> None:
        self.releases: list[dict[str, Any]] = []
        self.modules: dict[str, int] = {}
        self.digests: dict[tuple[str, str], int] = {}
        self.full: dict[str, dict[tuple[str, str], int]] = {}
        self.names: dict[str, dict[tuple[str, str], int]] = {}

    @classmethod
    def read(cls, old: Store) -> _Table:
        table = cls()
        table.releases = list(old.releases)
        for group in old.groups():
            for line in old.text(group).splitlines():
                if group == MODULES:
                    module, _, ranges = line.partition("\t")
                    table.modules[module] = _mask(ranges)
                elif group == DIGESTS:
                    module, digest, ranges = line.split("\t")
                    table.digests[(module, digest)] = _mask(ranges)
                elif line.startswith("@"):
                    rows = table.names if group == NAMES else table.full
                    current = rows.setdefault(line[1:], {})
                else:
                    path, ranges, data = line.split("\t", 2)
                    current[(path, data)] = _mask(ranges)
        return table

    def drop(self, number: int) -> None:
        """Forget a release, and close the gap in the numbers."""
        low = (1 << number) - 1

        def closed(mask: int) -> int:
            return (mask & low) | (mask >> (number + 1) << number)

        del self.releases[number]
        self._map(closed)

    def open(self, number: int, release: dict[str, Any]) -> None:
        """Make room for a release."""
        low = (1 << number) - 1

        def opened(mask: int) -> int:
            return (mask & low) | (mask >> number << (number + 1))

        self.releases.insert(number, release)
        self._map(opened)

    def _map(self, change: Any) -> None:
        self.modules = {m: new for m, mask in self.modules.items() if (new := change(mask))}
        self.digests = {k: new for k, mask in self.digests.items() if (new := change(mask))}
        for rows in (self.full, self.names):
            for module, own in list(rows.items()):
                kept = {key: new for key, mask in own.items() if (new := change(mask))}
                if kept:
                    rows[module] = kept
                else:
                    del rows[module]

    def fill(self, number: int, surface: SourceSurface) -> None:
        """Add a release's rows."""
        bit = 1 << number
        present = set(surface.modules())
        for module in sorted(present):
            parsed = surface.parse(module)
            if parsed is None:
                continue
            self.modules[module] = self.modules.get(module, 0) | bit
            if in_full(module):
                self._fill_in_full(module, parsed, surface.files.source(module) or b"", bit)
            elif in_names(module):
                self._fill_names(module, parsed, bit)

    def _fill_in_full(self, module: str, parsed: ModuleSyntax, source: bytes, bit: int) -> None:
        """Add a module with its signatures, and its digest where that is recorded."""
        if in_digests(module):
            key = (module, digest_of(source, parsed.is_package))
            self.digests[key] = self.digests.get(key, 0) | bit
        rows = self.full.setdefault(module, {})
        _put(rows, "", dump([parsed.stars, parsed.dynamic, parsed.exported]), bit)
        for prefix, names, entry in (
            ("", parsed.names(), parsed.entry),
            ("?", parsed.typing_names(), parsed.typing_entry),
        ):
            for name in names:
                made = entry(name)
                for path, data in split(prefix + name, made) if made is not None else ():
                    _put(rows, path, data, bit)

    def _fill_names(self, module: str, parsed: ModuleSyntax, bit: int) -> None:
        """Add a module by its names and their kinds."""
        rows = self.names.setdefault(module, {})
        _put(rows, "", "m", bit)
        if parsed.dynamic or parsed.stars:
            _put(rows, "*", "i", bit)
        for name in parsed.names():
            made = parsed.entry(name)
            kind = _kind(made) if made is not None else None
            if kind is not None:
                _put(rows, name, kind, bit)

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Iterate over (name, content) of the files that hold the table."""
        groups: dict[str, list[str]] = {}
        for module in sorted(self.full):
            groups.setdefault(group_of(module), []).append(_block(module, self.full[module]))
        groups[NAMES] = [_block(module, self.names[module]) for module in sorted(self.names)]
        groups[MODULES] = [f"{m}\t{ranges_of(mask)}\n" for m, mask in sorted(self.modules.items())]
        groups[DIGESTS] = [
            f"{module}\t{digest}\t{ranges_of(mask)}\n"
            for (module, digest), mask in sorted(self.digests.items())
        ]
        for group, blocks in sorted(groups.items()):
            text = "".join(blocks).encode("utf-8")
            packed = lzma.compress(text, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC32, filters=_FILTERS)
            yield f"surfaces/{group}.xz", packed
        index = {"format": FORMAT, "releases": self.releases}
        yield "releases.json", (json.dumps(index, indent=1) + "\n").encode("utf-8")


def _mask(ranges: str) -> int:
    from vllm_compat.analysis.surface.recorded import mask_of

    return mask_of(ranges)


def _put(rows: dict[tuple[str, str], int], path: str, data: str, bit: int) -> None:
    rows[(path, data)] = rows.get((path, data), 0) | bit


def _kind(entry: Entry) -> str | None:
    """Return the kind of a name; None for what a module imports from outside vLLM."""
    if isinstance(entry, Several):
        kinds = [kind for e in entry.entries if (kind := _kind(e)) is not None]
        return kinds[0] if kinds else None
    if isinstance(entry, ImportEntry):
        return "i" if entry.module.partition(".")[0] == "vllm" else None
    return str(to_row(entry)[0])


def _block(module: str, rows: dict[tuple[str, str], int]) -> str:
    lines = [f"@{module}\n"]
    for (path, data), mask in sorted(rows.items()):
        lines.append(f"{path}\t{ranges_of(mask)}\t{data}\n")
    return "".join(lines)


def record_release(
    source: str | Path, *, data: Path = DATA, version: str | None = None
) -> dict[str, Any]:
    """Record the surface of a published file, a checkout or an installed package.

    Args:
        source: a wheel, an sdist or a folder that holds vLLM.
        data: the folder that holds the records; what it holds of the same version is replaced.
        version: the version to record it as, by default what the source says it is.

    Returns the release's line in ``releases.json``: its version, distribution, file and SHA-256.
    Raises :class:`~vllm_compat.errors.UsageError` where the source can't be read.
    """
    return record_releases([source], data=data, versions=[version])[0]


def record_releases(
    sources: Iterable[str | Path],
    *,
    data: Path = DATA,
    versions: Iterable[str | None] | None = None,
) -> list[dict[str, Any]]:
    """Record several sources and write the files once (see :func:`record_release`)."""
    recorder = Recorder(data)
    paths = list(sources)
    told = list(versions) if versions is not None else [None] * len(paths)
    made = [recorder.add(path, version=v) for path, v in zip(paths, told, strict=True)]
    recorder.write()
    return made


class Recorder:
    """Records that are being added to; nothing is written before :meth:`write`."""

    def __init__(self, data: Path = DATA) -> None:
        self.data = data
        there = (data / "releases.json").exists()
        self._table = _Table.read(Store(data)) if there else _Table()
        self._serving = ServingTable(data)

    @property
    def versions(self) -> list[str]:
        """The versions recorded so far."""
        return [release["version"] for release in self._table.releases]

    def add(self, source: str | Path, *, version: str | None = None) -> dict[str, Any]:
        """Read a source and add it (see :func:`record_release`)."""
        surface = SourceSurface.at(source)
        named = version or surface.version
        if named == "unknown":
            raise UsageError(f"{source} does not say which version it is: give one.")
        release = {
            "version": named,
            "distribution": surface.distribution,
            "file": Path(source).name,
            "sha256": surface.digest(),
            "built": sorted(surface.built | surface.files.compiled),
        }
        if named in self.versions:
            self._table.drop(self.versions.index(named))
        number = sum(order(other) < order(named) for other in self.versions)
        self._table.open(number, release)
        self._table.fill(number, surface)
        self._serving.add(surface.files, named)
        return release

    def write(self) -> None:
        """Write the files, each at once."""
        (self.data / "surfaces").mkdir(parents=True, exist_ok=True)
        wanted = set()
        for name, content in self._table.files():
            path = self.data / name
            wanted.add(path)
            if path.exists() and path.read_bytes() == content:
                continue
            partial = path.with_name(path.name + ".part")
            partial.write_bytes(content)
            os.replace(partial, path)
        for path in (self.data / "surfaces").glob("*.xz"):
            if path not in wanted:
                path.unlink()
        self._serving.write()
        store.cache_clear()


# Published files.


def _index_url() -> str:
    """Return the package index that pip uses, without its trailing slash."""
    for variable in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        if url := os.environ.get(variable):
            return url.rstrip("/")
    # An environment that uv made has no pip, but Python brings one to install it from.
    code = (
        "import glob, os, sys; import ensurepip\n"
        "wheels = os.path.join(os.path.dirname(ensurepip.__file__), '_bundled', 'pip-*.whl')\n"
        "sys.path += glob.glob(wheels)\n"
        "from pip._internal.configuration import Configuration\n"
        "from pip._internal.models.index import PyPI\n"
        "found = Configuration(isolated=False); found.load(); found = dict(found.items())\n"
        "print(found.get('global.index-url') or PyPI.simple_url)\n"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    url = asked.stdout.strip()
    if not url:
        raise UsageError("No package index is known: install pip, or set PIP_INDEX_URL.")
    return url.rstrip("/")


def published(distribution: str = "vllm") -> dict[str, list[dict[str, Any]]]:
    """Return the files of every final release that pip's package index has, best first.

    The best is the sdist; where there is none, the smallest wheel. Each file is a mapping with
    ``filename``, ``url``, ``size`` and ``hashes``. Yanked files are left out.
    """
    request = urllib.request.Request(
        f"{_index_url()}/{distribution}/",
        headers={"Accept": "application/vnd.pypi.simple.v1+json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            files = json.load(answer)["files"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"The package index does not answer for {distribution}: {error}.") from error
    found: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        version = _file_version(str(file["filename"]))
        if version is None or version.is_prerelease or file.get("yanked"):
            continue
        found.setdefault(str(version), []).append(file)
    for own in found.values():
        own.sort(key=lambda f: (not str(f["filename"]).endswith(".tar.gz"), f.get("size") or 0))
    return {version: found[version] for version in sorted(found, key=Version)}


def _file_version(name: str) -> Version | None:
    if name.endswith(".tar.gz"):
        match = re.fullmatch(r".+?-(\d[^-]*)\.tar\.gz", name)
        text = match.group(1) if match else ""
    elif name.endswith(".whl"):
        text = name.split("-")[1]
    else:
        return None
    try:
        return Version(text)
    except InvalidVersion:
        return None


def fetch(file: dict[str, Any], folder: Path) -> Path:
    """Download a published file and compare its digest with the index's."""
    path = folder / str(file["filename"])
    total = hashlib.sha256()
    try:
        with (
            urllib.request.urlopen(str(file["url"]), timeout=300) as answer,
            open(path, "wb") as out,
        ):
            while chunk := answer.read(1 << 20):
                total.update(chunk)
                out.write(chunk)
    except (OSError, urllib.error.URLError) as error:
        raise UsageError(f"Cannot download {file['filename']}: {error}.") from error
    wanted = file.get("hashes", {}).get("sha256")
    if wanted and total.hexdigest() != wanted:
        path.unlink()
        raise UsageError(f"{file['filename']} arrived damaged: its SHA-256 is not the index's.")
    return path


def record_published(
    versions: Iterable[str] | None = None,
    *,
    first: str = "0.10.2",
    data: Path = DATA,
    distribution: str = "vllm",
) -> Iterator[dict[str, Any]]:
    """Record releases from the package index, and iterate over their lines as they are done.

    Without ``versions`` these are all from ``first`` on that have no record yet. One file at a time
    lies on disk.
    """
    recorder = Recorder(data)
    there = published(distribution)
    if versions is None:
        known = set(recorder.versions)
        wanted = [v for v in there if Version(v) >= Version(first) and v not in known]
    else:
        wanted = list(versions)
    for version in wanted:
        if version not in there:
            raise UsageError(f"The package index has no final release {version} of {distribution}.")
        with tempfile.TemporaryDirectory(prefix="vllm-compat-record-") as folder:
            path = fetch(there[version][0], Path(folder))
            yield recorder.add(path, version=version)
    recorder.write()
