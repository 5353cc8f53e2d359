"""Make every tiny family and check the reference on it.

Run by an environment's Python with a folder to write into. Silent where everything is right.
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
import transformers

from vllm_compat.trial.families import FAMILIES, FAMILY_NAMES, make_family
from vllm_compat.trial.reference import compare, reference_hidden_states, reference_run

LONG = [(7 * i + i * i) % 700 + 3 for i in range(70)]
LAYERS = [0, 1, 2, 3]


def check(name: str, folder: Path) -> None:
    """Rows are causal, every layer counts, and transformers' own outputs agree with the hooks."""
    model = make_family(name, folder / name)
    config = json.loads((model / "config.json").read_text())
    run = reference_run(model, [LONG, [5, 6, 7]], LAYERS)
    rows = run.hidden_states[0]
    assert [tuple(layer.shape) for layer in rows] == [(len(LONG), 256)] * 4, name
    assert run.logits[0].shape == (len(LONG), 768), name
    shorter = reference_hidden_states(model, [LONG[:40]], LAYERS)
    assert compare([[layer[:40] for layer in rows]], shorter).worst < 1e-5, name
    for before, after in pairwise(rows):
        assert 0.05 < float((after - before).norm() / before.norm()) < 2, name
    remote = name == "minicpm"  # whose tokenizer is slow and remote code, as Kimi's is
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=remote)
    assert tokenizer.is_fast is not remote, name
    if FAMILIES[name].model == config["architectures"][0]:
        loaded = getattr(transformers, config["architectures"][0]).from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.inference_mode():
            output = loaded(torch.tensor([LONG]), output_hidden_states=True, use_cache=False)
        for layer, mine in enumerate(rows[:-1]):
            assert compare([[mine]], [[output.hidden_states[layer + 1][0]]]).worst < 1e-5, name


def check_bytes(folder: Path) -> None:
    """The same arguments give the same bytes, another seed other ones."""

    def digest(seed: int, place: str) -> str:
        model = make_family("qwen3", folder / place, seed=seed)
        return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()

    torch.manual_seed(1)
    first = digest(0, "a")
    state = torch.get_rng_state()
    assert digest(0, "b") == first
    assert bool((torch.get_rng_state() == state).all())
    assert digest(1, "b") != first


def main(folder: Path) -> None:
    """Check everything."""
    check_bytes(folder)
    for name in FAMILY_NAMES:
        check(name, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
