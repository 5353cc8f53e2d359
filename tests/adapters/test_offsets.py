"""Offsets are those of the characters that a token touches, or there are none."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_compat.adapters._offsets import WithOffsets, exact_offsets
from vllm_compat.trial import byte_pairs, models

END = models.special_token_id("<|im_end|>")


class Slow:
    """A FAKE slow tokenizer over the lab's byte pairs; ``names`` says how it names a token."""

    is_fast = False

    def __init__(self, names: str = "byte level") -> None:
        self.names = names
        self.added_tokens_decoder = {END: "<|im_end|>"}
        self.tokens = {rank: token for token, rank in models.ranks().items()}

    def __call__(self, text: str, *, truncation: bool = False, max_length: int = 0) -> dict[str, Any]:
        ids: list[int] = []
        for place, part in enumerate(text.split("<|im_end|>")):
            ids += [END] if place else []
            ids += byte_pairs.encode(part, models.ranks())
        return {"input_ids": ids[:max_length] if truncation else ids}

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[Any]:
        return ["<|im_end|>" if i == END else self.name(self.tokens[i]) for i in ids]

    def name(self, token: bytes) -> Any:
        return token if self.names == "bytes" else byte_pairs.token_name(token)

    def __len__(self) -> int:
        return models.VOCABULARY


def naive(text: str, tokenizer: Slow, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return offsets by decoding each beginning of the text, character by character."""
    ends, places, begin = [], [], 0
    total = 0
    for c in text:
        total += len(c.encode())
        ends.append(total)
    for i in ids:
        size = len(b"<|im_end|>" if i == END else tokenizer.tokens[i])
        touched = [
            place
            for place, end in enumerate(ends)
            if end > begin and end - len(text[place].encode()) < begin + size
        ]
        places.append((touched[0], touched[-1] + 1))
        begin += size
    return places


TEXTS = st.lists(
    st.one_of(
        st.text(alphabet=st.characters(codec="utf-8"), max_size=8),
        st.sampled_from(["<|im_end|>", "你好，世界", "👍🏽", "def f(x):\n\treturn x", " é", "\u200d"]),
    ),
    max_size=8,
).map("".join)


@settings(deadline=None)
@given(TEXTS, st.sampled_from(["byte level", "bytes"]), st.integers(1, 40))
def test_each_token_gets_the_characters_that_it_touches(text: str, names: str, length: int) -> None:
    slow = Slow(names)
    ids = slow(text)["input_ids"]
    assert exact_offsets(slow, text, ids) == naive(text, slow, ids)
    cut = WithOffsets(slow)(text, truncation=True, max_length=length, return_offsets_mapping=True)
    assert cut["input_ids"] == ids[:length]
    assert cut["offset_mapping"] == naive(text, slow, ids)[:length]


def test_an_emoji_of_several_tokens_is_touched_by_each_of_them() -> None:
    slow = Slow()
    ids = [models.ranks()[bytes([value])] for value in "🦉".encode()]
    assert exact_offsets(slow, "🦉", ids) == [(0, 1)] * 4


class Pieces:
    """A FAKE SentencePiece tokenizer."""

    added_tokens_decoder: dict[int, str] = {}  # noqa: RUF012

    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.tokens[i] for i in ids]


@pytest.mark.parametrize(
    ("text", "tokens", "offsets"),
    [
        ("hello you", ("▁hello", "▁you"), [(0, 5), (5, 9)]),
        (" hello", ("▁", "▁hello"), [(0, 0), (0, 6)]),
        ("a 你", ("▁a", "▁", "<0xE4>", "<0xBD>", "<0xA0>"), [(0, 1), (1, 2), *[(2, 3)] * 3]),
        ("é", ("é",), [(0, 1)]),
    ],
)
def test_sentence_pieces_are_read_too(
    text: str, tokens: tuple[str, ...], offsets: list[tuple[int, int]]
) -> None:
    assert exact_offsets(Pieces(*tokens), text, range(len(tokens))) == offsets


def test_tokens_that_do_not_spell_the_text_get_no_offsets() -> None:
    with pytest.raises(ValueError, match=r"do not spell the text from character 2 on \('LLo'\)"):
        exact_offsets(Pieces("he", "ll", "o"), "heLLo", range(3))


def test_a_token_without_a_spelling_is_named() -> None:
    class Odd(Pieces):
        def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[Any]:
            return [None]

    with pytest.raises(ValueError, match="token None has no known spelling"):
        exact_offsets(Odd(), "x", [0])


def test_all_else_is_the_tokenizers_own_and_goes_to_other_processes() -> None:
    tokenizer = pickle.loads(pickle.dumps(WithOffsets(Slow())))
    assert tokenizer.is_fast is False
    assert len(tokenizer) == models.VOCABULARY
    assert "offset_mapping" not in tokenizer("text")
    with pytest.raises(AttributeError):
        tokenizer.no_such_thing  # noqa: B018
