"""The downstream's worker extension: hidden states captured by hooks, rows by request."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vllm_compat.adapters.base import Adapter, Case, Need
from vllm_compat.analysis.drift import FindingKind
from vllm_compat.runtime.context import belongs

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Patch, Transaction

_KEY = "_vllm_compat_capture"


class Capture(Adapter):
    """Capture with forward hooks instead of the downstream's own loop over one model family."""

    name = "worker.capture"
    order = 1210
    targets = (
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor.__init__",
        "{extension}._setup_hidden_states_capture",
        "{extension}._reset_capture",
        "{extension}._get_captured_states",
    )
    vllm = ">=0.11.0"
    downstream = "<0.5"
    excluded_by = ("engine.public",)
    changed = (
        "0.11.1 renamed the models' get_input_embeddings to embed_input_ids; Kimi-K2.5 (0.15.0) nests"
        " its layers and is no SupportsEagle3 before 0.18.0; model runner V2 (0.22 … 0.29) has no"
        " input_batch."
    )
    relies = (
        "Replaces the model's forward by a loop that knows one family (`layer(hidden_states=…,"
        " positions=…, residual=…)`); 0.3.0 cuts rows by offset, wrong for a prompt in chunks."
    )
    does = (
        "Leaves the forward alone, adds forward hooks to the layers asked for, attributes the rows of"
        " each step to requests by the batch's own order, and hands them over from host memory (vLLM's"
        " asynchronous scheduling pickles replies in a thread that does not wait for the device). Where"
        " hooks cannot tell the layers, the model's own auxiliary hidden states are taken. With"
        " capture='stock' the downstream's loop stays, fitted to the model's names."
    )
    until = "the downstream captures without replacing forward."
    stock_starts_without = True
    witnesses = ("gemma2", "command_r")  # from 0.19 on the downstream's loop is right for Gemma
    processes = frozenset({"driver", "worker"})
    shown_by = (
        "llama, speculators 0.3.0, vLLM 0.16.0: 'LlamaModel' object has no attribute"
        " 'get_input_embeddings'; gpt_neox, speculators 0.4.0.1: its layers return no pair"
    )

    def need(self, case: Case) -> Need | None:
        if not case.roles.extension:
            return None
        bound = [
            site
            for site in case.contract.others("types.MethodType")
            if site.module == case.roles.extension_module
        ]
        if not bound:
            return None
        module = case.roles.extension_module
        return Need(
            f"{bound[0].where} replaces the model's forward by a loop for one model family",
            tuple(
                finding
                for finding in case.findings
                if finding.kind is FindingKind.ATTRIBUTE_MISSING
                and all(site.module == module for site in finding.sites)
            ),
        )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        module = plan.roles.extension_module
        made_by: WeakKeyDictionary[Any, list[Patch]] = WeakKeyDictionary()

        def setup(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            from vllm_compat.capture import slabs
            from vllm_compat.capture.worker import Capture

            layer_ids = args[0] if args else kwargs["layer_ids"]
            stock = None
            if plan.environment.capture == "stock":
                stock = (sys.modules[module], lambda: wrapped(*args, **kwargs))
            shared = plan.environment.transfer != "rpc" and not slabs.refused()
            capture = plan.environment.capture
            transaction.take_back(made_by.pop(instance, []))  # it is set up once more
            before = len(transaction.patches)
            made = Capture(
                instance,
                layer_ids,
                capture=capture,
                stock=stock,
                shared=shared,
                prove="proofs" not in plan.switched_off,
                transaction=transaction,
            )
            transaction.set_attribute(instance, _KEY, made)
            made_by[instance] = transaction.patches[before:]

        def reset(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            getattr(instance, _KEY).reset()

        def states(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return getattr(instance, _KEY).states()

        def agree(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = wrapped(*args, **kwargs)
            given = args[0] if args else kwargs.get("vllm_config")
            if plan.environment.transfer != "rpc" and belongs(given, plan.roles.package):
                from vllm_compat.capture import slabs
                from vllm_compat.runtime import run_record

                refused = slabs.agree(instance.collective_rpc)
                run_record.tell_transfer("replies" if refused else "shared memory", refused)
            return result

        for target, wrapper in zip(self.targets_of(plan), (agree, setup, reset, states), strict=True):
            transaction.wrap(target, wrapper)
