# mypy: allow-subclassing-any, allow-untyped-calls
"""The tiny Kimi-K2.5's tokenizer: a slow one on byte-pair ranks, as the real model's is.

It shares the real one's class name, file names, layout (byte-pair tokens first, then a block of 256
special tokens, most of them reserved) and limits (no offsets). Code and vocabulary are its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer

SPECIAL_BLOCK = 256  # ids behind the byte-pair tokens
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


def printable_bytes() -> list[str]:
    """Return for each byte the printable character that stands for it in a token's name."""
    names: list[str] = []
    shifted = 0
    for value in range(256):
        if 0x21 <= value <= 0x7E or 0xA1 <= value <= 0xAC or 0xAE <= value <= 0xFF:
            names.append(chr(value))
        else:
            names.append(chr(0x100 + shifted))
            shifted += 1
    return names


class TikTokenTokenizer(PreTrainedTokenizer):
    """Encode with tiktoken; ``tokenizer_config.json`` gives special tokens their ids."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        vocab_file: str,
        added_tokens_decoder: dict[int, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        added_tokens_decoder = added_tokens_decoder or {}
        ranks = load_tiktoken_bpe(vocab_file)
        block = range(len(ranks), len(ranks) + SPECIAL_BLOCK)
        special = {index: f"<|reserved_token_{index}|>" for index in block}
        special.update({int(index): str(name) for index, name in added_tokens_decoder.items()})

        self.vocab_file = vocab_file
        self.model = tiktoken.Encoding(
            name=str(vocab_file),
            pat_str=PATTERN,
            mergeable_ranks=ranks,
            special_tokens={name: index for index, name in special.items()},
        )
        characters = printable_bytes()
        self.byte_of = {character: value for value, character in enumerate(characters)}
        self.names = {
            rank: "".join(characters[value] for value in token) for token, rank in ranks.items()
        }
        self.names.update(special)
        self.ids = {name: index for index, name in self.names.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder, **kwargs)

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, reserved ones included."""
        return int(self.model.n_vocab)

    def get_vocab(self) -> dict[str, int]:
        """Return every token's name with its id."""
        return dict(self.ids)

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [self.names[index] for index in self.model.encode_ordinary(text)]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.ids.get(token, self.ids.get(str(self.unk_token)))

    def _convert_id_to_token(self, index: int) -> str:
        return self.names.get(index, str(self.unk_token))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the text of these tokens, with U+FFFD where bytes make up no character."""
        spelled = bytearray()
        for character in "".join(tokens):
            value = self.byte_of.get(character)
            spelled += character.encode() if value is None else bytes([value])
        return spelled.decode("utf-8", "replace")

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the text exactly: no space is put around special tokens."""
        kwargs.setdefault("spaces_between_special_tokens", False)
        return super().decode(token_ids, *args, **kwargs)

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        """Copy the ranks into a folder and return the path of the copy."""
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        target = Path(save_directory) / f"{prefix}tiktoken.model"
        if target.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)
