"""A surface read from Python source: a checkout, ``site-packages``, a wheel or an sdist.

Modules are parsed when a question needs them, and never imported. Compiled modules, and what the
build writes (``vllm._C``, ``vllm.vllm_flash_attn``, …), have no source in a checkout or an sdist;
they count as there, with any name, where ``setup.py`` announces them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_compat.analysis.surface.entries import ImportEntry, definitions
from vllm_compat.analysis.surface.files import FolderTree, PackageFiles, TarTree, package_at
from vllm_compat.analysis.surface.static import StaticSurface
from vllm_compat.analysis.surface.things import Body
from vllm_compat.errors import UsageError

if TYPE_CHECKING:
    from vllm_compat.analysis.surface.modules import ModuleSyntax

# Written by the build from outside vLLM's own tree, without an entry of its own in setup.py.
_BUILT = ("_version", "commit_id", "vllm_flash_attn", "third_party", "grpc")


class SourceSurface(StaticSurface):
    """What the vLLM in a tree of files offers."""

    def __init__(self, files: PackageFiles) -> None:
        super().__init__()
        self.files = files
        self.package = files.package
        self.version = files.version
        self.distribution = files.distribution
        self.origin = files.origin
        self._found: dict[str, tuple[str, ...]] = {}
        self._bodies: dict[str, Body | None] = {}
        self._has: dict[str, bool] = {}

    @classmethod
    def at(cls, path: str | Path, package: str = "vllm") -> SourceSurface:
        """Read the surface of a folder, wheel or sdist.

        Raises :class:`~vllm_compat.errors.UsageError` where there is no such package.
        """
        return cls(package_at(Path(path), package))

    @cached_property
    def built(self) -> frozenset[str]:
        """Modules that the build adds to what a checkout or an sdist holds."""
        tree = self.files.tree
        parent = self.files.folder.rpartition("/")[0]
        setup = tree.read(f"{parent}/setup.py" if parent else "setup.py")
        if setup is None:
            return frozenset()
        names = {f"{self.package}.{name}" for name in _BUILT}
        pattern = rb"name=['\"](" + self.package.encode() + rb"(?:\.\w+)+)['\"]"
        names.update(m.decode() for m in re.findall(pattern, setup))
        return frozenset(names)

    def _is_opaque(self, module: str) -> bool:
        if self.files.is_compiled(module):
            return True
        return any(module == name or module.startswith(name + ".") for name in self.built)

    def _body(self, module: str) -> Body | None:
        if module not in self._bodies:
            self._bodies[module] = self._recorded(module) or self.parse(module)
        return self._bodies[module]

    def _recorded(self, module: str) -> Body | None:
        """Return what is recorded of a module that has the bytes of some release's."""
        from vllm_compat.analysis.surface.recorded import recognized

        found = self.files.locate(module) if self.package == "vllm" else None
        source = self.files.tree.read(found[0]) if found else None
        if found is None or source is None:
            return None
        return recognized(module, source, found[1])

    def parse(self, module: str) -> ModuleSyntax | None:
        """Parse a module afresh; None where it has no source.

        Raises :class:`~vllm_compat.errors.UsageError` on a syntax error.
        """
        from vllm_compat.analysis.surface.modules import ModuleSyntax

        found = self.files.locate(module)
        if found is None:
            return None
        path, is_package = found
        source = self.files.tree.read(path)
        if source is None:
            return None
        try:
            return ModuleSyntax(source, module, is_package, path)
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise UsageError(
                f"{self.files.file(module)}{line} in {self.origin} is not valid Python: "
                f"{error.msg if isinstance(error, SyntaxError) else error}."
            ) from error

    def has_module(self, name: str) -> bool:
        """Whether the module has source, is compiled, or is made by the build."""
        if name not in self._has:
            self._has[name] = self._ours(name) and (
                self.files.locate(name) is not None
                or self.files.has_module(name)
                or self._is_opaque(name)
            )
        return self._has[name]

    def modules(self) -> Iterator[str]:
        """Iterate over the dotted names of all modules with source."""
        return self.files.modules()

    @cached_property
    def _texts(self) -> list[tuple[str, bytes]]:
        return list(self.files.texts())  # tens of MB, read once for all names that have moved

    def find(self, name: str) -> tuple[str, ...]:
        """Return the dotted paths of every top-level definition called ``name``, sorted."""
        if name not in self._found:
            self._found[name] = self._as_recorded(name) or self._find(name)
        return self._found[name]

    def _as_recorded(self, name: str) -> tuple[str, ...]:
        """Return where this release's record has the name, if the source has it in all these places.

        Otherwise nothing: thousands of files, which may lie on a slow disk, must be searched.
        """
        from vllm_compat.analysis.surface.recorded import RecordedSurface, closest_record

        recorded = closest_record(self.version) if self.package == "vllm" else None
        if recorded is None:
            return ()
        places = RecordedSurface(recorded).find(name)
        return places if all(self._defines(*place.rsplit(".", 1)) for place in places) else ()

    def _defines(self, module: str, name: str) -> bool:
        """Whether a module defines a name, and does not only import it."""
        body = self._body(module)
        entry = body.entry(name) if body is not None else None
        return any(not isinstance(e, ImportEntry) for e in definitions(entry))

    def _find(self, name: str) -> tuple[str, ...]:
        # Files are searched as text first: parsing all of them would take half a minute.
        word = re.escape(name).encode()
        pattern = re.compile(
            rb"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+" + word + rb"\b|^[ \t]*" + word + rb"\s*[:=]",
            re.MULTILINE,
        )
        found = []
        for module, text in self._texts:
            if name.encode() in text and pattern.search(text) and self._defines(module, name):
                found.append(f"{module}.{name}")
        return tuple(sorted(found))

    def _naming(self, name: str) -> Iterator[str]:
        pattern = re.compile(rb"^class[ \t]+(\w+)[ \t]*\([^)]*\b" + name.encode() + rb"\b", re.MULTILINE)
        for module, text in self._texts:
            if name.encode() in text:
                yield from (f"{module}.{m.decode()}" for m in pattern.findall(text))

    def stamps(self) -> tuple[object, ...]:
        """Return the stamps of all files that answers may depend on, as they are when first asked."""
        return self._stamps

    @cached_property
    def _stamps(self) -> tuple[object, ...]:
        from vllm_compat.analysis.cache import stamp

        tree, files = self.files.tree, self.files
        told = (self.version, self.distribution, self.origin, files.folder)
        if not isinstance(tree, FolderTree):
            return (*told, *map(stamp, tree.sources(files.folder)))
        kept = (path for path in tree.files(files.folder) if path.endswith((".py", ".so", ".pyd")))
        paths = (f"{tree.root}/{path}" for path in (f"{files.folder}/../setup.py", *kept))
        return (*told, *map(stamp, paths))

    def digest(self) -> str:
        """Return the SHA-256 of the file, or of a folder's source."""
        return self.files.tree.digest()

    @property
    def is_archive(self) -> bool:
        """Whether the surface was read from one file."""
        return not isinstance(self.files.tree, FolderTree)

    @property
    def is_sdist(self) -> bool:
        """Whether that file is a source distribution."""
        return isinstance(self.files.tree, TarTree)
