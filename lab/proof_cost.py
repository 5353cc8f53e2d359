"""What the proofs of captured rows cost: their share of a worker's time, batch by batch.

Run inside an environment with vLLM and speculators (``python -m lab.proof_cost --out FILE``). A Llama
with random weights is extracted from, one prompt a batch and one step each, under ``apply()`` alone. In
the worker the time in the proofs' own code and hooks is added up, and divided by that of the whole
batch: both are processor seconds of the worker's main thread, which takes part in every computation, so
that what else the machine does changes little.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from vllm_compat.capture.proof import EVERY
from vllm_compat.trial.stamp import made_by

SIZES = (256, 512, 1024)
"""Tokens of a batch."""

BATCHES = 24
RUN = 128
"""Batches of a run whose share is reckoned from the medians of those that are watched and those not."""
FIRST = 5
"""How often a run's first batch is measured; the median counts."""

SHAPE = {"layers": 6, "hidden_size": 768, "heads": 12, "max_position": 2048}


class Meter:
    """Adds up the time in the proofs of one worker, in processor seconds of its main thread."""

    def __init__(self, capture: Any) -> None:
        from vllm_compat.capture import proof

        self.capture, self.prover = capture, capture._prover
        self.spent = 0.0
        self.begin = time.thread_time()
        for name in ("begin", "end", "meet", "judge"):
            setattr(self.prover, name, self.timed(getattr(self.prover, name)))
        self.prover.stream.check_logits = self.timed(self.prover.stream.check_logits)
        quietly = proof.quietly
        proof.quietly = lambda tell, hook: self.timed(quietly(tell, hook))
        for module in capture.runner.model.modules():
            for number, hook in module._forward_pre_hooks.items():
                if hook.__module__ == proof.__name__:
                    module._forward_pre_hooks[number] = self.timed(hook)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time is added to `spent`."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent += time.thread_time() - begin

        return measured


def install(worker: Any) -> float:
    """Put a meter into this worker; return what setting the proofs up takes, in seconds."""
    from vllm_compat.capture.prover import Prover
    from vllm_compat.runtime.patching import Transaction

    capture, transaction = worker._vllm_compat_capture, Transaction()
    begin = time.thread_time()
    Prover(
        capture.runner.model,
        worker.vllm_config.model_config.hf_text_config.num_hidden_layers,
        capture.unique_ids,
        captures=capture.active,
        spans=tuple,
        transaction=transaction,
    )
    spent = time.thread_time() - begin
    transaction.revert()
    worker._proof_meter = Meter(capture)
    return spent


def forget(worker: Any) -> None:
    """Forget what has been proven: the next step is as a run's first."""
    worker._proof_meter.prover.stream._steps.clear()


def read(worker: Any) -> tuple[float, float, int]:
    """Return seconds in the proofs and in all since the last time, and steps of the batch's size."""
    meter = worker._proof_meter
    now = time.thread_time()
    found = (meter.spent, now - meter.begin, max(meter.prover.stream._steps.values(), default=0))
    meter.spent, meter.begin = 0.0, now
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(prog="python -m lab.proof_cost", description=__doc__)
    parser.add_argument("--out", required=True, help="where the record goes")
    parser.add_argument("--batches", type=int, default=BATCHES)
    options = parser.parse_args(argv)

    import vllm_compat

    vllm_compat.apply()
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    from vllm_compat.trial.models import make_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_model("llama", Path(folder) / "llama", dtype="bfloat16", **SHAPE)
        generator = VllmHiddenStatesGenerator(str(model), layer_ids=[1, 3, 4, 5], max_model_len=1100)
        ask = partial(asked, generator.executor)
        set_up = ask(install)
        sizes = {size: measured(generator, ask, size, options.batches) for size in SIZES}
        generator.executor.shutdown()
    record = {
        "kind": "proof cost",
        "vllm_compat": made_by(),
        "versions": {"vllm": sys.modules["vllm"].__version__, "torch": sys.modules["torch"].__version__},
        "cores": len(os.sched_getaffinity(0)),
        "shape": SHAPE,
        "layers_captured": 4,
        "batches": options.batches,
        "run_batches": RUN,
        "set_up_seconds": set_up,
        "sizes": sizes,
    }
    Path(options.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    return 0


def asked(executor: Any, function: Callable[..., Any]) -> Any:
    """Return what a function gives in the first worker."""
    return executor.collective_rpc(function)[0]


def looked_at(number: int) -> bool:
    """Whether the step of this number, of one size, is watched (`StreamProof.begin`)."""
    return not number & (number - 1) or not number % EVERY


def measured(generator: Any, ask: Callable[..., Any], size: int, batches: int) -> dict[str, float]:
    """Return what batches of one size take, in seconds, and the proofs' shares of it."""

    def batch(seed: int) -> tuple[float, float, bool]:
        prompt = [32 + (seed * 7 + i * 17 + i * i * 3) % 400 for i in range(size)]
        ask(read)
        generator.generate([prompt])
        spent, whole, number = ask(read)
        return spent, whole, looked_at(number)

    batch(0)
    first = []
    for seed in range(FIRST):
        ask(forget)
        first.append(batch(seed))
    ask(forget)
    found = [batch(seed) for seed in range(batches)]
    share = sum(map(looked_at, range(1, RUN + 1))) / RUN
    watched = [spent / (whole - spent) for spent, whole, looked in found if looked]
    others = [spent / (whole - spent) for spent, whole, looked in found if not looked]
    return {
        "batch_seconds": median(whole - spent for spent, whole, _ in found),
        "first_batch": median(spent / (whole - spent) for spent, whole, _ in first),
        "watched_batch": median(watched),
        "watched": len(watched),
        "other_batch": median(others),
        "run": share * median(watched) + (1 - share) * median(others),
    }


if __name__ == "__main__":
    sys.exit(main())
