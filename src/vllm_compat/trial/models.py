"""Tiny random models with the shapes that matter, written without any hub.

Three architectures: ``llama``; ``deepseek_v3`` (multi-head latent attention, mixture of experts,
YaRN); ``kimi_k25`` (the same decoder nested under ``language_model.`` beside a vision tower, with
its own configuration, image processor and slow tokenizer as remote code), and ``kimi_k25_int4``,
whose routed experts are quantised as the published checkpoint's are. Dimensions that attention
kernels care about (64, 128, 512) are the real models' own, the others are small, so that a real
vLLM runs each of them on two CPU cores within seconds. Other families: `vllm_compat.trial.families`.

The same arguments give the same bytes: weights are drawn as multiples of 2**-24 from a seeded
generator, which every torch build computes alike, and nothing depends on time or place.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.errors import UsageError
from vllm_compat.trial import byte_pairs

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "kimi_k25_int4": "KimiK25ForConditionalGeneration",
}
MODEL_NAMES = tuple(ARCHITECTURES)

MERGES = 256
BYTE_PAIR_TOKENS = 256 + MERGES
SPECIAL_BLOCK = 256
VOCABULARY = BYTE_PAIR_TOKENS + SPECIAL_BLOCK

# Kimi-K2.5's special tokens at their real places behind the byte-pair tokens; the other places of
# the block are reserved, and code that renumbers without gaps shifts those behind each gap.
SPECIAL_TOKENS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
# Shown to people when special tokens are skipped in decoding.
_VISIBLE = frozenset(name for name in SPECIAL_TOKENS.values() if "think" in name or "tool_call" in name)

# The shape of Kimi's chats: role token, role name, <|im_middle|>, content, <|im_end|>; an assistant
# turn opens with its thoughts, empty ones included.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- set role = message['role'] -%}"
    "{%- if role in ['user', 'assistant'] -%}<|im_{{ role }}|>{{ role }}<|im_middle|>"
    "{%- else -%}<|im_system|>{{ role }}<|im_middle|>{%- endif -%}"
    "{%- if role == 'assistant' -%}"
    "<think>{{ message.get('reasoning_content') or message.get('thinking') or '' }}</think>"
    "{%- endif -%}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] or [] -%}"
    "{%- if part['type'] == 'text' -%}{{ part['text'] }}"
    "{%- else -%}<|media_begin|>image<|media_content|><|media_pad|><|media_end|>{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "<|im_end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|><think>{%- endif -%}"
)

_REMOTE_CODE = (
    "configuration_kimi_k25.py",
    "kimi_k25_vision_processing.py",
    "tokenization_kimi.py",
)


SPECIAL_IDS = {
    "bos_token_id": "[BOS]",
    "eos_token_id": "[EOS]",
    "pad_token_id": "[PAD]",
    "media_placeholder_token_id": "<|media_pad|>",
    "image_token_id": "<|media_pad|>",
}
"""Fields of a configuration that hold the id of a special token, and which it is here."""


def special_token_id(name: str) -> int:
    """Return the id of a special token in the tiny models' vocabulary."""
    for offset, token in SPECIAL_TOKENS.items():
        if token == name:
            return BYTE_PAIR_TOKENS + offset
    raise UsageError(f"The tiny models have no special token {name!r}.")


