"""Faults put into real runs on purpose: each must be an error before the caller has the rows.

Run inside an environment with vLLM and speculators (``python -m lab.faults MODEL --out
FILE``). One generator is built; clean calls, some with the canary, must raise nothing; then each fault
of `FAULTS` is put into the capture of the worker, of `MODEL_FAULTS` into the model, and one into the
scheduler, for one call, and what stops it is noted. A call after each fault shows that nothing stays.

A fault counts as there from the worker's first step on: what has been proven so far is forgotten, as in
a run that begins with it. All is under ``apply()`` alone; with ``--canary`` the canary looks as well.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_compat.trial.stamp import made_by

CLEAN_RUNS = 50
CANARY_EVERY = 5
"""Every so many clean runs have the canary as well, which costs eight calls."""

STEP_TOKENS = 48
"""Token budget of a step: the longest prompt is computed in chunks."""

Fault = Callable[[Any], None]


def _shift(capture: Any) -> None:
    for layer_id, tensor in capture._captured.items():
        capture._captured[layer_id] = tensor.roll(1, 0)


def _swap(capture: Any) -> None:
    """Swap two requests of one length, so that no count gives it away."""
    spans = list(capture._spans)
    for one in range(len(spans)):
        for other in range(one + 1, len(spans)):
            first, second = spans[one], spans[other]
            if first.count == second.count and first.start == second.start == 0:
                kind = type(first)
                spans[one] = kind(second.request_id, second.start, second.count)
                spans[other] = kind(first.request_id, first.start, first.count)
                capture._spans = tuple(spans)
                return


def _zero_layer(capture: Any) -> None:
    next(iter(capture._captured.values())).zero_()


def _drop_last_layer(capture: Any) -> None:
    capture._captured.pop(capture.unique_ids[-1])


def _repeat_chunk(capture: Any) -> None:
    """Give the later chunk of a prompt the rows of an earlier step."""
    held = capture.__dict__.setdefault("_fault_rows", {})
    if any(span.start for span in capture._spans):
        for layer_id, tensor in capture._captured.items():
            rows = min(len(tensor), len(held[layer_id]))
            tensor[:rows] = held[layer_id][:rows]
    else:
        held.update({k: tensor.clone() for k, tensor in capture._captured.items()})


def _cut_chunk(capture: Any) -> None:
    total = sum(span.count for span in capture._spans)
    for layer_id, tensor in capture._captured.items():
        capture._captured[layer_id] = tensor[: total - 1]


def _lose_chunk(capture: Any) -> None:
    capture._spans = tuple(span for span in capture._spans if not span.start)


def _nan_in_one_row(capture: Any) -> None:
    next(iter(capture._captured.values()))[2, 3] = float("nan")


def _other_dtype(capture: Any) -> None:
    import torch

    for layer_id, tensor in capture._captured.items():
        other = torch.float16 if tensor.dtype != torch.float16 else torch.bfloat16
        capture._captured[layer_id] = tensor.to(other)


def _other_order(capture: Any) -> None:
    """Attribute the rows in the reverse of the order in which the batch holds its requests."""
    capture._spans = tuple(reversed(capture._spans))


def _row_from_elsewhere(capture: Any) -> None:
    for tensor in capture._captured.values():
        tensor[0] = tensor[sum(span.count for span in capture._spans) - 1]


FAULTS: dict[str, Fault] = {
    "rows shifted by one": _shift,
    "two requests swapped": _swap,
    "rows in another order than the runner says": _other_order,
    "a layer of zeros": _zero_layer,
    "the last layer dropped": _drop_last_layer,
    "a chunk repeated": _repeat_chunk,
    "a chunk cut": _cut_chunk,
    "a chunk lost": _lose_chunk,
    "NaN in one row": _nan_in_one_row,
    "another dtype": _other_dtype,
    "one row from elsewhere": _row_from_elsewhere,
}


def _norms(capture: Any) -> list[Any]:
    """Return the norms that make the stream's sums: those in front of layers, and the last one."""
    model = capture.runner.model
    layers = model.get_submodule(capture.path)
    return [*(layer.input_layernorm for layer in layers), model.get_submodule("model.norm")]


def _add_itself(capture: Any) -> list[Any]:
    """Let each layer add its output to the residual, and norms take the residual alone."""

    def adds(forward: Any) -> Any:
        def added(*args: Any, **kwargs: Any) -> Any:
            hidden, residual = forward(*args, **kwargs)
            return hidden, residual + hidden

        return added

    def alone(forward: Any) -> Any:
        def of_residual(x: Any, residual: Any = None) -> Any:
            return forward(x) if residual is None else (forward(residual), residual)

        return of_residual

    layers, norms = list(capture.runner.model.get_submodule(capture.path)), _norms(capture)
    for layer in layers:
        layer.forward = adds(layer.forward)
    for norm in norms:
        norm.forward = alone(norm.forward)
    return [*layers, *norms]


def _second_forward(capture: Any) -> list[Any]:
    model = capture.runner.model
    forward = model.forward

    def twice(*args: Any, **kwargs: Any) -> Any:
        forward(*args, **kwargs)
        return forward(*args, **kwargs)

    model.forward = twice
    return [model]


