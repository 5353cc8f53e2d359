"""What an adapter is: a header that a person can read, a need that a program decides, a patch."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_compat.analysis.planner import Case, Need

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction


__all__ = ["Adapter", "Case", "Need", "lacks", "takes"]


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
