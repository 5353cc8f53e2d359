"""The downstream's source → its call sites of vLLM. Pure: nothing is imported, only read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property


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
        return self._calls.get(symbol, ())

    @cached_property
    def _calls(self) -> dict[str, tuple[CallSite, ...]]:
        found: dict[str, list[CallSite]] = {}
        for site in self.sites:
            if site.kind is SiteKind.CALL:
                found.setdefault(site.symbol, []).append(site)
        return {symbol: tuple(sites) for symbol, sites in found.items()}

    def others(self, callee: str) -> tuple[CallSite, ...]:
        """Return the calls of something that is not vLLM's, by the callee's source text."""
        return tuple(s for s in self.other_calls if s.symbol == callee)
