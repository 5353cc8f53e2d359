"""One cell of the matrix: stock speculators on one real vLLM, on one tiny model, judged.

Run inside an environment that has both (``python -m vllm_compat.trial.cell MODEL --out FILE``). It
builds stock's generator, runs the scenarios that have gone wrong for people, compares every row
with the transformers reference, and writes one JSON record. Exit status 0 means that every row is
right.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_compat.analysis.environment import ALONE, PUBLIC
from vllm_compat.trial.stamp import made_by

SCHEMA_VERSION = 1
STEP_TOKENS = 48
"""Token budget of a step in the scenarios that cut prompts (chunked prefill)."""

TOLERANCE = {"float32": (1e-5, 5e-6), "bfloat16": (0.08, 0.02)}
"""Largest right deviation of a row and of the median row, relative. bfloat16 keeps 8 bits."""


def prompts_of(vocabulary: int) -> dict[str, list[list[int]]]:
    """Return the scenarios' prompts: deterministic token ids below ``vocabulary``.

    Each scenario is one ``generate()`` call, and they run one after another on one generator.
    """

    def prompt(length: int, seed: int) -> list[int]:
        return [(seed * 131 + i * 17 + i * i * 7) % (vocabulary - 64) + 32 for i in range(length)]

    shared = prompt(40, 5)
    return {
        # speculators#365: from 11 requests on, stock 0.4 returns another order.
        "13 prompts of 1 to 13 tokens": [prompt(n, n) for n in range(1, 14)],
        # speculators#279: prompts cut by the step's token budget, twice.
        # Model runner V2 sorts a batch by length.
        "70, 5 and 30 tokens": [prompt(n, 40 + n) for n in (70, 5, 30)],
        "chunked prefill": [prompt(n, 20 + n) for n in (70, 5, 30, 100, 1)],
        "the same again": [prompt(n, 20 + n) for n in (70, 5, 30, 100, 1)],
        "shared prefixes": [[*shared, *prompt(n, 60 + n)] for n in (1, 20, 40)],
        "duplicates": [prompt(9, 3), prompt(9, 3), prompt(4, 4), prompt(9, 3)],
        # More than the downstream's MAX_NUM_SEQS of 32.
        "40 prompts": [prompt(1 + n % 7, 100 + n) for n in range(40)],
        "one prompt of one token": [prompt(1, 9)],
        # More KV blocks than a small cache has, together; one is longer than the blocks of 128 tokens
        # that the CPU's attention has from 0.29 on.
        "long prompts": [prompt(n, 200 + n) for n in (63, 200, 31, 90)],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cell and write its record; return the exit status."""
    options = _options(argv)
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "cell",
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "model": Path(options.model).name,
        "python": platform.python_version(),
        "outcome": "failed",
    }
    status = recorded(_run, options, record)
    print(json.dumps({k: record.get(k) for k in ("outcome", "error", "worst")}), file=sys.stderr)
    return status


