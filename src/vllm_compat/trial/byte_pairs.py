"""Byte-pair ranks: train them, write and read them, encode with them.

The tiny models' tokenizers all speak the vocabulary that this module trains. Its algorithm is the
one tiktoken runs (merge the adjacent pair whose bytes have the lowest rank until none is left), in
pure Python, so that the slow tokenizer, the fast one and this module can be held against one
another.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from itertools import pairwise

from vllm_compat.errors import UsageError

# Splits a text into the pieces inside which merges happen: runs of Han characters, words with the
# space before them, up to three digits, punctuation, white space. It uses only what Python's `re`,
# Rust's regex crates (tiktoken) and Oniguruma (tokenizers) read alike, and it leaves no character
# out: tiktoken drops what a pattern does not match, silently.
PATTERN = "|".join(
    (
        "[\u4e00-\u9fff]+",
        " ?[^\\W\\d_\u4e00-\u9fff]+",
        "\\d{1,3}",
        " ?(?:[^\\w\\s]|_)+",
        "\\s+(?!\\S)",
        "\\s+",
    )
)

# What the merges are learnt from: a little prose, chat, code, Chinese, accents, and emoji, so that
# every script has both merged and unmerged pieces.
TRAINING_TEXT = """\
The hidden states of the model are the input of the draft. What the model says next depends on the
tokens that it has seen, and on nothing else; the answer to the question is in the states.
A user asks: what is the capital of France? The assistant says: the capital of France is Paris.
Please write a function that returns the sum of the first n numbers, and explain what it does.
def add_numbers(first, second):
    # return the sum of the two numbers
    result = first + second
    return result
for index in range(10):
    print(index, add_numbers(index, index + 1))
if __name__ == "__main__": print({"key": [1, 2, 3], "other": 3.14159})
你好，世界！你是谁？我是一个语言模型。请问法国的首都是哪里？法国的首都是巴黎。
模型的隐藏状态是草稿模型的输入。我们的模型可以回答问题，也可以写代码。
Ça va très bien, merci. Où est la bibliothèque? L'été est déjà fini. Größe, Straße, über.
Привет, как дела? Всё хорошо, спасибо. これは日本語の文です。
😀😀 👍🏽 🚀🚀 ✅ 1234567890 2024-01-01 100% $5.00 a+b=c; x*y != z
"""


def train(merges: int, text: str = TRAINING_TEXT, pattern: str = PATTERN) -> dict[bytes, int]:
    """Return a rank for each of the 256 bytes and for `merges` learnt tokens.

    Each round merges the adjacent pair of tokens that stands in `text` most often; of equally
    frequent ones the smallest in byte order, so that the same input gives the same ranks
    everywhere. A text too small for that many merges is a `UsageError`.
    """
    ranks = {bytes([value]): value for value in range(256)}
    pieces = Counter(match.group().encode() for match in re.finditer(pattern, text))
    words = [([bytes([value]) for value in piece], count) for piece, count in pieces.items()]
    for _ in range(merges):
        found: Counter[bytes] = Counter()
        for parts, count in words:
            for left, right in pairwise(parts):
                found[left + right] += count
        if not found:
            raise UsageError(
                f"The training text is too small for {merges} merges: "
                f"it gives no more than {len(ranks) - 256}."
            )
        best = min(found, key=lambda token: (-found[token], token))
        ranks[best] = len(ranks)
        for parts, _count in words:
            _merge(parts, best)
    return ranks


def _merge(parts: list[bytes], token: bytes) -> None:
    """Join, in place and from the left, each two neighbours that make up `token`."""
    index = 0
    while index + 1 < len(parts):
        if parts[index] + parts[index + 1] == token:
            parts[index : index + 2] = [token]
        index += 1


def split(piece: bytes, ranks: dict[bytes, int], below: int | None = None) -> list[bytes]:
    """Return the tokens of one piece of text, using only merges whose rank is less than `below`."""
    limit = len(ranks) if below is None else below
    parts = [piece[index : index + 1] for index in range(len(piece))]
    while len(parts) > 1:
        joined = (left + right for left, right in pairwise(parts))
        candidates = [(ranks.get(token, limit), index) for index, token in enumerate(joined)]
        rank, index = min(candidates)
        if rank >= limit:
            break
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts


def encode(text: str, ranks: dict[bytes, int], pattern: str = PATTERN) -> list[int]:
    """Return the token ids of a text without special tokens."""
    return [
        ranks[token]
        for match in re.finditer(pattern, text)
        for token in split(match.group().encode(), ranks)
    ]


def decode(token_ids: list[int], ranks: dict[bytes, int]) -> str:
    """Return the text that these ids spell, with U+FFFD where bytes do not make up a character."""
    tokens = {rank: token for token, rank in ranks.items()}
    return b"".join(tokens[token_id] for token_id in token_ids).decode("utf-8", "replace")


def merge_pairs(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return, in the order of their ranks, the two tokens that each merged token is made of.

    This is the form in which fast tokenizers keep the same vocabulary.
    """
    pairs = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = split(token, ranks, below=rank)
            pairs.append((left, right))
    return pairs


def dump(ranks: dict[bytes, int]) -> str:
    """Return the text of a ``tiktoken.model`` file: one ``base64(token) rank`` a line."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ordered)


def load(text: str) -> dict[bytes, int]:
    """Return the ranks that the text of a ``tiktoken.model`` file holds."""
    ranks = {}
    for line in text.splitlines():
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    return ranks


def printable_bytes() -> list[str]:
    """Return for each byte the printable character that stands for it in a token's name.

    Bytes that are printable Latin-1 characters stand for themselves, the others for the characters
    from U+0100 on, as byte-level tokenizers write them.
    """
    names: list[str] = []
    shifted = 0
    for value in range(256):
        if 0x21 <= value <= 0x7E or 0xA1 <= value <= 0xAC or 0xAE <= value <= 0xFF:
            names.append(chr(value))
        else:
            names.append(chr(0x100 + shifted))
            shifted += 1
    return names


def token_name(token: bytes) -> str:
    """Return the printable name of a token."""
    names = printable_bytes()
    return "".join(names[value] for value in token)
