"""What an adapter is: a header that a person can read, a need that a program decides, a patch."""

from __future__ import annotations

import inspect
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_compat.analysis.drift import FindingKind
from vllm_compat.analysis.planner import Case, Need

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction, Wrapper


__all__ = [
    "Adapter",
    "Case",
    "DropsKeyword",
    "Need",
    "NotOn",
    "SuppliesKeyword",
    "dropping",
    "lacks",
    "supplying",
    "takes",
]


@dataclass(frozen=True)
class NotOn:
    """A device that does not need an adapter, on these releases (packaging specifiers; empty: all)."""

    device: str
    vllm: str = ""
    downstream: str = ""

    def __str__(self) -> str:
        ranges = (("vLLM", self.vllm), ("speculators", self.downstream))
        return ", ".join([self.device, *(f"{name} {given}" for name, given in ranges if given)])


class Adapter(ABC):
    """The smallest reversible change that makes one drift disappear.

    The class attributes are the register: the documentation, ``vllm-compat adapters`` and every table
    of adapters elsewhere (the planner's order, the matrix, the tests) are made from them. A new adapter
    is a class in the module of its area, a test of it, and a record or test that shows it.
    """

    name: ClassVar[str]
    """Area and drift, ``scheduler.block_size``; the area is the module's name."""
    order: ClassVar[int]
    """Its place in a plan, a number of its own: patches go in from the smallest number on."""
    targets: ClassVar[tuple[str, ...]]
    """What :meth:`install` enlists, ``module:Class.attribute``, and nothing else. ``{generator}``,
    ``{generator_module}`` and ``{extension}`` are the downstream's own names; another name in braces
    stands for what only the case tells (:meth:`told`)."""
    vllm: ClassVar[str]
    """The vLLM releases that are expected to need it, a packaging specifier."""
    downstream: ClassVar[str]
    """The downstream releases that are expected to need it, a packaging specifier."""
    not_on: ClassVar[tuple[NotOn, ...]] = ()
    """Devices that do not need it, although both releases are in its ranges."""
    decided_by: ClassVar[tuple[str, ...]] = ()
    """What decides besides vLLM, the downstream's calls of it and the device, so that no recorded
    surface tells: ``transformers``, ``preprocessing`` or ``trainer`` (`analysis.facts`), or the
    ``engine`` that is asked for."""
    excluded_by: ClassVar[tuple[str, ...]] = ()
    """Adapters which, where they are needed, do what this one does; the planner then leaves it out."""
    serves: ClassVar[str] = ""
    """The engine that it is (`analysis.environment.ENGINES`); empty for all that is none."""
    changed: ClassVar[str]
    """What changed upstream, and in which release."""
    pull_requests: ClassVar[tuple[str, ...]] = ()
    """The public threads about it, ``vllm#34435``."""
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
    stock_starts_without: ClassVar[bool] = False
    """Whether stock runs at all without it: then it is left out where stock's speed is measured."""
    shown_by: ClassVar[str]
    """The named run that fails, or gives wrong rows, without it."""
    witnesses: ClassVar[tuple[str, ...]] = ()
    """Tiny models on one of which a run without it fails; empty: any, Llama among them."""
    shown_in: ClassVar[tuple[str, ...]] = ()
    """The test or record that shows it, for a step of the pipeline that no cell of the matrix takes."""

    @abstractmethod
    def need(self, case: Case) -> Need | None:
        """Return why this case needs the adapter, or None. Pure, and asks no other adapter."""

    @abstractmethod
    def install(self, transaction: Transaction, plan: Plan) -> None:
        """Enlist the patches of this adapter: one for each of :meth:`targets_of`."""

    def told(self, plan: Plan) -> tuple[str, ...]:
        """Return the targets that only the case tells: those that :meth:`need` has put into the plan."""
        return plan.step(self.name).targets

    def targets_of(self, plan: Plan) -> tuple[str, ...]:
        """Return what is patched under this plan: the header's targets, names filled in."""
        roles = {
            "generator": plan.roles.generator,
            "generator_module": plan.roles.generator_module,
            "extension": plan.roles.extension,
        }
        found: list[str] = []
        for target in self.targets:
            pieces = list(string.Formatter().parse(target))
            if {field for _, field, _, _ in pieces if field} <= roles.keys():
                found.append(target.format(**roles))
                continue
            pattern = "".join(re.escape(text) + (".+" if field else "") for text, field, _, _ in pieces)
            found += [told for told in self.told(plan) if re.fullmatch(pattern, told)]
        return tuple(found)


class _KeywordAdapter(Adapter):
    """An adapter about one keyword of one callable, needed wherever that finding is there."""

    symbol: ClassVar[str]
    """The callable, as vLLM names it."""
    keyword: ClassVar[str]
    """Its parameter."""
    reason: ClassVar[str]
    """Why a plan has the adapter, one sentence."""
    kind: ClassVar[FindingKind]

    def is_ours(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is the downstream's: an engine of somebody else's is left alone."""
        return True

    def need(self, case: Case) -> Need | None:
        found = case.found(self.kind, self.symbol, self.keyword)
        return Need(self.reason, found) if found else None


class DropsKeyword(_KeywordAdapter):
    """Leaves out a keyword that a callable no longer takes."""

    kind = FindingKind.PARAMETER_REMOVED

    def install(self, transaction: Transaction, plan: Plan) -> None:
        for target in self.targets_of(plan):
            transaction.wrap(target, dropping(self.keyword, self.is_ours), confirm=lacks(self.keyword))


class SuppliesKeyword(_KeywordAdapter):
    """Gives a keyword that a callable has come to require."""

    value: ClassVar[Any]
    """What is given where the caller gave nothing."""
    kind = FindingKind.PARAMETER_REQUIRED

    def install(self, transaction: Transaction, plan: Plan) -> None:
        for target in self.targets_of(plan):
            transaction.wrap(
                target, supplying(self.keyword, self.value, self.is_ours), confirm=takes(self.keyword)
            )


When = Callable[[tuple[Any, ...], dict[str, Any]], bool]
"""Tells from a call's arguments whether it is one to change."""


def dropping(keyword: str, when: When | None = None) -> Wrapper:
    """Return a wrapper that leaves a keyword out."""

    def drop(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if when is None or when(args, kwargs):
            kwargs.pop(keyword, None)
        return wrapped(*args, **kwargs)

    return drop


def supplying(keyword: str, value: Any, when: When | None = None) -> Wrapper:
    """Return a wrapper that gives a keyword where the caller gave nothing."""

    def supply(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if when is None or when(args, kwargs):
            kwargs.setdefault(keyword, value)
        return wrapped(*args, **kwargs)

    return supply


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
