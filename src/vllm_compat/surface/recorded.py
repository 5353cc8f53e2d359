"""Surfaces of published releases, as recorded in ``vllm_compat/data``.

``releases.json`` lists the releases in order, each with the file it was read from and that file's
SHA-256. ``surfaces/`` holds what they offer, one compressed text per part of vLLM: below a line
``@module`` one row per name, with the releases (as ranges of their numbers) in which the row holds
and the entry itself (see :mod:`vllm_compat.surface.syntax`). A row that never changed stands there
once for all releases. Classes are taken apart into a header and one row per member.

Modules outside the parts that downstreams lean on (single models, layers, kernels) are recorded by
the names that they define only: what is called or read there counts as fitting.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from vllm_compat.errors import UsageError
from vllm_compat.surface.static import Body, StaticSurface
from vllm_compat.surface.syntax import Entry

DATA = Path(__file__).resolve().parent.parent / "data"
FORMAT = 1

MODULES = "modules"
NAMES = "names"

# Stand-ins for the names of a module of which only the names are recorded, by their kind.
_STAND_INS: dict[str, Entry] = {
    "c": ["c", ["?"], [], {}, {}, "g"],
    "f": ["f", [["args", 2, None, None], ["kwargs", 4, None, None]], None, ""],
    "a": ["a", None, None, ""],
    "i": ["a", None, None, ""],
}

_SPLIT = frozenset({"attention", "core", "engine", "worker"})


def group_of(module: str) -> str:
    """Return the name of the file that holds a module."""
    parts = module.split(".")
    if len(parts) < 3:
        return parts[0]
    if parts[1] == "v1" and len(parts) > 3 and parts[2] in _SPLIT:
        return ".".join(parts[:3])
    return ".".join(parts[:2])


@cache
def mask_of(ranges: str) -> int:
    """Return ``3,5-7`` as a number with these bits set."""
    mask = 0
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        mask |= ((1 << (high - low + 1)) - 1) << low
    return mask


def ranges_of(mask: int) -> str:
    """Return a number's bits as ``3,5-7``: the reverse of :func:`mask_of`."""
    parts: list[str] = []
    bit = 0
    while mask >> bit:
        if mask >> bit & 1:
            start = bit
            while mask >> (bit + 1) & 1:
                bit += 1
            parts.append(str(start) if start == bit else f"{start}-{bit}")
        bit += 1
    return ",".join(parts)


Row = tuple[str, int, str]  # path inside the module, releases, JSON


