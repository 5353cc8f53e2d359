#!/usr/bin/env python3
"""Tokens per second of extraction against plain vLLM prefill of the same batch, as ratios.

usage: generate.py [--shape tiny|8b] [--batch 8x2048 ...] [--calls 5]
                   [--modes plain,stock,rpc,auto] [--out FILE]
Run it in an environment that has vLLM and speculators. Weights are random (vLLM's dummy loader), so
that no download is needed. Modes, each in a process tree of its own, one after another:

  plain   vllm.LLM.generate with max_tokens=1
  stock   stock generator, stock capture and transfer, with only the adapters it cannot start without
  rpc     through the shim, rows in pickled replies
  auto    through the shim, rows in shared memory
  save    as auto, each sample saved with torch.save from four threads as stock's script does
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip
OPTIONAL = ["worker.capture", "scheduler.whole_prompts", "generator.input_order"]


def main() -> int:
    """Run the modes and print the ratios, or, as a child, one mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--batch", action="append", default=[], help="prompts x tokens")
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--modes", default="plain,stock,rpc,auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.batch = options.batch or ["8x2048"]
    if options.child:
        print(json.dumps(_measure(options)), flush=True)
        return 0
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), SHAPES[options.shape])
        for mode in options.modes.split(","):
            child = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--child", mode, "--folder", folder],
                stdout=subprocess.PIPE,
                text=True,
            )
            lines = [line for line in child.stdout.splitlines() if line.startswith('{"mode"')]
            results[mode] = json.loads(lines[-1]) if lines else {"failed": child.returncode}
            print(mode, results[mode], flush=True)
    for batch in options.batch:
        speeds = {m: r.get("tokens_per_second", {}).get(batch) for m, r in results.items()}
        base = speeds.get("plain")
        print(f"\n{batch} tokens, shape {options.shape}")
        for mode, speed in speeds.items():
            ratio = f"{speed / base:5.2f} of plain" if speed and base else ""
            print(f"  {mode:6} {speed or 0:10.0f} tokens/s  {ratio}")
    if options.out:
        Path(options.out).write_text(
            json.dumps({"kind": "generate", "shape": options.shape, "modes": results}, indent=1)
        )
    return 0 if all("failed" not in result for result in results.values()) else 1


def _write_model(folder: Path, shape: dict[str, int]) -> None:
    from vllm_compat.lab.models import VOCABULARY, write_fast_tokenizer

    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY,
              "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 500000.0,
              "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
              "bos_token_id": 1, "eos_token_id": 2, **shape}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_fast_tokenizer(folder)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    layers = SHAPES[options.shape]["num_hidden_layers"]
    ids = [2, layers // 2, layers - 3, layers - 1] if layers > 8 else [0, 1, 2, 3]
    run = _plain(options) if options.child == "plain" else _generator(options, ids)
    speeds, times = {}, {}
    for batch in options.batch:
        prompts, length = map(int, batch.split("x"))
        tokens = [[(7 * i + 31 * j) % 600 + 64 for i in range(length)] for j in range(prompts)]
        run(tokens)
        run(tokens)
        taken = []
        for _ in range(options.calls):
            begin = time.perf_counter()
            run(tokens)
            taken.append(time.perf_counter() - begin)
        speeds[batch] = prompts * length / statistics.median(taken)
        times[batch] = taken
    import torch
    import vllm

    return {
        "mode": options.child,
        "tokens_per_second": speeds,
        "seconds": times,
        "layer_ids": ids,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "tensor_parallel_size": options.tensor_parallel_size,
        "model_runner_v2": os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "default"),
    }


def _plain(options: argparse.Namespace) -> Any:
    from vllm import LLM, SamplingParams

    engine = LLM(
        options.folder,
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=4096,
        max_num_seqs=32,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.8,
        tensor_parallel_size=options.tensor_parallel_size,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    return lambda tokens: engine.generate(
        [{"prompt_token_ids": ids} for ids in tokens], sampling, use_tqdm=False
    )


def _generator(options: argparse.Namespace, ids: list[int]) -> Any:
    import vllm_compat

    if options.child == "stock":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # stock knows no other
        vllm_compat.apply(without=OPTIONAL)
    else:
        vllm_compat.apply(transfer="rpc" if options.child == "rpc" else "auto")
    import wrapt
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
    from vllm.config import LoadConfig

    def dummy(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **{**kwargs, "load_format": "dummy"})

    wrapt.wrap_function_wrapper(LoadConfig, "__init__", dummy)
    generator = VllmHiddenStatesGenerator(
        options.folder,
        layer_ids=ids,
        max_model_len=4096,
        gpu_memory_utilization=0.8,
        tensor_parallel_size=options.tensor_parallel_size,
    )
    if options.child != "save":
        return generator.generate
    return _saving(generator, Path(options.folder) / "saved")


def _saving(generator: Any, folder: Path) -> Any:
    """Generate and save each sample from four threads; the files replace one another."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    folder.mkdir(exist_ok=True)
    pool = ThreadPoolExecutor(4)

    def run(tokens: list[list[int]]) -> None:
        results = generator.generate(tokens)
        paths = [folder / f"data_{index}.pt" for index in range(len(results))]
        list(pool.map(torch.save, results, paths))

    return run


if __name__ == "__main__":
    sys.exit(main())
