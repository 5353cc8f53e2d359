"""Extract, revert while the workers live, apply again and extract with a new generator.

    revert.py MODEL RANKS

Prints one JSON object: what each worker says of itself before and after the revert, what the revert says
of the ranks, what the old generator answers, and how far its rows and those of the new one are apart.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

import vllm_compat
from vllm_compat.errors import UsageError
from vllm_compat.trial.reference import compare, reference_hidden_states

LAYERS = [3, 0]
PROMPTS = [[5 + n % 7] * n + [9] for n in range(1, 13)]


def look(worker: Any) -> dict[str, Any]:
    """Return what stands on this worker's runner and model; runs in the worker."""
    runner = worker.model_runner
    modules = list(runner.model.modules())
    extension = next(c for c in type(worker.worker).__mro__ if "custom_worker" in c.__module__)
    setup = vars(extension)["_setup_hidden_states_capture"]
    method = getattr(runner.execute_model, "__func__", None)
    return {
        "rank": worker.rank,
        "pid": os.getpid(),
        "in_force": vllm_compat.status().in_force,
        "own_method": "execute_model" in vars(runner),
        "classes_method": method is type(runner).execute_model,
        "hooks": sum(len(module._forward_hooks) for module in modules),
        "pre_hooks": sum(len(module._forward_pre_hooks) for module in modules),
        "left_on_worker": [name for name in vars(worker.worker) if name.startswith("_vllm_compat")],
        "extension": type(setup).__name__,
    }


def build(model: str, ranks: int) -> Any:
    return VllmHiddenStatesGenerator(
        model, layer_ids=LAYERS, max_model_len=128, tensor_parallel_size=ranks
    )


def rows_of(generator: Any) -> list[list[Any]]:
    """Return the rows by prompt and layer, as copies that hold no shared memory."""
    return [[layer.clone() for layer in r["hidden_states"]] for r in generator.generate(PROMPTS)]


def main() -> None:
    model, ranks = sys.argv[1], int(sys.argv[2])
    found: dict[str, Any] = {}
    vllm_compat.apply()
    first = build(model, ranks)
    rows = rows_of(first)
    found["before"] = first.executor.collective_rpc(look)
    status = vllm_compat.revert()
    found["in_force"], found["left"] = status.in_force, [patch.target for patch in status.left]
    found["ranks"] = [[r.rank, r.pid, r.state, list(r.left)] for r in status.ranks]
    found["after"] = first.executor.collective_rpc(look)
    try:
        first.generate(PROMPTS)
    except UsageError as error:
        found["refused"] = str(error)
    first.executor.shutdown()
    del first
    vllm_compat.apply()
    second = build(model, ranks)
    again = rows_of(second)
    found["again"] = second.executor.collective_rpc(look)
    second.executor.shutdown()
    pairs = [(a, b) for x, y in zip(rows, again, strict=True) for a, b in zip(x, y, strict=True)]
    found["equal"] = all(torch.equal(a, b) for a, b in pairs)
    reference = reference_hidden_states(model, PROMPTS, LAYERS)
    found["worst"] = [compare(each, reference).worst for each in (rows, again)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