def make_model(
    name: str,
    out_dir: str | Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    layers: int = 4,
    heads: int = 4,
    hidden_size: int = 256,
    experts: int = 8,
    dense_layers: int = 1,
    max_position: int = 2048,
    residual: float = 1.0,
) -> Path:
    """Write the model `name` (one of `MODEL_NAMES`) into a folder and return the folder.

    `dtype` is the checkpoint's (``float32``, ``bfloat16`` or ``float16``). `heads` counts attention
    heads and bounds the tensor-parallel size (Llama has half as many key-value heads); `experts`
    and `dense_layers` are for the mixture-of-experts models, whose first `dense_layers` layers have
    none. Existing files of the same names are replaced. ``kimi_k25_int4`` keeps its routed experts
    in 4 bits with scales of `dtype`; vLLM's Marlin kernel takes it on up to two tensor-parallel
    ranks. `residual` scales what each layer adds to its input: below 1 the next token depends most on
    the last one, so that a draft has something to learn. Needs torch and safetensors.
    """
    if name not in MODEL_NAMES:
        raise UsageError(f"There is no tiny model {name!r}: choose one of {', '.join(MODEL_NAMES)}.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UsageError(f"A tiny model cannot be written in {dtype!r}: choose float32 or bfloat16.")
    import torch
    from safetensors.torch import save_file

    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    shape = Shape(
        layers=layers,
        heads=heads,
        hidden_size=hidden_size,
        experts=experts,
        dense_layers=dense_layers,
        max_position=max_position,
    )
    weights = _Weights(seed, getattr(torch, dtype), residual)
    if name == "llama":
        config = _llama(shape, weights)
    elif name == "deepseek_v3":
        config = _deepseek(shape, weights)
    else:
        config = _kimi(shape, weights, int4=name == "kimi_k25_int4")
        _write_json(out / "preprocessor_config.json", _IMAGE_PROCESSOR)
        for file in _REMOTE_CODE:
            shutil.copyfile(Path(__file__).parent / "remote_code" / file, out / file)
    config["torch_dtype"] = dtype
    config["transformers_version"] = "4.57.0"
    _write_json(out / "config.json", config)
    _write_json(
        out / "generation_config.json",
        {
            "bos_token_id": special_token_id("[BOS]"),
            "eos_token_id": special_token_id("<|im_end|>"),
            "pad_token_id": special_token_id("[PAD]"),
        },
    )
    if config["model_type"] == "kimi_k25":
        write_slow_tokenizer(out)
    else:
        write_fast_tokenizer(out)
    save_file(weights.tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@dataclass(frozen=True)
class Shape:
    """The sizes that a caller may choose."""

    layers: int
    heads: int
    hidden_size: int
    experts: int
    dense_layers: int
    max_position: int


class _Weights:
    """Draw named tensors from one seeded generator, in the order in which they are asked for."""

    def __init__(self, seed: int, dtype: torch.dtype, residual: float = 1.0) -> None:
        import torch

        self.tensors: dict[str, torch.Tensor] = {}
        self._residual = residual
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def draw(
        self, name: str, *size: int, scale: float, around: float = 0.0, float32: bool = False
    ) -> None:
        """Add a tensor, uniform with the standard deviation `scale` around a value."""
        import torch

        # torch.rand gives multiples of 2**-24; one float32 product and one sum follow, no
        # transcendental function whose last bit might differ from build to build.
        values = torch.rand(*size, generator=self._generator) - 0.5
        values = values * (scale * 12**0.5) + around
        self.tensors[name] = values.to(torch.float32 if float32 else self._dtype)

    def linear(self, name: str, outputs: int, inputs: int, bias: bool = False) -> None:
        """Add a projection that keeps the scale of its input, but for the last of a block."""
        scale = self._residual if name.endswith(("o_proj", "down_proj")) else 1.0
        self.draw(f"{name}.weight", outputs, inputs, scale=scale * inputs**-0.5)
        if bias:
            self.draw(f"{name}.bias", outputs, scale=0.02)

    def norm(self, name: str, size: int, bias: bool = False) -> None:
        """Add a norm whose weights differ from one another, so that a skipped one shows."""
        self.draw(f"{name}.weight", size, scale=0.1, around=1.0)
        if bias:
            self.draw(f"{name}.bias", size, scale=0.02)

    def int4(self, name: str, outputs: int, inputs: int) -> None:
        """Add a projection of 4-bit weights, packed, with one scale for `INT4_GROUP` inputs."""
        import torch

        places = torch.rand(outputs, inputs, generator=self._generator)
        # All sixteen values are drawn alike; their standard deviation is sqrt(255 / 12).
        scale = inputs**-0.5 / (255 / 12) ** 0.5
        self.tensors[f"{name}.weight_packed"] = pack_int4((places * 16).to(torch.int8) - 8)
        self.draw(
            f"{name}.weight_scale",
            outputs,
            inputs // INT4_GROUP,
            scale=0.3 * scale,
            around=scale,
        )
        self.tensors[f"{name}.weight_shape"] = torch.tensor([outputs, inputs], dtype=torch.int32)

    def mlp(self, name: str, hidden_size: int, inner: int, int4: bool = False) -> None:
        """Add a gated feed-forward block."""
        add = self.int4 if int4 else self.linear
        add(f"{name}.gate_proj", inner, hidden_size)
        add(f"{name}.up_proj", inner, hidden_size)
        add(f"{name}.down_proj", hidden_size, inner)


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Pack whole numbers from -8 to 7 as compressed-tensors' ``pack-quantized`` format does.

    Eight neighbours of a row make one int32, the first of them its lowest four bits; each is stored
    as the unsigned number that is 8 greater, so that no zero point is needed.
    """
    import torch

    rows, columns = values.shape
    nibbles = (values.to(torch.int32) + 8).view(rows, columns // 8, 8)
    packed = torch.zeros(rows, columns // 8, dtype=torch.int32)
    for place in range(8):
        packed |= nibbles[:, :, place] << 4 * place
    return packed


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Return what `pack_int4` has packed, as int8."""
    import torch

    nibbles = torch.stack([packed >> 4 * place & 15 for place in range(8)], dim=-1)
    return (nibbles - 8).flatten(start_dim=-2).to(torch.int8)


def dequantise_int4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the float32 weights that packed values and their groups' scales stand for."""
    import torch

    values = unpack_int4(packed).to(torch.float32)
    return values * scale.to(torch.float32).repeat_interleave(INT4_GROUP, dim=1)


def _common(shape: Shape) -> dict[str, Any]:
    """Return the configuration fields that all decoders have."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 2 * shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": special_token_id("[BOS]"),
        "eos_token_id": special_token_id("[EOS]"),
        "pad_token_id": special_token_id("[PAD]"),
    }


def _llama(shape: Shape, weights: _Weights) -> dict[str, Any]:
    """Draw a Llama and return its configuration."""
    hidden, head_dim = shape.hidden_size, 64
    kv_heads = max(1, shape.heads // 2)
    weights.draw("model.embed_tokens.weight", VOCABULARY, hidden, scale=1.0)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        weights.linear(f"{prefix}.self_attn.q_proj", shape.heads * head_dim, hidden)
        weights.linear(f"{prefix}.self_attn.k_proj", kv_heads * head_dim, hidden)
        weights.linear(f"{prefix}.self_attn.v_proj", kv_heads * head_dim, hidden)
        weights.linear(f"{prefix}.self_attn.o_proj", hidden, shape.heads * head_dim)
        weights.mlp(f"{prefix}.mlp", hidden, 2 * hidden)
        weights.norm(f"{prefix}.input_layernorm", hidden)
        weights.norm(f"{prefix}.post_attention_layernorm", hidden)
    weights.norm("model.norm", hidden)
    weights.linear("lm_head", VOCABULARY, hidden)
    return {
        "architectures": [ARCHITECTURES["llama"]],
        "model_type": "llama",
        **_common(shape),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_bias": False,
        "rope_theta": 500000.0,
    }


def _deepseek(
    shape: Shape,
    weights: _Weights,
    prefix: str = "",
    theta: float = 10000.0,
    factor: float = 2.5,
    int4: bool = False,
) -> dict[str, Any]:
    """Draw a DeepSeek-V3 decoder, its names behind `prefix`, and return its configuration.

    Plain rope is miscomputed for it by vLLM's CPU builds (seen on 0.16.0: a three-dimensional query
    in ``RotaryEmbedding.forward_cpu``); YaRN, which the real models have, is right.
    """
    hidden, heads = shape.hidden_size, shape.heads
    q_rank, kv_rank, nope, rope, v_dim, inner = 128, 512, 128, 64, 128, 128
    weights.draw(f"{prefix}model.embed_tokens.weight", VOCABULARY, hidden, scale=1.0)
    for layer in range(shape.layers):
        here = f"{prefix}model.layers.{layer}"
        attention = f"{here}.self_attn"
        weights.linear(f"{attention}.q_a_proj", q_rank, hidden)
        weights.norm(f"{attention}.q_a_layernorm", q_rank)
        weights.linear(f"{attention}.q_b_proj", heads * (nope + rope), q_rank)
        weights.linear(f"{attention}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
        weights.norm(f"{attention}.kv_a_layernorm", kv_rank)
        weights.linear(f"{attention}.kv_b_proj", heads * (nope + v_dim), kv_rank)
        weights.linear(f"{attention}.o_proj", hidden, heads * v_dim)
        weights.norm(f"{here}.input_layernorm", hidden)
        weights.norm(f"{here}.post_attention_layernorm", hidden)
        if layer < shape.dense_layers:
            weights.mlp(f"{here}.mlp", hidden, 2 * hidden)
            continue
        weights.linear(f"{here}.mlp.gate", shape.experts, hidden)
        weights.draw(f"{here}.mlp.gate.e_score_correction_bias", shape.experts, scale=0.05, float32=True)
        for expert in range(shape.experts):
            weights.mlp(f"{here}.mlp.experts.{expert}", hidden, inner, int4=int4)
        weights.mlp(f"{here}.mlp.shared_experts", hidden, inner)
    weights.norm(f"{prefix}model.norm", hidden)
    weights.linear(f"{prefix}lm_head", VOCABULARY, hidden)
    return {
        "architectures": [ARCHITECTURES["deepseek_v3"]],
        "model_type": "deepseek_v3",
        **_common(shape),
        "num_key_value_heads": heads,
        "attention_dropout": 0.0,
        "q_lora_rank": q_rank,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": v_dim,
        "moe_intermediate_size": inner,
        **_deepseek_routing(shape, factor),
        "num_nextn_predict_layers": 0,
        "rope_theta": theta,
        "rope_scaling": _yarn(shape),
    }


def _deepseek_routing(shape: Shape, factor: float) -> dict[str, Any]:
    return {
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": factor,
        "first_k_dense_replace": shape.dense_layers,
        "moe_layer_freq": 1,
        "ep_size": 1,
    }


def _yarn(shape: Shape) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": shape.max_position // 8,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


_PATCH = 14
_IMAGE_PROCESSOR = {
    "auto_map": {"AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor"},
    "image_processor_type": "KimiK25VisionProcessor",
    "media_proc_cfg": {
        "in_patch_limit": 64,
        "patch_size": _PATCH,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 8,
        "in_patch_limit_each_frame": 16,
        "in_patch_limit_video": None,
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
        "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
    },
}


INT4_GROUP = 32
# What the published checkpoint has: the ignored names leave the routed experts alone.
INT4_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": INT4_GROUP,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
}


def draw_vision_tower(weights: _Weights, vision: Mapping[str, Any], hidden_size: int) -> None:
    """Draw Kimi-K2.5's vision tower and projector for a vision configuration."""
    width, inner, grid = (
        int(vision[name]) for name in ("hidden_size", "intermediate_size", "pos_emb_height")
    )
    patch, blocks = int(vision["patch_size"]), int(vision["num_hidden_layers"])
    tower = "vision_tower"
    weights.draw(f"{tower}.patch_embed.proj.weight", width, 3, patch, patch, scale=0.02)
    weights.draw(f"{tower}.patch_embed.proj.bias", width, scale=0.02)
    weights.draw(f"{tower}.patch_embed.pos_emb.weight", grid, grid, width, scale=1.0)
    for block in range(blocks):
        here = f"{tower}.encoder.blocks.{block}"
        weights.norm(f"{here}.norm0", width, bias=True)
        weights.norm(f"{here}.norm1", width, bias=True)
        weights.linear(f"{here}.mlp.fc0", inner, width, bias=True)
        weights.linear(f"{here}.mlp.fc1", width, inner, bias=True)
        weights.linear(f"{here}.wqkv", 3 * width, width, bias=True)
        weights.linear(f"{here}.wo", width, width, bias=True)
    weights.norm(f"{tower}.encoder.final_layernorm", width, bias=True)
    weights.norm("mm_projector.pre_norm", width, bias=True)
    weights.linear("mm_projector.proj.0", 4 * width, 4 * width, bias=True)
    weights.linear("mm_projector.proj.2", hidden_size, 4 * width, bias=True)


def write_kimi_code(folder: Path) -> list[str]:
    """Put Kimi-K2.5's remote code and image processor where they are missing; return their names."""
    supplied = []
    for file in _REMOTE_CODE:
        if not (folder / file).exists():
            shutil.copyfile(Path(__file__).parent / "remote_code" / file, folder / file)
            supplied.append(file)
    if not (folder / "preprocessor_config.json").exists():
        _write_json(folder / "preprocessor_config.json", _IMAGE_PROCESSOR)
        supplied.append("preprocessor_config.json")
    return supplied


def kimi_vision(
    *, width: int, inner: int, heads: int, blocks: int, grid: int, text: int
) -> dict[str, Any]:
    """Return the configuration of Kimi-K2.5's vision tower in the sizes given."""
    sizes = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_hidden_layers": blocks,
    }
    return {
        "patch_size": _PATCH,
        "pos_emb_type": "divided_fixed",
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "video_attn_type": "spatial_temporal",
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": width,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "text_hidden_size": text,
        # The sizes once in vLLM's spelling and once in the published one.
        **sizes,
        **{f"vt_{field}": size for field, size in sizes.items()},
        # The position grid in vLLM's spelling and in that of transformers 5.
        "init_pos_emb_height": grid,
        "init_pos_emb_width": grid,
        "init_pos_emb_time": 4,
        "pos_emb_height": grid,
        "pos_emb_width": grid,
        "pos_emb_time": 4,
    }


