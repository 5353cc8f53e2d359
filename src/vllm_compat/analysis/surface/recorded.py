"""Surfaces of published releases, as recorded in ``vllm_compat/data``.

``releases.json`` lists the releases in order, each with the file it was read from and that file's
SHA-256. ``surfaces/`` holds what they offer, one compressed text per part of vLLM: below a line
``@module`` one row per name, with the releases (as ranges of their numbers) in which the row holds
and the entry itself (see :mod:`vllm_compat.analysis.surface.entries`). A row that never changed stands
there once for all releases. Classes are taken apart into a header and one row per member.

Modules outside the parts that downstreams lean on (single models, layers, kernels) are recorded by
the names that they define only: of what is called or read there :meth:`RecordedSurface.tells` says that
it is not known.

``digests`` tells the source that the modules of the engine were read from, so that a module with the
same bytes elsewhere (an installed release, most of a nightly) need not be parsed again.
"""

from __future__ import annotations

import json
import lzma
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from vllm_compat.analysis.surface.entries import (
    AttributeEntry,
    ClassEntry,
    Entry,
    FunctionEntry,
    ImportEntry,
    Several,
    from_row,
    to_row,
)
from vllm_compat.analysis.surface.model import Parameter, ParameterKind
from vllm_compat.analysis.surface.static import StaticSurface
from vllm_compat.analysis.surface.things import Body
from vllm_compat.errors import UsageError

DATA = Path(__file__).resolve().parents[2] / "data"
FORMAT = 1

MODULES = "modules"
NAMES = "names"
DIGESTS = "digests"

# Stand-ins for the names of a module of which only the names are recorded, by their kind.
_STAND_INS: dict[str, Entry] = {
    "c": ClassEntry(("?",), (), {}, {}, "g"),
    "f": FunctionEntry(
        (
            Parameter("args", ParameterKind.VAR_POSITIONAL),
            Parameter("kwargs", ParameterKind.VAR_KEYWORD),
        )
    ),
    "a": AttributeEntry(),
    "i": AttributeEntry(),
}

_FILES = (
    "vllm.v1.worker.gpu",
    "vllm.v1.attention",
    "vllm.v1.core",
    "vllm.v1.engine",
    "vllm.v1.executor",
    "vllm.v1.worker",
    "vllm.distributed",
    "vllm.v1",
)
_SHALLOW = frozenset({"vllm.v1.worker.gpu", "vllm.distributed", "vllm.v1"})
"""Packages of which downstreams mostly use the modules right below: deeper ones are a file apart."""


def group_of(module: str) -> str:
    """Return the name of the file that holds a module: what is read together stands together."""
    parent = module.rpartition(".")[0]
    for package in _FILES:
        if parent == package:
            return package
        if parent.startswith(f"{package}."):
            return f"{package}.deeper" if package in _SHALLOW else package
    parts = module.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 else parts[0]


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


def digest_of(source: bytes, is_package: bool) -> str:
    """Return what a module's source is known by: eight hexadecimal digits.

    They tell a release's file from an edited one; nothing hangs on their being hard to forge.
    """
    from hashlib import blake2b

    return blake2b(source, digest_size=4, person=b"package" if is_package else b"module").hexdigest()


Row = tuple[int, str]  # releases, JSON


_END = re.compile(r"[.#\t]")


class Rows:
    """The rows of one module, looked up in its text: most of them nobody asks for.

    Rows are sorted by path, so that those of one path, and those below it, stand together.
    """

    def __init__(self, block: str) -> None:
        self._text = "\n" + block
        self._known: dict[str, tuple[Row, ...]] = {}

    def of(self, path: str) -> tuple[Row, ...]:
        """Return the rows of a path: a name, or below a class ``name.member``, ``name#0``."""
        if path not in self._known:
            self._known[path] = tuple(self._find(path))
        return self._known[path]

    def _find(self, path: str) -> Iterator[Row]:
        for rest in self._lines(f"\n{path}\t"):
            ranges, _, data = rest.partition("\t")
            yield mask_of(ranges), data

    def _lines(self, head: str) -> Iterator[str]:
        """Iterate over what follows ``head`` in the lines that begin so."""
        text = self._text
        at = text.find(head)
        while at >= 0 and text.startswith(head, at):
            end = text.find("\n", at + 1)
            yield text[at + len(head) : end]
            at = end

    def members(self, path: str) -> Iterator[str]:
        """Iterate over the names below a class, in any release."""
        return iter(dict.fromkeys(_END.split(rest, maxsplit=1)[0] for rest in self._lines(f"\n{path}.")))

    def names(self) -> Iterator[str]:
        """Iterate over the module's own names, in any release, its header aside."""
        lines = self._text[1:].splitlines()
        return filter(None, dict.fromkeys(_END.split(line, maxsplit=1)[0] for line in lines))


