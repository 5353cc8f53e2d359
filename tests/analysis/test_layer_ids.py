"""Tests of the layer mapping: configurations, both numberings, what is refused and what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.analysis.layer_ids import Layer, auto_selected, layers_of, number_of_layers, render
from vllm_compat.errors import UsageError

KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {"model_type": "kimi_k2", "num_hidden_layers": 61, "hidden_size": 7168},
    "vision_config": {"vt_num_hidden_layers": 27},
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def written(folder: Path, config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def small(folder: Path, layers: int, *ids: int) -> Any:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers}
    return layers_of(written(folder, config), ids or None)


class TestMapping:
    def test_kimi_k25(self, tmp_path: Path) -> None:
        kimi = layers_of(written(tmp_path, KIMI))
        assert (kimi.layers, kimi.hidden_size, kimi.selection) == (61, 7168, "auto")
        assert kimi.entries == (
            Layer(0, 2, 3, "auxiliary"),
            Layer(1, 30, 31, "auxiliary"),
            Layer(2, 58, 59, "auxiliary"),
            Layer(3, 60, 61, "verifier's last"),
        )
        assert kimi.draft_ids == (3, 31, 59)
        assert kimi.vllm_default_ids == (2, 30, 58)
        assert kimi.bytes_per_token == 57_344
        assert kimi.notes == ()

    def test_several_streams_are_told_and_billed(self, tmp_path: Path) -> None:
        several = layers_of(written(tmp_path, {**LLAMA, "hc_mult": 4}))
        assert (several.streams, several.bytes_per_token) == (4, 4 * 4 * 4096 * 2)
        assert "4 residual streams a token (hc_mult of its configuration)" in several.notes[0]
        assert "32 layers of 4096, 4 streams a token, ids 0 to 31" in render(several)

    def test_a_flat_configuration(self, tmp_path: Path) -> None:
        llama = layers_of(written(tmp_path, LLAMA), [2, 16, 29, 31])
        assert llama.selection == "given"
        assert llama.draft_ids == (3, 17, 30)
        assert llama.bytes_per_token == 4 * 4096 * 2

    def test_stock_looks_outside_before_inside(self) -> None:
        config = {"num_hidden_layers": 8, "text_config": {"num_hidden_layers": 4}}
        assert number_of_layers(config) == 8

    @pytest.mark.parametrize("key", ["n_layer", "n_layers"])
    def test_older_names(self, key: str) -> None:
        assert number_of_layers({key: 12}) == 12

    def test_float32_takes_twice_the_space(self, tmp_path: Path) -> None:
        config = {**LLAMA, "torch_dtype": "float32"}
        assert layers_of(written(tmp_path, config)).bytes_per_token == 4 * 4096 * 4

    def test_an_unknown_width(self, tmp_path: Path) -> None:
        assert small(tmp_path, 9).bytes_per_token is None


class TestRefusals:
    @pytest.mark.parametrize(
        ("ids", "said"),
        [
            ([2, 30, -1], "Layer id -1 is not in 0 to 60.*the last layer is 60"),
            ([2, 61], "Layer id 61 is not in 0 to 60: the model has 61 layers"),
            ([], "No layer ids are given"),
        ],
    )
    def test_ids_that_are_none(self, tmp_path: Path, ids: list[int], said: str) -> None:
        with pytest.raises(UsageError, match=said):
            layers_of(written(tmp_path, KIMI), ids)

    @pytest.mark.parametrize("count", [1, 2])
    def test_models_too_small_for_stocks_choice(self, tmp_path: Path, count: int) -> None:
        with pytest.raises(UsageError, match=f"does not fit a model of {count} layers"):
            small(tmp_path, count)
        assert small(tmp_path, count, count - 1).layers == count

    @pytest.mark.parametrize("config", [{}, {"text_config": {}}, {"num_hidden_layers": "many"}])
    def test_configurations_that_do_not_say(self, tmp_path: Path, config: Any) -> None:
        with pytest.raises(UsageError, match=r"does not tell the number of layers: .*; name "):
            layers_of(written(tmp_path, config))

    def test_no_configuration(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"has no config.json, so it is no model's folder: name"):
            layers_of(tmp_path)

    @pytest.mark.parametrize("text", ["{not json", "[1, 2]"])
    def test_no_json_object(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match=r"config.json"):
            layers_of(tmp_path)


class TestNotes:
    @pytest.mark.parametrize(
        ("count", "chosen", "kept"),
        [(3, [2, 1, 0, 2], 3), (4, [2, 2, 1, 3], 3), (6, [2, 3, 3, 5], 3)],
    )
    def test_stocks_choice_in_small_models(
        self, tmp_path: Path, count: int, chosen: list[int], kept: int
    ) -> None:
        tiny = small(tmp_path, count)
        assert list(tiny.asked) == chosen == list(auto_selected(count))
        assert f"Stock's own choice {chosen} names a layer twice" in tiny.notes[0]
        assert f"writes {kept} entries" in tiny.notes[0]

    def test_another_order(self, tmp_path: Path) -> None:
        notes = " ".join(small(tmp_path, 32, 16, 2, 29, 31).notes)
        assert "Stock writes entries in the order of the layers, [2, 16, 29, 31]" in notes
        assert "trained on [16, 2, 29] is served with [2, 16, 29]" in notes

    def test_a_last_entry_that_is_not_the_last_layer(self, tmp_path: Path) -> None:
        (note,) = small(tmp_path, 32, 2, 16, 29, 30).notes
        assert "that of layer 31, not 30" in note

    def test_another_number_of_entries(self, tmp_path: Path) -> None:
        (note,) = small(tmp_path, 32, 2, 31).notes
        assert "these are 1 and one" in note


class TestHubCache:
    def cache(self, root: Path) -> Path:
        folder = root / "models--moonshotai--Kimi-K2.5"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("abc123")
        written(folder / "snapshots" / "abc123", KIMI)
        return root

    @pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
    def test_a_cached_model(self, tmp_path: Path, variable: str) -> None:
        below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}
        self.cache(tmp_path / below[variable])
        kimi = layers_of("moonshotai/Kimi-K2.5", environ={variable: str(tmp_path)})
        assert (kimi.model, kimi.layers) == ("moonshotai/Kimi-K2.5", 61)

    def test_nothing_is_downloaded(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="nothing is downloaded here"):
            layers_of("moonshotai/Kimi-K2.5", environ={"HF_HUB_CACHE": str(tmp_path)})


class TestRendering:
    def test_text(self, tmp_path: Path) -> None:
        text = render(layers_of(written(tmp_path, KIMI)))
        assert "61 layers of 7168, ids 0 to 60" in text
        assert "57,344 bytes a token" in text
        assert "    3        60       61  residual stream after layer 60, verifier's last" in text
        assert "eagle_aux_hidden_state_layer_ids: [3, 31, 59]" in text
        assert "Without it vLLM takes [2, 30, 58], which are layer ids [1, 29, 57] here." in text

    def test_json(self, tmp_path: Path) -> None:
        record = json.loads(render(layers_of(written(tmp_path, KIMI)), "json"))
        assert record["schema_version"] == 1
        assert record["draft_ids"] == [3, 31, 59]
        assert record["entries"][3]["role"] == "verifier's last"

    def test_a_form_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="'yaml'"):
            render(layers_of(written(tmp_path, KIMI)), "yaml")
