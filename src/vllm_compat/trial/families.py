"""Tiny random models of many families, made from transformers' own classes.

Each is the family's own configuration class with small sizes, its own model class with random
weights, saved by transformers itself, beside the fast tokenizer of `vllm_compat.trial.models`. The
features that tell a family from Llama are all in use and large enough to show in every row: a
sliding window shorter than a prompt, an embedding scale, residual multipliers, norms whose weights
differ from one another, biases that are not zero.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.errors import UsageError
from vllm_compat.trial.models import (
    VOCABULARY,
    make_model,
    special_token_id,
    write_fast_tokenizer,
    write_slow_tokenizer,
)

if TYPE_CHECKING:
    import torch

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 4, 2, 64
WINDOW = 32
"""Sliding windows and attention chunks, in tokens: shorter than the cells' long prompts."""


@dataclass(frozen=True)
class Family:
    """One family: transformers' classes, the fields that are not common, and what it is there for.

    ``embedding`` is the standard deviation of the embedding's weights; a family that multiplies
    them has smaller ones, so that every residual stream begins at about one. ``queries`` scales the
    weights of the queries' norm: attention without a scale of its own would choose one token alone, and
    make of float32's roundings ten times as much. ``zero`` ends the names of parameters that stay zero.
    ``published`` is the architecture's name in published configurations, and in vLLM, where transformers
    has another.
    """

    model: str
    config: str
    why: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    embedding: float = 1.0
    queries: float = 1.0
    drops: tuple[str, ...] = ()
    zero: str = ""
    published: str = ""


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 2048,
}
_EXPERTS, _CHOSEN, _INNER = 8, 2, 128

# The places behind the byte-pair tokens that Kimi's special tokens leave free.
VISION_TOKENS = {
    32: "<|vision_start|>",
    33: "<|vision_end|>",
    34: "<|vision_pad|>",
    35: "<|image_pad|>",
    36: "<|video_pad|>",
}

