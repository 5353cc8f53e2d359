"""The tiny families, as far as they can be seen without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_compat.errors import UsageError
from vllm_compat.trial import families, models


@pytest.mark.parametrize(("name", "dtype"), [("clippy", "float32"), ("qwen3", "int4")])
def test_what_cannot_be_made_is_refused_before_torch_is_needed(
    name: str, dtype: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"clippy|int4"):
        families.make_family(name, tmp_path / "model", dtype=dtype)
    assert not (tmp_path / "model").exists()


def test_every_family_says_what_it_is_there_for() -> None:
    assert len({family.why for family in families._ALL.values()}) == len(families._ALL)


def test_minicpm_is_granite_under_other_names() -> None:
    granite = {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-6,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.125,
        "residual_multiplier": 0.7,
        "logits_scaling": 4.0,
    }
    config = families.as_minicpm(granite)
    assert (config["scale_emb"], config["scale_depth"], config["dim_model_base"]) == (6.0, 1.4, 64)
    assert not {"embedding_multiplier", "logits_scaling"} & set(config)
    back = families.minicpm_as_granite(config)
    assert {key: back[key] for key in granite} == granite


def test_vision_tokens_take_reserved_places(tmp_path: Path) -> None:
    assert not set(families.VISION_TOKENS) & set(models.SPECIAL_TOKENS)
    models.write_fast_tokenizer(tmp_path, families.VISION_TOKENS)
    text = (tmp_path / "tokenizer.json").read_text()
    assert f'"<|image_pad|>": {models.BYTE_PAIR_TOKENS + 35}' in text
    assert "<|reserved_token_547|>" not in text


def test_drafted_families_have_names_of_their_own() -> None:
    assert not set(families.FAMILIES) & set(families.DRAFTED)
    assert not set(models.MODEL_NAMES) & {*families.FAMILIES, *families.DRAFTED}
