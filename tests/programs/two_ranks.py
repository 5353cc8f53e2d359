"""One of two ranks that meet through gloo, with the capture of a worker over a tiny decoder.

``two_ranks.py RANK FILE``: ``FILE`` is where the ranks find each other. Prints, for each way in which a
batch can go, what rank 0 answers to the driver: ``right`` or the sentence of the error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from tests.with_torch.faulty import LAYERS, DecoderLayer, RMSNorm, Runner, batch


class ReducingNorm(RMSNorm):
    """Adds the ranks' parts up before it adds the residual, as fused kernels do."""

    def forward(self, x: Any, residual: Any = None) -> Any:
        if residual is not None:
            x = x.clone()
            torch.distributed.all_reduce(x)
        return super().forward(x, residual)


class LeavesItsReduction(DecoderLayer):
    """Hands on its own part of the sum; the next layer's norm adds the parts up."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = ReducingNorm()

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        hidden_states, residual = super().forward(positions, hidden_states, residual)
        part = 0.3 if torch.distributed.get_rank() == 0 else 0.7
        return hidden_states * part, residual


def partial_sums(runner: Any, rank: int) -> None:
    runner.model.replace_layers(LeavesItsReduction)
    runner.model.model.norm = ReducingNorm()


def shuts_its_eyes(runner: Any, rank: int) -> None:
    """On rank 1 a layer cannot be read, and hooks of the proofs fail."""
    if rank == 1:
        runner.broken_hooks = True


def misread(runner: Any, rank: int) -> None:
    """Rank 0 takes a wrong stream."""
    runner.misread = rank == 0


def raises_on(which: int) -> Callable[[Any, int], None]:
    def put(runner: Any, rank: int) -> None:
        def fail(*args: Any) -> None:
            raise RuntimeError("no memory")

        if rank == which:
            runner.model.model.layers[2].register_forward_pre_hook(fail)

    return put


WAYS: dict[str, Callable[[Any, int], None]] = {
    "clean": lambda runner, rank: None,
    "partial sums": partial_sums,
    "hooks fail on rank 1": shuts_its_eyes,
    "a wrong stream on rank 0": misread,
    "the step raises on rank 1": raises_on(1),
    "the step raises on rank 0": raises_on(0),
    "clean again": lambda runner, rank: None,
}


def go(way: str, rank: int) -> str:
    """Compute a batch and answer the driver, as worker processes do: an error ends one message only."""
    from vllm_compat.capture.worker import Capture
    from vllm_compat.errors import GuardError

    runner = Runner()
    WAYS[way](runner, rank)
    config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=LAYERS))
    extension = SimpleNamespace(model_runner=runner, vllm_config=SimpleNamespace(model_config=config))
    capture = Capture(extension, [0, 1, 3], shared=False)
    if getattr(runner, "broken_hooks", False):
        assert capture._prover is not None
        capture._prover.stream._rows = None  # type: ignore[union-attr, method-assign, assignment]
        capture._prover.stream._sampled = None  # type: ignore[union-attr, method-assign, assignment]
    if getattr(runner, "misread", False):
        end = capture._end

        def wrong() -> None:
            for layer_id in capture._captured:
                capture._captured[layer_id] *= 2
            end()

        capture._end = wrong  # type: ignore[method-assign]
    for call in (capture.reset, lambda: batch(runner)):
        try:
            call()
        except Exception as error:
            print(f"rank {rank}, {way}: {error!r}", file=sys.stderr)
    try:
        states = capture.states()
    except GuardError as error:
        return str(error)
    return "right" if states else "nothing"


def main() -> None:
    """Go all ways."""
    rank, place = int(sys.argv[1]), sys.argv[2]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    tensor_parallel = SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=None)
    pipeline = SimpleNamespace(world_size=1, rank_in_group=0)
    distributed: Any = ModuleType("vllm.distributed")
    distributed.get_tp_group = lambda: tensor_parallel
    distributed.get_pp_group = lambda: pipeline
    interfaces: Any = ModuleType("vllm.model_executor.models.interfaces")
    interfaces.supports_eagle3 = lambda model: False
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models"):
        sys.modules[name] = ModuleType(name)
    sys.modules["vllm.distributed"] = distributed
    sys.modules["vllm.model_executor.models.interfaces"] = interfaces
    print(json.dumps({way: go(way, rank) for way in WAYS}))


if __name__ == "__main__":
    main()
