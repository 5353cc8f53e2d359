"""A program that works as speculators' offline script does, and has never heard of vllm_compat.

It saves each sample in place from four threads, and goes on behind the highest number that it finds.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from speculators.data_generation.logging_utils import PipelineLogger
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
from transformers import AutoTokenizer

log = PipelineLogger(__name__)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser()
    parser.add_argument("--target-model-path", required=True)
    parser.add_argument("--train-data-path", required=True)
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--layer-ids", type=int, nargs="+")
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.target_model_path, trust_remote_code=True)
    samples = []
    for line in Path(args.train_data_path).read_text(encoding="utf-8").splitlines():
        text = tokenizer.apply_chat_template(json.loads(line)["conversations"], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: args.seq_length - 1]
        samples.append((ids, [int(place % 3 > 0) for place in range(len(ids))]))

    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [re.fullmatch(r"data_(\d+)\.pt", path.name) for path in folder.iterdir()]
    first = max((int(number[1]) for number in numbers if number), default=-1) + 1
    if first >= len(samples):
        print("saved 0 samples")
        return

    generator = VllmHiddenStatesGenerator(
        model_path=args.target_model_path,
        layer_ids=args.layer_ids,
        max_model_len=args.seq_length,
        gpu_memory_utilization=args.gpu_memory_utilization,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    log.info(f"Processing {len(samples) - first}/{len(samples)} samples")
    with ThreadPoolExecutor(max_workers=4) as pool:
        futures = []
        for start in range(first, len(samples), args.batch_size):
            batch = samples[start : start + args.batch_size]
            results = generator.generate([ids for ids, _ in batch])
            for place, result in enumerate(results):
                sample = {
                    "input_ids": result["input_ids"],
                    "hidden_states": [h.contiguous() for h in result["hidden_states"]],
                    "loss_mask": torch.tensor(batch[place][1][: len(result["input_ids"])]),
                }
                path = folder / f"data_{start + place}.pt"
                futures.append(pool.submit(torch.save, sample, path))
        for future in futures:
            future.result()
    print(f"saved {len(samples) - first} samples")


if __name__ == "__main__":
    main()
