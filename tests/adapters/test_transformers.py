"""Adapters of transformers 5, on FAKES of 4 and 5."""

from __future__ import annotations

import importlib
import sys
import typing
from collections.abc import Callable

import pytest

from vllm_compat.adapters import by_name
from vllm_compat.adapters.base import Case
from vllm_compat.patching import Transaction
from vllm_compat.plan import Plan

MakeCase = Callable[..., Case]
Install = Callable[[str, Case], Plan]
GONE = "transformers.modeling_attn_mask_utils"


@pytest.mark.parametrize("name", ["transformers.torch_annotation", "transformers.missing_modules"])
def test_only_transformers_5_is_mended(make_case: MakeCase, name: str) -> None:
    adapter = by_name(name)
    assert adapter.need(make_case("speculators_0_4", transformers="transformers_4")) is None
    need = adapter.need(make_case("speculators_0_4", transformers="transformers_5"))
    assert need is not None
    assert "transformers 5.0.0" in need.reason


def test_what_the_downstream_does_not_import_is_not_missed(make_case: MakeCase) -> None:
    case = make_case("speculators_0_3", transformers="transformers_5")
    assert by_name("transformers.missing_modules").need(case) is None


def test_annotations_can_be_evaluated_and_the_module_is_as_before_afterwards(
    fake_modules: Callable[..., None],
    make_case: MakeCase,
    install: Install,
    transaction: Transaction,
) -> None:
    fake_modules("transformers_5", "torch")
    module = importlib.import_module("transformers.configuration_utils")
    with pytest.raises(NameError, match="torch"):
        typing.get_type_hints(module.PreTrainedConfig)
    install("transformers.torch_annotation", make_case("speculators_0_4", transformers="transformers_5"))
    torch = importlib.import_module("torch")
    assert typing.get_type_hints(module.PreTrainedConfig)["dtype"] == torch.dtype | None
    transaction.revert()
    assert not hasattr(module, "torch")


def test_torch_is_not_imported_before_transformers_is(
    fake_modules: Callable[..., None], make_case: MakeCase, install: Install
) -> None:
    fake_modules("transformers_5", "torch")
    install("transformers.torch_annotation", make_case("speculators_0_4", transformers="transformers_5"))
    assert "torch" not in sys.modules
    module = importlib.import_module("transformers.configuration_utils")
    assert module.torch is sys.modules["torch"]


def test_a_missing_module_can_be_imported_and_its_names_refuse_to_work(
    fake_modules: Callable[..., None],
    make_case: MakeCase,
    install: Install,
    transaction: Transaction,
) -> None:
    fake_modules("transformers_5")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(GONE)
    install("transformers.missing_modules", make_case("speculators_0_4", transformers="transformers_5"))
    module = importlib.import_module(GONE)
    with pytest.raises(NotImplementedError) as caught:
        module.AttentionMaskConverter(is_causal=True)
    assert str(caught.value) == (
        f"{GONE}.AttentionMaskConverter is not in transformers 5.0.0; what calls it needs an older"
        " transformers."
    )
    transaction.revert()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(GONE)
