"""Tokenizers: remote code where, and only where, the user named the model; offsets for slow ones."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from vllm_compat.adapters.base import Adapter, Case, Need, supplying
from vllm_compat.analysis.facts import preprocessing_of
from vllm_compat.runtime.context import current_build

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction

FROM_PRETRAINED = "transformers.AutoTokenizer.from_pretrained"
CONFIG_FROM_PRETRAINED = "transformers.AutoConfig.from_pretrained"


class Offsets(Adapter):
    """Give the character offsets that a slow tokenizer cannot give."""

    name = "tokenizer.offsets"
    order = 910
    targets = ("{dataset_function}",)
    vllm = ">=0.11.0"
    downstream = "<0.5"
    changed = (
        "Nothing in vLLM: slow tokenizers have no offsets. transformers 4 raises NotImplementedError,"
        " transformers 5 leaves offset_mapping out."
    )
    relies = (
        "Finds the assistant's tokens by offsets, and skips a conversation that raises with a log line:"
        " a model that ships only a slow tokenizer (Kimi-K2.5) gets an empty dataset."
    )
    does = (
        "Hands the mapping function a tokenizer that computes offsets from the bytes that its tokens"
        " spell, checked against the text each time. Fast tokenizers are left alone."
    )
    decided_by = ("preprocessing",)
    shown_in = ("tests/e2e/test_pipeline.py",)
    until = "the downstream does without offsets, or the model ships a fast tokenizer."
    shown_by = (
        "kimi_k25, speculators 0.3.0 and 0.4.0.1, vLLM 0.16.0 and vLLM 0.24.0: 14 of 14 conversations"
        " are lost"
    )

    def need(self, case: Case) -> Need | None:
        place = preprocessing_of(case.environment)
        if place is None:
            return None
        return Need(
            f"{place.site} asks the tokenizer for offsets, which a slow one cannot give",
            targets=(place.dataset,),
        )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        def with_offsets(
            wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            from vllm_compat.adapters._offsets import WithOffsets

            given = inspect.signature(wrapped).bind(*args, **kwargs)
            tokenizer = given.arguments["tokenizer"]
            if not getattr(tokenizer, "is_fast", True):
                given.arguments["tokenizer"] = WithOffsets(tokenizer)
            return wrapped(*given.args, **given.kwargs)

        for target in self.targets_of(plan):
            transaction.wrap(target, with_offsets)


class RemoteCode(Adapter):
    """Load the generator's tokenizer with the trust that it has for the model's configuration."""

    name = "tokenizer.trust_remote_code"
    order = 920
    targets = ("transformers.models.auto.tokenization_auto:AutoTokenizer.from_pretrained",)
    vllm = ">=0.11.0"
    downstream = "<0.5"
    excluded_by = ("engine.public",)
    changed = "Nothing: Kimi-K2.5's tokenizer has always been remote code."
    relies = (
        "Reads the tokenizer without trust_remote_code; its very next line reads the configuration"
        " of the same model with it."
    )
    does = (
        "Adds trust_remote_code=True while a generator is being built, for the path that it was"
        " built with, and for no other."
    )
    until = "the downstream passes the argument."
    witnesses = ("minicpm",)  # transformers 5 has a class of its own for Kimi's
    shown_by = (
        "kimi_k25 (transformers 4) and minicpm (4 and 5), speculators 0.3.0, vLLM 0.16.0 and 0.29.0:"
        " the tokenizer's remote code is refused"
    )

    def need(self, case: Case) -> Need | None:
        module = case.roles.generator_module
        tokenizer = [s for s in case.contract.others(FROM_PRETRAINED) if s.module == module]
        config = [s for s in case.contract.others(CONFIG_FROM_PRETRAINED) if s.module == module]
        if not tokenizer or any(s.keyword("trust_remote_code") for s in tokenizer):
            return None
        if not any(s.keyword("trust_remote_code") == "True" for s in config):
            return None
        return Need(
            f"{tokenizer[0].where} loads the tokenizer without trust_remote_code, {config[0].where}"
            " trusts the same model's configuration"
        )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        def trusted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
            build = current_build()
            return build is not None and str(path) == build.model_path

        (target,) = self.targets
        transaction.wrap(target, supplying("trust_remote_code", True, trusted))