KIMI_VISION = kimi_vision(width=1152, inner=4304, heads=16, blocks=27, grid=64, text=7168)
"""Kimi-K2.5's vision tower as published."""


def _kimi(shape: Shape, weights: _Weights, int4: bool = False) -> dict[str, Any]:
    """Draw a Kimi-K2.5 and return its configuration."""
    text = _deepseek(shape, weights, "language_model.", theta=50000.0, factor=2.827, int4=int4)
    text["model_type"] = "kimi_k2"
    if int4:
        text["quantization_config"] = INT4_CONFIG
    # As many heads as the decoder: tensor-parallel ranks share both.
    heads = shape.heads
    vision = kimi_vision(
        width=32 * heads, inner=64 * heads, heads=heads, blocks=2, grid=8, text=shape.hidden_size
    )
    draw_vision_tower(weights, vision, shape.hidden_size)
    return kimi_config(text, vision)


def kimi_config(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """Return Kimi-K2.5's configuration around those of its decoder and its vision tower."""
    return {
        "architectures": [ARCHITECTURES["kimi_k25"]],
        "model_type": "kimi_k25",
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "text_config": text,
        "vision_config": vision,
        "media_placeholder_token_id": special_token_id("<|media_pad|>"),
        "image_token_id": special_token_id("<|media_pad|>"),
        "ignore_index": -100,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "tie_word_embeddings": False,
        **kimi_ends(),
    }


def kimi_ends() -> dict[str, int]:
    """Return the ids of its tokens that begin, end and fill a sequence."""
    return {
        "bos_token_id": special_token_id("[BOS]"),
        "eos_token_id": special_token_id("[EOS]"),
        "pad_token_id": special_token_id("[PAD]"),
    }


@cache
def _ranks() -> dict[bytes, int]:
    return byte_pairs.train(MERGES)


def ranks() -> dict[bytes, int]:
    """Return the byte-pair ranks that every tiny model's tokenizer has."""
    return dict(_ranks())


def _tokenizer_config(special: Mapping[int, str]) -> dict[str, Any]:
    """Return what the two tokenizers' configurations have in common."""
    return {
        "added_tokens_decoder": {
            str(BYTE_PAIR_TOKENS + offset): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": name not in _VISIBLE,
            }
            for offset, name in sorted(special.items())
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": CHAT_TEMPLATE,
    }


def write_slow_tokenizer(out_dir: str | Path) -> None:
    """Write Kimi's tokenizer: ranks, remote code and configuration, and no ``tokenizer.json``.

    It encodes any text, has the special tokens of the real one at the same places of the block
    behind the byte-pair tokens, and cannot give offsets.
    """
    out = Path(out_dir)
    (out / "tiktoken.model").write_text(byte_pairs.dump(_ranks()), encoding="ascii")
    code = "tokenization_kimi.py"
    shutil.copyfile(Path(__file__).parent / "remote_code" / code, out / code)
    config = _tokenizer_config(SPECIAL_TOKENS)
    config["tokenizer_class"] = "TikTokenTokenizer"
    config["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    _write_json(out / "tokenizer_config.json", config)


def write_fast_tokenizer(out_dir: str | Path, more: Mapping[int, str] | None = None) -> None:
    """Write a fast tokenizer with the same vocabulary, special tokens and chat template.

    It gives the same ids as the slow one, and offsets besides. `more` names reserved places of the
    special block, for models that need tokens which Kimi has not.
    """
    out = Path(out_dir)
    table = _ranks()
    special = {**SPECIAL_TOKENS, **(more or {})}
    named = {BYTE_PAIR_TOKENS + offset: name for offset, name in sorted(special.items())}
    block = range(BYTE_PAIR_TOKENS, VOCABULARY)
    vocabulary = {byte_pairs.token_name(token): rank for token, rank in table.items()}
    vocabulary.update({named.get(index, f"<|reserved_token_{index}|>"): index for index in block})
    merges = [
        [byte_pairs.token_name(left), byte_pairs.token_name(right)]
        for left, right in byte_pairs.merge_pairs(table)
    ]
    added = [
        {
            "id": index,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": name not in _VISIBLE,
        }
        for index, name in named.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    _write_json(
        out / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "Split",
                        "pattern": {"Regex": byte_pairs.PATTERN},
                        "behavior": "Isolated",
                        "invert": False,
                    },
                    {**byte_level, "trim_offsets": False},
                ],
            },
            "post_processor": None,
            "decoder": {**byte_level, "trim_offsets": False},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": merges,
            },
        },
    )
    config = _tokenizer_config(special)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(out / "tokenizer_config.json", config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
