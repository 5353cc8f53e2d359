"""Trust in remote code: where the user named the model, and nowhere else."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.adapters import by_name
from vllm_compat.adapters.base import Case
from vllm_compat.engine import building
from vllm_compat.plan import Plan

MakeCase = Callable[..., Case]
FILE = "speculators/data_generation/vllm_hidden_states_generator.py"
TRUSTED = "from_pretrained(model_path, trust_remote_code=True)"


@pytest.mark.parametrize("downstream", ["speculators_0_3", "speculators_0_4"])
def test_trust_is_given_where_the_next_line_has_it_already(make_case: MakeCase, downstream: str) -> None:
    need = by_name("tokenizer.trust_remote_code").need(make_case(downstream))
    assert need is not None
    assert need.reason.count(f"{FILE}:") == 2


@pytest.mark.parametrize(
    "edit",
    [
        (FILE, f"AutoConfig.{TRUSTED}", "AutoConfig.from_pretrained(model_path)"),
        (FILE, f"AutoConfig.{TRUSTED}", f"AutoConfig.{TRUSTED.replace('True', 'False')}"),
        (FILE, f"AutoConfig.{TRUSTED}", "None"),
        (FILE, "AutoTokenizer.from_pretrained(model_path)", f"AutoTokenizer.{TRUSTED}"),
        (
            FILE,
            "AutoTokenizer.from_pretrained(model_path)",
            f"AutoTokenizer.{TRUSTED.replace('True', 'False')}",
        ),
    ],
    ids=["nobody trusts", "configuration refused", "no configuration", "given", "refused"],
)
def test_trust_is_not_invented(make_case: MakeCase, edit: tuple[str, str, str]) -> None:
    assert by_name("tokenizer.trust_remote_code").need(make_case("speculators_0_4", edit)) is None


@pytest.fixture
def tokenizers(
    fake_modules: Callable[..., None], make_case: MakeCase, install: Callable[[str, Case], Plan]
) -> Any:
    """The FAKE AutoTokenizer, adapted; it keeps what it is asked."""
    fake_modules("transformers_4")
    module = importlib.import_module("transformers.models.auto.tokenization_auto")
    install("tokenizer.trust_remote_code", make_case())
    return module.AutoTokenizer


def asked(tokenizers: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    tokenizers.from_pretrained(*args, **kwargs)
    found: dict[str, Any] = tokenizers.asked[-1][1]
    return found


def test_the_models_own_tokenizer_is_trusted_while_its_generator_is_built(tokenizers: Any) -> None:
    with building(None, "/models/kimi"):
        assert asked(tokenizers, "/models/kimi") == {"trust_remote_code": True}
        by_name = {"pretrained_model_name_or_path": "/models/kimi"}
        assert asked(tokenizers, **by_name) == {"trust_remote_code": True}
        assert asked(tokenizers, Path("/models/kimi")) == {"trust_remote_code": True}
        assert isinstance(tokenizers.from_pretrained("/models/kimi"), tokenizers)


@pytest.mark.parametrize("path", ["/models/other", "/models/kimi/", "kimi", None, "None", ""])
def test_no_other_path_is_trusted(tokenizers: Any, path: Any) -> None:
    with building(None, "/models/kimi"):
        assert asked(tokenizers, path) == {}


def test_nothing_is_trusted_before_or_after(tokenizers: Any) -> None:
    assert asked(tokenizers, "/models/kimi") == {}
    with building(None, "/models/kimi"):
        pass
    assert asked(tokenizers, "/models/kimi") == {}


def test_a_no_stays_a_no(tokenizers: Any) -> None:
    with building(None, "/models/kimi"):
        assert asked(tokenizers, "/models/kimi", trust_remote_code=False) == {"trust_remote_code": False}


def test_another_thread_is_not_trusted_meanwhile(tokenizers: Any) -> None:
    with building(None, "/models/kimi"):
        thread = threading.Thread(target=tokenizers.from_pretrained, args=("/models/kimi",))
        thread.start()
        thread.join()
    assert tokenizers.asked[-1] == ("/models/kimi", {})


PREPROCESSING = "speculators/data_generation/preprocessing.py"


@pytest.mark.parametrize("downstream", ["speculators_0_3", "speculators_0_4"])
def test_offsets_are_needed_where_the_downstream_asks_for_them(
    make_case: MakeCase, downstream: str
) -> None:
    need = by_name("tokenizer.offsets").need(make_case(downstream))
    assert need is not None
    assert f"{PREPROCESSING}:" in need.reason
    assert need.targets == ("speculators.data_generation.preprocessing:build_eagle3_dataset",)
    without = (PREPROCESSING, "return_offsets_mapping=True, ", "")
    assert by_name("tokenizer.offsets").need(make_case(downstream, without)) is None


@pytest.mark.parametrize("fast", [True, False])
def test_a_slow_tokenizer_gets_offsets_and_a_fast_one_is_handed_on(
    fake_modules: Callable[..., None],
    make_case: MakeCase,
    install: Callable[[str, Case], Plan],
    fast: bool,
) -> None:
    class Words:
        is_fast = fast
        added_tokens_decoder: dict[int, str] = {}  # noqa: RUF012

        def __call__(self, text: str, **keywords: Any) -> dict[str, Any]:
            given.append(keywords)
            return {"input_ids": [0], **({"offset_mapping": "own"} if fast else {})}

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return ["abc"]

    given: list[dict[str, Any]] = []
    fake_modules("speculators_0_3", "transformers_4", "vllm", "torch")
    module = importlib.import_module("speculators.data_generation.preprocessing")
    install("tokenizer.offsets", make_case())
    data = {"conversations": [[{"content": "abc"}]]}
    (sample,) = module.build_eagle3_dataset(data, tokenizer=Words())
    assert list(sample["loss_mask"]) == (list("own") if fast else [(0, 3)])
    assert given[0].get("return_offsets_mapping", False) is fast
