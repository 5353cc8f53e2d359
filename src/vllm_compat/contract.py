"""The downstream's source → its call sites of vLLM. Pure: nothing is imported, only read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_compat.errors import UsageError

if TYPE_CHECKING:
    from vllm_compat.surface.files import PackageFiles


class SiteKind(str, Enum):
    """How a call site uses vLLM."""

    IMPORT = "import"
    CALL = "call"
    ATTRIBUTE = "attribute"
    SUBCLASS = "subclass"
    HOOK = "hook"


@dataclass(frozen=True)
class Use:
    """What the downstream does with the result of a call.

    ``how`` is one of ``subscript`` (``detail``: the index's source), ``argument`` (``detail``:
    ``callee[position or keyword]``), ``attribute`` (``detail``: its name), ``truth``, ``contains``,
    ``iterate`` (``detail``: the targets' source), ``assigned`` (``detail``: the dotted target),
    ``compared`` (``detail``: operator and operand), ``returned``, ``ignored``.
    """

    how: str
    detail: str = ""


@dataclass(frozen=True)
class CallSite:
    """One use of vLLM in the downstream's source.

    ``symbol`` is the dotted vLLM path as the downstream's names say (``vllm.v1.request.Request``,
    ``vllm.v1.executor.multiproc_executor.MultiprocExecutor.collective_rpc``).
    ``f().x`` is the attribute ``x`` of what ``f`` returns, ``f()[]`` an item of it; instances are
    written as their class. ``positional`` and ``keywords`` hold the source text of the arguments;
    ``star`` whether ``*`` or ``**`` arguments hide some. ``within`` is the dotted function the site
    stands in. ``optional``: the downstream copes where it fails, by ``try``, ``hasattr`` or a
    version test (``guard`` holds that test's source). ``unless`` names symbols whose presence means
    that this site never runs (what a ``try`` imports before falling back to this), ``needs`` those
    whose absence does (what a ``hasattr`` asks for). ``store``: the
    name is written to, as in a monkeypatch. ``any_of`` names what the object may be instead: it is
    enough that one of them fits. ``unbound``: a method is called on its class, so that the first
    argument is the instance. ``is_module``: an import that names a module as such. ``arms`` are the
    branches it stands in, as
    ``line:then`` or ``line:else``. A ``subclass``
    site's symbol is the base; a ``hook``
    site is a method of a worker extension, its symbol the worker's name that must stay free.
    """

    kind: SiteKind
    symbol: str
    module: str
    file: str
    line: int
    within: str = ""
    positional: tuple[str, ...] = ()
    keywords: tuple[tuple[str, str], ...] = ()
    star: bool = False
    uses: tuple[Use, ...] = ()
    optional: bool = False  # inside ``try: … except ImportError`` or a hasattr test
    guard: str = ""
    unless: tuple[str, ...] = ()
    store: bool = False
    any_of: tuple[str, ...] = ()
    unbound: bool = False
    needs: tuple[str, ...] = ()
    is_module: bool = False
    arms: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """``file:line`` for people."""
        return f"{self.file}:{self.line}"

    def keyword(self, name: str) -> str | None:
        """Return the source text given for a keyword, or None."""
        return dict(self.keywords).get(name)


@dataclass(frozen=True)
class Contract:
    """All call sites of one downstream release.

    ``name`` and ``version`` are the distribution's; ``package`` its import name; ``root`` where it
    was read. ``sites`` is every use of vLLM. ``other_calls`` are the calls of anything else in the
    modules that use vLLM, for drifts of behaviour that no signature shows: their ``symbol`` is the
    callee's source, imported names written out (``torch.cuda.mem_get_info``). ``modules`` maps each
    module that uses vLLM, and each that those import inside the package, to what it imports there.
    ``written`` names the attributes that it gives to objects other than ``self``.
    """

    name: str
    version: str
    package: str
    root: str
    sites: tuple[CallSite, ...] = ()
    other_calls: tuple[CallSite, ...] = field(default=())
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    written: tuple[str, ...] = ()

    def calls(self, symbol: str) -> tuple[CallSite, ...]:
        """Return the calls of that vLLM symbol."""
        return tuple(s for s in self.sites if s.kind is SiteKind.CALL and s.symbol == symbol)

    def others(self, callee: str) -> tuple[CallSite, ...]:
        """Return the calls of something that is not vLLM's, by the callee's source text."""
        return tuple(s for s in self.other_calls if s.symbol == callee)


def read_contract(target: str | Path | None = None, *, python: str | None = None) -> Contract:
    """Read a downstream's call sites of vLLM from its source, without importing it.

    ``target`` is a path (the package's folder, one that holds it, a wheel or an sdist) or the name
    of an installed distribution; by default ``speculators``. ``python`` names another interpreter
    whose environment is looked in. Raises :class:`~vllm_compat.errors.UsageError` in one sentence.
    """
    return contract_of(find_downstream(target, python=python))


def find_downstream(target: str | Path | None = None, *, python: str | None = None) -> PackageFiles:
    """Find the source that :func:`read_contract` reads."""
    from vllm_compat.surface.files import package_at

    if target is None:
        return _installed("speculators", python)
    if not str(target):
        raise UsageError("The name of a downstream is empty: name a distribution, a folder or a file.")
    path = Path(target).expanduser()
    looks_like_path = isinstance(target, Path) or "/" in str(target) or "\\" in str(target)
    if looks_like_path or str(target).endswith((".whl", ".gz", ".zip")):
        return package_at(path)
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", str(target)) and not path.exists():
        raise UsageError(
            f"There is no downstream {str(target)!r}: name an installed distribution without a version"
            " (speculators), a folder, a wheel or an sdist (`pip download --no-deps` fetches one)."
        )
    try:
        return _installed(str(target), python)
    except UsageError:
        if path.exists():
            return package_at(path)
        raise


def read_installed(
    name: str = "speculators", path: str | Path | None = None, *, python: str | None = None
) -> Contract:
    """Read the contract of a distribution that is installed, or lies in the folder ``path``.

    Raises :class:`~vllm_compat.errors.UsageError` where it isn't there.
    """
    from vllm_compat.surface.files import import_name, package_at

    if path is not None:
        return contract_of(package_at(Path(path), import_name(name)))
    return contract_of(_installed(name, python))


def _installed(name: str, python: str | None) -> PackageFiles:
    from vllm_compat.surface.files import import_name, installed_package

    return installed_package(import_name(name), distribution=name, python=python)


def contract_of(files: PackageFiles) -> Contract:
    """Read the contract of a package's source."""
    from vllm_compat.callsites import read_package

    return read_package(files)
