#!/usr/bin/env python3
"""Run the tiny models through plain vLLM and hold its log-probabilities against transformers'.

Nothing of the shim is in force here: this says that a vLLM and the lab's models are fit to test it
with. Run it with the Python of a lab environment (``python -m vllm_compat.lab.environments 0.16.0``
makes one and prints its path); one model a process, for vLLM keeps global state.

    python scripts/check_tiny_models.py kimi_k25 --tensor-parallel-size 2
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_compat.lab.models import BYTE_PAIR_TOKENS, MODEL_NAMES, make_model
from vllm_compat.lab.reference import reference_run

LENGTHS = (1, 2, 7, 33, 64, 130)


def check(name: str, dtype: str, tensor_parallel_size: int, folder: Path) -> float:
    """Return the largest difference of a prompt token's log-probability from the reference."""
    model = make_model(name, folder / name, heads=max(4, tensor_parallel_size))
    draw = random.Random(0)
    prompts = [[draw.randrange(BYTE_PAIR_TOKENS) for _ in range(n)] for n in LENGTHS]
    layers = json.loads((model / "config.json").read_text())
    last = layers.get("text_config", layers)["num_hidden_layers"] - 1
    reference = reference_run(model, prompts, [last])

    os.environ["VLLM_PLUGINS"] = ""  # no plugin at all, ours included
    import vllm

    start = time.monotonic()
    options: dict[str, Any] = {}
    if name == "kimi_k25":
        options["limit_mm_per_prompt"] = {"vision_chunk": 0}
    if any(field.name == "swap_space" for field in dataclasses.fields(vllm.EngineArgs)):
        options["swap_space"] = 0  # 4 GiB a rank otherwise, which vLLM checks against the memory
    llm = vllm.LLM(
        str(model),
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        trust_remote_code=True,
        enforce_eager=True,
        max_model_len=256,
        disable_log_stats=True,
        **options,
    )
    loaded = time.monotonic()
    try:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, logprobs=1),
            use_tqdm=False,
        )
        finished = time.monotonic()
    finally:
        # Newer releases (seen on 0.30.0) wait for their engine at exit, and it for them.
        llm.llm_engine.engine_core.shutdown()
    worst = 0.0
    for prompt, logits, output in zip(prompts, reference.logits, outputs, strict=True):
        expected = logits.log_softmax(dim=-1)
        for place, found in enumerate(output.prompt_logprobs[1:]):
            for token, entry in found.items():
                worst = max(worst, abs(entry.logprob - float(expected[place, token])))
        for token, entry in output.outputs[0].logprobs[0].items():
            worst = max(worst, abs(entry.logprob - float(expected[len(prompt) - 1, token])))
    print(
        f"{name} {dtype} tp={tensor_parallel_size} vllm={vllm.__version__}: "
        f"worst log-probability difference {worst:.2e}, "
        f"start {loaded - start:.1f} s, generate {finished - loaded:.1f} s"
    )
    return worst


def main() -> int:
    """Check one model; exit with 1 if it is further from the reference than allowed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=MODEL_NAMES)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vllm-compat-models-") as folder:
        worst = check(options.model, options.dtype, options.tensor_parallel_size, Path(folder))
    return 0 if worst <= options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
