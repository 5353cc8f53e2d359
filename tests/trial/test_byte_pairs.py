"""The byte-pair ranks: the same everywhere, and read alike by three implementations."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_compat.errors import UsageError
from vllm_compat.trial import byte_pairs

MERGES = 256
# Characters that the engines' classes might disagree about: combining marks, joiners, number forms,
# connector punctuation, ideographic space, digits of other scripts, emoji sequences.
SPICE = "\u0301\u200d\ufe0f½Ⅷ‿_\u3000\xa0١२😀👍🏽中国é\t\n\r 09az'\""
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(SPICE))


FEW = byte_pairs.train(40)


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return byte_pairs.train(MERGES)


def test_the_vocabulary_never_changes(ranks: dict[bytes, int]) -> None:
    # Models that were written and records that were kept depend on it.
    digest = hashlib.sha256(byte_pairs.dump(ranks).encode()).hexdigest()
    assert digest == "aedf04bf15b04c4655dfad92f35628b23a6829e5ff211ed6382d8d9b8151846d"


def test_ranks_are_the_bytes_and_then_the_merges(ranks: dict[bytes, int]) -> None:
    assert sorted(ranks.values()) == list(range(256 + MERGES))
    assert all(ranks[bytes([value])] == value for value in range(256))
    assert all(len(token) > 1 for token, rank in ranks.items() if rank >= 256)


def test_merges_cover_several_scripts(ranks: dict[bytes, int]) -> None:
    assert {b" the", "模型".encode(), "的".encode()} <= set(ranks)


def test_a_text_too_small_is_refused() -> None:
    with pytest.raises(UsageError, match="too small for 9 merges"):
        byte_pairs.train(9, text="ab")


@given(text=TEXTS)
def test_every_text_comes_back(text: str) -> None:
    assert byte_pairs.decode(byte_pairs.encode(text, FEW), FEW) == text


@given(text=TEXTS)
def test_tiktoken_reads_the_ranks_alike(text: str) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding(
        name="lab", pat_str=byte_pairs.PATTERN, mergeable_ranks=FEW, special_tokens={}
    )
    assert byte_pairs.encode(text, FEW) == encoding.encode_ordinary(text)


def test_a_merge_pair_makes_its_token(ranks: dict[bytes, int]) -> None:
    pairs = byte_pairs.merge_pairs(ranks)
    assert [ranks[left + right] for left, right in pairs] == list(range(256, 256 + MERGES))
    assert all(left in ranks and right in ranks for left, right in pairs)


def test_the_file_form_comes_back(ranks: dict[bytes, int]) -> None:
    assert byte_pairs.load(byte_pairs.dump(ranks)) == ranks


def test_token_names_are_printable_and_distinct(ranks: dict[bytes, int]) -> None:
    names = {byte_pairs.token_name(token) for token in ranks}
    assert len(names) == len(ranks)
    assert all(name.isprintable() and " " not in name for name in names)
    assert byte_pairs.token_name(b" the") == "Ġthe"
