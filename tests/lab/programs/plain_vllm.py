"""Run one model folder through plain vLLM and hold its log-probabilities against transformers'.

Run by an environment's Python: ``plain_vllm.py FOLDER [DTYPE [TENSOR_PARALLEL_SIZE]]``. It prints
one line of JSON: the worst difference over the first sixteen tokens of all prompts, and over all
tokens (a model may be right only within its sliding window).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm_compat.lab.reference import reference_run

LENGTHS = (1, 13, 30, 70, 100)
NEAR = 16


def prompts_of(vocabulary: int) -> list[list[int]]:
    """Return prompts of byte-pair tokens."""
    return [[(n * 131 + i * 17 + i * i * 7) % (vocabulary - 256) for i in range(n)] for n in LENGTHS]


def main(model: str, dtype: str = "float32", tensor_parallel_size: str = "1") -> None:
    """Run and compare."""
    config = json.loads((Path(model) / "config.json").read_text())
    text = config.get("text_config", config)
    prompts = prompts_of(text["vocab_size"])
    reference = reference_run(model, prompts, [text["num_hidden_layers"] - 1])
    os.environ["VLLM_PLUGINS"] = ""  # no plugin at all, ours included
    import vllm

    options: dict[str, Any] = {}
    if any(field.name == "swap_space" for field in dataclasses.fields(vllm.EngineArgs)):
        options["swap_space"] = 0
    if config["model_type"] == "kimi_k25":
        options["limit_mm_per_prompt"] = {"vision_chunk": 0}
    if text.get("attention_chunk_size"):
        options["block_size"] = 16  # the CPU's own 128 must not be larger than a chunk
    llm = vllm.LLM(
        model,
        dtype=dtype,
        tensor_parallel_size=int(tensor_parallel_size),
        trust_remote_code=True,
        enforce_eager=True,
        max_model_len=256,
        disable_log_stats=True,
        **options,
    )
    try:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, logprobs=1),
            use_tqdm=False,
        )
    finally:
        # Newer releases (seen on 0.30.0) wait for their engine at exit, and it for them.
        llm.llm_engine.engine_core.shutdown()
    worst = {"near": 0.0, "all": 0.0}
    for prompt, logits, output in zip(prompts, reference.logits, outputs, strict=True):
        expected = logits.log_softmax(dim=-1)
        found = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
        assert len(found) == len(prompt)
        for place, entries in enumerate(found):
            for token, entry in entries.items():
                difference = abs(entry.logprob - float(expected[place, token]))
                worst["all"] = max(worst["all"], difference)
                if place < NEAR:
                    worst["near"] = max(worst["near"], difference)
    print(json.dumps({"model": Path(model).name, "vllm": vllm.__version__, **worst}))


if __name__ == "__main__":
    main(*sys.argv[1:])
