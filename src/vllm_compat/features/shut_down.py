"""A generator's workers are ended before the interpreter takes itself apart."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_compat.features.base import Feature
from vllm_compat.runtime import run_record

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction


class ShutDown(Feature):
    """End a generator's workers when the interpreter ends."""

    name = "shut_down"
    does = "Shuts the executor of each generator down when the interpreter begins to end."
    why = (
        "The generator's __del__ does it later, among modules that are gone already, and prints errors"
        " that say nothing of the run."
    )
    targets = ("VllmHiddenStatesGenerator.__init__", "atexit")

    def install(self, transaction: Transaction, plan: Plan, role: str) -> None:
        """Enlist the wrapper of the generator's construction."""

        def built(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = wrapped(*args, **kwargs)
            reference = weakref.ref(instance)

            def shut_down() -> None:
                executor = getattr(reference(), "executor", None)
                if executor is not None and run_record.is_ours():
                    with suppress(Exception):
                        executor.shutdown()

            transaction.at_exit(shut_down, "what is called at exit")
            return result

        module, _, cls = plan.roles.generator.partition(":")
        transaction.wrap(f"{module}:{cls}.__init__", built)
