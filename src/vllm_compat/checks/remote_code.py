"""No code that a model brings is run, where the user has switched it off (``--no-remote-code``).

transformers imports such code in one place, whoever has asked for it and whatever trust was given; that
place refuses, in every process of the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_compat.errors import GuardError

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction

SWITCH = "remote_code"
"""What switches it off among ``apply(without=…)``."""

OWNER = "check: remote code"
PLACE = "transformers.dynamic_module_utils:get_class_in_module"


def install(transaction: Transaction, plan: Plan) -> None:
    """Enlist the refusal where the user has asked for it."""
    if SWITCH in plan.switched_off:
        transaction.owned_by(OWNER).wrap(PLACE, refuse)


def refuse(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse to import a class of a model's own code: the wrapper of :data:`PLACE`."""
    name = args[0] if args else kwargs.get("class_name")
    path = args[1] if len(args) > 1 else kwargs.get("module_path")
    raise GuardError(
        f"{name} is code that the model brings ({path}), and remote code is switched off for this run:"
        " read that code, then run without --no-remote-code if you trust it."
    )
