"""Step 4: stock's trainer on an extracted folder; then, where asked, the draft on other folders.

On a CPU torch's flex_attention, which speculators' script asks for, has no backward pass: the same
mask is then given to ordinary attention, through the interface that transformers has for it.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn, split_files
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.trainer import Trainer, TrainerConfig
from torch.utils.data import DataLoader
from transformers import AttentionInterface, AutoConfig, LlamaConfig


def options() -> argparse.Namespace:
    """Return the arguments, named as speculators' script names them where it has them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verifier-name-or-path", required=True)
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--save-path", required=True)
    parser.add_argument("--d2t-path", required=True)
    parser.add_argument("--t2d-path", required=True)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--total-seq-len", type=int, default=8192)
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--metrics", help="where each step's metrics go, a line of JSON each")
    parser.add_argument("--evaluate", nargs="*", default=[], help="folders to try the draft on")
    return parser.parse_args()


def main() -> None:
    """Train, then evaluate."""
    args = options()
    device: Any = 0 if torch.cuda.is_available() else "cpu"
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    log = Metrics(args.metrics)
    logging.getLogger("speculators.metrics").addHandler(log)
    logging.getLogger("speculators.metrics").setLevel(logging.INFO)

    d2t = torch.from_numpy(np.load(args.d2t_path))
    t2d = torch.from_numpy(np.load(args.t2d_path))
    model = Eagle3DraftModel(config=draft_config(args, len(d2t), device), t2d=t2d, d2t=d2t)
    train_files, val_files = split_files(args.data_path, ratio=0.9)
    trainer = Trainer(
        model,
        TrainerConfig(
            lr=args.lr,
            num_epochs=args.epochs,
            save_path=args.save_path,
            local_rank=device,
            train_call_kwargs={"ttt_steps": args.ttt_steps, "use_off_policy_tokens": True},
            val_call_kwargs={"ttt_steps": args.ttt_steps},
        ),
        loader(train_files, args),
        loader(val_files, args),
    )
    trainer.run_training()
    losses = [entry["train"]["loss"] for entry in log.entries if "train" in entry]
    print(f"trained {len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
    for folder in args.evaluate:
        found = evaluate(model, args, folder, device)
        print("evaluated " + json.dumps({"folder": folder, **found}), flush=True)


def draft_config(args: argparse.Namespace, draft_vocabulary: int, device: Any) -> Any:
    """Return the configuration of a draft with one Llama layer of the verifier's width."""
    verifier = AutoConfig.from_pretrained(args.verifier_name_or_path)
    verifier = getattr(verifier, "text_config", verifier)
    layer = LlamaConfig(
        vocab_size=verifier.vocab_size,
        hidden_size=verifier.hidden_size,
        intermediate_size=verifier.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=verifier.num_attention_heads,
        num_key_value_heads=verifier.num_attention_heads,
        hidden_act=verifier.hidden_act,
        max_position_embeddings=verifier.max_position_embeddings,
        rms_norm_eps=verifier.rms_norm_eps,
    )
    if device == "cpu":
        AttentionInterface.register("dense_attention", dense_attention)
    layer._attn_implementation = "dense_attention" if device == "cpu" else "simple_flex_attention"
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocabulary,
        norm_before_residual=True,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=args.ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=args.verifier_name_or_path, architectures=[]),
        ),
    )


def dense_attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Any, None]:
    """Attend as flex_attention does with the same block mask, all of it laid out."""
    rows = torch.arange(query.shape[2])[:, None]
    columns = torch.arange(key.shape[2])[None, :]
    allowed = mask.mask_mod(torch.tensor(0), torch.tensor(0), rows, columns)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


def loader(files: list[str], args: argparse.Namespace) -> DataLoader[Any]:
    """Return stock's batches of packed samples."""
    dataset = Eagle3SampleFileDataset(args.total_seq_len, file_list=files)
    sampler = MultipackDistributedBatchSamplerV2(
        batch_max_length=args.total_seq_len,
        lengths=dataset.approx_lengths,
        num_replicas=1,
        rank=0,
    )
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=create_collate_fn(args.total_seq_len))


def evaluate(model: Any, args: argparse.Namespace, folder: str, device: Any) -> dict[str, Any]:
    """Return stock's loss and first-step accuracy for each sample of a folder."""
    model.eval()
    losses, right = {}, {}
    for file in sorted(Path(folder).glob("data_*.pt")):
        (batch,) = loader([str(file)], args)
        with torch.no_grad():
            _, _, metrics = model(
                **{k: v.to(device) for k, v in batch.items()}, ttt_steps=args.ttt_steps
            )
        losses[file.name] = round(float(metrics["loss"]), 6)
        right[file.name] = round(float(metrics["full_acc_0"]), 6)
    return {"loss": losses, "accuracy": right}


class Metrics(logging.Handler):
    """Keeps what stock's trainer logs of each step, and writes it to a file where one is named."""

    def __init__(self, path: str | None) -> None:
        super().__init__()
        self.entries: list[dict[str, Any]] = []
        self._file = open(path, "w", encoding="utf-8") if path else None  # noqa: SIM115

    def emit(self, record: logging.LogRecord) -> None:
        """Take one entry, a dictionary."""
        if isinstance(record.msg, dict):
            self.entries.append(record.msg)
            if self._file:
                print(json.dumps(record.msg), file=self._file, flush=True)


if __name__ == "__main__":
    main()
