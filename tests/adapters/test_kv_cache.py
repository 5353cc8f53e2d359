"""Adapters of the KV cache's planning, on FAKE planning functions."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_compat.adapters import by_name, make_plan
from vllm_compat.adapters.base import Case
from vllm_compat.analysis.drift import FindingKind
from vllm_compat.analysis.plan import Plan
from vllm_compat.errors import PatchError
from vllm_compat.runtime.context import building
from vllm_compat.runtime.patching import Transaction

MakeCase = Callable[..., Case]
Install = Callable[[str, Case], Plan]

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
RESOLVED = (
    "vllm/config.py",
    "    num_gpu_blocks: int | None = None\n",
    "    num_gpu_blocks: int | None = None\n\n"
    "    def get_resolved_kv_cache_layout(self) -> str:\n        return 'NHD'\n",
)


def test_the_specs_are_dropped_where_they_are_no_longer_taken(make_case: MakeCase) -> None:
    adapter = by_name("kv_cache.specs_argument")
    need = adapter.need(make_case())
    assert need is not None
    assert need.findings[0].kind is FindingKind.PARAMETER_REMOVED
    assert adapter.need(make_case("speculators_0_4")) is None
    taken = (
        "vllm/v1/core/kv_cache_utils.py",
        "kv_cache_groups: list[KVCacheGroupSpec], available",
        "kv_cache_groups: list[KVCacheGroupSpec], kv_cache_specs: dict[str, Any], available",
    )
    assert adapter.need(make_case("speculators_0_3", taken)) is None


def test_the_specs_are_dropped_in_the_generators_call_and_in_no_other(
    fake_modules: Callable[..., None],
    make_case: MakeCase,
    install: Install,
    transaction: Transaction,
) -> None:
    fake_modules("vllm", "speculators_0_3", "transformers_4", "torch")
    module = importlib.import_module(GENERATOR)
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    before = module.get_kv_cache_config_from_groups
    install("kv_cache.specs_argument", make_case())
    arguments = {"vllm_config": None, "kv_cache_groups": [], "available_memory": 5 * 2**20}
    planned = module.get_kv_cache_config_from_groups(kv_cache_specs={}, **arguments)
    assert planned.num_blocks == 5
    assert module.get_kv_cache_config_from_groups(**arguments).num_blocks == 5
    assert utils.get_kv_cache_config_from_groups is before
    transaction.revert()
    assert module.get_kv_cache_config_from_groups is before


@pytest.mark.parametrize("downstream", ["speculators_0_3", "speculators_0_4"])
def test_the_engine_core_plans_where_layouts_are_resolved(make_case: MakeCase, downstream: str) -> None:
    adapter = by_name("kv_cache.engine_core")
    assert adapter.need(make_case(downstream)) is None
    resolved = make_case(downstream, RESOLVED)
    need = adapter.need(resolved)
    assert need is not None
    assert "by hand" in need.reason
    planned = make_plan(resolved.contract, resolved.surface, resolved.environment).adapters
    assert "kv_cache.specs_argument" not in planned, "it answers the call itself"


@pytest.fixture
def core(fake_modules: Callable[..., None]) -> type:
    """A FAKE engine core, whose planning is what a test says it is."""
    fake_modules("vllm", "speculators_0_4", "transformers_4", "torch")
    importlib.import_module(GENERATOR)
    module = ModuleType("vllm.v1.engine.core")

    class EngineCore:
        answer: Any = None

        def __init__(self) -> None:
            raise AssertionError("it would load a model")

        def _initialize_kv_caches(self, vllm_config: Any) -> Any:
            self.model_executor.initialize_from_config(["by the core"])  # type: ignore[attr-defined]
            return type(self).answer

    module.EngineCore = EngineCore  # type: ignore[attr-defined]
    sys.modules["vllm.v1.engine"] = ModuleType("vllm.v1.engine")
    sys.modules["vllm.v1.engine.core"] = module
    return EngineCore


def engine() -> tuple[Any, Any, list[Any]]:
    """Return a FAKE executor (asked through its class), a configuration, what it was given."""
    executor_module = importlib.import_module("vllm.v1.executor.multiproc_executor")
    executor = object.__new__(executor_module.MultiprocExecutor)
    given: list[Any] = []
    executor.collective_rpc = lambda method, args: given.append((method, *args))
    return executor, SimpleNamespace(cache_config=SimpleNamespace()), given


@pytest.mark.parametrize("wrap", [lambda planned: planned, lambda planned: (1, 0, planned)])
def test_the_core_plans_over_the_downstreams_executor_which_is_then_not_set_up_twice(
    core: Any, make_case: MakeCase, install: Install, wrap: Callable[[Any], Any]
) -> None:
    planned = SimpleNamespace(kv_cache_groups=[], num_blocks=7)
    core.answer = wrap(planned)
    install("kv_cache.engine_core", make_case("speculators_0_4", RESOLVED))
    module = sys.modules[GENERATOR]
    executor, config, given = engine()
    generator = SimpleNamespace(executor=executor)
    with building(generator, "model"):
        got = module.get_kv_cache_config_from_groups(
            vllm_config=config, kv_cache_groups=[], available_memory=1000.7
        )
        assert got is planned
        assert config.cache_config.kv_cache_memory_bytes == 1000
        executor.initialize_from_config([planned])
    assert given == [("initialize_from_config", ["by the core"])], "once, by the core"
    executor.initialize_from_config(["later"])
    assert given[1:] == [("initialize_from_config", ["later"])]


def test_the_calls_before_it_refuse_no_hybrid_model_while_an_engine_is_built(
    core: Any, make_case: MakeCase, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[GENERATOR]

    def refuse(specs: object) -> None:
        raise ValueError("Failed to promote local KV cache specs")

    monkeypatch.setattr(module, "unify_hybrid_kv_cache_specs", refuse)
    monkeypatch.setattr(module, "_get_kv_cache_groups_uniform_spec", refuse)
    install("kv_cache.engine_core", make_case("speculators_0_4", RESOLVED))
    with building(SimpleNamespace(), "model"):
        assert module.unify_hybrid_kv_cache_specs({"layer": object()}) is None
        assert module._get_kv_cache_groups_uniform_spec({"layer": object()}) == []
    for call in (module.unify_hybrid_kv_cache_specs, module._get_kv_cache_groups_uniform_spec):
        with pytest.raises(ValueError, match="Failed to promote"):
            call({})


def test_another_executor_is_set_up_as_ever(core: Any, make_case: MakeCase, install: Install) -> None:
    core.answer = SimpleNamespace(kv_cache_groups=[])
    install("kv_cache.engine_core", make_case("speculators_0_4", RESOLVED))
    ours, config, _ = engine()
    other, _, given = engine()
    with building(SimpleNamespace(executor=ours), "model"):
        sys.modules[GENERATOR].get_kv_cache_config_from_groups(
            vllm_config=config, kv_cache_groups=[], available_memory=1
        )
        other.initialize_from_config(["theirs"])
    assert given == [("initialize_from_config", ["theirs"])]


def test_outside_of_a_construction_planning_is_vllms(
    core: Any, make_case: MakeCase, install: Install
) -> None:
    install("kv_cache.engine_core", make_case("speculators_0_4", RESOLVED))
    planned = sys.modules[GENERATOR].get_kv_cache_config_from_groups(
        vllm_config=None, kv_cache_groups=[], available_memory=3 * 2**20
    )
    assert planned.num_blocks == 3


@pytest.mark.parametrize("answer", [None, (1, 2), object()])
def test_a_core_that_plans_nothing_is_refused_in_words(
    core: Any, make_case: MakeCase, install: Install, answer: object
) -> None:
    core.answer = answer
    install("kv_cache.engine_core", make_case("speculators_0_4", RESOLVED))
    executor, config, _ = engine()
    with (
        building(SimpleNamespace(executor=executor), "model"),
        pytest.raises(PatchError, match="returns no KV cache configuration"),
    ):
        sys.modules[GENERATOR].get_kv_cache_config_from_groups(
            vllm_config=config, kv_cache_groups=[], available_memory=1
        )


GROUPS = (
    "vllm/v1/core/kv_cache_utils.py",
    "def unify_hybrid_kv_cache_specs",
    "def get_kv_cache_groups(vllm_config: object, kv_cache_spec: object) -> list[object]:\n"
    "    return [vllm_config, kv_cache_spec]\n\n\ndef unify_hybrid_kv_cache_specs",
)


def test_layers_are_grouped_by_vllm_where_it_does_and_its_runner_wants_it(
    make_case: MakeCase,
) -> None:
    def needed(*edits: Any, device: str = "cuda") -> bool:
        case = make_case("speculators_0_4", *edits, device=device)
        plan = make_plan(case.contract, case.surface, case.environment)
        return "kv_cache.groups" in plan.adapters

    assert needed(GROUPS)
    assert not needed(GROUPS, device="cpu"), "no V2 there, and none of its hybrids needs it"
    assert not needed(GROUPS, RESOLVED), "the engine core groups them"
    assert not needed(), "this vLLM groups nothing"


def test_the_downstreams_layers_are_grouped_while_an_engine_is_built(
    core: Any, make_case: MakeCase, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    monkeypatch.setattr(
        utils, "get_kv_cache_groups", lambda config, specs: [config, specs], raising=False
    )
    module = sys.modules[GENERATOR]

    def refuse(specs: object) -> None:
        raise ValueError("failed to convert the KV cache specs")

    monkeypatch.setattr(module, "unify_hybrid_kv_cache_specs", refuse)
    monkeypatch.setattr(module, "_get_kv_cache_groups_uniform_spec", refuse)
    install("kv_cache.groups", make_case("speculators_0_4", GROUPS, device="cuda"))
    with building(SimpleNamespace(vllm_config="config"), "model"):
        assert module.unify_hybrid_kv_cache_specs("specs") is None
        assert module._get_kv_cache_groups_uniform_spec("specs") == ["config", "specs"]
    for call in (module.unify_hybrid_kv_cache_specs, module._get_kv_cache_groups_uniform_spec):
        with pytest.raises(ValueError, match="failed to convert"):
            call("specs")
