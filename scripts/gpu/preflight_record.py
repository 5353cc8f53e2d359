"""What preflight predicts on a GPU, and what a run then has in force and takes: one JSON record.

    python scripts/gpu/preflight_record.py OUT.json [dense moe int4]

Each case is a model of published layer shapes with as many layers as fill a good part of a card of 80 GB
or more, its weights drawn on the device (``load_format="dummy"``): no download, no disk. Prediction and
run are processes of their own. The record is right where backend and methods are the same and the memory
is within a tenth. Needs one GPU, vLLM, speculators and vllm_compat; no network.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_compat.trial.models import _INT4_CONFIG, write_fast_tokenizer
from vllm_compat.trial.stamp import made_by

LENGTH, BATCH, CALLS = 2048, 4, 3
YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
COMMON = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16", "initializer_range": 0.02,
}  # fmt: skip
DEEPSEEK = {
    **COMMON, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "moe_layer_freq": 1, "ep_size": 1,
    "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "rope_theta": 10000,
    "rope_scaling": YARN, "max_position_embeddings": 163840,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    # A Llama of 70 billion parameters has 80 such layers.
    "dense": (
        {
            **COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 36, "mlp_bias": False,
            "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072,
        },
        [2, 18, 33, 35],
    ),
    "moe": ({**DEEPSEEK, "num_hidden_layers": 4}, [1, 2, 3]),
    "int4": (
        {
            **DEEPSEEK, "num_hidden_layers": 8, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
            "num_attention_heads": 64, "num_key_value_heads": 64, "quantization_config": _INT4_CONFIG,
        },
        [1, 4, 7],
    ),
}  # fmt: skip


def predict(folder: Path, layer_ids: list[int]) -> dict[str, Any]:
    """Return preflight's report, as its JSON."""
    from vllm_compat.commands.preflight.judge import Options, preflight, render

    options = Options(
        model=str(folder), layer_ids=tuple(layer_ids), max_model_len=LENGTH, batch_size=BATCH
    )
    report: dict[str, Any] = json.loads(render(preflight(options), "json"))
    return report


def run(folder: Path, layer_ids: list[int]) -> dict[str, Any]:
    """Run stock's generator and return what its worker has in force and how much it takes."""
    import vllm_compat

    vllm_compat.apply()
    import wrapt
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
    from vllm.config import LoadConfig

    from vllm_compat.trial.cell import describe_worker

    def dummy(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **{**kwargs, "load_format": "dummy"})

    wrapt.wrap_function_wrapper(LoadConfig, "__init__", dummy)
    found: dict[str, Any] = {}
    begin = time.perf_counter()
    generator = VllmHiddenStatesGenerator(str(folder), layer_ids=layer_ids, max_model_len=LENGTH)
    found["start_seconds"] = round(time.perf_counter() - begin, 1)
    found["workers"] = generator.executor.collective_rpc(describe_worker)
    found["after_start"] = generator.executor.collective_rpc(memory)
    prompts = [[(i * 7 + j) % 500 + 5 for i in range(LENGTH - 1)] for j in range(BATCH)]
    try:
        for _ in range(CALLS):
            generator.generate(prompts)
    except Exception as error:  # random weights may give rows that the guards refuse
        found["generate_error"] = f"{type(error).__name__}: {error}"[:500]
    found["memory"] = generator.executor.collective_rpc(memory)
    generator.executor.shutdown()
    return found


def memory(worker: Any) -> dict[str, int]:
    """Return the worker's device memory in bytes; runs there."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return {
        "used": total - free,
        "total": total,
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }


def compare(predicted: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    """Hold the prediction against what was seen."""
    asked, worker, used = predicted["asked"], seen["workers"][0], seen["memory"][0]["used"]
    methods = {name.partition(": ")[2] for name in asked["methods"]}
    in_force = {name.partition(": ")[2] for name in worker["quant_methods"]}
    total = predicted["memory"]["total"]
    return {
        "backend": sorted(asked["attention"]) == sorted(set(worker["attention"])),
        "methods": methods <= in_force,
        "predicted_bytes": total,
        "measured_bytes": used,
        "deviation": round(total / used - 1, 4),
        "share_of_card": round(used / seen["memory"][0]["total"], 3),
        "right": sorted(asked["attention"]) == sorted(set(worker["attention"]))
        and methods <= in_force
        and abs(total / used - 1) <= 0.1,
    }


def in_process(mode: str, folder: Path, layer_ids: list[int], log: Path) -> dict[str, Any]:
    """Run this file's `mode` in a process of its own and return what it printed last."""
    out = folder / f"{mode}.json"
    command = [sys.executable, __file__, f"--{mode}", str(folder), json.dumps(layer_ids), str(out)]
    with log.open("ab") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, timeout=420)
    if not out.exists():
        tail = log.read_text(errors="replace").splitlines()[-25:]
        return {"error": f"exit status {done.returncode}", "log": tail}
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def main() -> int:
    """Make the record of the cases named, or do one part of a case."""
    if sys.argv[1].startswith("--"):
        mode, folder, layer_ids, out = sys.argv[1:]
        part = predict if mode == "--predict" else run
        Path(out).write_text(json.dumps(part(Path(folder), json.loads(layer_ids))))
        return 0
    out, names = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    record: dict[str, Any] = {
        "schema_version": 1,
        "kind": "preflight on a GPU",
        "vllm_compat": made_by(),
        "cases": {},
    }
    for name in names:
        config, layer_ids = CASES[name]
        with tempfile.TemporaryDirectory(prefix="vllm-compat-") as temporary:
            folder = Path(temporary)
            (folder / "config.json").write_text(json.dumps(config))
            write_fast_tokenizer(folder)
            case: dict[str, Any] = {"config": config, "layer_ids": layer_ids}
            record["cases"][name] = case
            log = out.with_suffix(f".{name}.log")
            case["predicted"] = in_process("predict", folder, layer_ids, log)
            case["seen"] = in_process("run", folder, layer_ids, log)
            try:
                case["compared"] = compare(case["predicted"], case["seen"])
            except (KeyError, TypeError, IndexError) as error:
                case["compared"] = {"right": False, "error": f"{type(error).__name__}: {error}"}
            for text in ("start_seconds", "generate_error"):
                print(name, text, case["seen"].get(text))
            print(name, json.dumps(case["compared"]), flush=True)
        record["environment"] = {
            key: value for key, value in os.environ.items() if key.startswith("VLLM_")
        }
        out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(case["compared"]["right"] for case in record["cases"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
