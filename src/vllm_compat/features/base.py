"""What a feature is: a header that a person can read, and patches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction


class Feature(ABC):
    """A change of behaviour that no drift asks for; it can be switched off by its name.

    The class attributes are its part of the register.
    """

    name: ClassVar[str]
    """What it is called, one word: ``atomic_save``."""
    does: ClassVar[str]
    """What is other than without it."""
    why: ClassVar[str]
    """What goes wrong without it."""
    targets: ClassVar[tuple[str, ...]]
    """What is patched."""
    needs_launcher: ClassVar[bool] = False
    """Whether it is in force under ``vllm-compat run`` only."""
    beneath_checks: ClassVar[bool] = False
    """Whether it goes in before the checks, so that it is in force in each batch that they ask for."""
    processes: ClassVar[frozenset[str]] = frozenset({"driver"})
    """Where it is in force: ``driver``, ``worker`` or both."""

    def applies(self, plan: Plan) -> bool:
        """Whether there is anything to do for this plan in this environment."""
        return bool(plan.roles.generator)

    @abstractmethod
    def install(self, transaction: Transaction, plan: Plan, role: str) -> None:
        """Enlist the patches of this feature, in a process of this role."""


def generate_rest(
    wrapped: Any, rest: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return the results of ``generate()`` for those prompts of a call that a feature does not answer.

    ``wrapped`` is what the feature stands around, ``args`` and ``kwargs`` what the caller has given: all
    of it but the prompts is handed on.
    """
    if args:
        return wrapped(rest, *args[1:], **kwargs)
    return wrapped(**{**kwargs, "token_ids": rest})
