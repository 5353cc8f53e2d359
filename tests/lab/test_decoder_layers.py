"""The committed table of decoder layers: complete, small, and nothing in it moves unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.decoder_layers import TABLE, make_table, releases_of
from lab.layers_page import FAMILIES, drafted, layer_rows

from vllm_compat.analysis.surface.recorded import recorded_versions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
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


def test_the_page_has_every_layer_of_every_release_and_what_proves_it() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for row in layer_rows(READ):
        assert f"\n{row}\n" in page, "run scripts/render_records.py"
        cells = [cell.strip() for cell in row.replace("\\|", "").split("|")[1:-1]]
        assert len(cells) == 5
        assert all(cells[:4]), row
    for row in READ["rows"]:
        name = row["file"].replace("vllm/model_executor/models/", "").replace("vllm/models/", "models/")
        assert f"| `{row['layer']}` in `{name}` | {row['releases'][0]}" in page


def test_what_people_train_drafts_for_is_in_it() -> None:
    found = {name for row in READ["rows"] for name in drafted(row)}
    assert found == set(FAMILIES)