def _leave_reduction(capture: Any) -> list[Any]:
    """Let each layer hand on its rank's part of the sum, and the next norm reduce it."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    def reduces(forward: Any) -> Any:
        def reduced(x: Any, residual: Any = None) -> Any:
            if residual is None:
                return forward(x)
            return forward(tensor_model_parallel_all_reduce(x), residual)

        return reduced

    for layer in capture.runner.model.get_submodule(capture.path):
        layer.mlp.down_proj.reduce_results = False
    norms = _norms(capture)
    for norm in norms:
        norm.forward = reduces(norm.forward)
    return norms


MODEL_FAULTS: dict[str, Callable[[Any], list[Any]]] = {
    "layers add their output themselves": _add_itself,
    "a second forward in each step": _second_forward,
    "partial sums left to the next norm": _leave_reduction,
}
"""Faults of the model itself, there from the first step on; each returns what got another forward."""

OF_RANKS = ("partial sums left to the next norm",)
"""Faults that there are with several ranks only."""


def _take_out(capture: Any) -> None:
    capture.__dict__.pop("_end", None)
    capture.__dict__.pop("_fault_rows", None)
    for module in capture.__dict__.pop("_fault_modules", ()):
        del module.forward
    for layer in capture.runner.model.get_submodule(capture.path):
        layer.mlp.down_proj.reduce_results = True


def inject(worker: Any, name: str | None) -> None:
    """Put a fault into this worker, or take it out (None); runs in the worker."""
    capture = worker._vllm_compat_capture
    _take_out(capture)
    if name is not None:
        capture._prover.stream._steps.clear()  # as a run that has been so from its first step on
    if name in MODEL_FAULTS:
        capture._fault_modules = MODEL_FAULTS[name](capture)
        return
    if name is None or not capture.active:
        return
    end = capture._end

    def faulty() -> None:
        if capture._captured and capture._spans:
            FAULTS[name](capture)
        end()

    capture._end = faulty


def preempting(scheduler: Any) -> tuple[list[int], Callable[[], None]]:
    """Let a scheduler preempt what runs, once, in mid-prompt.

    Return a list that will hold how many requests that were, and the undoing.
    """
    schedule = scheduler.schedule
    steps = [0]
    preempted: list[int] = []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        steps[0] += 1
        if steps[0] == 2:
            preempted.append(len(scheduler.running))
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return schedule(*args, **kwargs)

    scheduler.schedule = interrupted
    return preempted, lambda: scheduler.__dict__.pop("schedule")


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything and write the record; return 0 if each fault was stopped and no clean run was."""
    parser = argparse.ArgumentParser(prog="python -m lab.faults", description=__doc__)
    parser.add_argument("model", help="folder of a tiny model")
    parser.add_argument("--out", required=True, help="where the record goes")
    parser.add_argument("--capture", default="auto")
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--clean", type=int, default=CLEAN_RUNS, help="clean calls")
    parser.add_argument("--canary", action="store_true", help="with the canary, as `run` has it")
    options = parser.parse_args(argv)

    import vllm_compat

    vllm_compat.apply(capture=options.capture, canary=options.canary)
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    generator = VllmHiddenStatesGenerator(
        options.model, layer_ids=[0, 1, 3], max_model_len=256, tensor_parallel_size=options.ranks
    )
    generator.scheduler.max_num_scheduled_tokens = STEP_TOKENS
    record: dict[str, Any] = {
        "kind": "faults",
        "vllm_compat": made_by(),
        "model": Path(options.model).name.partition("-")[0],
        "versions": {name: metadata.version(name) for name in ("speculators", "torch")},
        "ranks": options.ranks,
        "canary": options.canary,
        "faults": {},
    }
    record["versions"]["vllm"] = sys.modules["vllm"].__version__
    prompts = _prompts(0)
    expected = generator.generate(prompts)
    for run in range(options.clean):
        if run % CANARY_EVERY:
            generator.generate(_prompts(run))
        else:
            _call(generator, _prompts(run))
    record["clean_runs"] = options.clean
    names = [*FAULTS, *MODEL_FAULTS]
    for name in names if options.ranks > 1 else [n for n in names if n not in OF_RANKS]:
        generator.executor.collective_rpc(inject, args=(name,))
        record["faults"][name] = _stopped(generator, prompts)
        generator.executor.collective_rpc(inject, args=(None,))
        _same(_call(generator, prompts), expected)
    preempted, undo = preempting(generator.scheduler)
    # Computed again from its start, a preempted request must come out right: nothing to stop.
    _same(_call(generator, prompts), expected)
    undo()
    record["preempted_requests"] = sum(preempted)
    generator.executor.shutdown()
    missed = [name for name, words in record["faults"].items() if words is None]
    if not record["preempted_requests"]:
        missed.append("nothing was preempted")
    record["outcome"] = "right" if not missed else "failed"
    Path(options.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    return 1 if missed else 0


def _prompts(seed: int) -> list[list[int]]:
    """Return prompts of equal lengths, of one token, and of several steps."""
    return [
        [32 + (seed * 7 + k * 13 + i * 17 + i * i * 3) % 400 for i in range(length)]
        for k, length in enumerate((70, 9, 9, 1, 30, 9))
    ]


def _call(generator: Any, prompts: list[list[int]]) -> Any:
    """Extract with the canary, which otherwise sings for a generator's first call only."""
    from vllm_compat.checks.batch import Agreed
    from vllm_compat.runtime import run

    run.current().part(Agreed).generators.discard(generator)
    return generator.generate(prompts)


def _stopped(generator: Any, prompts: list[list[int]]) -> str | None:
    """Return the words with which a call was stopped; None if it was not."""
    try:
        _call(generator, prompts)
    except Exception as error:
        return re.sub(r"/\S*/site-packages/", "", " ".join(str(error).split()))[:300]
    return None


def _same(found: Any, expected: Any) -> None:
    """Check that a call after a fault gives what the first call gave."""
    from vllm_compat.checks.canary import difference

    for one, other in zip(found, expected, strict=True):
        for layer, wanted in zip(one["hidden_states"], other["hidden_states"], strict=True):
            worst = float(difference(layer, wanted).max())
            if worst > 0.1:
                raise SystemExit(f"A call after a fault differs by {worst}.")


if __name__ == "__main__":
    sys.exit(main())
