"""Quantised weights of rehearsals stand for what their reference holds."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from vllm_compat.lab import checkpoint  # noqa: E402
from vllm_compat.lab.models import dequantise_int4  # noqa: E402


def weight(outputs: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outputs)
    return (torch.rand(outputs, inputs, generator=generator) - 0.5).to(torch.bfloat16)


def error(exact: torch.Tensor, original: torch.Tensor) -> float:
    return float((exact - original.to(torch.float32)).norm() / original.to(torch.float32).norm())


def test_four_bits_in_groups() -> None:
    original = weight(64, 128)
    parts, exact = checkpoint.int4("a.weight", original, 32)
    assert set(parts) == {"a.weight_packed", "a.weight_scale", "a.weight_shape"}
    again = dequantise_int4(parts["a.weight_packed"], parts["a.weight_scale"])
    assert torch.equal(again, exact)
    assert 0.01 < error(exact, original) < 0.15


def test_eight_bits_in_blocks() -> None:
    original = weight(200, 300)
    parts, exact = checkpoint.fp8_blocks("a.weight", original, 128, 128)
    scale = parts["a.weight_scale_inv"]
    assert tuple(scale.shape) == (2, 3)
    spread = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(parts["a.weight"].to(torch.float32) * spread, exact)
    assert 0.001 < error(exact, original) < 0.05


def test_microscaled_four_bits_as_transformers_reads_them() -> None:
    original = weight(6 * 64, 96).view(6, 64, 96)
    blocks, scales, exact = checkpoint.mxfp4(original)
    assert (tuple(blocks.shape), tuple(scales.shape)) == ((6, 64, 3, 16), (6, 64, 3))
    assert 0.01 < error(exact, original) < 0.2
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    again = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(again, exact.transpose(1, 2))


def test_what_a_scheme_ignores_stays() -> None:
    scheme = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "symmetric": True, "group_size": 32}}},
    }
    tensors = {
        "model.layers.0.self_attn.q_proj.weight": weight(32, 64),
        "model.layers.0.mlp.up_proj.weight": weight(32, 64),
        "model.layers.0.mlp.gate.weight": weight(8, 64),
        "lm_head.weight": weight(32, 64),
    }
    quantised, exact = checkpoint._quantise(tensors, scheme)
    assert set(exact) == set(tensors)
    assert {name for name in tensors if name not in quantised} == {"model.layers.0.mlp.up_proj.weight"}
