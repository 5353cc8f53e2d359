"""The program of a rehearsal: make the weights, run stock's generator, compare every row.

Started by `vllm_compat.commands.rehearse.rehearse` under the launcher (``python -m vllm_compat run -m
vllm_compat.commands.rehearse.program REQUEST RESULT``), so that it meets what the user's own program
would.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

NOT_MADE = "not made"
"""Outcome where the rehearsal lacks something of its own: it says nothing of the user's run."""

TOLERANCE = {
    "bfloat16": (0.08, 0.02),
    "float16": (0.08, 0.02),
    "float32": (0.08, 0.02),  # which stock runs in bfloat16
    # Quantised activations: a wrong row is off by 1.4.
    "fp8": (0.3, 0.1),
}
"""Largest right deviation of a row, and of the median row, relative."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse one request; return 0 where the rows are right or could not be compared."""
    request_path, out = arguments or sys.argv[1:]
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    result: dict[str, Any] = {"outcome": NOT_MADE, "notes": []}
    Path(out).write_text(json.dumps(result), encoding="utf-8")  # for whoever is killed while it makes it
    try:
        _rehearse(request, result)
    except Exception as error:
        from vllm_compat.runtime.heartbeat import describe

        result["error"] = describe(error)
        raise
    finally:
        Path(out).write_text(json.dumps(result), encoding="utf-8")
    return 1 if result["outcome"] in ("failed", "wrong", NOT_MADE) else 0


def _rehearse(request: dict[str, Any], result: dict[str, Any]) -> None:
    from vllm_compat.trial.checkpoint import NoReferenceError, make_checkpoint

    folder, reference = Path(request["model"]), Path(request["reference"])
    _stand_in_files(folder, request, result)
    comparable = True
    try:
        result["notes"] += make_checkpoint(
            folder, reference, dequantised=bool(request.get("dequantised"))
        )
    except NoReferenceError as error:
        comparable = False
        result["notes"].append(
            f"{error} So there is no reference: vLLM draws the weights itself (load format dummy), and"
            " only shapes, order, finiteness and repeatability are judged."
        )
    result["outcome"] = "failed"  # from here on it is what the user's own program would meet
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    if not comparable:
        _draw_in_vllm()
    from vllm_compat.trial.cell import describe_worker

    generator = VllmHiddenStatesGenerator(
        str(folder),
        layer_ids=request["layer_ids"],
        max_model_len=request["max_model_len"],
        tensor_parallel_size=request["devices"],
        gpu_memory_utilization=request["gpu_memory_utilization"],
    )
    result["in_force"] = generator.executor.collective_rpc(describe_worker)[0]
    layer_ids = [int(k) for k in generator.layer_ids]
    text = json.loads((folder / "config.json").read_text())
    text = text.get("text_config", text)
    prompts = prompts_of(
        int(text["vocab_size"]), int(request["batch_size"]), int(request["max_model_len"])
    )
    batches = [prompts, prompts[::-1]]
    results = [generator.generate(batch) for batch in batches]
    _tokenizer(generator, result)
    generator.executor.shutdown()
    result["samples"] = sum(map(len, batches))
    if not comparable:
        result["outcome"] = "not compared"
        return
    _judge(request, result, text, reference, batches, results, layer_ids)


def prompts_of(vocabulary: int, count: int, length: int) -> list[list[int]]:
    """Return ``count`` prompts, each with a beginning of its own, of 1 to 200 tokens."""
    lengths = [1, 2, 3, 200, 64, 33, 17, 130, 5, 80, 16, 15, 31]
    found = []
    for number in range(count):
        size = max(1, min(lengths[number % len(lengths)], length - 1))
        start = 32 + number * 7
        found.append(
            [(start + (number + 3) * i * 17 + i * i * 7) % (vocabulary - 300) for i in range(size)]
        )
    return found


def _stand_in_files(folder: Path, request: dict[str, Any], result: dict[str, Any]) -> None:
    """Put what is missing beside the configuration: tokenizer, image processor, remote code."""
    from vllm_compat.trial import models

    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    kimi = config.get("model_type") == "kimi_k25"
    if not request["own_tokenizer"]:
        # Ids of special tokens beyond the small vocabulary become those of the small tokenizer.
        for part in (config, config.get("text_config") or {}):
            for name, token in models.SPECIAL_IDS.items():
                if isinstance(part.get(name), int | list):
                    part[name] = models.special_token_id(token)
        path.write_text(json.dumps(config, indent=1))
        (models.write_slow_tokenizer if kimi else models.write_fast_tokenizer)(folder)
    if kimi:
        supplied = models.write_kimi_code(folder)
        if supplied:
            result["notes"].append(f"Remote code of our own stood in for: {', '.join(supplied)}.")


def _draw_in_vllm() -> None:
    import wrapt
    from vllm.config import LoadConfig

    def dummy(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **{**kwargs, "load_format": "dummy"})

    wrapt.wrap_function_wrapper(LoadConfig, "__init__", dummy)


