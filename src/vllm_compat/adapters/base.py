"""What an adapter is: a header that a person can read, a need that a program decides, a patch."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_compat.contract import CallSite, Contract
from vllm_compat.drift import Finding, FindingKind
from vllm_compat.environment import Environment
from vllm_compat.surface.model import Surface

if TYPE_CHECKING:
    from vllm_compat.patching import Transaction
    from vllm_compat.plan import Plan


@dataclass(frozen=True)
class Roles:
    """The downstream's own names that adapters patch, read from the contract.

    ``generator`` and ``extension`` are written ``module:Class``; empty where the downstream has
    none.
    """

    package: str
    generator: str = ""
    extension: str = ""

    @property
    def generator_module(self) -> str:
        """The module that holds the generator."""
        return self.generator.partition(":")[0]

    @property
    def extension_module(self) -> str:
        """The module that holds the worker extension."""
        return self.extension.partition(":")[0]


@dataclass(frozen=True)
class Case:
    """One (contract, surface, environment) with the findings between the first two."""

    contract: Contract
    surface: Surface
    environment: Environment
    findings: tuple[Finding, ...]
    roles: Roles

    def found(self, kind: FindingKind, symbol: str, name: str | None = None) -> tuple[Finding, ...]:
        """Return the findings of that kind about that symbol (and parameter)."""
        return tuple(
            f
            for f in self.findings
            if f.kind is kind and f.symbol == symbol and (name is None or f.name == name)
        )

    def calls(self, symbol: str) -> tuple[CallSite, ...]:
        """Return the downstream's calls of a vLLM symbol."""
        return self.contract.calls(symbol)


@dataclass(frozen=True)
class Need:
    """Why an adapter is in a plan: one sentence, and the findings that it repairs.

    ``targets`` are given where the place of the patch depends on the case.
    """

    reason: str
    findings: tuple[Finding, ...] = field(default=())
    targets: tuple[str, ...] = ()


class Adapter(ABC):
    """The smallest reversible change that makes one drift disappear.

    The class attributes are the register: the documentation and ``vllm-compat adapters`` are
    generated from them.
    """

    name: ClassVar[str]
    """Area and drift, ``scheduler.block_size``."""
    target: ClassVar[str]
    """What is patched, as vLLM or the downstream names it."""
    vllm: ClassVar[str]
    """The vLLM releases that are expected to need it, a packaging specifier."""
    downstream: ClassVar[str]
    """The downstream releases that are expected to need it, a packaging specifier."""
    changed: ClassVar[str]
    """What changed upstream, in which release and public pull request."""
    relies: ClassVar[str]
    """What the downstream does."""
    does: ClassVar[str]
    """What the adapter does about it."""
    until: ClassVar[str]
    """When it can go."""
    processes: ClassVar[frozenset[str]] = frozenset({"driver"})
    """Where it is in force: ``driver``, ``worker`` or both."""
    derived: ClassVar[bool] = False
    """Whether it follows from any surface by itself: a keyword that is gone and whose meaning is known
    to be elsewhere, a required argument whose value is known, a name that has moved."""
    shown_by: ClassVar[str]
    """The named run that fails, or gives wrong rows, without it."""

    @abstractmethod
    def need(self, case: Case) -> Need | None:
        """Return why this case needs the adapter, or None. Pure."""

    @abstractmethod
    def install(self, transaction: Transaction, plan: Plan) -> None:
        """Enlist the patches of this adapter."""


def lacks(parameter: str) -> Callable[[Any], str | None]:
    """Return a check that the live callable takes no such keyword, as the plan read from source."""

    def confirm(live: Any) -> str | None:
        parameters = inspect.signature(live).parameters.values()
        accepted = any(p.name == parameter or p.kind is p.VAR_KEYWORD for p in parameters)
        return f"it takes {parameter}, and the plan says that it does not" if accepted else None

    return confirm


def takes(parameter: str) -> Callable[[Any], str | None]:
    """Return a check that the live callable takes such a keyword, as the plan read from source."""

    def confirm(live: Any) -> str | None:
        missing = lacks(parameter)(live) is None
        return f"it takes no {parameter}, and the plan says that it does" if missing else None

    return confirm
