"""The committed table of decoder layers: complete, small, and nothing in it moves unnoticed."""

from __future__ import annotations

import json
from typing import Any

from lab.decoder_layers import TABLE, make_table, releases_of

from vllm_compat.analysis.surface.recorded import recorded_versions

READ: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))

PARTIAL = {
    ("DeepseekV32DecoderLayer", "vllm/models/deepseek_v32/amd/model.py", "0.31.0"),
    ("DeepseekV32DecoderLayer", "vllm/models/deepseek_v32/nvidia/model.py", "0.28.0"),
    ("Dots3NoteDecoderLayer", "vllm/models/dots3_note/nvidia/model.py", "0.28.0"),
    ("MiniMaxM3DecoderLayer", "vllm/models/minimax_m3/nvidia/model.py", "0.24.0"),
    ("MistralLarge4DecoderLayer", "vllm/models/mistral/mistral_large4/amd/model.py", "0.34.0"),
    ("MistralLarge4DecoderLayer", "vllm/models/mistral/mistral_large4/nvidia/model.py", "0.34.0"),
    ("Qwen3_5DecoderLayer", "vllm/models/qwen3_5/nvidia/model.py", "0.34.0"),
}


def test_every_recorded_release_is_in_it() -> None:
    missing = {str(v) for v in recorded_versions()} - set(READ["releases"])
    assert not missing, f"run python3 -m lab layers SOURCE for {sorted(missing)}"


def test_it_is_small() -> None:
    assert TABLE.stat().st_size < 300_000


def test_counts_and_rows_agree_and_it_makes_itself_again() -> None:
    again = make_table(releases_of(READ))
    assert again["counts"] == READ["counts"]
    assert len(again["rows"]) == len(READ["rows"])


def test_layers_that_hand_on_partial_sums_are_the_known_ones() -> None:
    found = {
        (row["layer"], row["file"], row["releases"][0])
        for row in READ["rows"]
        if any(case["kind"] == "partial" for case in row["cases"])
    }
    assert found == PARTIAL


def test_what_is_neither_proven_nor_known_to_be_otherwise_is_counted() -> None:
    newest = READ["counts"][READ["releases"][-1]]
    assert newest == {"sum": 74, "several": 15, "stream": 26, "unknown": 13, "first": 11, "partial": 4}