class Store:
    """The recorded data in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            index = json.loads((folder / "releases.json").read_text("utf-8"))
            found = index["format"]
            self.releases: list[dict[str, Any]] = index["releases"]
            self.numbers = {release["version"]: i for i, release in enumerate(self.releases)}
        except FileNotFoundError:
            raise UsageError(f"There are no recorded releases in {folder}.") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"The record {folder / 'releases.json'} is damaged: {error}."
            ) from error
        if found != FORMAT:
            raise UsageError(
                f"The record {folder / 'releases.json'} has format {found}; this vllm_compat reads "
                f"format {FORMAT}."
            )
        self._texts: dict[str, str] = {}
        self._defined: dict[str, list[tuple[str, int]]] = {}
        self._mentioned: dict[str, list[tuple[str, int]]] = {}
        self._rows: dict[str, dict[str, list[Row]] | None] = {}
        self._entries: dict[tuple[str, str, tuple[int, ...]], Entry | None] = {}

    def text(self, group: str) -> str:
        """Return the whole text of a part; empty where there is none."""
        if group not in self._texts:
            path = self.folder / "surfaces" / f"{group}.xz"
            try:
                self._texts[group] = lzma.decompress(path.read_bytes()).decode("utf-8")
            except FileNotFoundError:
                self._texts[group] = ""
            except (OSError, lzma.LZMAError, EOFError, ValueError) as error:
                raise UsageError(f"The record {path} is damaged: {error}.") from error
        return self._texts[group]

    def groups(self) -> Iterator[str]:
        """Iterate over the names of all parts, sorted."""
        for path in sorted((self.folder / "surfaces").glob("*.xz")):
            yield path.name.removesuffix(".xz")

    def rows(self, module: str) -> dict[str, list[Row]] | None:
        """Return a module's rows by top-level name; None where it is not recorded in full."""
        if module not in self._rows:
            self._rows[module] = self._parse(self.text(group_of(module)), module)
        return self._rows[module]

    def name_rows(self, module: str) -> dict[str, list[Row]] | None:
        """Return the rows of a module that is recorded by its names; None where it isn't."""
        return self._parse(self.text(NAMES), module)

    @staticmethod
    def _parse(text: str, module: str) -> dict[str, list[Row]] | None:
        head = f"@{module}\n"
        start = 0 if text.startswith(head) else text.find("\n" + head) + 1
        if not text.startswith(head, start):
            return None
        end = text.find("\n@", start)
        block = text[start + len(head) : end if end >= 0 else len(text)]
        found: dict[str, list[Row]] = {}
        for line in block.splitlines():
            path, ranges, data = line.split("\t", 2)
            top = path.partition(".")[0].partition("#")[0]
            found.setdefault(top, []).append((path, mask_of(ranges), data))
        return found

    def modules_mask(self, module: str) -> int:
        """Return the releases that have a module."""
        text = self.text(MODULES)
        head = f"{module}\t"
        start = 0 if text.startswith(head) else text.find("\n" + head) + 1
        if not text.startswith(head, start):
            return 0
        end = text.find("\n", start)
        return mask_of(text[start + len(head) : end if end >= 0 else len(text)])

    def has_below(self, package: str, number: int) -> bool:
        """Whether a release has modules below a name: a namespace package."""
        text = self.text(MODULES)
        head = f"{package}."
        at = 0 if text.startswith(head) else text.find("\n" + head) + 1
        while text.startswith(head, at):
            end = text.find("\n", at)
            _, _, ranges = text[at : end if end >= 0 else len(text)].partition("\t")
            if mask_of(ranges) >> number & 1:
                return True
            if end < 0:
                break
            at = end + 1
        return False

    def module_names(self, number: int) -> Iterator[str]:
        """Iterate over the modules of one release."""
        for line in self.text(MODULES).splitlines():
            module, _, ranges = line.partition("\t")
            if mask_of(ranges) >> number & 1:
                yield module

    def entry(self, module: str, name: str, number: int, rows: list[Row]) -> Entry | None:
        """Put a name's rows of one release together again."""
        active = tuple(i for i, row in enumerate(rows) if row[1] >> number & 1)
        if not active:
            return None
        key = (module, name, active)
        if key not in self._entries:
            parts = {rows[i][0]: rows[i][2] for i in active}
            self._entries[key] = join(name, parts)
        return self._entries[key]

    def find(self, name: str, number: int) -> list[str]:
        """Return where a release defines a top-level name."""
        if name not in self._defined:
            self._defined[name] = list(self._definitions(name))
        return sorted({path for path, mask in self._defined[name] if mask >> number & 1})

    def _definitions(self, name: str) -> Iterator[tuple[str, int]]:
        """Iterate over where any release defines a name, and which do."""
        for group in self.groups():
            if group == MODULES:
                continue
            text = self.text(group)
            for path in (name, f"{name}#0"):
                at = text.find(f"\n{path}\t")
                while at >= 0:
                    end = text.find("\n", at + 1)
                    line = text[at + 1 : end if end >= 0 else len(text)]
                    _, ranges, data = line.split("\t", 2)
                    imported = data == "i" if group == NAMES else data.startswith('["i"')
                    if not imported:
                        yield f"{self._module_at(text, at + 1)}.{name}", mask_of(ranges)
                    at = text.find(f"\n{path}\t", at + 1)

    def naming(self, name: str, number: int) -> list[str]:
        """Return the classes of a release whose header mentions a name."""
        if name not in self._mentioned:
            self._mentioned[name] = list(self._mentions(name))
        return [path for path, mask in self._mentioned[name] if mask >> number & 1]

    def _mentions(self, name: str) -> Iterator[tuple[str, int]]:
        """Iterate over the classes of any release whose header mentions a name."""
        pattern = re.compile(rf'^(\w+)\t([\d,-]+)\t\["c",\[[^\]]*\b{re.escape(name)}\b', re.M)
        for group in self.groups():
            text = self.text(group) if group not in (MODULES, NAMES) else ""
            for match in pattern.finditer(text) if name in text else ():
                module = self._module_at(text, match.start())
                yield f"{module}.{match.group(1)}", mask_of(match.group(2))

    @staticmethod
    def _module_at(text: str, at: int) -> str:
        """Return the module that a place in a part's text belongs to."""
        start = text.rfind("\n@", 0, at) + 2
        return text[max(start, 1) : text.index("\n", start)]


