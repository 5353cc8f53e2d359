"""Step 1 loses nothing without an error that says how much and why."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_compat.adapters.base import Case
from vllm_compat.analysis.facts import preprocessing_of
from vllm_compat.checks import dataset
from vllm_compat.errors import GuardError
from vllm_compat.runtime.patching import Transaction

MODULE = "speculators.data_generation.preprocessing"


class Dataset(dict[str, Any]):
    """A FAKE dataset with one column."""

    @property
    def column_names(self) -> list[str]:
        return list(self)

    def __len__(self) -> int:
        return len(next(iter(self.values())))

    def select(self, places: range) -> Dataset:
        return Dataset({name: [column[i] for i in places] for name, column in self.items()})


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


class Tokenizer:
    """A FAKE fast tokenizer that does not take every text."""

    is_fast = True
    name_or_path = ""

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        if "bad" in text:
            raise RuntimeError("no such text")
        return {"input_ids": [1], "offset_mapping": [(0, int("mute" not in text))]}


@pytest.fixture
def preprocessing(
    fake_modules: Callable[..., None], transaction: Transaction, make_case: Callable[..., Case]
) -> Any:
    """The FAKE preprocessing with the guards in force."""
    fake_modules("speculators_0_3", "transformers_4", "vllm", "torch")
    place = preprocessing_of(make_case().environment)
    assert place is not None
    dataset.install(transaction.owned_by("guard"), place, max_loss=0.01)
    return importlib.import_module(MODULE)


def test_a_dataset_that_is_whole_passes(preprocessing: Any) -> None:
    data = Dataset(conversations=[talk("a"), talk("b")])
    assert len(preprocessing.build_eagle3_dataset(data, Tokenizer())) == 2


def test_what_is_lost_is_an_error_with_counts_and_the_first_reason(preprocessing: Any) -> None:
    data = Dataset(conversations=[talk("a"), [], talk("bad"), talk("bad", "bad"), talk("b")])
    with pytest.raises(
        GuardError,
        match=r"2 of 5 conversations are lost .*, 2 are left and 1 have no turns\. The first reason:"
        r" Failed to process conversation 2: RuntimeError\('no such text'\)\.",
    ):
        preprocessing.build_eagle3_dataset(data, tokenizer=Tokenizer())


def test_a_conversation_without_turns_is_left_out_and_told(
    preprocessing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    data = Dataset(conversations=[talk("a"), []])
    assert len(preprocessing.build_eagle3_dataset(data, Tokenizer())) == 1
    assert "1 of 2 conversations have no turns" in caplog.text


@pytest.mark.parametrize("rows", [[], [[], []]])
def test_an_empty_dataset_is_an_error(preprocessing: Any, rows: list[Any]) -> None:
    with pytest.raises(GuardError, match="The dataset is empty"):
        preprocessing.build_eagle3_dataset(Dataset(conversations=rows), Tokenizer())


def test_a_column_of_another_name_is_named() -> None:
    with pytest.raises(GuardError, match=r"no column 'conversations' \(they have messages\)"):
        dataset.check_counts(Dataset(messages=[talk("a")]), 0, [], 0.01)


def test_a_dataset_with_nothing_to_train_on_is_an_error(preprocessing: Any) -> None:
    data = Dataset(conversations=[talk("mute"), talk("mute")])
    with pytest.raises(GuardError, match="None of 2 samples has a token to train on"):
        preprocessing.build_eagle3_dataset(data, Tokenizer())


def test_a_loss_that_comes_out_of_a_cache_is_looked_at_once_more(
    preprocessing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    datasets = ModuleType("datasets")
    for name in ("disable_caching", "enable_caching", "is_caching_enabled"):
        setattr(datasets, name, lambda name=name: calls.append(name) or True)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    stock = preprocessing._preprocess_batch

    def cached(examples: Any, tokenizer: Any, max_length: int) -> Any:
        calls.append("batch")
        return [] if calls == ["batch"] else stock(examples, tokenizer, max_length)

    monkeypatch.setattr(preprocessing, "_preprocess_batch", cached)
    with pytest.raises(GuardError, match=r"1 of 1 .* Failed to process conversation 0: RuntimeError"):
        preprocessing.build_eagle3_dataset(Dataset(conversations=[talk("bad")]), Tokenizer())
    assert calls == ["batch", "is_caching_enabled", "disable_caching", "batch", "enable_caching"]


def test_a_cached_dataset_is_not_tokenised_anew_to_learn_a_reason(
    preprocessing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = ModuleType("datasets")
    for name in ("disable_caching", "enable_caching", "is_caching_enabled"):
        setattr(datasets, name, lambda: True)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    seen: list[int] = []

    def cached(examples: Any, tokenizer: Any, max_length: int) -> Any:
        seen.append(len(examples))
        return []

    monkeypatch.setattr(preprocessing, "_preprocess_batch", cached)
    many = Dataset(conversations=[talk("good")] * 10_000)
    with pytest.raises(GuardError, match=r"10000 of 10000 .* none is logged \(the first 256 were tried"):
        preprocessing.build_eagle3_dataset(many, Tokenizer())
    assert seen[0] == 10_000
    assert sum(seen[1:]) == 256


def test_reasons_come_from_forked_processes_too() -> None:
    with dataset._reasons("some.module") as so_far:
        child = os.fork()
        if child == 0:
            logging.getLogger("some.module").error("  \u2717 Failed to\n process")
            os._exit(0)
        os.waitpid(child, 0)
        assert so_far() == ["Failed to process"]
    assert not logging.getLogger("some.module").handlers


@pytest.mark.parametrize("empty", [True, False])
def test_frequencies_that_a_run_without_data_has_left_are_refused(
    preprocessing: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: bool
) -> None:
    kept = {} if empty else {5: 1}
    torch = importlib.import_module("torch")
    monkeypatch.setattr(torch, "load", lambda *_, **__: kept, raising=False)
    path = tmp_path / "token_freq.pt"
    path.touch()
    data = Dataset(conversations=[talk("a")])
    if not empty:
        preprocessing.load_and_preprocess_dataset(data, Tokenizer(), path)
        return
    with pytest.raises(GuardError, match=r"token_freq.pt holds no token frequencies"):
        preprocessing.load_and_preprocess_dataset(data, Tokenizer(), path)


class TokenizersBackend:
    """A FAKE of what transformers 5 makes of a slow tokenizer."""

    def __init__(self, path: Path, shift: int) -> None:
        self.name_or_path = str(path)
        self.shift = shift

    def convert_tokens_to_ids(self, token: str) -> int:
        return 7 + self.shift


class TikTokenTokenizer(TokenizersBackend):
    """The FAKE model's own."""


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    described = {
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {"7": {"content": "<think>"}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    return tmp_path


@pytest.mark.parametrize(
    ("shift", "what"),
    [(2, r"1 special tokens are shifted \(<think> is 9 instead of 7\)"), (0, "ids of text may differ")],
)
def test_a_converted_tokenizer_is_refused_in_words(kimi: Path, shift: int, what: str) -> None:
    with pytest.raises(GuardError, match=f"a TokenizersBackend that .*own class is TikTokenT.*{what}"):
        dataset.check_own_class(TokenizersBackend(kimi, shift))


def test_the_models_own_and_what_it_ships_itself_pass(kimi: Path) -> None:
    dataset.check_own_class(TikTokenTokenizer(kimi, 0))
    dataset.check_own_class(TokenizersBackend(kimi / "elsewhere", 2))
    (kimi / "tokenizer.json").touch()
    dataset.check_own_class(TokenizersBackend(kimi, 0))
