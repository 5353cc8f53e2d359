"""What ``check`` has read before, kept in the user's cache folder.

A speed-up that nothing depends on: what is kept is found by the size, times and inode of every file
that it was read from and by vllm_compat's own source, so that a change of any of them is a miss; a
record that is cut short, damaged, somebody else's or from another version is a miss as well, and a
folder that can't be written to is left alone. Records hold JSON and run nothing. ``apply()`` never
looks here.

The folder is ``$VLLM_COMPAT_CACHE``, else ``$XDG_CACHE_HOME/vllm_compat/check`` or
``~/.cache/vllm_compat/check``; ``VLLM_COMPAT_CACHE=off`` and ``check --no-cache`` do without.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

VARIABLE = "VLLM_COMPAT_CACHE"
KEPT = 256
"""How many records are kept; the oldest go first."""

T = TypeVar("T")
_BAD = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)


def cache_folder() -> Path | None:
    """Return the folder that the environment names, or the user's own; None where it is off."""
    named = os.environ.get(VARIABLE, "")
    if named.lower() in ("off", "0", "no", "false"):
        return None
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")
    if not os.path.isabs(base):
        base = os.path.join(home, ".cache")
    return Path(base, "vllm_compat", "check") if os.path.isabs(home) else None


def stamp(path: str | Path) -> tuple[object, ...]:
    """Return what changes when a file does; a missing file has a stamp too."""
    try:
        found = os.stat(path)
    except OSError:
        return (str(path), None)
    return (str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


class Memory:
    """Records in one folder; without a folder everything is made anew."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @cached_property
    def _code(self) -> str:
        """Our own source and records, the interpreter's version: what answers also depend on."""
        root = Path(__file__).parents[1]
        parts: list[object] = [sys.version]
        analysis = (
            "analysis",
            "analysis/callsites",
            "analysis/drift",
            "analysis/serving",
            "analysis/surface",
        )
        commands = ("commands", "commands/checking")
        rooms = ("", *analysis, "adapters", *commands, "data", "data/surfaces")
        for folder in (root / room for room in rooms):
            with os.scandir(folder) as found:
                names = sorted(e.name for e in found if e.name.endswith((".py", ".json", ".xz")))
            parts += [stamp(folder / name) for name in names]
        return repr(parts)

    @property
    def on(self) -> bool:
        """Whether anything is kept."""
        return self._usable

    @cached_property
    def _usable(self) -> bool:
        """Whether the folder is there, or can be made, and is this user's alone to write to."""
        if self._folder is None:
            return False
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = os.stat(self._folder)
        except OSError:
            return False
        mine = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
        return mine and not found.st_mode & 0o022

    def recall(
        self,
        kind: str,
        key: Iterable[object],
        make: Callable[[], T],
        *,
        pack: Callable[[T], Any],
        unpack: Callable[[Any], T],
    ) -> T:
        """Return what ``make`` returns, from a record of the same key where there is one.

        ``pack`` turns it into what JSON can hold, ``unpack`` back. What ``make`` raises is raised,
        and nothing is kept of it.
        """
        if not self._usable:
            return make()
        assert self._folder is not None
        path = self._folder / f"{kind}-{_digest(repr((self._code, list(key))))}.json"
        try:
            return unpack(_read(path))
        except _BAD:
            pass
        made = make()
        with contextlib.suppress(*_BAD):
            self._write(path, pack(made))
        return made

    def _write(self, path: Path, value: Any) -> None:
        import json

        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        partial = path.with_name(f".{path.name}.{os.getpid()}.{time.time_ns()}")
        try:
            with open(partial, "x", encoding="utf-8") as file:
                file.write(f"{_digest(text)}\n{text}")
            os.replace(partial, path)  # whole, or not at all: others may read and write it now
        finally:
            partial.unlink(missing_ok=True)
        self._prune()

    def _prune(self) -> None:
        assert self._folder is not None
        with os.scandir(self._folder) as entries:
            found = [(entry.stat().st_mtime_ns, entry.path) for entry in entries if entry.is_file()]
        for _, old in sorted(found)[: max(0, len(found) - KEPT)]:
            os.unlink(old)


def _read(path: Path) -> Any:
    import json

    digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    if digest != _digest(text):
        raise ValueError("damaged")
    return json.loads(text)


def _digest(text: str) -> str:
    from hashlib import blake2b

    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