def _tokenizer(generator: Any, result: dict[str, Any]) -> None:
    tokenizer = generator.tokenizer
    text = "What is 7 times 6? 你好 🙂\n```python\nprint(42)\n```"
    again = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    if again.strip() != text.strip():
        result["notes"].append(f"{type(tokenizer).__name__} decodes what it has encoded to {again!r}.")


def _judge(
    request: dict[str, Any],
    result: dict[str, Any],
    text: dict[str, Any],
    reference: Path,
    batches: list[list[list[int]]],
    results: list[Any],
    layer_ids: list[int],
) -> None:
    from vllm_compat.trial.reference import compare, reference_hidden_states

    result["outcome"] = NOT_MADE
    right = reference_hidden_states(reference, batches[0], layer_ids)
    result["outcome"] = "failed"
    references = [right, right[::-1]]
    dtype = str(results[0][0]["hidden_states"][0].dtype).removeprefix("torch.")
    scheme = text.get("quantization_config") or {}
    kind = "fp8" if scheme.get("quant_method") == "fp8" else dtype
    routed = any(text.get(n) for n in ("n_routed_experts", "num_experts", "num_local_experts"))
    unrouted = [i for i, k in enumerate(layer_ids) if k < int(text.get("first_k_dense_replace") or 0)]
    wrong, said = [], []
    for number, (found, expected) in enumerate(zip(results, references, strict=True)):
        deviation = compare(found, expected)
        before = unrouted if routed else None
        faults = _faults(found, expected, deviation, TOLERANCE[kind], before)
        wrong += [f"call {number}{fault}" for fault in faults]
        said.append(f"worst {deviation.worst:.2e}, median {deviation.median:.2e}")
    count = sum(len(ids) for batch in batches for ids in batch) * len(layer_ids)
    result["compared"] = (
        f"{count} rows of {result['samples']} samples in {dtype} compared with transformers in float32:"
        f" {'; '.join(said)}; no row belongs to another token or sample."
    )
    if wrong:
        result["outcome"] = "wrong"
        result["error"] = f"rows are wrong: {'; '.join(wrong)}"
        result.pop("compared")
    else:
        result["outcome"] = "right"


def _faults(
    found: Sequence[Any],
    expected: Sequence[Any],
    deviation: Any,
    tolerance: tuple[float, float],
    unrouted: Sequence[int] | None,
) -> Iterator[str]:
    """Yield what says that the rows of a call are wrong.

    ``unrouted`` are the layer entries before the first router, None for a model without routers. A
    router may choose another expert in low precision than in float32: the median counts, the layers
    before the first router, and that each row is nearest to its own reference.
    """
    from vllm_compat.trial.reference import compare

    worst, median = tolerance
    if deviation.median > median or (unrouted is None and deviation.worst > worst):
        yield f": {deviation}"
    if unrouted:
        before = compare(
            [[r["hidden_states"][i] for i in unrouted] for r in found],
            [[layers[i] for i in unrouted] for layers in expected],
        )
        if before.worst > worst:
            yield f", before the first router: {before}"
    strange = strangers(found, expected, len(expected[0]) if unrouted is None else len(unrouted))
    if strange:
        yield f": {strange}"


def strangers(found: Sequence[Any], expected: Sequence[Any], routed_from: int) -> str:
    """Return what says that rows belong to other tokens or samples; nothing if nothing does.

    A row is strange where it is nearer to another row's reference than to its own; positions whose
    references are almost the same are left out. From the layer entry ``routed_from`` on a router may
    have chosen otherwise in low precision, which moves single rows anywhere. There a few strange rows
    are no sign, but these are: two that have changed places, half of a sample, three in a hundred.
    """
    import torch

    sizes = [len(layers[0]) for layers in expected]
    for layer in range(len(expected[0])):
        rows = torch.cat([r["hidden_states"][layer].to(torch.float32) for r in found])
        right = torch.cat([layers[layer].to(torch.float32) for layers in expected])
        rows = rows / rows.norm(dim=1, keepdim=True)
        right = right / right.norm(dim=1, keepdim=True)
        likeness = rows @ right.T
        own = likeness.diagonal().clone()
        likeness[right @ right.T > 0.99] = -1.0
        nearest = likeness.max(dim=1)
        strange = nearest.values > own
        count = int(strange.sum())
        if not count:
            continue
        places = strange.nonzero().flatten()
        swapped = nearest.indices[nearest.indices[places]] == places
        swapped &= strange[nearest.indices[places]]
        per_sample = [int(part.sum()) for part in strange.split(sizes)]
        whole = any(2 * n >= size >= 3 for n, size in zip(per_sample, sizes, strict=True))
        if layer < routed_from or bool(swapped.any()) or whole or count > max(3, 3 * len(rows) // 100):
            return (
                f"layer entry {layer}: {count} of {len(rows)} rows are nearer to another row's"
                f" reference than to their own, the first is row {int(places[0])}"
            )
    return ""


if __name__ == "__main__":
    sys.exit(main())
