"""Check the tiny models' files and the reference on them.

Run by an environment's Python with a folder to write into. Silent where everything is right.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
import transformers

from vllm_compat.errors import UsageError
from vllm_compat.trial.models import MODEL_NAMES, make_model
from vllm_compat.trial.reference import compare, reference_hidden_states, reference_run

PROMPTS = [[7], [1, 2, 3, 4, 5], list(range(40, 80))]
LAYERS = [0, 2, 3]


def refused(action: object, *arguments: object) -> str:
    """Return what `UsageError` says."""
    try:
        action(*arguments)  # type: ignore[operator]
    except UsageError as error:
        return str(error)
    raise AssertionError(f"{action} was not refused")


def check_bytes(name: str, folder: Path) -> None:
    """The same arguments give the same bytes, other ones other weights."""

    def digest(seed: int, place: str, dtype: str = "float32") -> str:
        model = make_model(name, folder / f"{name}-{place}", seed=seed, dtype=dtype)
        return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()

    assert digest(0, "a") == digest(0, "b")
    assert digest(1, "b") != digest(0, "a")
    assert digest(0, "b", "bfloat16") != digest(0, "a")


def check_reference(name: str, folder: Path) -> None:
    """Rows are those of `output_hidden_states`, prompts are alone, and order is kept."""
    model = folder / f"{name}-a"
    run = reference_run(model, PROMPTS, LAYERS)
    rows = run.hidden_states
    for prompt, layers, logits in zip(PROMPTS, rows, run.logits, strict=True):
        assert [tuple(layer.shape) for layer in layers] == [(len(prompt), 256)] * len(LAYERS)
        assert all(bool(layer.isfinite().all()) for layer in layers)
        assert logits.shape == (len(prompt), 768)
    assert compare(rows, rows).worst == 0.0
    # A prefix gives the same rows as the whole: attention is causal, nothing is padded.
    shorter = reference_hidden_states(model, [PROMPTS[2][:25]], LAYERS)
    assert compare([[layer[:25] for layer in rows[2]]], shorter).worst < 1e-5
    turned = reference_hidden_states(model, PROMPTS[::-1], LAYERS[::-1])
    assert compare([layers[::-1] for layers in turned[::-1]], rows).worst == 0.0
    if not name.startswith("kimi_k25"):
        reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        with torch.inference_mode():
            output = reference(torch.tensor([PROMPTS[2]]), output_hidden_states=True)
        for layer, mine in zip(LAYERS[:-1], rows[2], strict=False):
            assert compare([[mine]], [[output.hidden_states[layer + 1][0]]]).worst < 1e-5
    assert "Layer id 4 does not exist" in refused(reference_run, model, PROMPTS, [4])


def check_compare() -> None:
    """The worst row is found, and what cannot be compared is refused."""
    right = [[torch.ones(3, 4), torch.ones(3, 4)], [torch.ones(2, 4), torch.ones(2, 4)]]
    wrong = [[layer.clone() for layer in layers] for layers in right]
    wrong[1][0][1] *= 1.5
    deviation = compare([{"hidden_states": layers} for layers in wrong], right)
    assert deviation.worst == 0.5
    assert deviation.median == 0.0
    assert deviation.rows == 10
    assert (deviation.worst_prompt, deviation.worst_layer, deviation.worst_token) == (1, 0, 1)
    assert "worst 5.00e-01 (prompt 1" in str(deviation)
    assert "1 results for 2 prompts" in refused(compare, wrong[:1], right)
    assert "2 layers, the reference 1" in refused(compare, wrong[:1], [right[0][:1]])
    assert "has the shape (2, 4)" in refused(compare, [[torch.ones(2, 4)]], [[torch.ones(3, 4)]])
    wrong[0][1][2] = float("nan")
    assert "Result 0, layer entry 1 is not finite" in refused(compare, wrong, right)
    assert "nothing to compare" in refused(compare, [], [])


def main(folder: Path) -> None:
    """Check everything."""
    check_compare()
    for name in MODEL_NAMES:
        check_bytes(name, folder)
        check_reference(name, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
