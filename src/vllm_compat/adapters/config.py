"""``vllm.config``: arguments that the downstream does not know of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_compat.adapters.base import Adapter, Case, Need, SuppliesKeyword, dropping
from vllm_compat.runtime.context import belongs, current_build, is_downstream

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction

SCHEDULER_CONFIG = "vllm.config.SchedulerConfig"
CACHE_CONFIG = "vllm.config.CacheConfig"
REQUEST = "vllm.v1.request.Request"


class IsEncoderDecoder(SuppliesKeyword):
    """Supply ``is_encoder_decoder=False`` to ``SchedulerConfig``."""

    name = "config.is_encoder_decoder"
    order = 110
    derived = True
    targets = ("vllm.config:SchedulerConfig.__init__",)
    symbol = SCHEDULER_CONFIG
    keyword = "is_encoder_decoder"
    value = False
    reason = "SchedulerConfig requires is_encoder_decoder, which is not given"
    vllm = ">=0.12.0"
    downstream = "<0.4"
    excluded_by = ("engine.public",)
    changed = "0.12.0 made the InitVar `is_encoder_decoder` required (vllm-ascend#4688 met it)."
    pull_requests = ("vllm-ascend#4688",)
    relies = "Builds SchedulerConfig without it."
    does = (
        "Gives False where the downstream, building its engine, gave nothing: hidden states come from"
        " decoders."
    )
    until = "speculators 0.3.0 is out of use; 0.4.0 gives the argument itself."
    shown_by = "llama, speculators 0.3.0, vLLM 0.16.0: SchedulerConfig raises TypeError"

    def is_ours(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return current_build() is not None


class BlockSizeByBackend(Adapter):
    """Let vLLM choose the KV cache's block size by attention backend."""

    name = "config.block_size"
    order = 120
    targets = ("vllm.config:CacheConfig.__init__",)
    vllm = ">=0.29.0"
    downstream = "<0.5"
    excluded_by = ("engine.public",)
    changed = (
        "Attention backends state the block sizes that they take, and refuse others; without a given"
        " size vLLM settles on one that all layers take."
    )
    relies = "Asks for blocks of 16 tokens, whatever the backend."
    does = "Leaves the size open, in the downstream's own call; the engine core then settles it."
    until = "the downstream gives no block size."
    shown_by = (
        "llama, speculators 0.4.0.1, vLLM 0.32.0 CPU build: No common block size for 16 (CPU_ATTN:"
        " [MultipleOf(32)])"
    )

    def need(self, case: Case) -> Need | None:
        cache_config = case.surface.resolve(CACHE_CONFIG)
        if cache_config is None or "get_resolved_kv_cache_layout" not in cache_config.members:
            return None
        sites = [site for site in case.calls(CACHE_CONFIG) if site.keyword("block_size")]
        if not sites:
            return None
        return Need(f"{sites[0].where} fixes a block size that the attention backend may refuse")

    def install(self, transaction: Transaction, plan: Plan) -> None:
        def in_a_build(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            return current_build() is not None

        (target,) = self.targets
        transaction.wrap(target, dropping("block_size", in_a_build))


class PrefixCachingOff(Adapter):
    """Switch prefix caching off for an engine whose requests carry no block hasher."""

    name = "config.prefix_caching"
    order = 130
    targets = ("vllm.config:VllmConfig.__init__",)
    vllm = ">=0.12.0"
    downstream = "<0.4"
    excluded_by = ("engine.public",)
    changed = "0.12.0 turned `CacheConfig.enable_prefix_caching` on by default."
    pull_requests = ("speculators#279",)
    relies = (
        "Builds CacheConfig without the argument and Request without `block_hasher`; wants every"
        " prompt computed in full (speculators#279)."
    )
    does = "Sets enable_prefix_caching to False in the downstream's own engine, and in no other."
    until = "speculators 0.3.0 is out of use; 0.4.0 switches it off itself."
    witnesses = ("llama", "mistral")  # 0.33 caches fewer blocks, but for windows
    shown_by = (
        "llama, speculators 0.3.0, vLLM 0.16.0: BlockPool.cache_full_blocks fails its assertion on"
        " prompts of a block or more; 0.29.0: IndexError there; 0.33.0: only with windows (mistral)"
    )

    def need(self, case: Case) -> Need | None:
        signature = case.surface.signature(CACHE_CONFIG)
        parameter = signature.get("enable_prefix_caching") if signature else None
        calls = case.calls(CACHE_CONFIG)
        requests = case.calls(REQUEST)
        if parameter is None or parameter.default != "True" or not calls:
            return None
        if any(site.keyword("enable_prefix_caching") for site in calls):
            return None
        if not requests or any(site.keyword("block_hasher") for site in requests):
            return None
        return Need("prefix caching is on by default and requests carry no block hasher")

    def install(self, transaction: Transaction, plan: Plan) -> None:
        package = plan.roles.package

        def switch_off(
            wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            cache_config = kwargs.get("cache_config")
            parallel_config = kwargs.get("parallel_config")
            if cache_config is not None and is_downstream(parallel_config, package):
                cache_config.enable_prefix_caching = False
            return wrapped(*args, **kwargs)

        (target,) = self.targets
        transaction.wrap(target, switch_off)


class SlidingWindow(Adapter):
    """Tell the cache configuration of the window that every layer of a model slides."""

    name = "config.sliding_window"
    order = 140
    targets = ("vllm.config:VllmConfig.__post_init__",)
    vllm = ">=0.11.0"
    downstream = "<0.5"
    excluded_by = ("engine.public",)
    changed = (
        "Nothing: attention layers without a window of their own take CacheConfig.sliding_window, which"
        " EngineArgs sets where all layers slide (not where windowed and full layers take turns)."
    )
    relies = "Builds CacheConfig by hand, without it: a model such as Mistral attends to everything."
    does = (
        "Sets it in the downstream's own engine, from the model's configuration, unless its layer_types"
        " name other layers too: the rule of EngineArgs since 0.32 at the latest; before, it took layers"
        " that are all full for windowed ones, which the models' own configurations avoid."
    )
    until = "the downstream builds its configuration through EngineArgs."
    witnesses = ("mistral",)
    shown_by = "mistral, speculators 0.3.0 and 0.4.0.1, vLLM 0.16.0: rows behind the window are wrong"

    def need(self, case: Case) -> Need | None:
        signature = case.surface.signature(CACHE_CONFIG)
        calls = case.calls(CACHE_CONFIG)
        if signature is None or signature.get("sliding_window") is None or not calls:
            return None
        if all(site.keyword("sliding_window") for site in calls):
            return None
        return Need(f"{calls[0].where} says nothing of the model's sliding window")

    def install(self, transaction: Transaction, plan: Plan) -> None:
        package = plan.roles.package

        def supply(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            cache_config, model_config = instance.cache_config, instance.model_config
            if belongs(instance, package) and model_config is not None:
                kinds = getattr(model_config.hf_text_config, "layer_types", None)
                every_layer = not kinds or set(kinds) == {"sliding_attention"}
                if every_layer and cache_config.sliding_window is None:
                    cache_config.sliding_window = model_config.get_sliding_window()
            return wrapped(*args, **kwargs)

        (target,) = self.targets
        transaction.wrap(target, supply)