_BAMBA = {
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_LLAMA4 = {
    "head_dim": HEAD_DIM,
    "intermediate_size": _INNER,
    "intermediate_size_mlp": 2 * HIDDEN,
    "num_local_experts": _EXPERTS,
    "num_experts_per_tok": 1,
    "attention_chunk_size": WINDOW,
    # vLLM has it only where a model is served with more than 32,768 tokens.
    "attn_temperature_tuning": False,
}
_QWEN_VL_TEXT = {
    **_SIZES,
    "head_dim": HEAD_DIM,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}

FAMILIES = {
    "mistral": Family(
        "MistralForCausalLM",
        "MistralConfig",
        "sliding window in every layer",
        {"head_dim": HEAD_DIM, "sliding_window": WINDOW},
    ),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", "biases in attention"),
    "qwen3": Family(
        "Qwen3ForCausalLM", "Qwen3Config", "norms of queries and keys", {"head_dim": HEAD_DIM}
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        "softmax router, every layer with experts",
        {
            "head_dim": HEAD_DIM,
            "num_experts": _EXPERTS,
            "num_experts_per_tok": _CHOSEN,
            "moe_intermediate_size": _INNER,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        "experts without a shared one",
        {"num_local_experts": _EXPERTS, "num_experts_per_tok": _CHOSEN, "intermediate_size": 128},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        "embedding scale, four norms a layer, soft caps, a window on every other layer",
        {
            "head_dim": HEAD_DIM,
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": WINDOW,
            "hidden_act": "gelu_pytorch_tanh",  # published ones have it beside hidden_activation
        },
        embedding=HIDDEN**-0.5,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        "embedding scale, local and global rope",
        {
            "head_dim": HEAD_DIM,
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        },
        embedding=HIDDEN**-0.5,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        "Phi3Config",
        "fused projections",
        {"original_max_position_embeddings": 2048},
    ),
    "granite": Family(
        "GraniteForCausalLM",
        "GraniteConfig",
        "multipliers of embedding, attention and residual",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 4.0,
        },
        embedding=1 / 6,
    ),
    "minicpm": Family(
        "GraniteForCausalLM",  # the same mathematics under other names: see `minicpm_as_granite`
        "GraniteConfig",
        "scale_emb and scale_depth; remote configuration",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": HEAD_DIM**-0.5,
            "residual_multiplier": 1.4 / LAYERS**0.5,
            "logits_scaling": HIDDEN / 64,
        },
        embedding=1 / 6,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        "sinks, a window on every other layer, biased experts",
        {
            "head_dim": HEAD_DIM,
            "intermediate_size": _INNER,
            "num_local_experts": _EXPERTS,
            "num_experts_per_tok": _CHOSEN,
            "sliding_window": WINDOW,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config", "norms behind the blocks"),
    "command_r": Family(
        "CohereForCausalLM",
        "CohereConfig",
        "parallel residual",
        {"use_qk_norm": False, "logit_scale": 0.5},
    ),
    # In vLLM the next three hand back a pair whose first tensor is the whole stream already.
    "exaone4": Family(
        "Exaone4ForCausalLM",
        "Exaone4Config",
        "norms behind the blocks, rope in windowed layers only",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        },
    ),
    "stablelm": Family("StableLmForCausalLM", "StableLmConfig", "layer norms with biases, partial rope"),
    "phimoe": Family(
        "PhimoeForCausalLM",
        "PhimoeConfig",
        "layer norms and experts that are chosen by a threshold",
        {
            "num_local_experts": _EXPERTS,
            "num_experts_per_tok": 2,
            "intermediate_size": _INNER,
            "attention_bias": True,
            "lm_head_bias": True,
        },
        published="PhiMoEForCausalLM",
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        "one tensor, no residual pair; layers under gpt_neox",
        {"rotary_pct": 0.5, "use_parallel_residual": True},
        drops=("num_key_value_heads",),
    ),
    "falcon": Family(
        "FalconForCausalLM",
        "FalconConfig",
        "one tensor, multi-query; layers under transformer.h",
        {"multi_query": True, "parallel_attn": True},
        drops=("num_key_value_heads", "intermediate_size"),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        "MLA, softmax router, YaRN",
        {
            "num_key_value_heads": HEADS,
            "q_lora_rank": 128,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": _INNER,
            "n_routed_experts": _EXPERTS,
            "n_shared_experts": 1,
            "num_experts_per_tok": _CHOSEN,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            # transformers 4 scales attention by none of YaRN's factors, 5 and vLLM by both: all 1.
            "rope_scaling": {
                "rope_type": "yarn",
                "type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.0,
                "mscale_all_dim": 0.0,
                "attention_factor": 1.0,
            },
        },
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        "chunked attention, layers without rope, experts in every other",
        _LLAMA4 | {"interleave_moe_layer_step": 2},
    ),
    "llama4_dense": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        "the same without experts, whose router no CPU build serves",
        _LLAMA4 | {"interleave_moe_layer_step": 2 * LAYERS},
    ),
    "bamba": Family("BambaForCausalLM", "BambaConfig", "Mamba-2 and attention layers in turn", _BAMBA),
    "granite_hybrid": Family(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        "Mamba-2 and attention with multipliers, no experts",
        {
            **{name: value for name, value in _BAMBA.items() if name.startswith("mamba")},
            "layer_types": ["mamba", "attention"] * (LAYERS // 2),
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 2 * HIDDEN,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 4.0,
        },
        embedding=1 / 6,
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        "text path of a vision model, multimodal rope",
        {
            "text_config": {
                **_QWEN_VL_TEXT,
                "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_heads": 2,
                "out_hidden_size": HIDDEN,
                "fullatt_block_indexes": [1],
            },
        },
        drops=tuple(_SIZES),
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        "text path of a vision model with deepstack inputs, interleaved multimodal rope",
        {
            "text_config": {
                **_QWEN_VL_TEXT,
                "rope_scaling": {
                    "rope_type": "default",
                    "mrope_section": [12, 10, 10],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_heads": 2,
                "out_hidden_size": HIDDEN,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
        },
        drops=tuple(_SIZES),
    ),
}
_GATED_DELTA = {
    "head_dim": HEAD_DIM,
    "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_ROUTED = {
    "num_experts": _EXPERTS,
    "num_experts_per_tok": _CHOSEN,
    "moe_intermediate_size": _INNER,
    "shared_expert_intermediate_size": _INNER,
}
_LATENT = {
    **FAMILIES["deepseek_v2"].fields,
    "rope_scaling": None,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
_INDEXED = {**_LATENT, "index_n_heads": 4, "index_head_dim": 128, "index_topk": 64}

_NEMOTRON = {
    "head_dim": HEAD_DIM,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "chunk_size": 16,
}

DRAFTED = {
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        "gated delta nets and gated attention in turn, experts",
        {**_GATED_DELTA, **_ROUTED},
    ),
    "qwen3_5": Family(
        "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", "the same without experts", _GATED_DELTA
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        "the same with experts in every layer",
        {**_GATED_DELTA, **_ROUTED},
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        "sigmoid router, a dense first layer, half of rope",
        {
            "head_dim": HEAD_DIM,
            "moe_intermediate_size": _INNER,
            "n_routed_experts": _EXPERTS,
            "num_experts_per_tok": _CHOSEN,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", "MLA with an indexer over tokens", _INDEXED
    ),
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM", "DeepseekV32Config", "MLA with an indexer, DeepSeek's", _INDEXED
    ),
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        "several streams a token",
        {
            "num_key_value_heads": 1,
            "moe_intermediate_size": _INNER,
            "head_dim": 128,
            "q_lora_rank": 128,
            "n_routed_experts": _EXPERTS,
            "num_experts_per_tok": _CHOSEN,
            "o_groups": 2,
            "o_lora_rank": 64,
            "index_n_heads": 4,
            "index_topk": 64,
        },
        drops=("num_key_value_heads", "intermediate_size"),
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        "delta attention and MLA, hands on its residual last",
        {
            **{name: _LATENT[name] for name in _LATENT if name.startswith(("qk_", "v_", "kv_"))},
            "num_key_value_heads": HEADS,
            "moe_intermediate_size": _INNER,
            "num_local_experts": _EXPERTS,
            "num_experts_per_tok": _CHOSEN,
            "linear_num_heads": HEADS,
        },
        drops=("num_key_value_heads",),
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        "norms over all heads at once, sigmoid router",
        {
            "head_dim": HEAD_DIM,
            "intermediate_size": _INNER,
            "num_local_experts": _EXPERTS,
            "num_experts_per_tok": _CHOSEN,
            "rotary_dim": HEAD_DIM // 2,
            # In published configurations; vLLM reads them, transformers has no other ways.
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM", "Ernie4_5Config", "interleaved rope", {"head_dim": HEAD_DIM}
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        "experts behind a dense first layer, two shared ones",
        {"moe_num_experts": _EXPERTS, "moe_k": _CHOSEN, "moe_intermediate_size": _INNER},
        # The bias that only chooses: CPU builds leave it out of a softmax (`CPURouter`, vLLM 0.32.0).
        zero="e_score_correction_bias",
    ),
    "hunyuan": Family(
        "HunYuanDenseV1ForCausalLM",
        "HunYuanDenseV1Config",
        "norms of queries and keys behind rope",
        {"head_dim": HEAD_DIM},
    ),
    "hunyuan_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        "HunYuanMoEV1Config",
        "the same with experts and a shared one",
        {
            "head_dim": HEAD_DIM,
            "num_experts": _EXPERTS,
            "moe_topk": [_CHOSEN] * LAYERS,
            # transformers makes experts of the dense size, whatever stands here; vLLM reads it.
            "moe_intermediate_size": [_SIZES["intermediate_size"]] * LAYERS,
            "num_shared_expert": [1] * LAYERS,
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
        },
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        "one mixer a layer: Mamba-2, attention, MLP or experts",
        {
            **_NEMOTRON,
            "layers_block_type": ["mamba", "attention", "mlp", "moe"],
            "n_routed_experts": _EXPERTS,
            "num_experts_per_tok": _CHOSEN,
            "moe_intermediate_size": _INNER,
            "moe_shared_expert_intermediate_size": _INNER,
        },
        drops=("num_hidden_layers",),
    ),
    "nemotron_h_dense": Family(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        "Mamba-2, attention and MLPs alone",
        {**_NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
        drops=("num_hidden_layers",),
    ),
    "gemma3n": Family(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        "four streams a token, embeddings in every layer",
        {
            "head_dim": HEAD_DIM,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 64,
            "num_kv_shared_layers": 0,
            "laurel_rank": 16,
            "activation_sparsity_pattern": [0.5] * (LAYERS // 2) + [0.0] * (LAYERS // 2),
        },
        embedding=HIDDEN**-0.5,
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        "wider heads in layers without a window, embeddings in every layer",
        {
            "head_dim": HEAD_DIM,
            "global_head_dim": 2 * HEAD_DIM,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 64,
        },
        embedding=HIDDEN**-0.5,
        queries=HEAD_DIM**-0.5,
    ),
}
"""Families that people train drafts for and that need transformers 5: see `lab.drafted`."""

FAMILY_NAMES = tuple(FAMILIES)
DRAFTED_NAMES = tuple(DRAFTED)
_ALL = {**FAMILIES, **DRAFTED}


def make_tiny(name: str, out_dir: str | Path, *, dtype: str = "float32") -> Path:
    """Write a tiny model into a folder, one of `models` or a family."""
    if name in _ALL:
        return make_family(name, out_dir, dtype=dtype)
    return make_model(name, out_dir, dtype=dtype)


def make_family(name: str, out_dir: str | Path, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Write a family's tiny model (`FAMILY_NAMES`, `DRAFTED_NAMES`) into a folder; return the folder.

    `dtype` is the checkpoint's. The same arguments give the same weights with the same release of
    transformers; releases that name the weights differently in memory draw others. A folder that
    transformers 4 has written is read by later ones too. Needs torch and transformers.
    """
    if name not in _ALL:
        raise UsageError(f"There is no tiny family {name!r}: choose one of {', '.join(_ALL)}.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UsageError(f"A tiny model cannot be written in {dtype!r}: choose float32 or bfloat16.")
    import torch
    import transformers

    family = _ALL[name]
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    config = getattr(transformers, family.config)(**_fields(name))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, family.model)(config)
        _draw(model, seed, family.embedding, family.queries, family.zero)
    model.to(getattr(torch, dtype)).save_pretrained(out)
    saved = json.loads((out / "config.json").read_text(encoding="utf-8"))
    # transformers 4 leaves it out for Qwen2.5-VL.
    saved["architectures"] = [family.published or family.model]
    saved.setdefault("num_hidden_layers", LAYERS)  # Nemotron-H's counts the kinds of its layers
    if name == "minicpm":
        saved = as_minicpm(saved)
        shutil.copyfile(Path(__file__).parent / "remote_code" / _MINICPM_CODE, out / _MINICPM_CODE)
    _write_json(out / "config.json", saved)
    vision = name.endswith("_vl")
    if name == "minicpm":
        write_slow_tokenizer(out)  # remote code, of a model type that no transformers has a class for
    else:
        write_fast_tokenizer(out, VISION_TOKENS if vision else {})
    if vision:
        _write_processors(out, name)
        # Their processors take no other class.
        path = out / "tokenizer_config.json"
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        _write_json(path, tokenizer | {"tokenizer_class": "Qwen2Tokenizer"})
    return out


def _fields(name: str) -> dict[str, Any]:
    """Return the arguments of a family's configuration class."""
    family = _ALL[name]
    fields: dict[str, Any] = {
        **{key: value for key, value in _SIZES.items() if key not in family.drops},
        "bos_token_id": special_token_id("[BOS]"),
        "eos_token_id": special_token_id("[EOS]"),
        "pad_token_id": special_token_id("[PAD]"),
        **family.fields,
    }
    if name.endswith("_vl"):
        start = special_token_id("[BOS]")
        ids = {token: start + offset for offset, token in VISION_TOKENS.items()}
        fields |= {
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "tie_word_embeddings": False,
        }
    return fields


def _draw(model: Any, seed: int, embedding: float, queries: float = 1.0, zero: str = "") -> None:
    """Give every parameter values under which no part of the model is idle.

    Each has a generator of its own, seeded by its name. transformers' own initialisation is too
    small for a test: layers that add a hundredth of the stream hide their errors, and so do biases
    of 0 and norm weights of 1.
    """
    import torch
    from torch import nn

    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            continue  # the decay rates of a Mamba, which must stay in their range
        if zero and name.endswith(zero):
            parameter.zero_()
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        values = (torch.rand(parameter.shape, generator=generator) - 0.5) * 12**0.5
        if id(parameter) in embeddings:
            parameter.copy_(values * embedding)
        elif parameter.dim() > 1:
            parameter.copy_(values * _inputs(parameter) ** -0.5)
        elif bool((parameter == parameter.flatten()[0]).all()):
            parameter.copy_(parameter + 0.1 * values)  # a norm's weights or a bias
        else:
            parameter.copy_(0.5 * values)
        if name.endswith("q_norm.weight"):
            parameter.mul_(queries)


def _inputs(parameter: torch.Tensor) -> float:
    """Return about how many inputs of a projection are summed up."""
    shape = parameter.shape
    if len(shape) == 3:  # experts, inputs first or outputs first, or a short convolution
        return float((shape[1] + shape[2]) / 2)
    return float(parameter[0].numel())


_MINICPM_CODE = "configuration_minicpm.py"


def as_minicpm(granite: Mapping[str, Any]) -> dict[str, Any]:
    """Return MiniCPM's configuration for a Granite's: what `minicpm_as_granite` takes back."""
    config = dict(granite)
    del config["attention_multiplier"]
    residual = config.pop("residual_multiplier")
    scaling = config.pop("logits_scaling")
    config["scale_emb"] = config.pop("embedding_multiplier")
    config["scale_depth"] = residual * config["num_hidden_layers"] ** 0.5
    config["dim_model_base"] = round(config["hidden_size"] / scaling)
    config["architectures"] = ["MiniCPMForCausalLM"]
    config["model_type"] = "minicpm"
    config["auto_map"] = {"AutoConfig": "configuration_minicpm.MiniCPMConfig"}
    return config


def minicpm_as_granite(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration under which transformers' Granite computes what a MiniCPM computes.

    transformers has no MiniCPM of its own; the two differ in the names of their multipliers only.
    """
    granite = {key: value for key, value in config.items() if key != "auto_map"}
    head_dim = config["hidden_size"] / config["num_attention_heads"]
    return granite | {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": config["scale_emb"],
        "attention_multiplier": head_dim**-0.5,
        "residual_multiplier": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "logits_scaling": config["hidden_size"] / config["dim_model_base"],
    }


def _write_processors(out: Path, name: str) -> None:
    """Write the image and video processors' configurations of a vision model."""
    newer = name == "qwen3_vl"
    common = {
        "processor_class": "Qwen3VLProcessor" if newer else "Qwen2_5_VLProcessor",
        "patch_size": 16 if newer else 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        # In pixels: one merged patch to eight of them.
        "size": {"shortest_edge": 32 * 32, "longest_edge": 8 * 32 * 32},
        "min_pixels": 32 * 32,
        "max_pixels": 8 * 32 * 32,
    }
    image = {**common, "image_processor_type": "Qwen2VLImageProcessorFast"}
    video = {
        **common,
        "video_processor_type": "Qwen3VLVideoProcessor" if newer else "Qwen2VLVideoProcessor",
    }
    _write_json(out / "preprocessor_config.json", image)
    _write_json(out / "video_preprocessor_config.json", video)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
