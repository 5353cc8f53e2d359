"""Make and read training data with stock speculators' own classes, as its trainers get them.

``make FOLDER`` writes in-process data; ``read FOLDER OUT`` reads a folder through the stock release
that is on the path, shift for training included, and ``compare OUT OTHER`` says whether two readings
are the same, bit for bit; ``convert …`` is the command of that name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

IDS, LAYERS, WIDTH = (2, 4, 5, 7), 8, 16
DTYPE = torch.bfloat16


def make(folder: Path) -> None:
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    for index, rows in enumerate((7, 30, 2, 19, 11, 4)):
        sample = {
            "input_ids": torch.randint(0, 500, (rows,)),
            "hidden_states": [torch.randn(rows, WIDTH, dtype=DTYPE) for _ in IDS],
            "loss_mask": torch.randint(0, 2, (rows,)),
        }
        torch.save(sample, folder / f"data_{index}.pt")
    (folder / "data_config.json").write_text(json.dumps({"hidden_states": {"layer_ids": IDS}}))


def in_process(folder: Path) -> list[dict[str, Any]]:
    from speculators.train.data import Eagle3SampleFileDataset

    data = Eagle3SampleFileDataset(999, datapath=str(folder), hidden_states_dtype=DTYPE)
    order = sorted(range(len(data)), key=lambda place: int(Path(data.data[place]).stem.split("_")[1]))
    assert all(data.approx_lengths[place] > 0 for place in order)
    return [data[place] for place in order]


def server(folder: Path) -> list[dict[str, Any]]:
    """Read both halves of a split, so that the second one's file numbers are stock's own affair."""
    import inspect

    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset

    more: dict[str, Any] = {}
    if (folder / "fp8").exists():
        from hs_connectors.transfer import FP8Transfer

        more = {"transfer": FP8Transfer(folder / "hidden_states")}
    if "train_ratio" in inspect.signature(ArrowDataset).parameters:
        halves: list[dict[str, Any]] = [{"train_ratio": 0.5, "split": half} for half in ("train", "val")]
    else:
        halves = [{"split_ratio": ratio} for ratio in (0.5, -0.5)]
    items = []
    for half in halves:
        data = ArrowDataset(999, folder, on_missing="raise", hidden_states_dtype=DTYPE, **half, **more)
        items += [data[index] for index in range(len(data))]
    assert all(isinstance(item, dict) for item in items), items
    return [shift_batch(item) for item in items]


def quantise(folder: Path) -> None:
    """Turn the states of a server folder into what hs-connectors' fp8 connector writes."""
    from hs_connectors.fp8_utils import quantize_tensor_to_fp8
    from safetensors.torch import load_file, save_file

    (folder / "fp8").touch()
    for path in (folder / "hidden_states").glob("hs_*.safetensors"):
        tensors = load_file(path)
        states, scales = quantize_tensor_to_fp8(tensors["hidden_states"])
        save_file(
            {
                "hidden_states": states,
                "hidden_states_scales": scales,
                "token_ids": tensors["token_ids"].clone(),
            },
            path,
        )


def compare(one: Path, other: Path) -> None:
    left, right = (torch.load(path, weights_only=True) for path in (one, other))
    assert len(left) == len(right) == 6
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key].dtype == b[key].dtype, (index, key, a[key].dtype, b[key].dtype)
            assert torch.equal(a[key], b[key]), (index, key)


def convert(*words: str) -> None:
    from vllm_compat.cli import main as command

    assert command(["convert", *words]) == 0


def main(step: str, *paths: str) -> None:
    if step == "convert":
        return convert(*paths)
    first, rest = Path(paths[0]), [Path(path) for path in paths[1:]]
    if step == "make":
        make(first)
    elif step == "quantise":
        quantise(first)
    elif step == "compare":
        compare(first, rest[0])
    else:
        read = in_process if any(first.glob("data_*.pt")) else server
        torch.save(read(first), rest[0])


if __name__ == "__main__":
    # Steps are parted by commas, so that one interpreter does several.
    words = sys.argv[1:]
    while words:
        end = words.index(",") if "," in words else len(words)
        main(*words[:end])
        words = words[end + 1 :]
    print("done")
