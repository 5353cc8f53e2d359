"""Hold the lab's 4-bit packing, and the tiny Kimi-K2.5 with 4-bit experts, against its format.

Run by an environment's Python with a folder to write into. Silent where everything is right.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors.quantized_compressors import pack_quantized
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file

from vllm_compat.lab.models import dequantise_int4, make_model, pack_int4, unpack_int4
from vllm_compat.lab.reference import compare, reference_hidden_states

PROMPTS = [[7], [1, 2, 3, 4, 5], list(range(40, 80))]


def check_packing() -> None:
    """Every value in every place comes out as theirs does, and back."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (64, 256), dtype=torch.int8, generator=generator)
    packed = pack_int4(values)
    assert torch.equal(packed, pack_quantized.pack_to_int32(values, 4))
    assert torch.equal(unpack_int4(packed), values)
    assert torch.equal(pack_quantized.unpack_from_int32(packed, 4, values.shape), values)


def check_model(folder: Path, dtype: str) -> None:
    """Exactly the routed experts are packed, and they stand for the weights that theirs gives."""
    model = make_model("kimi_k25_int4", folder / dtype, dtype=dtype)
    quantisation = json.loads((model / "config.json").read_text())["text_config"]["quantization_config"]
    tensors = load_file(model / "model.safetensors")
    packed = [name for name in tensors if name.endswith(".weight_packed")]
    # Four layers, the first without experts; eight experts of three projections.
    assert len(packed) == 3 * 8 * 3
    assert all(".mlp.experts." in name for name in packed)
    for name in tensors:
        module = name.rpartition(".")[0]
        linear = re.search(r"_proj$|proj_with_mqa$|lm_head$", module)
        if linear and name.startswith("language_model."):
            ignored = any(
                re.match(pattern.removeprefix("re:"), module)
                if pattern.startswith("re:")
                else module.endswith(pattern)
                for pattern in quantisation["ignore"]
            )
            assert ignored == (".mlp.experts." not in name), name
    group = quantisation["config_groups"]["group_0"]
    arguments = QuantizationArgs.model_validate(group["weights"])
    for name in packed[:6]:
        stem = name.removesuffix("_packed")
        scale = tensors[f"{stem}_scale"]
        assert scale.dtype == getattr(torch, dtype)
        data = {
            "weight_packed": tensors[name],
            "weight_scale": scale.to(torch.float32),
            "weight_shape": tensors[f"{stem}_shape"],
        }
        compressor = pack_quantized.PackedQuantizationCompressor()
        theirs = compressor.decompress_weight(data, arguments)
        mine = dequantise_int4(tensors[name], scale)
        assert torch.equal(mine, theirs)
        assert 0.8 < float(mine.std()) * mine.shape[1] ** 0.5 < 1.2
        values = unpack_int4(tensors[name])
        assert sorted(values.unique().tolist()) == list(range(-8, 8))


def check_reference(folder: Path) -> None:
    """The reference runs on it, and the experts count."""
    rows = reference_hidden_states(folder / "float32", PROMPTS, [0, 2, 3])
    assert all(bool(layer.isfinite().all()) for layers in rows for layer in layers)
    plain = make_model("kimi_k25", folder / "plain")
    others = reference_hidden_states(plain, PROMPTS, [0, 2, 3])
    assert compare(rows, others).worst > 0.1
    # The first layer has no experts and is the same in both.
    assert compare([layers[:1] for layers in rows], [layers[:1] for layers in others]).worst == 0.0


def main(folder: Path) -> None:
    """Check everything."""
    check_packing()
    check_model(folder, "float32")
    check_model(folder, "bfloat16")
    check_reference(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
