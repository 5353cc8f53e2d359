"""What is lost within conversations is counted, told always, and refused above the user's share."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest

from vllm_compat.adapters.base import Case
from vllm_compat.analysis.facts import preprocessing_of
from vllm_compat.checks import dataset
from vllm_compat.checks.losses import Losses, in_words, spread
from vllm_compat.errors import GuardError
from vllm_compat.runtime.patching import Transaction

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}{{ m['content'] }}{% if m.tool_calls %}x{% endif %}{% endfor %}"
)


class Dataset(dict[str, Any]):
    """A FAKE dataset with one column."""

    @property
    def column_names(self) -> list[str]:
        return list(self)

    def __len__(self) -> int:
        return len(self["conversations"])

    def select(self, places: list[int]) -> Dataset:
        return Dataset(conversations=[self["conversations"][place] for place in places])


class Tokenizer:
    """A FAKE fast tokenizer whose template renders tool calls."""

    is_fast = True
    name_or_path = ""
    chat_template = TEMPLATE

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        if "bad" in text:
            raise RuntimeError("no such text")
        return {"input_ids": [1, 2], "offset_mapping": [(0, 1), (1, 2)]}


def user(text: str = "What?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str = "That.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.fixture
def build(
    fake_modules: Callable[..., None], transaction: Transaction, make_case: Callable[..., Case]
) -> Callable[..., Any]:
    """The FAKE preprocessing with the guards in force, at a given share."""
    fake_modules("speculators_0_4", "transformers_4", "vllm", "torch")
    place = preprocessing_of(make_case().environment)
    assert place is not None

    def built(conversations: list[Any], max_loss: float = 0.01) -> Any:
        dataset.install(transaction.owned_by("guard"), place, max_loss=max_loss)
        preprocessing = importlib.import_module("speculators.data_generation.preprocessing")
        return preprocessing.build_eagle3_dataset(Dataset(conversations=conversations), Tokenizer())

    return built


def test_one_lost_conversation_of_many_is_told_and_does_not_end_the_run(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert len(build([*[[user()]] * 199, [user("bad")]])) == 199
    assert "1 of 200 conversations are lost on the way to token ids, 199 are left." in caplog.text
    assert "no such text" in caplog.text


def test_more_than_the_share_is_refused_and_the_advice_lets_it_through(
    build: Callable[..., Any],
) -> None:
    rows = [*[[user()]] * 29, [user("bad")]]
    with pytest.raises(GuardError, match=r"1 of 30 .*--max-loss 0\.034 \(apply\(max_loss=0\.034\)\)"):
        build(rows)


@pytest.mark.parametrize("share", [1 / 30, 1 / 3, 0.5, 1.0, 2 / 300_000, 0.0099])
def test_the_share_that_is_advised_is_enough_and_not_much_more(share: float) -> None:
    assert share <= float(in_words(share)) <= share * 1.2


def test_with_that_share_the_data_are_used(build: Callable[..., Any]) -> None:
    assert len(build([*[[user()]] * 29, [user("bad")]], max_loss=0.034)) == 29


def test_nothing_left_is_refused_whatever_the_share(build: Callable[..., Any]) -> None:
    with pytest.raises(GuardError, match=r"2 of 2 conversations are lost.* Nothing of this dataset"):
        build([[user("bad")], [user("bad")]], max_loss=1)


def test_turns_left_out_for_their_role_are_counted_with_the_role(build: Callable[..., Any]) -> None:
    tool = {"role": "tool", "content": "rain until noon"}
    own = {"role": "our_model_v2", "content": "It will rain."}
    with pytest.raises(GuardError, match=r"3 of 7 turns are left out for their role: 'tool' \(2\),"):
        build([[user(), tool, tool, answer()], [user(), own, answer()]])


def test_a_tool_call_that_the_template_would_render_is_a_loss(build: Callable[..., Any]) -> None:
    with pytest.raises(GuardError, match=r"parts of turns .* are left out: 'tool_calls' \(1\)"):
        build([[user(), answer(tool_calls=[{"name": "get_weather"}])]])
    assert build([[user(), answer(weight=0.5)]])  # no template renders it


def test_stock_is_not_made_to_warn_twice(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    build([[user(), {"role": "tool", "content": "rain"}, answer()]], max_loss=1)
    assert "Unknown role" not in caplog.text
    assert not logging.getLogger(
        sys.modules["speculators.data_generation.preprocessing"].__name__
    ).disabled


@pytest.mark.parametrize(
    ("mask", "untrained"),
    [([0, 1, 1, 0, 1], 0), ([0, 0, 0, 0, 1], 1), ([1, 0, 0, 0, 0], 1), ([0, 0, 0, 0, 0], 2)],
)
def test_answers_without_a_token_to_train_on_are_counted(mask: list[int], untrained: int) -> None:
    losses = Losses()
    turns = [user(), answer(), user(), answer("and this"), user(), answer(" ")]
    losses.add_mask(turns, mask)
    assert (losses.answers, losses.untrained) == (2, untrained)


def test_untrained_answers_are_refused_with_the_pattern_as_the_way_out() -> None:
    losses = Losses(answers=4, untrained=2)
    with pytest.raises(
        GuardError, match=r"2 of 4 answers have no token to train on\. .* assistant_pattern"
    ):
        dataset.check_within(losses, 0.01)
    dataset.check_within(losses, 0.5)


def test_places_are_spread_over_a_large_dataset() -> None:
    assert spread(3, 5) == [0, 1, 2]
    places = spread(1_000_000, 1000)
    assert len(places) == len(set(places)) == 1000
    assert places[-1] >= 999_000
