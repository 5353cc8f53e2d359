"""Steps 1 and 2: conversations to token ids and loss masks, then to hidden states. Resumes."""

from __future__ import annotations

import argparse
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from speculators.data_generation.config_generator import DataGenerationConfig
from speculators.data_generation.preprocessing import load_and_preprocess_dataset
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

logging.basicConfig(level=logging.WARNING)


def options() -> argparse.Namespace:
    """Return the arguments, named as speculators' script names them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target-model-path", required=True)
    parser.add_argument("--train-data-path", required=True)
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--max-samples", type=int)
    parser.add_argument("--token-freq-path", default="./token_freq.pt")
    parser.add_argument("--hf-cache-dir")
    parser.add_argument("--layer-ids", type=int, nargs="+")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-preprocessing-workers", type=int, default=8)
    parser.add_argument("--prepare-only", action="store_true", help="end after step 1")
    return parser.parse_args()


def main() -> None:
    """Prepare the conversations, and extract those that have no file yet."""
    args = options()
    dataset, _ = load_and_preprocess_dataset(
        target_model_path=args.target_model_path,
        train_data_path=args.train_data_path,
        seq_length=args.seq_length,
        build_dataset_num_proc=args.num_preprocessing_workers,
        seed=args.seed,
        max_samples=args.max_samples,
        token_freq_path=args.token_freq_path,
        cache_dir=args.hf_cache_dir,
    )
    trained = int(sum(int(sample["loss_mask"].sum()) for sample in dataset))
    tokens = sum(len(sample["input_ids"]) for sample in dataset)
    print(f"prepared {len(dataset)} samples, {tokens} tokens, {trained} to train on", flush=True)
    if not args.prepare_only:
        extract(args, dataset)


def extract(args: argparse.Namespace, dataset: Any) -> None:
    """Write ``data_<i>.pt`` for each sample behind those that are there."""
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    there = [int(path.stem[5:]) for path in folder.glob("data_*.pt")]
    first = max(there, default=-1) + 1
    if first >= len(dataset):
        print(f"extracted 0 samples, {first} were there", flush=True)
        return
    generator = VllmHiddenStatesGenerator(
        model_path=args.target_model_path,
        layer_ids=args.layer_ids,
        max_model_len=args.seq_length,
        gpu_memory_utilization=args.gpu_memory_utilization,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    with ThreadPoolExecutor(max_workers=4) as pool:
        futures = []
        for start in range(first, len(dataset), args.batch_size):
            batch = dataset[start : min(start + args.batch_size, len(dataset))]
            results = generator.generate(batch["input_ids"])
            for place, result in enumerate(results):
                sample = {
                    "input_ids": result["input_ids"],
                    "hidden_states": [h.contiguous() for h in result["hidden_states"]],
                    "loss_mask": batch["loss_mask"][place][: len(result["input_ids"])],
                }
                futures.append(pool.submit(torch.save, sample, folder / f"data_{start + place}.pt"))
        for future in futures:
            future.result()
    config = DataGenerationConfig.from_generator(
        generator=generator,
        train_data_path=args.train_data_path,
        seq_length=args.seq_length,
        cache_dir=str(args.hf_cache_dir),
        num_samples=len(dataset),
        max_samples=args.max_samples,
        seed=args.seed,
    )
    (folder / "data_config.json").write_text(json.dumps(config.to_dict(), indent=2))
    print(f"extracted {len(dataset) - first} samples, {first} were there", flush=True)


if __name__ == "__main__":
    main()
