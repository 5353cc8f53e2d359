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
def test_trust_is_given_where_the_next_line_has_it_already(
    make_case: MakeCase, downstream: str
) -> None:
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
        assert asked(tokenizers, "/models/kimi", trust_remote_code=False) == {
            "trust_remote_code": False
        }


def test_another_thread_is_not_trusted_meanwhile(tokenizers: Any) -> None:
    with building(None, "/models/kimi"):
        thread = threading.Thread(target=tokenizers.from_pretrained, args=("/models/kimi",))
        thread.start()
        thread.join()
    assert tokenizers.asked[-1] == ("/models/kimi", {})
