"""``vllm-compat verify``: data that are wrong throughout, told by where they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.commands.verify.provenance import known_of


def config_of(folder: Path, **changed: Any) -> dict[str, Any]:
    """Return what stock writes to data_config.json, as far as it is looked at."""
    known = {
        "architecture": "GlmMoeDsaForCausalLM",
        "vllm": "0.30.0+cu130",
        "ranks": 8,
        "gpu": "8x NVIDIA H200",
    }
    known |= changed
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [known["architecture"]]}))
    return {
        "reproducibility": {"package_versions": {"vllm": known["vllm"]}, "gpu": known["gpu"]},
        "model": {"target_model_path": str(folder), "tensor_parallel_size": known["ranks"]},
    }


def test_data_of_layers_that_were_misread_are_to_be_extracted_again(tmp_path: Path) -> None:
    said = known_of(config_of(tmp_path))
    assert said is not None
    assert "GlmMoeDsaForCausalLM, made with vLLM 0.30.0+cu130 on 8 tensor-parallel ranks" in said
    assert "Extract these again" in said


def test_data_of_a_model_without_one_stream_are_told(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"attn_res_block_size": 4}}))
    said = known_of(config)
    assert said is not None
    assert "attention residuals (attn_res_block_size of its configuration)" in said


@pytest.mark.parametrize(
    "changed",
    [{"vllm": "0.28.0"}, {"ranks": 1}, {"architecture": "LlamaForCausalLM"}, {"gpu": "CPU ONLY"}],
    ids=str,
)
def test_nothing_is_said_of_data_that_were_read_rightly(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert known_of(config_of(tmp_path, **changed)) is None


def test_nothing_is_said_where_the_model_is_not_at_hand(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "config.json").unlink()
    assert known_of(config) is None
    assert known_of({}) is None
