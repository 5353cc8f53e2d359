"""``vllm.v1.core.kv_cache_utils``: planning the KV cache by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_compat.adapters.base import Adapter, Case, DropsKeyword, Need, NotOn
from vllm_compat.analysis.drift import FindingKind
from vllm_compat.errors import PatchError
from vllm_compat.runtime.context import current_build

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction, Wrapper

KV_CACHE_UTILS = "vllm.v1.core.kv_cache_utils"
FROM_GROUPS = f"{KV_CACHE_UTILS}.get_kv_cache_config_from_groups"
UNIFORM_SPEC = f"{KV_CACHE_UTILS}._get_kv_cache_groups_uniform_spec"


class SpecsArgument(DropsKeyword):
    """Drop ``kv_cache_specs`` from ``get_kv_cache_config_from_groups``."""

    name = "kv_cache.specs_argument"
    order = 610
    derived = True
    targets = ("{generator_module}:get_kv_cache_config_from_groups",)
    symbol = FROM_GROUPS
    keyword = "kv_cache_specs"
    reason = "get_kv_cache_config_from_groups takes no kv_cache_specs"
    vllm = ">=0.12.0,<0.29.0"
    downstream = "<0.4"
    excluded_by = ("kv_cache.engine_core", "engine.public")  # that one answers the call itself
    changed = "0.12.0 dropped the argument: the groups hold the specs."
    relies = "Passes kv_cache_specs=…, as 0.11 wanted it."
    does = "Leaves the argument out where the function no longer takes it."
    until = "speculators 0.3.0 is out of use, or vLLM 0.28: later releases plan by kv_cache.engine_core."
    shown_by = "llama, speculators 0.3.0, vLLM 0.16.0: unexpected keyword argument"


class Groups(Adapter):
    """Put the layers into KV cache groups as this release does, not into one."""

    name = "kv_cache.groups"
    order = 620
    targets = (
        "{generator_module}:unify_hybrid_kv_cache_specs",
        "{generator_module}:_get_kv_cache_groups_uniform_spec",
    )
    vllm = ">=0.11.0,<0.29.0"
    downstream = "<0.5"
    not_on = (NotOn("cpu"),)  # they have no model runner V2
    excluded_by = ("kv_cache.engine_core", "engine.public")
    changed = (
        "Nothing: layers whose KV cache specs differ (windowed and full attention, Mamba) belong into"
        " groups of their own. Model runner V2 (0.22 and later) asserts that a group's layers are alike."
    )
    relies = (
        "Makes one kind of them by force, which V2 and Mamba layers refuse, and puts all into one group."
    )
    does = (
        "Answers with this release's own get_kv_cache_groups, in the downstream's own engine. Not on"
        " CPU builds: they have no V2, and run windowed and full layers in one group."
    )
    until = "the downstream starts vLLM through its engine, or vLLM 0.28: see kv_cache.engine_core."
    shown_by = (
        "gemma2, gemma3_text, gpt_oss, speculators 0.4.0.1, vLLM 0.26.0 on an H200 (V2): All attention"
        " layers in the same KV cache group must have the same attention spec; granite_hybrid, ditto:"
        " failed to convert the KV cache specs to one unified type"
    )

    def need(self, case: Case) -> Need | None:
        where = forced_into_one_group(case)
        return Need(f"{where} puts layers of every kind into one KV cache group") if where else None

    def install(self, transaction: Transaction, plan: Plan) -> None:
        def as_they_are(
            wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            return wrapped(*args, **kwargs) if current_build() is None else None

        def grouped(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            build = current_build()
            if build is None:
                return wrapped(*args, **kwargs)
            from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

            specs = args[0] if args else next(iter(kwargs.values()))
            return get_kv_cache_groups(build.generator.vllm_config, specs)

        unify, group = self.targets_of(plan)
        transaction.wrap(unify, as_they_are)
        transaction.wrap(group, grouped)


class EngineCorePlans(Adapter):
    """Let the release's own engine core plan and set up the KV cache."""

    name = "kv_cache.engine_core"
    order = 630
    targets = (
        "{generator_module}:unify_hybrid_kv_cache_specs",
        "{generator_module}:_get_kv_cache_groups_uniform_spec",
        "{generator_module}:get_kv_cache_config_from_groups",
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor.initialize_from_config",
    )
    vllm = ">=0.29.0"
    downstream = "<0.5"
    excluded_by = ("engine.public",)
    changed = (
        "0.29.0: the KV cache layout must be resolved among all workers before the cache is planned;"
        " 0.27.0 had moved the warm-up out of initialize_from_config; block sizes are settled by the"
        " attention backends in the workers. All these steps stand in the engine core, which the"
        " downstream does not use."
    )
    relies = (
        "Unifies the layers' KV cache specs, puts them into one group, plans one configuration and hands"
        " it to the executor, all by hand."
    )
    does = (
        "Answers the downstream's planning call by running this release's own"
        " EngineCore._initialize_kv_caches over the downstream's executor, with the memory that the"
        " downstream has set aside; its initialize_from_config has then been done already. The two calls"
        " before it, which refuse hybrid models, do nothing while the downstream builds its engine."
    )
    until = "the downstream starts vLLM through its engine."
    shown_by = (
        "llama, speculators 0.4.0.1, vLLM 0.32.0: `KV cache layout has not been resolved yet`;"
        " granite_hybrid, ditto: `Failed to promote local KV cache specs`"
    )

    def need(self, case: Case) -> Need | None:
        sites = case.calls(FROM_GROUPS)
        if not sites or not resolves_layout(case):
            return None
        return Need(
            f"{sites[0].where} plans the KV cache by hand, before its layout is resolved",
            case.found(FindingKind.PARAMETER_REMOVED, FROM_GROUPS),
        )

    def install(self, transaction: Transaction, plan: Plan) -> None:
        def by_engine_core(
            wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            build = current_build()
            if build is None:
                return wrapped(*args, **kwargs)
            generator = build.generator
            config = kwargs["vllm_config"]
            config.cache_config.kv_cache_memory_bytes = int(kwargs["available_memory"])
            planned = _engine_core_over(generator.executor, config)
            generator.__dict__["_vllm_compat_kv_cache"] = planned
            return planned

        def once(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            build = current_build()
            done = build and build.generator.__dict__.pop("_vllm_compat_kv_cache", None)
            if done is not None and build and instance is build.generator.executor:
                return None
            return wrapped(*args, **kwargs)

        def left_to_it(answer: Any) -> Wrapper:
            def do_nothing(
                wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
            ) -> Any:
                return wrapped(*args, **kwargs) if current_build() is None else answer

            return do_nothing

        unify, group, configure, initialize = self.targets_of(plan)
        transaction.wrap(unify, left_to_it(None))
        transaction.wrap(group, left_to_it([]))
        transaction.wrap(configure, by_engine_core)
        transaction.wrap(initialize, once)


def resolves_layout(case: Case) -> bool:
    """Tell whether this vLLM resolves the KV cache layout first, so that its engine core must plan."""
    cache_config = case.surface.resolve("vllm.config.CacheConfig")
    return cache_config is not None and "get_resolved_kv_cache_layout" in cache_config.members


def forced_into_one_group(case: Case) -> str | None:
    """Return the call that puts all layers into one KV cache group although this vLLM has groups.

    None also on CPU builds, which have no model runner V2 and run windowed and full layers in one.
    """
    sites = case.calls(UNIFORM_SPEC)
    if not sites or case.environment.device == "cpu":
        return None
    there = case.surface.resolve(f"{KV_CACHE_UTILS}.get_kv_cache_groups") is not None
    return sites[0].where if there else None


def _engine_core_over(executor: Any, vllm_config: Any) -> Any:
    """Run this release's own KV cache set-up over an executor; return the scheduler's config."""
    from vllm.v1.engine.core import EngineCore

    core = object.__new__(EngineCore)
    core.vllm_config = vllm_config
    core.model_executor = executor
    core.available_gpu_memory_for_kv_cache = -1
    answer = core._initialize_kv_caches(vllm_config)
    found = [
        part
        for part in (answer if isinstance(answer, tuple) else (answer,))
        if hasattr(part, "kv_cache_groups")
    ]
    if len(found) != 1:
        raise PatchError(
            "This vLLM's EngineCore._initialize_kv_caches returns no KV cache configuration"
            f" ({type(answer).__name__}): a newer vllm_compat is needed for it."
        )
    return found[0]
