"""The header of a file of hidden states, written and read without torch."""

import json
import struct
from pathlib import Path

import pytest

from vllm_compat.runtime.states_header import KEY, StatesHeader, checksum, from_metadata, read_header

HEADER = StatesHeader(
    request="cmpl-1",
    tokens=7,
    layer_ids=(4, 2, 8),
    hidden_size=64,
    dtype="bfloat16",
    model="tiny",
    model_digest="0" * 64,
    vllm="0.32.0",
    vllm_compat="0.1.0",
    checksum="00000000",
)


def written(path: Path, metadata: object) -> Path:
    text = json.dumps({"__metadata__": metadata} if metadata is not None else {}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return path


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    assert read_header(written(tmp_path / "a", HEADER.metadata())) == HEADER


def test_a_file_of_stock_says_nothing(tmp_path: Path) -> None:
    assert read_header(written(tmp_path / "a", None)) is None
    assert from_metadata({"format": "pt"}) is None


@pytest.mark.parametrize("content", [b"", b"\x00", b"\xff" * 20, struct.pack("<Q", 4) + b"[1,]"])
def test_what_is_no_safetensors_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        read_header(tmp_path / "a")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layer_ids": 3}'])
def test_a_text_that_is_not_ours_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="not a text of this library"):
        from_metadata({KEY: text})


def test_the_checksum_is_of_all_bytes_in_order() -> None:
    assert checksum(b"ab", b"c") == checksum(b"abc") != checksum(b"c", b"ab")