class View:
    """One release, and which others would have answered alike all that was asked so far.

    What a question's answer depends on are rows; those releases in which just the same rows hold
    answer the same. ``alike`` has a bit for each.
    """

    __slots__ = ("alike", "number")

    def __init__(self, number: int, releases: int) -> None:
        self.number = number
        self.alike = (1 << releases) - 1

    def holds(self, mask: int) -> bool:
        """Whether what holds in some releases holds in this one."""
        if mask >> self.number & 1:
            self.alike &= mask
            return True
        self.alike &= ~mask
        return False

    def row(self, rows: Iterable[Row]) -> str | None:
        """Return that of a path's rows which holds in this release."""
        found: str | None = None
        for mask, data in rows:
            if self.holds(mask):
                found = data
        return found


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
            raise UsageError(f"The record {folder / 'releases.json'} is damaged: {error}.") from error
        if found != FORMAT:
            raise UsageError(
                f"The record {folder / 'releases.json'} has format {found}; this vllm_compat reads "
                f"format {FORMAT}."
            )
        self._texts: dict[str, str] = {}
        self._defined: dict[str, list[tuple[str, int]]] = {}
        self._mentioned: dict[str, list[tuple[str, int]]] = {}
        self._rows: dict[str, Rows | None] = {}
        self._values: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}  # of rows that say all of an entry, by their JSON
        self._built_in: dict[str, int] = {}
        self._below: dict[str, int] = {}

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

    def rows(self, module: str) -> Rows | None:
        """Return a module's rows; None where it is not recorded in full."""
        if module not in self._rows:
            self._rows[module] = self._block(self.text(group_of(module)), module)
        return self._rows[module]

    def name_rows(self, module: str) -> Rows | None:
        """Return the rows of a module that is recorded by its names; None where it isn't."""
        return self._block(self.text(NAMES), module)

    @staticmethod
    def _block(text: str, module: str) -> Rows | None:
        head = f"@{module}\n"
        start = 0 if text.startswith(head) else text.find("\n" + head) + 1
        if not text.startswith(head, start):
            return None
        end = text.find("\n@", start)
        return Rows(text[start + len(head) : end + 1 if end >= 0 else len(text)])

    def number_of(self, module: str, digest: str) -> int | None:
        """Return a release whose fully recorded module has that digest, or None."""
        text = self.text(DIGESTS)
        head = f"{module}\t{digest}\t"
        start = 0 if text.startswith(head) else text.find("\n" + head) + 1
        if not text.startswith(head, start):
            return None
        end = text.find("\n", start)
        mask = mask_of(text[start + len(head) : end if end >= 0 else len(text)])
        return mask.bit_length() - 1

    def value(self, data: str) -> Any:
        """Return what a row's JSON says, read once."""
        if data not in self._values:
            self._values[data] = json.loads(data)
        return self._values[data]

    def modules_mask(self, module: str) -> int:
        """Return the releases that have a module."""
        ranges = self._module_ranges.get(module)
        return mask_of(ranges) if ranges else 0

    @cached_property
    def _module_ranges(self) -> dict[str, str]:
        parted = (line.partition("\t") for line in self.text(MODULES).splitlines())
        return {module: ranges for module, _, ranges in parted}

    @cached_property
    def _sorted_modules(self) -> list[str]:
        return sorted(self._module_ranges)

    def below_mask(self, package: str) -> int:
        """Return the releases that have modules below a name: a package, maybe a namespace one."""
        if package not in self._below:
            start = f"{package}."
            names = self._sorted_modules
            mask = 0
            for at in range(bisect_left(names, start), len(names)):
                if not names[at].startswith(start):
                    break
                mask |= mask_of(self._module_ranges[names[at]])
            self._below[package] = mask
        return self._below[package]

    def built_mask(self, module: str) -> int:
        """Return the releases whose build makes a module."""
        if module not in self._built_in:
            mask = 0
            for name, releases in self._built.items():
                if module == name or module.startswith(name + "."):
                    mask |= releases
            self._built_in[module] = mask
        return self._built_in[module]

    @cached_property
    def _built(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for number, release in enumerate(self.releases):
            for name in release["built"]:
                found[name] = found.get(name, 0) | 1 << number
        return found

    def module_names(self, number: int) -> Iterator[str]:
        """Iterate over the modules of one release."""
        for module, ranges in self._module_ranges.items():
            if mask_of(ranges) >> number & 1:
                yield module

    def defined(self, name: str) -> list[tuple[str, int]]:
        """Return where any release defines a top-level name, and which do."""
        if name not in self._defined:
            self._defined[name] = list(self._definitions(name))
        return self._defined[name]

    def mentioned(self, name: str) -> list[tuple[str, int]]:
        """Return the classes of any release whose header mentions a name, and which do."""
        if name not in self._mentioned:
            self._mentioned[name] = list(self._mentions(name))
        return self._mentioned[name]

    def _definitions(self, name: str) -> Iterator[tuple[str, int]]:
        """Iterate over where any release defines a name, and which do."""
        for group in self.groups():
            if group in (MODULES, DIGESTS):
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

    def _mentions(self, name: str) -> Iterator[tuple[str, int]]:
        """Iterate over the classes of any release whose header mentions a name."""
        # Anywhere in the header, since bases may hold brackets: who asks looks at the bases themselves.
        pattern = re.compile(rf'^(\w+)\t([\d,-]+)\t\["c",\[.*\b{re.escape(name)}\b', re.M)
        for group in self.groups():
            text = self.text(group) if group not in (MODULES, NAMES, DIGESTS) else ""
            for match in pattern.finditer(text) if name in text else ():
                module = self._module_at(text, match.start())
                yield f"{module}.{match.group(1)}", mask_of(match.group(2))

    @staticmethod
    def _module_at(text: str, at: int) -> str:
        """Return the module that a place in a part's text belongs to."""
        start = text.rfind("\n@", 0, at) + 2
        return text[max(start, 1) : text.index("\n", start)]


def split(name: str, entry: Entry) -> Iterator[tuple[str, str]]:
    """Take an entry apart into (path, JSON) rows: the reverse of :func:`_join`."""
    yield name, dump(to_row(entry))
    if isinstance(entry, ClassEntry):
        for member, inner in entry.members.items():
            yield from split(f"{name}.{member}", inner)
    elif isinstance(entry, Several) and not entry.only_attributes:
        for number, inner in enumerate(entry.entries):
            yield from split(f"{name}#{number}", inner)


class _Members(Mapping[str, Entry]):
    """A class's members in one release, put together one by one as they are asked for."""

    def __init__(self, store: Store, view: View, rows: Rows, path: str, order: list[str]) -> None:
        self._parts = store, view, rows
        self._path = path
        self._order = order
        self._made: dict[str, Entry | None] = {}

    def _entry(self, name: str) -> Entry | None:
        if name not in self._made:
            self._made[name] = _join(*self._parts, f"{self._path}.{name}")
        return self._made[name]

    @property
    def annotated(self) -> Sequence[str]:
        """The names that are declared with an annotation, in order: those that may be fields."""
        return self._order

    def __getitem__(self, name: str) -> Entry:
        entry = self._entry(name)
        if entry is None:
            raise KeyError(name)
        return entry

    def __iter__(self) -> Iterator[str]:
        # Fields in the order in which they are declared, then all else.
        order = dict.fromkeys(self._order)
        order.update(dict.fromkeys(self._parts[2].members(self._path)))
        return (name for name in order if self._entry(name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _join(store: Store, view: View, rows: Rows, path: str) -> Entry | None:
    """Put the rows of one release together to an entry."""
    row = view.row(rows.of(path))
    if row is None:
        return None
    known = store.entries.get(row)
    if known is not None:
        return known
    if row.startswith('["c"'):
        _, bases, decorators, keywords, flags, order = store.value(row)
        members = _Members(store, view, rows, path, order)
        return ClassEntry(tuple(bases), tuple(decorators), keywords, members, flags)
    if row.startswith('["u",') and isinstance(number := store.value(row)[1], int):
        parts = (_join(store, view, rows, f"{path}#{i}") for i in range(number))
        return Several(tuple(part for part in parts if part is not None))
    entry = store.entries[row] = from_row(json.loads(row))
    return entry


def dump(value: object) -> str:
    """Return compact JSON on one line."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


class RecordedBody:
    """A module of one release that is recorded in full."""

    def __init__(self, store: Store, view: View, rows: Rows) -> None:
        self._store = store
        self._view = view
        self._rows = rows
        self._made: dict[str, Entry | None] = {}

    def _head(self, part: int) -> Any:
        """Return a part of the module's header; releases with the same one are alike."""
        heads = [(mask, self._store.value(data)[part]) for mask, data in self._rows.of("")]
        own = next(value for mask, value in heads if mask >> self._view.number & 1)
        self._view.alike &= sum(mask for mask, value in heads if value == own)
        return own

    @cached_property
    def stars(self) -> list[str]:
        found: list[str] = self._head(0)
        return found

    @cached_property
    def dynamic(self) -> bool:
        return bool(self._head(1))

    @cached_property
    def exported(self) -> list[str] | None:
        found: list[str] | None = self._head(2)
        return found

    def may_have(self, name: str) -> bool:
        return self.dynamic

    def _there(self, name: str) -> bool:
        return self._view.row(self._rows.of(name)) is not None

    def names(self) -> list[str]:
        return [n for n in self._rows.names() if n[0] != "?" and self._there(n)]

    def typing_names(self) -> list[str]:
        return [n[1:] for n in self._rows.names() if n[0] == "?" and self._there(n)]

    def entry(self, name: str) -> Entry | None:
        return self._entry(name) if name and name[0] != "?" else None

    def typing_entry(self, name: str) -> Entry | None:
        return self._entry("?" + name)

    def _entry(self, name: str) -> Entry | None:
        if name not in self._made:
            self._made[name] = _join(self._store, self._view, self._rows, name)
        return self._made[name]


class _NamesBody:
    """A module of one release that is recorded by its names only, or not even by these."""

    exported: list[str] | None = None
    stars: tuple[str, ...] = ()

    def __init__(self, view: View, rows: Rows | None) -> None:
        self._view = view
        self._rows = rows
        self.dynamic = rows is None or view.row(rows.of("*")) is not None

    def may_have(self, name: str) -> bool:
        # What a module imports from outside vLLM is not recorded: a name that no release ever had
        # may be such a one.
        return self.dynamic or self._rows is None or not self._rows.of(name)

    def _kind(self, name: str) -> str | None:
        if self._rows is None or name in ("", "*"):
            return None
        return self._view.row(self._rows.of(name))

    def names(self) -> list[str]:
        return [n for n in self._rows.names() if self._kind(n)] if self._rows is not None else []

    def typing_names(self) -> list[str]:
        return []

    def entry(self, name: str) -> Entry | None:
        return _STAND_INS.get(self._kind(name) or "")

    def typing_entry(self, name: str) -> Entry | None:
        return None


@lru_cache(maxsize=4)
def store(folder: Path = DATA) -> Store:
    """Return the recorded data of a folder, read once."""
    return Store(folder)


def recorded_versions(folder: Path = DATA) -> tuple[str, ...]:
    """Return the versions of the recorded releases, oldest first."""
    return tuple(release["version"] for release in store(folder).releases)


def recognized(module: str, source: bytes, is_package: bool, folder: Path = DATA) -> Body | None:
    """Return what is recorded of a module of vLLM with just that source, or None."""
    try:
        known = store(folder)
        number = known.number_of(module, digest_of(source, is_package))
        rows = known.rows(module) if number is not None else None
    except UsageError:
        return None  # a damaged record: the source is there to be parsed
    if number is None or rows is None:
        return None
    return RecordedBody(known, View(number, len(known.releases)), rows)


def _parsed(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:
        return None


def closest_record(version: str, folder: Path = DATA) -> str | None:
    """Return the recorded version that a version string means, local parts aside, or None."""
    known = recorded_versions(folder)
    if version in known:
        return version
    wanted = _parsed(version)
    for recorded in known if wanted else ():
        own = _parsed(recorded)
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
                f"There is no record of vLLM {version}; recorded are {versions[0]} to {versions[-1]}:"
                f" get its wheel (`pip download --no-deps vllm=={version}`) and name the file instead."
            )
        self._number = self._store.numbers[known]
        release = self._store.releases[self._number]
        self.version = known
        self.distribution = str(release["distribution"])
        self.origin = f"record of {release['file']}"
        self.sha256 = str(release["sha256"])
        self._view = View(self._number, len(self._store.releases))
        self._bodies: dict[str, Body | None] = {}
        self._has: dict[str, bool] = {}
        self._opaque: dict[str, bool] = {}

    @property
    def alike(self) -> tuple[str, ...]:
        """The releases, this one among them, that answer alike all that was asked so far."""
        releases = self._store.releases
        return tuple(r["version"] for i, r in enumerate(releases) if self._view.alike >> i & 1)

    def _is_opaque(self, module: str) -> bool:
        if module not in self._opaque:
            self._opaque[module] = self._view.holds(self._store.built_mask(module))
        return self._opaque[module]

    def _body(self, module: str) -> Body | None:
        if module not in self._bodies:
            self._bodies[module] = self._load(module)
        return self._bodies[module]

    def _load(self, module: str) -> Body | None:
        if not self._view.holds(self._store.modules_mask(module)):
            return None
        rows = self._store.rows(module)
        if rows is not None and self._view.holds(sum(mask for mask, _ in rows.of(""))):
            return RecordedBody(self._store, self._view, rows)
        return _NamesBody(self._view, self._store.name_rows(module))

    def has_module(self, name: str) -> bool:
        """Whether the release has the module, a namespace package of that name, or builds it."""
        if name not in self._has:
            self._has[name] = self._ours(name) and (
                self._view.holds(self._store.modules_mask(name))
                or self._view.holds(self._store.below_mask(name))
                or self._is_opaque(name)
            )
        return self._has[name]

    def tells(self, path: str, by_name: bool = False) -> bool:
        """Whether a path leads into modules recorded in full, re-exports followed.

        ``by_name``: or to a name at the top of another one, of which it is recorded whether it is there.
        """
        names = path.replace("()", "").replace("[]", "").split(".")
        start = 1
        while start < len(names) and self.has_module(".".join(names[: start + 1])):
            start += 1
        module = ".".join(names[:start])
        body = self._body(module)
        if start == len(names) or body is None:
            return True
        name, enough = names[start], by_name and start + 1 == len(names)
        if isinstance(body, _NamesBody):
            return (enough and body.entry(name) is not None) or not (
                body.entry(name) is not None or body.may_have(name)
            )
        thing = self._lookup(module, name)
        entry = body.entry(name)
        home = thing.module if thing is not None else ""
        if not home and isinstance(entry, ImportEntry):
            home = entry.module  # nothing is known of what is imported
        if enough and thing is not None and thing.path:
            return True
        return not (self._ours(home) and isinstance(self._body(home), _NamesBody))

    def modules(self) -> Iterator[str]:
        """Iterate over the dotted names of all modules with source."""
        self._view.alike &= 1 << self._number
        return self._store.module_names(self._number)

    def _naming(self, name: str) -> Iterator[str]:
        found = [p for p, mask in self._store.mentioned(name) if self._view.holds(mask)]
        return iter(found)

    def find(self, name: str) -> tuple[str, ...]:
        """Return the dotted paths of every top-level definition called ``name``, sorted."""
        found = {p for p, mask in self._store.defined(name) if self._view.holds(mask)}
        return tuple(sorted(found))