def split(name: str, entry: Entry) -> Iterator[tuple[str, str]]:
    """Take an entry apart into (path, JSON) rows: the reverse of :func:`join`."""
    if entry[0] == "c":
        members = entry[4]
        order = [n for n, e in members.items() if e[0] == "a" and not {"v", "x"} & set(e[3])]
        yield name, dump(["c", entry[1], entry[2], entry[3], entry[5], order])
        for member, inner in members.items():
            yield from split(f"{name}.{member}", inner)
    elif entry[0] == "u" and any(e[0] != "a" for e in entry[1]):
        yield name, dump(["u", len(entry[1])])
        for number, inner in enumerate(entry[1]):
            yield from split(f"{name}#{number}", inner)
    else:
        yield name, dump(entry)


def join(name: str, parts: dict[str, str]) -> Entry:
    """Put rows together to an entry."""
    entry: Entry = json.loads(parts[name])
    if entry[0] == "c":
        prefix = name + "."
        direct: dict[str, None] = dict.fromkeys(entry[5])
        for path in parts:
            if path.startswith(prefix):
                direct.setdefault(path[len(prefix) :].partition(".")[0].partition("#")[0])
        inside: dict[str, dict[str, str]] = {}
        for path, data in parts.items():
            if path.startswith(prefix):
                member = path[len(prefix) :].partition(".")[0].partition("#")[0]
                inside.setdefault(member, {})[path] = data
        members = {m: join(prefix + m, inside[m]) for m in direct}
        return ["c", entry[1], entry[2], entry[3], members, entry[4]]
    if entry[0] == "u" and isinstance(entry[1], int):
        alternatives = []
        for number in range(entry[1]):
            path = f"{name}#{number}"
            own = {p: d for p, d in parts.items() if p == path or p.startswith(path + ".")}
            alternatives.append(join(path, own))
        return ["u", alternatives]
    return entry