def recorded(
    run: Callable[[argparse.Namespace, dict[str, Any]], None],
    options: argparse.Namespace,
    record: dict[str, Any],
) -> int:
    """Run, with what stops it in the record; write that to ``options.out`` and return the status.

    The status is 0 if the record's outcome is ``right``.
    """
    begin = time.perf_counter()
    record["vllm_compat"] = made_by()
    try:
        run(options, record)
    except BaseException as error:
        record["error"] = f"{type(error).__name__}: {error}"
        record["traceback"] = traceback.format_exc(limit=-6)
    record["seconds"] = round(time.perf_counter() - begin, 2)
    Path(options.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if record["outcome"] == "right" else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m vllm_compat.trial.cell", description=__doc__)
    parser.add_argument("model", help="folder of a tiny model")
    parser.add_argument("--out", required=True, help="where the record goes")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--layer-ids", default="0,1,3")
    parser.add_argument("--kv-blocks", type=int, help="size of the KV cache, in blocks (Llama only)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8)
    parser.add_argument("--backend", help="attention backend to force, as vLLM names it")
    parser.add_argument("--stock", action="store_true", help="without vllm_compat")
    parser.add_argument("--late", action="store_true", help="apply() after the imports")
    parser.add_argument("--already", action="store_true", help="the launcher has called apply()")
    parser.add_argument("--without", action="append", default=[], help="switch an adapter off")
    parser.add_argument("--capture", default="auto")
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--canary", action="store_true")
    parser.add_argument("--scenario", action="append", default=[], help="only these scenarios")
    parser.add_argument("--repeat", type=int, default=0, help="calls of the throughput measurement")
    parser.add_argument("--requests", type=int, default=0, help="short requests in a row, at the end")
    return parser.parse_args(argv)


def _run(options: argparse.Namespace, record: dict[str, Any]) -> None:
    import asyncio  # noqa: F401  vLLM and wrapt both do; the shim adds nothing by being first

    import vllm_compat

    def apply() -> None:
        if not options.stock and not options.already:
            vllm_compat.apply(
                capture=options.capture,
                transfer=options.transfer,
                engine=options.engine,
                canary=options.canary,
                without=options.without,
            )
        status = vllm_compat.status()
        if status.plan is not None:
            record["plan"] = json.loads(status.plan.dumps())
            record["plan_digest"] = status.plan.digest
            record["apply_seconds"] = round(status.seconds, 4)

    if not options.late:
        apply()
    begin = time.perf_counter()
    # Stock's own order: speculators before vLLM, which matters to forked workers on a GPU.
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    if options.late:
        apply()
    import torch
    import vllm

    record["import_seconds"] = round(time.perf_counter() - begin, 2)
    _record_versions(record, torch, vllm)
    _force(options)
    config = json.loads((Path(options.model) / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    layer_ids = [int(part) for part in options.layer_ids.split(",")]

    begin = time.perf_counter()
    generator = VllmHiddenStatesGenerator(
        options.model,
        layer_ids=layer_ids,
        max_model_len=256,
        tensor_parallel_size=options.tensor_parallel_size,
        gpu_memory_utilization=_utilization(options, text),
        **_small_steps(options, VllmHiddenStatesGenerator),
    )
    record["start_seconds"] = round(time.perf_counter() - begin, 2)
    scheduler = getattr(generator, "scheduler", None)  # the second engine keeps its own to itself
    if scheduler is not None:
        record["kv_blocks"] = scheduler.kv_cache_config.num_blocks
    record["workers"] = generator.executor.collective_rpc(describe_worker)
    record["patches"] = [vars(p) for p in vllm_compat.status().patches]
    scenarios = prompts_of(text["vocab_size"])
    if options.scenario:
        scenarios = {name: scenarios[name] for name in options.scenario}
    results = _results(generator, scenarios)
    if options.kv_blocks and not options.stock and options.engine not in (PUBLIC, ALONE):
        record["too_long"] = _too_long(generator, options.kv_blocks, text["vocab_size"])
        results["after the refusal"] = generator.generate(scenarios["duplicates"])
        scenarios["after the refusal"] = scenarios["duplicates"]
    if options.repeat:
        record["throughput"] = _throughput(generator, text["vocab_size"], options.repeat)
    if options.requests:
        record["endurance"] = _endurance(generator, text["vocab_size"], options.requests)
    record["proofs"] = generator.executor.collective_rpc(describe_proofs)[0]
    generator.executor.shutdown()
    _judge(options, record, scenarios, results, layer_ids, text)


def _results(generator: Any, scenarios: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Return what `generate()` gives for each scenario; two of them run with small steps."""
    results: dict[str, Any] = {}
    scheduler = getattr(generator, "scheduler", None)
    for name, prompts in scenarios.items():
        if name == "chunked prefill" and scheduler is not None:
            budget = scheduler.max_num_scheduled_tokens
            scheduler.max_num_scheduled_tokens = _step_tokens(generator, prompts)
        results[name] = generator.generate(prompts)
        if name == "shared prefixes" and scheduler is not None:
            scheduler.max_num_scheduled_tokens = budget
    return results


def _record_versions(record: dict[str, Any], torch: Any, vllm: Any) -> None:
    from importlib import metadata

    import transformers

    record["versions"] = {
        "vllm": vllm.__version__,
        "speculators": metadata.version("speculators"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _force(options: argparse.Namespace) -> None:
    """Make stock's ``dtype="auto"`` the one asked for: it runs float32 checkpoints in bfloat16.

    The attention backend is forced where asked for, which stock has no argument for either.
    """
    import wrapt
    from vllm.config import ModelConfig

    def dtype(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **{**kwargs, "dtype": options.dtype})

    def blocks(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **{**kwargs, "num_gpu_blocks_override": options.kv_blocks})

    wrapt.wrap_function_wrapper(ModelConfig, "__init__", dtype)
    if options.kv_blocks and options.engine in (PUBLIC, ALONE):
        from vllm.config import CacheConfig

        wrapt.wrap_function_wrapper(CacheConfig, "__init__", blocks)
    if options.backend:
        force_backend(options.backend)


def force_backend(name: str) -> None:
    """Make every engine of this process take an attention backend, as vLLM names it."""
    import wrapt
    from vllm.config import AttentionConfig, VllmConfig

    def backend(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **{**kwargs, "attention_config": AttentionConfig(backend=name)})

    wrapt.wrap_function_wrapper(VllmConfig, "__init__", backend)


def describe_worker(worker: Any) -> dict[str, Any]:
    """Return what a worker has in force: runner, attention backends, methods of MoE layers.

    Runs in the worker; classes are named as vLLM names them.
    """
    runner = worker.model_runner
    backends = sorted(
        {
            backend.get_name() if hasattr(backend, "get_name") else type(backend).__name__
            for module in runner.model.modules()
            for backend in [getattr(module, "attn_backend", None)]
            if backend is not None
        }
    )
    methods = sorted(
        {
            f"{type(module).__name__}: {type(module.quant_method).__name__}"
            for module in runner.model.modules()
            if getattr(module, "quant_method", None) is not None
        }
    )
    import torch

    import vllm_compat

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "attention": backends,
        "quant_methods": methods,
        "async_scheduling": worker.vllm_config.scheduler_config.async_scheduling,
        "start_method": _started_by(),
        "shim_seconds": round(vllm_compat.status().seconds, 4),
        "capture": getattr(getattr(worker, "_vllm_compat_capture", None), "strategy", "downstream"),
        "block_size": worker.vllm_config.cache_config.block_size,
    }


def describe_proofs(worker: Any) -> dict[str, Any] | None:
    """Return how many steps the proofs of a worker watched, and the layers behind which no stream shows.

    None where nothing is proven (stock alone, or the proofs left out). Runs in the worker, at the end.
    """
    prover = getattr(getattr(worker, "_vllm_compat_capture", None), "_prover", None)
    if prover is None or prover.stream is None:
        return None
    return {"steps_watched": prover.stream.watched, "unproven_layers": sorted(prover.unproven)}


def _started_by() -> str:
    """Tell how this process was started: a spawned one has multiprocessing's own main module."""
    return "spawn" if "--multiprocessing-fork" in sys.orig_argv else "fork"


def _small_steps(options: argparse.Namespace, generator: Any) -> dict[str, int]:
    """Return what makes the second engine cut prompts, which nobody can ask of it between two calls."""
    named = inspect.signature(generator).parameters
    if options.engine not in (PUBLIC, ALONE) or "max_num_batched_tokens" not in named:
        return {}
    return {"max_num_batched_tokens": STEP_TOKENS}


def _utilization(options: argparse.Namespace, text: dict[str, Any]) -> float:
    """Return stock's memory fraction; one that gives ``--kv-blocks`` blocks where asked for."""
    if not options.kv_blocks or options.engine in (PUBLIC, ALONE):
        return float(options.gpu_memory_utilization)
    size = {"float32": 4, "bfloat16": 2}[options.dtype]
    heads = text["num_key_value_heads"] // options.tensor_parallel_size
    block = 2 * 16 * heads * text["head_dim"] * size * text["num_hidden_layers"]
    space = int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) * 2**30
    return float((options.kv_blocks + 0.5) * block / (space * 0.2))


def _step_tokens(generator: Any, prompts: list[list[int]]) -> int:
    """Return the token budget that cuts prompts; where vLLM never cuts one, the longest must fit.

    A configuration made by hand has chunked prefill off in 0.11.0, on in later releases.
    """
    config = generator.scheduler.scheduler_config
    chunked = getattr(config, "chunked_prefill_enabled", config.enable_chunked_prefill)
    return STEP_TOKENS if chunked else max(map(len, prompts))


def _too_long(generator: Any, blocks: int, vocabulary: int) -> str:
    """Ask for a prompt that can never fit; return the error's words."""
    try:
        generator.generate([[1, 2, 3], [7] * (16 * blocks)])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"A prompt of {16 * blocks} tokens went into {blocks} blocks.")


def _throughput(generator: Any, vocabulary: int, calls: int) -> dict[str, float]:
    batch = [[(i * 7 + j) % (vocabulary - 64) + 32 for i in range(128)] for j in range(8)]
    tokens = sum(map(len, batch))
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        generator.generate(batch)
        times.append(time.perf_counter() - begin)
    times.sort()
    return {"tokens": tokens, "median_seconds": times[len(times) // 2], "calls": calls}


def _endurance(generator: Any, vocabulary: int, requests: int) -> dict[str, Any]:
    """Run many short requests, 32 a call; return what driver and workers hold on the way and at the end.

    ``resident`` are KiB of each process (the driver first), ``descriptors`` its open files,
    ``shared`` the KiB of anonymous shared memory that it has mapped and touched.
    """
    pids = [os.getpid(), *generator.executor.collective_rpc(_pid)]
    held: list[list[dict[str, int]]] = []
    done = 0
    digests = set()
    while done < requests:
        batch = [[(i * 7 + j) % (vocabulary - 64) + 32 for i in range(1 + j % 16)] for j in range(32)]
        digests.add(_digest(generator.generate(batch)))
        done += len(batch)
        if len(held) == 0 and done >= requests / 10:
            held.append([_held(pid) for pid in pids])
    held.append([_held(pid) for pid in pids])
    return {
        "requests": done,
        "different_results": len(digests),
        "after_a_tenth": held[0],
        "at_the_end": held[1],
    }


def _pid(worker: Any) -> int:
    return os.getpid()


def _held(pid: int) -> dict[str, int]:
    smaps = Path(f"/proc/{pid}/smaps").read_text().split("\n")
    shared, ours = 0, False
    for line in smaps:
        if "-" in line.split(" ")[0]:
            ours = "memfd:vllm_compat" in line
        elif ours and line.startswith("Rss:"):
            shared += int(line.split()[1])
    resident = int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])
    return {
        "resident": resident,
        "shared": shared,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


def _digest(results: Sequence[Any]) -> str:
    """Return a digest of every row of every layer, in order: equal only where all bits are."""
    import torch

    digest = hashlib.sha256()
    for result in results:
        for tensor in result["hidden_states"]:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _judge(
    options: argparse.Namespace,
    record: dict[str, Any],
    scenarios: dict[str, list[list[int]]],
    results: dict[str, Any],
    layer_ids: list[int],
    text: dict[str, Any],
) -> None:
    from vllm_compat.trial.reference import reference_hidden_states

    record["scenarios"] = {}
    wrong: list[str] = []
    # Layers before the first router: their rows are exact even where a router chose differently.
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    routed = any(text.get(name) for name in names)
    unrouted = [i for i, k in enumerate(layer_ids) if k < text.get("first_k_dense_replace", 0)]
    for name, prompts in scenarios.items():
        reference = reference_hidden_states(options.model, prompts, layer_ids)
        entry: dict[str, Any] = {
            "prompts": len(prompts),
            "tokens": sum(map(len, prompts)),
            "shape": [len(layer_ids), *results[name][0]["hidden_states"][0].shape],
            "dtype": str(results[name][0]["hidden_states"][0].dtype),
            "digest": _digest(results[name]),
        }
        faults = _compare(entry, results[name], reference, options.dtype, unrouted if routed else None)
        wrong += [f"{name}{fault}" for fault in faults]
        record["scenarios"][name] = entry
    record["worst"] = max((s.get("worst", 0.0) for s in record["scenarios"].values()), default=0.0)
    if wrong:
        record["error"] = "; ".join(wrong)
    else:
        record["outcome"] = "right"


def _compare(
    entry: dict[str, Any], found: Any, reference: Any, dtype: str, unrouted: list[int] | None
) -> Iterator[str]:
    """Write into a scenario's entry how far its rows are off, and yield what is wrong with them.

    ``unrouted`` are the layer entries before the first router, None for a model without routers.
    """
    from vllm_compat.trial.reference import compare

    try:
        deviation = compare(found, reference)
    except Exception as error:
        entry["wrong"] = str(error)
        yield f": {error}"
        return
    entry.update(worst=deviation.worst, median=deviation.median, q99=deviation.quantile_99)
    if fault := _judgement(deviation, dtype, moe=unrouted is not None):
        yield f": {fault}"
    if unrouted and dtype != "float32":
        states = [[r["hidden_states"][i] for i in unrouted] for r in found]
        right = [[layers[i] for i in unrouted] for layers in reference]
        deviation = compare(states, right)
        entry["worst_before_routing"] = deviation.worst
        if fault := _judgement(deviation, dtype, moe=False):
            yield f", before the first router: {fault}"


def _judgement(deviation: Any, dtype: str, *, moe: bool) -> str | None:
    """Return what is wrong with a deviation, or None.

    In bfloat16 a router may choose another expert than in float32, and that row is then far off, as
    far as a wrong one; so with experts the median counts, and the layers before the first router.
    """
    worst, median = TOLERANCE[dtype]
    if moe and dtype != "float32":
        worst = float("inf")
    if deviation.worst > worst or deviation.median > median:
        return f"{deviation}; allowed are {worst:.1g} at worst and {median:.1g} in the median"
    return None


if __name__ == "__main__":
    sys.exit(main())
