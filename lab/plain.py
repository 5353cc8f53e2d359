"""vLLM alone on a tiny model, against transformers: whose fault is a failing cell?

Neither speculators nor this library takes part: ``vllm.LLM`` computes the log-probabilities of
prompts and of one token behind each, and they are compared with those of the transformers reference.
Where this fails, the build of vLLM cannot run the model, whatever stands on top of it.

    python -m lab.plain MODEL --out FILE
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_compat.trial.cell import prompts_of, recorded

SCENARIO = "70, 5 and 30 tokens"

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest right deviation of a log-probability, absolute. Wrong numbers are off by 0.1 to 10."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run vLLM on the model and write a record; return 0 if its numbers are right."""
    parser = argparse.ArgumentParser(prog="python -m lab.plain", description=__doc__)
    parser.add_argument("model", help="folder of a tiny model")
    parser.add_argument("--out", required=True, help="where the record goes")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--scenario", default=SCENARIO, help="a cell's prompts that are run")
    options = parser.parse_args(argv)
    record: dict[str, Any] = {"kind": "plain", "outcome": "failed"}
    return recorded(_run, options, record)


def _run(options: argparse.Namespace, record: dict[str, Any]) -> None:
    os.environ["VLLM_PLUGINS"] = ""  # no plugin at all, ours included
    from vllm import LLM, SamplingParams

    from vllm_compat.trial.reference import reference_run

    config = json.loads((Path(options.model) / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    prompts = prompts_of(text["vocab_size"])[options.scenario]
    llm = LLM(
        options.model,
        dtype=options.dtype,
        tensor_parallel_size=options.tensor_parallel_size,
        max_model_len=256,
        enforce_eager=True,
        trust_remote_code=True,
        **({"limit_mm_per_prompt": {"vision_chunk": 0}} if "text_config" in config else {}),
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, logprobs=0),
        use_tqdm=False,
    )
    reference = reference_run(options.model, prompts, [0])
    worst = 0.0
    for prompt, output, logits in zip(prompts, outputs, reference.logits, strict=True):
        right = logits.float().log_softmax(-1)
        answer = output.outputs[0]
        told = [*zip(prompt[1:], (output.prompt_logprobs or [None])[1:], strict=True)]
        told.append((answer.token_ids[0], answer.logprobs[0]))
        for place, (token, found) in enumerate(told):
            worst = max(worst, abs(found[token].logprob - float(right[place, token])))
    record["worst"] = worst
    if worst <= TOLERANCE[options.dtype]:
        record["outcome"] = "right"
    else:
        record["error"] = (
            f"log-probabilities of prompt tokens are off by up to {worst:.2g}; allowed are"
            f" {TOLERANCE[options.dtype]:g}"
        )


if __name__ == "__main__":
    sys.exit(main())
