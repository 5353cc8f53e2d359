"""A generator's workers are ended before the interpreter ends, or when they are refused."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_compat.features.base import Feature
from vllm_compat.runtime import run_record
from vllm_compat.runtime.context import belongs

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction


class ShutDown(Feature):
    """End a generator's workers when the interpreter ends, or when a check refuses them."""

    name = "shut_down"
    does = (
        "Shuts the executor of each generator down when the interpreter begins to end, and one whose"
        " ranks are refused (a rank has another plan) at once."
    )
    why = (
        "The generator's __del__ does it later, among modules that are gone already, and prints errors"
        " that say nothing of the run; workers that are refused stay until then, with the model in"
        " memory."
    )
    targets = ("VllmHiddenStatesGenerator.__init__", "MultiprocExecutor.__init__", "atexit")

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

        def started(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                return wrapped(*args, **kwargs)
            except Exception:
                given = args[0] if args else kwargs.get("vllm_config")
                if plan.is_public or belongs(given, plan.roles.package):
                    with suppress(Exception):  # one that has not started at all ends what it has itself
                        instance.shutdown()
                raise

        executor = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"
        if plan.is_public:
            executor = "vllm_compat.engine.driver:PublicExecutor"
        transaction.wrap(f"{executor}.__init__", started)
