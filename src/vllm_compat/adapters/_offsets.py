"""Character offsets for tokenizers that cannot give any, exact by construction.

A slow tokenizer tells ids and, for each id, a token; nothing of where in the text it stands. But a
tokenizer that loses nothing spells its text: the bytes of its tokens, one after another, are the
bytes of the text. Where they are, and that is checked for every text, each token's place is known,
a token that holds a part of a character included: its offsets are the characters that it touches,
which is what fast tokenizers answer. Where they are not, nothing is guessed.

Pure: needs neither transformers nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from vllm_compat._version import __version__

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class WithOffsets:
    """A tokenizer that also answers ``return_offsets_mapping=True``; all else is the tokenizer's own.

    Goes to worker processes by pickle, and needs no patch there. vllm_compat's version is part of
    it, so that what an older version has left in a cache of `datasets` is not taken for its result.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._made_by = __version__

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the tokenizer's encoding of a text, with ``offset_mapping`` where it is asked for.

        Raises:
            ValueError: The tokens do not spell the text.
        """
        if not isinstance(text, str) or not kwargs.get("return_offsets_mapping"):
            return self._tokenizer(text, *args, **kwargs)
        kwargs.pop("return_offsets_mapping")
        encoding = self._tokenizer(text, *args, **kwargs)
        encoding["offset_mapping"] = exact_offsets(self._tokenizer, text, encoding["input_ids"])
        return encoding

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_tokenizer", "_made_by"):
            raise AttributeError(name)  # while it is being unpickled it has no tokenizer yet
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)


def exact_offsets(tokenizer: Any, text: str, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return for each token the characters that it touches, ``(first, last + 1)``.

    ``ids`` may spell the beginning of the text only, where the tokenizer has cut it. The tokens'
    names are read in three ways: bytes as they are (Qwen's first), byte-level names (GPT-2, Kimi),
    SentencePiece names (``▁`` for a blank, ``<0xE4>`` for a byte, one blank in front). The first
    reading that spells the text is right.

    Raises:
        ValueError: None does: says where they part, so that nobody gets offsets that are guessed.
    """
    data = text.encode()
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    added = {int(key): str(value) for key, value in tokenizer.added_tokens_decoder.items()}
    closest = -1
    for spell in (_byte_level, _sentence_piece):
        pieces = _spelled(zip(ids, tokens, strict=True), added, spell)
        if pieces is None:
            continue
        joined = b"".join(pieces)
        if data.startswith(joined):
            return _places(text, data, pieces, 0)
        if spell is _sentence_piece and (b" " + data).startswith(joined):
            return _places(text, data, pieces, 1)
        closest = max(closest, _common(data, joined))
    if closest < 0:
        unknown = next(t for t in tokens if not isinstance(t, bytes) and _sentence_piece(t) is None)
        raise ValueError(f"no offsets can be given: token {unknown!r} has no known spelling")
    place = len(data[:closest].decode("utf-8", "ignore"))
    raise ValueError(
        f"no offsets can be given: the tokens of {type(tokenizer).__name__} do not spell the text from"
        f" character {place} on ({text[place : place + 20]!r}); it changes the text before it splits it"
    )


def _spelled(
    pairs: Iterable[tuple[int, Any]],
    added: dict[int, str],
    spell: Callable[[Any], bytes | None],
) -> list[bytes] | None:
    """Return each token's bytes in one reading, or None where a token has no such reading."""
    pieces = []
    for token_id, token in pairs:
        if token_id in added:
            piece: bytes | None = added[token_id].encode()
        else:
            piece = token if isinstance(token, bytes) else spell(token)
        if piece is None:
            return None
        pieces.append(piece)
    return pieces


@cache
def _byte_of() -> dict[str, int]:
    """Return the byte that each printable character stands for in byte-level names (GPT-2's rule)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in set(shown)]
    table = {chr(value): value for value in shown}
    table.update({chr(0x100 + place): value for place, value in enumerate(hidden)})
    return table


@cache
def _byte_level(token: str | None) -> bytes | None:
    try:
        return bytes(map(_byte_of().__getitem__, token)) if isinstance(token, str) else None
    except KeyError:
        return None


def _sentence_piece(token: str | None) -> bytes | None:
    if not isinstance(token, str):
        return None
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte.group(1), 16)]) if byte else token.replace("\u2581", " ").encode()


def _places(text: str, data: bytes, pieces: Sequence[bytes], ahead: int) -> list[tuple[int, int]]:
    """Return the characters that pieces touch; ``ahead`` bytes of them stand before the text."""
    if len(data) == len(text):
        character: Sequence[int] = range(len(text))
    else:
        character = [place for place, c in enumerate(text) for _ in c.encode()]
    places, begin = [], -ahead
    for piece in pieces:
        end = begin + len(piece)
        first, last = max(begin, 0), max(end, 0)
        start = character[first] if first < len(data) else len(text)
        places.append((start, character[last - 1] + 1 if last > first else start))
        begin = end
    return places


def _common(one: bytes, other: bytes) -> int:
    """Return the length of the beginning that two byte strings share."""
    length = min(len(one), len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)
