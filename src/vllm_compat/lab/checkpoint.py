"""Random weights for a small model's configuration, as its checkpoint and as its reference.

Transformers' own class of the architecture says which tensors there are; their values are drawn as
`vllm_compat.lab.families` draws them. The checkpoint is then quantised as the configuration says; the
reference holds, in float32, the weights that the quantised ones stand for.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.errors import UsageError
from vllm_compat.lab.families import _draw
from vllm_compat.lab.models import _Weights, draw_vision_tower, pack_int4, unpack_int4

if TYPE_CHECKING:
    from torch import Tensor

KIMI_PREFIX = "language_model."


class NoReferenceError(UsageError):
    """Transformers does not know the architecture."""


def make_checkpoint(
    folder: Path, reference: Path, *, dequantised: bool = False, seed: int = 0
) -> list[str]:
    """Write weights beside ``folder``'s ``config.json``, and the reference; return notes for people.

    With ``dequantised``, the checkpoint is not quantised, and its configuration says so.

    Raises:
        NoReferenceError: Transformers does not know the architecture, so nothing was written.
        UsageError: The quantisation scheme is not one that can be made here.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kimi = config.get("model_type") == "kimi_k25"
    text = dict(config["text_config"]) if kimi else dict(config)
    scheme = text.pop("quantization_config", None) or config.get("quantization_config")
    if kimi:
        text.update(model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"])
    tensors = _draw_weights(text, seed)
    notes = []
    exact = {name: value.to(torch.float32) for name, value in tensors.items()}
    if scheme and dequantised:
        notes.append("The weights were not quantised, as asked for.")
        for part in (config, config.get("text_config") or {}):
            part.pop("quantization_config", None)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    elif scheme:
        tensors, exact = _quantise(tensors, scheme)
        notes.append(f"The weights are quantised: {scheme.get('quant_method')}.")
    if kimi:
        tensors = {f"{KIMI_PREFIX}{name}": value for name, value in tensors.items()}
        vision = _Weights(seed, torch.bfloat16)
        draw_vision_tower(vision, config["vision_config"], int(text["hidden_size"]))
        tensors.update(vision.tensors)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    reference.mkdir(parents=True, exist_ok=True)
    text.pop("auto_map", None)
    (reference / "config.json").write_text(json.dumps(text))
    save_file(
        {name: value.contiguous() for name, value in exact.items()},
        reference / "model.safetensors",
        metadata={"format": "pt"},
    )
    return notes


def _draw_weights(text: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Return the tensors of a text model under their published names, in bfloat16."""
    import torch
    import transformers
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(prefix="vllm-compat-weights-") as temporary:
        place = Path(temporary)
        (place / "config.json").write_text(json.dumps({**text, "torch_dtype": "float32"}))
        try:
            config = transformers.AutoConfig.from_pretrained(place)
        except (ValueError, KeyError) as error:
            raise NoReferenceError(
                f"transformers {transformers.__version__} does not know {text.get('model_type')!r}:"
                f" {str(error).partition('.')[0]}."
            ) from error
        name = (text.get("architectures") or [""])[0]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            cls = getattr(transformers, name, None)
            if cls is not None:
                model = cls(config)
            else:
                model = transformers.AutoModelForCausalLM.from_config(config)
            _draw(model, seed, 1.0)
        model.to(torch.bfloat16).save_pretrained(place / "saved")
        tensors: dict[str, Tensor] = {}
        for file in sorted((place / "saved").glob("*.safetensors")):
            tensors.update(load_file(file))
    return tensors


def _quantise(
    tensors: Mapping[str, Tensor], scheme: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors quantised, and in float32 what they then stand for."""
    import torch

    method = scheme.get("quant_method")
    if method == "compressed-tensors" and scheme.get("format") == "pack-quantized":
        group = _int4_group(scheme)

        def one(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
            return int4(name, weight, group)

        skip = _ignored(scheme.get("ignore") or [])
    elif method == "fp8" and scheme.get("weight_block_size"):
        rows, columns = scheme["weight_block_size"]

        def one(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
            return fp8_blocks(name, weight, rows, columns)

        skip = _ignored([*(scheme.get("modules_to_not_convert") or []), "lm_head"])
    elif method == "mxfp4":
        return _quantise_mxfp4(tensors)
    else:
        raise UsageError(
            f"Weights of the quantisation scheme {method!r} cannot be made here: rehearse with"
            " --dequantised, which leaves the quantised kernels out."
        )
    quantised: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        linear = name.endswith(("_proj.weight", "_proj_with_mqa.weight"))
        if linear and value.dim() == 2 and not skip(module):
            parts, exact[name] = one(name, value)
            quantised.update(parts)
        else:
            quantised[name], exact[name] = value, value.to(torch.float32)
    return quantised, exact


def _ignored(names: list[str]) -> Any:
    """Return a function that tells which modules a scheme leaves alone."""

    def skip(module: str) -> bool:
        for name in names:
            if name.startswith("re:"):
                if re.match(name[3:], module) or re.match(name[3:], f"{KIMI_PREFIX}{module}"):
                    return True
            elif module == name or module.endswith(f".{name}"):
                return True
        return False

    return skip


def _int4_group(scheme: Mapping[str, Any]) -> int:
    for group in (scheme.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        plain = weights.get("num_bits") == 4 and weights.get("symmetric") and not weights.get("actorder")
        if plain and weights.get("group_size") and not group.get("input_activations"):
            return int(weights["group_size"])
    raise UsageError(
        "This compressed-tensors scheme is not one of 4-bit symmetric groups, and its weights cannot be"
        " made here: rehearse with --dequantised, which leaves the quantised kernels out."
    )


def int4(name: str, weight: Tensor, group: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return a projection in symmetric groups of 4 bits, packed, and what it stands for."""
    import torch

    outputs, inputs = weight.shape
    values = weight.to(torch.float32).view(outputs, inputs // group, group)
    scale = (values.abs().amax(dim=-1, keepdim=True) / 7).to(weight.dtype)
    whole = (values / scale.to(torch.float32)).round().clamp(-8, 7).to(torch.int8).view(outputs, inputs)
    module = name.removesuffix(".weight")
    packed = pack_int4(whole)
    exact = unpack_int4(packed).to(torch.float32) * scale.to(torch.float32).view(
        outputs, -1
    ).repeat_interleave(group, dim=1)
    parts = {
        f"{module}.weight_packed": packed,
        f"{module}.weight_scale": scale.view(outputs, -1),
        f"{module}.weight_shape": torch.tensor([outputs, inputs], dtype=torch.int32),
    }
    return parts, exact


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of e2m1; the fourth bit is the sign (OCP Microscaling Formats 1.0)."""

MX_GROUP = 32


def _quantise_mxfp4(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Quantise gpt-oss's experts, which transformers holds as ``[experts, inputs, outputs]``."""
    import torch

    quantised: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.dim() == 3 and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales, stands_for = mxfp4(value.transpose(1, 2))
            quantised[f"{name}_blocks"], quantised[f"{name}_scales"] = blocks, scales
            exact[name] = stands_for.transpose(1, 2).contiguous()
        else:
            quantised[name], exact[name] = value, value.to(torch.float32)
    return quantised, exact


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks ``[…, groups, 16]`` of two values a byte, scales ``[…, groups]``, the exact values.

    Groups of 32 inputs share a power of two; the first of two neighbours is the lower half of a byte.
    """
    import torch

    *outer, inputs = weight.shape
    values = weight.to(torch.float32).reshape(*outer, inputs // MX_GROUP, MX_GROUP)
    largest = values.abs().amax(dim=-1, keepdim=True).clamp(min=2.0**-100)
    exponent = torch.floor(torch.log2(largest)) - 2  # 6.0, the largest, is 1.5 × 2**2
    scaled = values / torch.exp2(exponent)
    table = torch.tensor(FP4)
    place = (scaled.abs().clamp(max=6.0).unsqueeze(-1) - table).abs().argmin(dim=-1)
    stands_for = table[place] * torch.where(scaled < 0, -1.0, 1.0) * torch.exp2(exponent)
    nibbles = (place + 8 * (scaled < 0)).to(torch.uint8)
    blocks = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    scales = (exponent.squeeze(-1) + 127).to(torch.uint8)
    return blocks, scales, stands_for.reshape(*outer, inputs)


def fp8_blocks(name: str, weight: Tensor, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return a projection in e4m3 with one scale for a block, and what it stands for."""
    import torch

    outputs, inputs = weight.shape
    down, across = -(-outputs // rows), -(-inputs // columns)
    scale = torch.empty(down, across, dtype=torch.float32)
    whole = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
    exact = torch.empty(outputs, inputs, dtype=torch.float32)
    largest = torch.finfo(torch.float8_e4m3fn).max
    for i in range(down):
        for j in range(across):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            values = weight[block].to(torch.float32)
            scale[i, j] = values.abs().max().clamp(min=1e-12) / largest
            whole[block] = (values / scale[i, j]).to(torch.float8_e4m3fn)
            exact[block] = whole[block].to(torch.float32) * scale[i, j]
    return {name: whole, f"{name}_scale_inv": scale}, exact
