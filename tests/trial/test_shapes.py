"""Shapes for `vllm-compat bench`: the published widths, and fewer layers where asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_compat.errors import UsageError
from vllm_compat.trial.shapes import SHAPES, describe, write_shape


def test_kimi_has_its_published_widths_and_as_many_layers_as_asked_for(tmp_path: Path) -> None:
    config = json.loads((write_shape("kimi-k2.5", tmp_path, 12) / "config.json").read_text())
    text = config["text_config"]
    assert (text["hidden_size"], text["n_routed_experts"], text["num_hidden_layers"]) == (7168, 384, 12)
    assert text["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    assert config["vision_config"]["vt_num_hidden_layers"] == 27
    assert (tmp_path / "tiktoken.model").exists()
    assert not (tmp_path / "tokenizer.json").exists(), "Kimi's tokenizer is a slow one"
    for file in ("configuration_kimi_k25.py", "tokenization_kimi.py"):
        assert (tmp_path / file).exists()


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_its_own_number_of_layers_and_no_more(tmp_path: Path, name: str) -> None:
    config = json.loads((write_shape(name, tmp_path) / "config.json").read_text())
    assert config.get("text_config", config)["num_hidden_layers"] == SHAPES[name].layers
    for layers in (0, SHAPES[name].layers + 1):
        with pytest.raises(UsageError, match=f"--layers is {layers}"):
            write_shape(name, tmp_path, layers)


def test_records_say_how_many_layers_of_a_model_were_there() -> None:
    assert describe("kimi-k2.5", 12) == ("random weights, Kimi-K2.5 with INT4 experts, 12 of 61 layers")
    assert describe("8b") == describe("8b", 32) == "random weights, 8b Llama"
