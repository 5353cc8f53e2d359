"""Adapters of a machine without CUDA, and of forked workers on one with it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

import pytest

from vllm_compat.adapters import by_name
from vllm_compat.adapters.base import Case
from vllm_compat.analysis.plan import Plan
from vllm_compat.runtime.patching import Transaction

MakeCase = Callable[..., Case]
Install = Callable[[str, Case], Plan]

CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
FILE = f"{GENERATOR.replace('.', '/')}.py"


@pytest.mark.parametrize(("device", "needed"), [("cuda", True), ("cpu", False), ("rocm", False)])
def test_fork_is_a_question_of_cuda(make_case: MakeCase, device: str, needed: bool) -> None:
    case = make_case("speculators_0_4", device=device)
    assert (by_name("device.fork").need(case) is not None) is needed


def test_fork_is_no_question_without_a_generator(make_case: MakeCase) -> None:
    assert by_name("device.fork").need(make_case("speculators_0_5", device="cuda")) is None


def test_the_variable_is_set_unless_the_user_has_and_goes_again(
    make_case: MakeCase,
    install: Install,
    transaction: Transaction,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CHECK, raising=False)
    install("device.fork", make_case(device="cuda"))
    assert os.environ[CHECK] == "1"
    transaction.revert()
    assert CHECK not in os.environ


@pytest.mark.parametrize(
    ("downstream", "target"),
    [
        ("speculators_0_3", "torch.cuda:mem_get_info"),
        ("speculators_0_4", f"{GENERATOR}:mem_get_info"),
    ],
)
def test_memory_is_answered_where_the_generator_asks_for_it(
    make_case: MakeCase, downstream: str, target: str
) -> None:
    need = by_name("device.mem_get_info").need(make_case(downstream))
    assert need is not None
    assert need.targets == (target,)
    assert f"{FILE}:" in need.reason


@pytest.mark.parametrize("device", ["cuda", "rocm", "unknown"])
def test_memory_is_the_devices_where_there_is_one(make_case: MakeCase, device: str) -> None:
    assert by_name("device.mem_get_info").need(make_case(device=device)) is None


def test_who_does_not_ask_is_not_answered(make_case: MakeCase) -> None:
    case = make_case("speculators_0_4", (FILE, "free, _ = mem_get_info()", "free = 2**30"))
    assert by_name("device.mem_get_info").need(case) is None


def test_the_answer_is_the_space_that_was_set_aside_for_the_cache(
    fake_modules: Callable[..., None],
    make_case: MakeCase,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_modules("torch")
    cuda = importlib.import_module("torch.cuda")
    with pytest.raises(AssertionError, match="CUDA"):
        cuda.mem_get_info()
    install("device.mem_get_info", make_case())
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert cuda.mem_get_info() == (3 * 2**30, 3 * 2**30)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    assert cuda.mem_get_info() == (2**29, 2**29)


@pytest.mark.parametrize("space", [None, "0", ""])
def test_the_answer_is_the_hosts_memory_where_nothing_was_set_aside(
    fake_modules: Callable[..., None],
    make_case: MakeCase,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    space: str | None,
) -> None:
    pytest.importorskip("psutil", reason="vLLM brings it along")
    fake_modules("torch")
    install("device.mem_get_info", make_case())
    if space is None:
        monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    else:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    free, total = importlib.import_module("torch.cuda").mem_get_info()
    assert 0 < free <= total


def test_the_downstreams_own_function_is_answered_under_the_name_that_it_has_bound(
    fake_modules: Callable[..., None],
    make_case: MakeCase,
    install: Install,
    transaction: Transaction,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_modules("vllm", "speculators_0_4", "transformers_4", "torch")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    module = importlib.import_module(GENERATOR)
    own = importlib.import_module("speculators.utils.util")
    before = module.mem_get_info
    install("device.mem_get_info", make_case("speculators_0_4"))
    assert module.mem_get_info() == (2**30, 2**30)
    assert own.mem_get_info() == (0, 0)
    transaction.revert()
    assert module.mem_get_info is before


CONFIG = "speculators.data_generation.config_generator"


def test_a_name_is_asked_for_by_the_release_that_does_not_look_first(make_case: MakeCase) -> None:
    adapter = by_name("device.accelerator_name")
    need = adapter.need(make_case("speculators_0_4"))
    assert need is not None
    assert need.targets == (f"{CONFIG}:get_device_name",)
    assert f"{CONFIG.replace('.', '/')}.py:" in need.reason
    assert adapter.need(make_case("speculators_0_4", device="cuda")) is None
    assert adapter.need(make_case("speculators_0_3")) is None


def test_no_accelerator_is_named_where_torch_finds_none(
    fake_modules: Callable[..., None], make_case: MakeCase, install: Install, transaction: Transaction
) -> None:
    fake_modules("speculators_0_4", "transformers_4", "vllm", "torch")
    install("device.accelerator_name", make_case("speculators_0_4"))
    module = importlib.import_module(CONFIG)
    assert module.describe()["device"] == "NO ACCELERATOR"
    transaction.revert()
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):
        module.describe()
