"""Names that have moved: need from recorded vLLM releases, patches on FAKE modules."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
from tests.downstreams import contract

from vllm_compat.adapters import by_name, make_plan
from vllm_compat.analysis.environment import Environment
from vllm_compat.analysis.plan import Plan
from vllm_compat.analysis.surface.recorded import RecordedSurface
from vllm_compat.runtime.patching import Transaction

OLD = "vllm.v1.core.kv_cache_utils"
NEW = "vllm.v1.core.kv_cache_planning"
ENVIRONMENT = Environment("3.11.0", (), "cuda")


def plan_on(vllm: str, speculators: str) -> Plan:
    return make_plan(contract(speculators), RecordedSurface(vllm), ENVIRONMENT)


@pytest.mark.parametrize("speculators", ["0.3.0", "0.4.0", "0.4.0.1"])
def test_three_names_are_followed_on_0_33_and_none_before(speculators: str) -> None:
    assert "imports.moved_names" not in plan_on("0.32.0", speculators).adapters
    plan = plan_on("0.33.0", speculators)
    assert not plan.unmet
    names = ("_get_kv_cache_groups_uniform_spec", "get_kv_cache_config_from_groups",
             "unify_hybrid_kv_cache_specs")  # fmt: skip
    assert plan.step("imports.moved_names").targets == tuple(
        f"{OLD}.{name}={NEW}.{name}" for name in names
    )


def test_a_moved_name_is_importable_from_where_it_was_until_revert(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = ModuleType(OLD), ModuleType(NEW)
    for name in ("vllm", "vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, OLD, old)
    monkeypatch.setitem(sys.modules, NEW, new)
    for name in ("get_kv_cache_config_from_groups", "unify_hybrid_kv_cache_specs",
                 "_get_kv_cache_groups_uniform_spec"):  # fmt: skip
        setattr(new, name, object())
    transaction = Transaction()
    by_name("imports.moved_names").install(transaction, plan_on("0.33.0", "0.4.0.1"))
    found = importlib.import_module(OLD)
    assert found.get_kv_cache_config_from_groups is new.get_kv_cache_config_from_groups
    transaction.revert()
    assert not hasattr(old, "get_kv_cache_config_from_groups")