def dump(value: object) -> str:
    """Return compact JSON on one line."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


class _RecordedBody:
    """A module of one release that is recorded in full."""

    def __init__(self, store: Store, module: str, number: int, rows: dict[str, list[Row]]) -> None:
        self._store = store
        self._module = module
        self._number = number
        self._rows = rows
        header = next(d for _, mask, d in rows[""] if mask >> number & 1)
        self.stars, self.dynamic, self._exported = json.loads(header)

    @property
    def exported(self) -> list[str] | None:
        return self._exported  # type: ignore[no-any-return]

    def _there(self, name: str) -> bool:
        return any(mask >> self._number & 1 for _, mask, _ in self._rows[name])

    def names(self) -> list[str]:
        return [n for n in self._rows if n and n[0] != "?" and self._there(n)]

    def typing_names(self) -> list[str]:
        return [n[1:] for n in self._rows if n and n[0] == "?" and self._there(n)]

    def entry(self, name: str) -> Entry | None:
        rows = self._rows.get(name) if name and name[0] != "?" else None
        return self._store.entry(self._module, name, self._number, rows) if rows else None

    def typing_entry(self, name: str) -> Entry | None:
        rows = self._rows.get("?" + name)
        return self._store.entry(self._module, "?" + name, self._number, rows) if rows else None


class _NamesBody:
    """A module of one release that is recorded by its names only, or not even by these."""

    exported: list[str] | None = None

    def __init__(self, number: int, rows: dict[str, list[Row]] | None) -> None:
        self.stars: list[str] = []
        self._kinds: dict[str, str] = {}
        self.dynamic = rows is None
        for name, own in (rows or {}).items():
            for _, mask, data in own:
                if name and mask >> number & 1:
                    self._kinds[name] = data
        if "*" in self._kinds:
            self.dynamic = True

    def names(self) -> list[str]:
        return [name for name in self._kinds if name != "*"]

    def typing_names(self) -> list[str]:
        return []

    def entry(self, name: str) -> Entry | None:
        return _STAND_INS.get(self._kinds.get(name, ""))

    def typing_entry(self, name: str) -> Entry | None:
        return None


@lru_cache(maxsize=4)
def store(folder: Path = DATA) -> Store:
    """Return the recorded data of a folder, read once."""
    return Store(folder)


def recorded_versions(folder: Path = DATA) -> tuple[str, ...]:
    """Return the versions of the recorded releases, oldest first."""
    return tuple(release["version"] for release in store(folder).releases)


def _parsed(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:
        return None


def closest_record(version: str, folder: Path = DATA) -> str | None:
    """Return the recorded version that a version string means, local parts aside, or None."""
    wanted = _parsed(version)
    for recorded in recorded_versions(folder):
        own = _parsed(recorded)
        if recorded == version:
            return recorded
        if own and wanted and Version(own.public) == Version(wanted.public):
            return recorded
    return None


def recorded_until(version: str | None = None, folder: Path = DATA) -> list[RecordedSurface]:
    """Return the surfaces of the recorded releases up to a version, oldest first.

    All of them without a version, or where it can't be ordered. A nightly counts as what comes
    after the release that it follows.
    """
    end = _parsed(version) if version else None
    return [
        RecordedSurface(recorded, folder)
        for recorded in recorded_versions(folder)
        if end is None or (own := _parsed(recorded)) is None or own <= end
    ]


class RecordedSurface(StaticSurface):
    """What a recorded release offers.

    Raises :class:`~vllm_compat.errors.UsageError` where there is no record of that version.
    """

    def __init__(self, version: str, folder: Path = DATA) -> None:
        super().__init__()
        self._store = store(folder)
        known = closest_record(version, folder)
        if known is None:
            versions = recorded_versions(folder)
            raise UsageError(
                f"There is no record of vLLM {version}; recorded are {versions[0]} to "
                f"{versions[-1]}."
            )
        self._number = self._store.numbers[known]
        release = self._store.releases[self._number]
        self.version = known
        self.distribution = str(release["distribution"])
        self.origin = f"record of {release['file']}"
        self.sha256 = str(release["sha256"])
        self._built = tuple(release["built"])
        self._bodies: dict[str, Body | None] = {}
        self._has: dict[str, bool] = {}

    def _is_opaque(self, module: str) -> bool:
        return any(module == name or module.startswith(name + ".") for name in self._built)

    def _body(self, module: str) -> Body | None:
        if module not in self._bodies:
            self._bodies[module] = self._load(module)
        return self._bodies[module]

    def _load(self, module: str) -> Body | None:
        if not self._store.modules_mask(module) >> self._number & 1:
            return None
        rows = self._store.rows(module)
        if rows is not None and any(mask >> self._number & 1 for _, mask, _ in rows[""]):
            return _RecordedBody(self._store, module, self._number, rows)
        return _NamesBody(self._number, self._store.name_rows(module))

    def has_module(self, name: str) -> bool:
        """Whether the release has the module, a namespace package of that name, or builds it."""
        if name not in self._has:
            self._has[name] = self._ours(name) and (
                bool(self._store.modules_mask(name) >> self._number & 1)
                or self._store.has_below(name, self._number)
                or self._is_opaque(name)
            )
        return self._has[name]

    def modules(self) -> Iterator[str]:
        """Iterate over the dotted names of all modules with source."""
        return self._store.module_names(self._number)

    def _naming(self, name: str) -> Iterator[str]:
        return iter(self._store.naming(name, self._number))

    def find(self, name: str) -> tuple[str, ...]:
        """Return the dotted paths of every top-level definition called ``name``, sorted."""
        return tuple(self._store.find(name, self._number))
