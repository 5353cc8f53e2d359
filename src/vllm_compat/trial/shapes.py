"""Models in their published widths with random weights, for `vllm-compat bench`: configurations alone.

The weights are drawn by vLLM's dummy loader, so nothing but configuration and tokenizer is written, and
nothing is downloaded. Sizes are those of the published ``config.json`` files. Tokenizers are those of
the tiny models: prompts are given as ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_compat.errors import UsageError
from vllm_compat.trial.models import (
    INT4_CONFIG,
    KIMI_VISION,
    VOCABULARY,
    kimi_config,
    kimi_ends,
    write_fast_tokenizer,
    write_kimi_code,
    write_slow_tokenizer,
)


@dataclass(frozen=True)
class Shape:
    """A model with random weights: what it is called, its sizes, and its number of layers."""

    title: str
    layers: int
    sizes: Mapping[str, Any]

    @property
    def remote(self) -> bool:
        """Whether it comes with code of its own, which is ours."""
        return self.sizes.get("model_type") == "kimi_k2"


_LLAMA = {"model_type": "llama", "rope_theta": 500000.0, "hidden_act": "silu"}
_KIMI = {
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "ep_size": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 262144,
    "vocab_size": 163840,
    "initializer_range": 0.02,
    "use_cache": True,
}
SHAPES: dict[str, Shape] = {
    "tiny": Shape(
        "tiny Llama",
        4,
        {**_LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64},
    ),
    "8b": Shape(
        "8b Llama",
        32,
        {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128},
    ),
    "kimi-k2.5": Shape("Kimi-K2.5 with INT4 experts", 61, _KIMI),
}  # fmt: skip


def describe(name: str, layers: int | None = None) -> str:
    """Return a shape in words, as records name their model."""
    shape = SHAPES[name]
    some = f", {layers} of {shape.layers} layers" if layers not in (None, shape.layers) else ""
    return f"random weights, {shape.title}{some}"


def write_shape(name: str, folder: Path, layers: int | None = None) -> Path:
    """Write a shape's configuration and tokenizer into a folder; return the folder.

    ``layers`` is how many of its layers it has (default: as published).

    Raises:
        UsageError: It has no such number of layers.
    """
    shape = SHAPES[name]
    layers = shape.layers if layers is None else layers
    if not 1 <= layers <= shape.layers:
        raise UsageError(
            f"--layers is {layers}; {shape.title} has {shape.layers}, and at least 1 is needed."
        )
    text = {**shape.sizes, "num_hidden_layers": layers}
    config = _kimi(text) if shape.remote else _llama(text)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if shape.remote:
        write_kimi_code(folder)
        write_slow_tokenizer(folder)
    else:
        write_fast_tokenizer(folder)
    return folder


def _llama(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **text,
    }


def _kimi(text: dict[str, Any]) -> dict[str, Any]:
    inner = {
        **text,
        **kimi_ends(),
        "architectures": ["DeepseekV3ForCausalLM"],
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": INT4_CONFIG,
    }
    return {**kimi_config(inner, KIMI_VISION), "torch_dtype": "bfloat16"}
