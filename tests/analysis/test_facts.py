"""A fact is written as one line of text, and the line gives the fact back."""

from __future__ import annotations

import pytest

from vllm_compat.analysis.environment import Environment
from vllm_compat.analysis.facts import (
    Fact,
    MissingNames,
    Preprocessing,
    TorchForTyping,
    Trainer,
    facts_in,
    missing_names,
    names_torch_for_typing,
    preprocessing_of,
    texts_of,
    trainer_of,
)

LINES: dict[Fact, str] = {
    TorchForTyping(): "transformers.configuration_utils names torch, imported for type checking only",
    MissingNames("transformers.gone", ("A", "B")): "missing transformers.gone:A,B",
    Preprocessing("a/b.py:4", "a.b:build"): "offsets asked a/b.py:4 a.b:build",
    Preprocessing("a/b.py:4", "a.b:build", "a.b:save"): "offsets asked a/b.py:4 a.b:build a.b:save",
    Trainer("a/c.py:7", "a.c:Draft", "setup"): "draft made by a/c.py:7 a.c:Draft setup",
    Trainer("a/c.py:7", "a.c:Draft", "setup", ("prefix", "norm")): (
        "draft made by a/c.py:7 a.c:Draft setup prefix norm"
    ),
}
"""Plans, caches and digests hold these lines: one that changes makes other plans of the same facts."""


@pytest.mark.parametrize("fact", LINES)
def test_a_fact_has_its_line(fact: Fact) -> None:
    assert fact.text == LINES[fact]


@pytest.mark.parametrize("fact", LINES)
def test_a_line_is_read_as_its_own_kind_and_as_no_other(fact: Fact) -> None:
    for kind in (TorchForTyping, MissingNames, Preprocessing, Trainer):
        assert kind.from_text(fact.text) == (fact if isinstance(fact, kind) else None)


def test_an_environment_holds_lines_and_is_asked_for_facts() -> None:
    known = Environment("3.11", (), "cpu", features=texts_of(LINES))
    assert names_torch_for_typing(known)
    assert missing_names(known) == {"transformers.gone": ("A", "B")}
    assert len(list(facts_in(known, Preprocessing))) == len(list(facts_in(known, Trainer))) == 2
    assert preprocessing_of(known) == Preprocessing("a/b.py:4", "a.b:build")
    assert trainer_of(known) == Trainer("a/c.py:7", "a.c:Draft", "setup")


def test_of_an_environment_without_facts_nothing_is_known() -> None:
    bare = Environment("3.11", (), "cpu", features=("a line of another making",))
    assert not names_torch_for_typing(bare)
    assert missing_names(bare) == {}
    assert preprocessing_of(bare) is trainer_of(bare) is None
