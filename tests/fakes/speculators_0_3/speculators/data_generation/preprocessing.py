"""FAKE preprocessing: asks the tokenizer for offsets, logs what fails, and goes on."""

from __future__ import annotations

import logging
from typing import Any

from speculators.train.vocab_mapping import save_token_frequency_distribution

log = logging.getLogger(__name__)


def _normalize_conversation(conv: Any, turn_dropout: bool = False) -> list[Any]:
    kept = [turn for turn in conv if turn.get("role", "user") in ("user", "assistant", "system")]
    if len(kept) < len(conv):
        log.warning("Unknown role, skipping turn")
    return [{"role": turn.get("role", "user"), "content": turn["content"]} for turn in kept]


def _preprocess_batch(examples: Any, tokenizer: Any, max_length: int) -> list[Any]:
    results = []
    for place, conversation in enumerate(examples):
        if not conversation:
            continue
        try:
            text = "".join(turn["content"] for turn in conversation)
            encoding = tokenizer(text, return_offsets_mapping=True, max_length=max_length)
            spans = encoding["offset_mapping"]
            results.append({"input_ids": encoding["input_ids"], "loss_mask": Mask(spans)})
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            log.warning(f"  \u26a0 Failed to process conversation {place}: {error!r}")
    return results


class Mask(list[Any]):
    def any(self) -> bool:
        return any(end > start for start, end in self)


def build_eagle3_dataset(
    dataset: Any, tokenizer: Any, max_length: int = 2048, num_proc: int = 8
) -> list[Any]:
    return _preprocess_batch(dataset["conversations"], tokenizer, max_length)


def load_and_preprocess_dataset(dataset: Any, tokenizer: Any, token_freq_path: str) -> list[Any]:
    built = build_eagle3_dataset(dataset=dataset, tokenizer=tokenizer)
    save_token_frequency_distribution(dataset=built, output_path=token_freq_path)
    return built
