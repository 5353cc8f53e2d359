"""Tokens per second of extraction against plain vLLM prefill of the same batch, as ratios.

Modes, each in a process tree of its own, one after another, on one machine:

``plain``
    ``vllm.LLM.generate`` with ``max_tokens=1``: what the engine can do.
``stock``
    stock speculators, its own capture and its own replies, with only the adapters without which it
    does not start on this vLLM.
``rpc``
    through vllm_compat, rows in pickled replies (``transfer="rpc"``).
``auto``
    through vllm_compat as it is by default, rows in shared memory.
``public``
    the same with the second engine, on vLLM's public interface.

With folders to save to, ``auto`` then saves as stock's script does: ``torch.save`` of each sample from
four threads while the next batch runs. Beside it stand the same saving without extraction, and ``cp`` of
the same files in the same folder: the two bounds.

Without a model, a Llama with random weights (vLLM's dummy loader) is made; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_compat.analysis.installed import require_installed
from vllm_compat.analysis.layer_ids import read_config
from vllm_compat.commands import bench_report
from vllm_compat.commands.bench_report import batches_of
from vllm_compat.errors import GuardError, UsageError
from vllm_compat.trial import parts
from vllm_compat.trial.cell import describe_worker, force_backend
from vllm_compat.trial.shapes import SHAPES, describe, write_shape
from vllm_compat.trial.stamp import made_by

SCHEMA_VERSION = 1
MODES = ("plain", "stock", "rpc", "auto", "auxiliary", "public")
DEFAULT_MODES = MODES[:4]
Tokens = list[list[int]]
PHASES = ("forward", "reply", "messages", "scheduling", "rest")
"""Where a ``generate()`` call of the downstream spends its time, as its driver sees it: steps of the
model; the reply with the captured rows; other messages to the workers; the scheduler; all else, which
is requests, copies and checks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``vllm-compat bench``."""
    parser.add_argument("--model", help="a model's folder or hub id (default: random weights)")
    parser.add_argument(
        "--shape", choices=SHAPES, help="size of the model with random weights (default: tiny)"
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="how many of the shape's layers it has (default: all)"
    )
    parser.add_argument(
        "--backend", metavar="NAME", help="attention backend to force, as vLLM names it (TRITON_MLA)"
    )
    parser.add_argument(
        "--batch",
        action="append",
        default=[],
        metavar="NxT",
        help="N prompts of T tokens each; may be given more than once (default: 8x512)",
    )
    parser.add_argument(
        "--calls",
        type=int,
        default=5,
        metavar="N",
        help="calls that are timed, for each batch (default: 5)",
    )
    parser.add_argument(
        "--modes",
        default=",".join(DEFAULT_MODES),
        metavar="MODES",
        help=f"what to compare, some of {','.join(MODES)} (default: {','.join(DEFAULT_MODES)})",
    )
    parser.add_argument(
        "--layer-ids",
        type=int,
        nargs="+",
        metavar="K",
        help="speculators' ids of the layers to extract (default: stock's own choice)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="how many GPUs one copy of the model is spread over (default: 1)",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.8,
        metavar="F",
        help="share of a GPU's memory that vLLM may use (default: 0.8)",
    )
    parser.add_argument(
        "--save",
        action="append",
        default=[],
        metavar="DIR",
        help="also measure saving, into a new folder in this one",
    )
    _add_outputs(parser)
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add where the result goes to, and the record of an earlier one."""
    parser.add_argument("--out", metavar="FILE", help="write the record to this JSON file")
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="write what can be attached to an issue to this JSON file: versions, device, plan, ratios,"
        " guards; no paths, prompts, host or user names",
    )
    parser.add_argument(
        "--preflight",
        metavar="FILE",
        help="with --report: what `vllm-compat preflight --json` had said, to stand beside what was"
        " measured",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the result to this file (.svg or .png; needs matplotlib)"
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="measure nothing: show, draw or report this record of an earlier --out",
    )


def run(options: argparse.Namespace) -> int:
    """Run the modes, print ratios first, write record and plot; return the exit status.

    Raises:
        UsageError: An option makes no sense, or vLLM, speculators or matplotlib is needed and missing.
    """
    if options.plot:
        _matplotlib()
    if options.report and not Path(options.report).absolute().parent.is_dir():
        raise UsageError(f"--report {options.report}: there is no such folder.")
    if options.preflight:
        if not options.report:
            raise UsageError("--preflight goes with --report.")
        bench_report.read_preflight(Path(options.preflight))
    if options.source:
        record = bench_report.read_json(
            "--from", Path(options.source), "bench", "is no record of `vllm-compat bench`"
        )
    else:
        _check(options)
        require_installed("nothing was measured")
        record = _measure_all(options)
        if options.out:
            Path(options.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(render(record))
    if options.report:
        _write_report(options, record)
    if options.plot:
        plot(record, Path(options.plot))
    return 0 if all("failed" not in mode for mode in record["modes"].values()) else 1


def _write_report(options: argparse.Namespace, record: dict[str, Any]) -> None:
    said = None
    if options.preflight:
        path = Path(options.preflight)
        said = bench_report.read_preflight(path, record["tensor_parallel_size"])
    report = bench_report.report_of(record, said)
    Path(options.report).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _check(options: argparse.Namespace) -> None:
    options.batch = options.batch or ["8x512"]
    for batch in options.batch:
        parts = batch.split("x")
        if len(parts) != 2 or not all(p.isdigit() and int(p) for p in parts):
            raise UsageError(f"--batch is {batch!r}; it must be like 8x512, prompts x tokens.")
    for mode in options.modes.split(","):
        if mode not in MODES:
            raise UsageError(f"--modes names {mode!r}; there are {', '.join(MODES)}.")
    if options.calls < 1:
        raise UsageError(f"--calls is {options.calls}; it must be at least 1.")
    if options.model and options.shape:
        raise UsageError("--shape is for random weights; leave it out with --model.")
    if options.model and options.layers:
        raise UsageError("--layers is for random weights; leave it out with --model.")
    for folder in options.save:
        if not Path(folder).is_dir():
            raise UsageError(f"--save {folder}: there is no such folder.")


def _measure_all(options: argparse.Namespace) -> dict[str, Any]:
    modes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if not model and options.shape in (None, "tiny"):
            # Stock chooses one of four layers twice, and returns it once.
            options.layer_ids = options.layer_ids or [0, 1, 2, 3]
        if not model:
            model = str(write_shape(options.shape or "tiny", Path(folder), options.layers))
        architecture = _architecture(model)
        for mode in options.modes.split(","):
            print(f"bench: {mode} …", file=sys.stderr, flush=True)
            modes[mode] = _child(options, mode, model)
            if "failed" in modes[mode]:
                print(f"bench: {mode} failed: {modes[mode]['failed']}", file=sys.stderr)
    facts: dict[str, Any] = next((m.pop("facts") for m in modes.values() if "facts" in m), {})
    for mode in modes.values():
        mode.pop("facts", None)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "bench",
        "vllm_compat": made_by(),
        "model": options.model or describe(options.shape or "tiny", options.layers),
        "architecture": architecture,
        "tensor_parallel_size": options.tensor_parallel_size,
        "calls": options.calls,
        **({"backend": options.backend} if options.backend else {}),
        **facts,
        "modes": modes,
    }


def _architecture(model: str) -> str | None:
    """Return the class that a model's configuration names; None where there is none to be read yet."""
    try:
        names = read_config(model).get("architectures")
    except UsageError:
        return None  # a hub id that vLLM will fetch
    return str(names[0]) if isinstance(names, list) and names else None


def _child(options: argparse.Namespace, mode: str, model: str) -> dict[str, Any]:
    """Run one mode in a process of its own and return what it has measured."""
    command = [sys.executable, "-m", "vllm_compat.commands.bench", "--child", mode, "--model", model]
    command += ["--calls", str(options.calls)]
    command += ["--tensor-parallel-size", str(options.tensor_parallel_size)]
    command += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    for batch in options.batch:
        command += ["--batch", batch]
    if options.layer_ids:
        command += ["--layer-ids", *map(str, options.layer_ids)]
    if not options.model:
        command += ["--shape", options.shape or "tiny"]
    if options.backend:
        command += ["--backend", options.backend]
    if mode == "auto":
        for folder in options.save:
            command += ["--save", folder]
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        status = subprocess.call([*command, "--out", out.name], stdout=sys.stderr)
        text = Path(out.name).read_text(encoding="utf-8")
    if not text:
        return {"failed": f"exit status {status}"}
    return dict(json.loads(text))


# ---- in the child ---------------------------------------------------------------------------------


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    longest = max(int(batch.split("x")[1]) for batch in options.batch)
    phases: dict[str, float] = defaultdict(float)
    generator = None
    if options.child == "plain":
        call = _plain(options, longest)
    else:
        generator = _generator(options, longest)
        _watch(generator, phases)
        call = generator.generate
    measured: dict[str, Any] = {"batches": {}}
    for batch in options.batch:
        tokens = _tokens(batch)
        try:
            call(tokens)
        except GuardError as error:  # stock mixes up its larger batches
            measured["batches"][batch] = {"failed": str(error)}
            continue
        call(tokens)
        phases.clear()
        seconds = [_timed(call, tokens) for _ in range(options.calls)]
        entry: dict[str, Any] = {
            "tokens_per_second": round(sum(map(len, tokens)) / statistics.median(seconds), 1),
            "seconds": [round(s, 5) for s in seconds],
        }
        if generator is not None:
            entry["phases"] = {k: round(v / options.calls, 5) for k, v in phases.items()}
            rest = sum(seconds) / options.calls - sum(entry["phases"].values())
            entry["phases"]["rest"] = round(rest, 5)
            if options.child == "auto":
                entry["parts"] = _parts(generator, tokens)
        measured["batches"][batch] = entry
    if generator is not None:
        measured["layer_ids"] = list(generator.layer_ids)
        measured["runner"] = generator.executor.collective_rpc(_runner)[0]
        told = generator.executor.collective_rpc(describe_worker)[0]
        measured["plan"] = _plan()
        measured["worker"] = {key: told[key] for key in ("attention", "quant_methods")}
        if options.child == "auto":
            measured["saving"] = [_saving(generator, options, folder) for folder in options.save]
            measured["handover"] = _handover()
    measured["facts"] = _facts()
    if generator is not None:
        measured["worker_peak_bytes"] = generator.executor.collective_rpc(_peak_memory)
        generator.executor.shutdown()
    return measured


def _parts(generator: Any, tokens: Tokens) -> dict[str, float]:
    """Return the share of the layers' time by part, in one call more, on the first rank."""
    generator.executor.collective_rpc(parts.watch)
    generator.generate(tokens)
    spent: dict[str, float] = generator.executor.collective_rpc(parts.seconds)[0]
    return parts.shares(spent)


def _peak_memory(worker: Any) -> dict[str, int]:
    """Return the most memory that a worker has had, in bytes: of the host, and of its GPU."""
    import resource

    import torch

    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"host": host, "device": gpu}


def _tokens(batch: str, salt: int = 0) -> Tokens:
    prompts, length = map(int, batch.split("x"))
    return [[(7 * i + 31 * j + salt) % 600 + 64 for i in range(length)] for j in range(prompts)]


def _timed(call: Callable[[Tokens], Any], tokens: Tokens) -> float:
    begin = time.perf_counter()
    call(tokens)
    return time.perf_counter() - begin


def _plain(options: argparse.Namespace, longest: int) -> Callable[[Tokens], Any]:
    from vllm import LLM, SamplingParams

    more: dict[str, Any] = {"attention_config": {"backend": options.backend}} if options.backend else {}
    remote = bool(options.shape) and SHAPES[options.shape].remote
    if remote:
        more["limit_mm_per_prompt"] = {"vision_chunk": 0}  # text alone, as the downstream asks
    engine = LLM(
        options.model,
        load_format="dummy" if options.shape else "auto",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=longest + 1,
        max_num_seqs=32,
        max_num_batched_tokens=max(8192, longest + 1),
        gpu_memory_utilization=options.gpu_memory_utilization,
        tensor_parallel_size=options.tensor_parallel_size,
        trust_remote_code=remote or not options.shape,  # as the downstream does for the same model
        **more,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    return lambda tokens: engine.generate(
        [{"prompt_token_ids": ids} for ids in tokens], sampling, use_tqdm=False
    )


def _generator(options: argparse.Namespace, longest: int) -> Any:
    import vllm_compat
    from vllm_compat import features
    from vllm_compat.adapters import registry

    if options.child == "stock":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # stock knows no other
        own = [adapter.name for adapter in registry() if adapter.stock_starts_without]
        vllm_compat.apply(without=[*own, *features.names()])
    else:  # but for rpc, rows leave as in auto
        vllm_compat.apply(
            capture="auxiliary" if options.child == "auxiliary" else "auto",
            transfer="rpc" if options.child == "rpc" else "auto",
            engine="public" if options.child == "public" else "auto",
        )
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    if options.backend:
        force_backend(options.backend)
    if options.shape:
        import wrapt
        from vllm.config import LoadConfig

        def dummy(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return wrapped(*args, **{**kwargs, "load_format": "dummy"})

        wrapt.wrap_function_wrapper(LoadConfig, "__init__", dummy)
    return VllmHiddenStatesGenerator(
        options.model,
        layer_ids=options.layer_ids,
        max_model_len=longest + 1,
        gpu_memory_utilization=options.gpu_memory_utilization,
        tensor_parallel_size=options.tensor_parallel_size,
    )


def _watch(generator: Any, phases: dict[str, float]) -> None:
    """Add up the time of each phase, on this generator's own executor and scheduler."""

    def message(method: Any, *args: Any, **kwargs: Any) -> str:
        return "reply" if method == "_get_captured_states" else "messages"

    # execute_model and sample_tokens go through collective_rpc in some releases: phases must not
    # count twice, so only the messages that the downstream itself sends are watched.
    inside = [False]
    for name in ("execute_model", "sample_tokens", "compute"):  # the last is the second engine's
        step = getattr(generator.executor, name, None)
        if step is not None:
            setattr(generator.executor, name, _step(step, phases, inside))
    rpc = generator.executor.collective_rpc

    @functools.wraps(rpc)
    def collective_rpc(*args: Any, **kwargs: Any) -> Any:
        if inside[0]:
            return rpc(*args, **kwargs)
        begin = time.perf_counter()
        try:
            return rpc(*args, **kwargs)
        finally:
            phases[message(*args, **kwargs)] += time.perf_counter() - begin

    generator.executor.collective_rpc = collective_rpc
    if not hasattr(generator, "scheduler"):  # the second engine's is in vLLM's engine core
        return
    schedule = generator.scheduler.schedule

    @functools.wraps(schedule)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return schedule(*args, **kwargs)
        finally:
            phases["scheduling"] += time.perf_counter() - begin

    generator.scheduler.schedule = timed


def _step(step: Any, phases: dict[str, float], inside: list[bool]) -> Any:
    @functools.wraps(step)
    def timed(*args: Any, **kwargs: Any) -> Any:
        outer, inside[0] = inside[0], True
        begin = time.perf_counter()
        try:
            return step(*args, **kwargs)
        finally:
            inside[0] = outer
            if not outer:
                phases["forward"] += time.perf_counter() - begin

    return timed


def _plan() -> dict[str, Any] | None:
    """Return what is in force in this process."""
    import vllm_compat

    status = vllm_compat.status()
    if status.plan is None:
        return None
    return {
        "adapters": list(status.plan.adapters),
        "features": list(status.features),
        "switched_off": list(status.plan.switched_off),
        "engine": status.plan.engine,
    }


def _runner(worker: Any) -> str:
    runner = type(worker.model_runner)
    return "V2" if ".gpu.model_runner" in runner.__module__ else "V1"


def _handover() -> dict[str, Any]:
    module = sys.modules.get("vllm_compat.capture.handover")
    return module.facts() if module else {}


def _saving(generator: Any, options: argparse.Namespace, place: str) -> dict[str, Any]:
    """Extract and save as stock's script does; then save alone, then ``cp``, in the same folder."""
    import torch

    folder = Path(tempfile.mkdtemp(prefix="vllm-compat-bench-", dir=place))
    batch = options.batch[0]
    try:
        begin = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            futures = []
            for call in range(options.calls):
                results = generator.generate(_tokens(batch, call))
                for index, result in enumerate(results):
                    path = folder / f"data_{call * len(results) + index}.pt"
                    futures.append(pool.submit(torch.save, _sample(result), path))
            for future in futures:
                future.result()
        extraction = time.perf_counter() - begin
        size = sum(path.stat().st_size for path in folder.iterdir())
        seen = (folder / "data_0.pt").stat().st_size
        copied = _cp(folder, folder.with_suffix(".copy"))
        kept = [_sample(r) for r in results]
        alone = _save_alone(kept, folder, options.calls)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder.with_suffix(".copy"), ignore_errors=True)
    tokens = sum(map(len, _tokens(batch))) * options.calls
    return {
        "folder": place,
        "filesystem": _filesystem(place),
        "batch": batch,
        "files": options.calls * len(results),
        "bytes": size,
        "bytes_of_a_file": seen,
        "tokens_per_second": round(tokens / extraction, 1),
        "gb_per_second": {
            "extraction and saving": round(size / extraction / 1e9, 3),
            "saving alone": round(size / alone / 1e9, 3),
            "cp": round(size / copied / 1e9, 3),
        },
    }


def _sample(result: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {
        "input_ids": result["input_ids"],
        "hidden_states": [h.contiguous() for h in result["hidden_states"]],
        "loss_mask": torch.ones(len(result["input_ids"]), dtype=torch.long),
    }


def _save_alone(samples: list[dict[str, Any]], folder: Path, calls: int) -> float:
    import torch

    for path in folder.iterdir():
        path.unlink()
    begin = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(torch.save, sample, folder / f"data_{call * len(samples) + index}.pt")
            for call in range(calls)
            for index, sample in enumerate(samples)
        ]
        for job in jobs:
            job.result()
    return time.perf_counter() - begin


def _cp(source: Path, target: Path) -> float:
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    return time.perf_counter() - begin


def _filesystem(place: str) -> str:
    done = subprocess.run(["stat", "-f", "-c", "%T", place], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _facts() -> dict[str, Any]:
    from importlib import metadata

    import torch
    import vllm

    facts: dict[str, Any] = {
        "vllm": vllm.__version__,
        "speculators": metadata.version("speculators"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "device": "cpu",
    }
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return facts
    query = "name,driver_version,compute_cap,memory.total"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    )
    cards = [line.split(", ") for line in done.stdout.strip().splitlines()]
    if not cards:
        return {**facts, "device": current_platform.device_name}
    name, driver, capability, memory = cards[0]
    facts.update(device=name, driver=driver, compute_capability=capability)
    return {**facts, "memory_mib": int(memory), "gpus": len(cards)}


# ---- what comes out -------------------------------------------------------------------------------


def render(record: dict[str, Any]) -> str:
    """Return the record as text, ratios first."""
    modes = {name: mode for name, mode in record["modes"].items() if "batches" in mode}
    where = "this is a CPU run" if record.get("device") == "cpu" else record.get("device", "?")
    lines = [
        f"{record['model']}, vLLM {record.get('vllm')}, speculators {record.get('speculators')},"
        f" tensor parallel {record['tensor_parallel_size']}: {where}"
    ]
    for batch in batches_of(record):
        lines += ["", f"{batch} tokens"]
        base = speed(record, "plain", batch)
        for name in modes:
            found = speed(record, name, batch)
            if found is None:
                lines.append(f"  {name:6}failed: {modes[name]['batches'].get(batch, {}).get('failed')}")
                continue
            ratio = f"{found / base:5.2f} of plain" if base else ""
            shares = ", ".join(f"{k} {v:.0%}" for k, v in shares_of(record, name, batch).items())
            lines.append(f"  {name:6}{ratio}  {found:10,.0f} tokens/s   {shares}")
        if spent := parts_of(record, batch):
            lines.append("  layers: " + ", ".join(f"{k} {v:.0%}" for k, v in spent.items()))
    for saved in modes.get("auto", {}).get("saving", []):
        speeds = saved["gb_per_second"]
        base = speed(record, "plain", saved["batch"])
        of_plain = f", {saved['tokens_per_second'] / base:.2f} of plain" if base else ""
        lines += [
            "",
            f"Saved to {saved['folder']} ({saved['filesystem']}), {saved['batch']}:"
            f" {speeds['extraction and saving'] / speeds['cp']:.2f} of cp,"
            f" {saved['tokens_per_second']:,.0f} tokens/s{of_plain};"
            f" GB/s: {', '.join(f'{k} {v:.2f}' for k, v in speeds.items())}",
        ]
    failed = [f"{n}: {m['failed']}" for n, m in record["modes"].items() if "failed" in m]
    return "\n".join([*lines, *(["", "Failed: " + "; ".join(failed)] if failed else [])])


def speed(record: dict[str, Any], mode: str, batch: str) -> float | None:
    """Return the median tokens per second of a mode, or None where it was not measured."""
    found = record["modes"].get(mode, {}).get("batches", {}).get(batch)
    return float(found["tokens_per_second"]) if found and "failed" not in found else None


def shares_of(record: dict[str, Any], mode: str, batch: str) -> dict[str, float]:
    """Return the share of a call's time by phase; empty for plain prefill."""
    phases = record["modes"][mode].get("batches", {}).get(batch, {}).get("phases", {})
    total = sum(phases.values())
    return {name: phases[name] / total for name in PHASES if phases.get(name, 0) > 0}


def parts_of(record: dict[str, Any], batch: str) -> dict[str, float]:
    """Return the share of the layers' time by part, those above one percent; empty if not measured."""
    entry = record["modes"].get("auto", {}).get("batches", {}).get(batch, {})
    return {name: share for name, share in entry.get("parts", {}).items() if share >= 0.01}


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'vllm-compat[bench]'.") from None
    matplotlib.use("Agg")
    return matplotlib


def plot(record: dict[str, Any], target: Path) -> None:
    """Draw seconds a call, by phase, one bar a mode, one panel a batch; plain is the line."""
    matplotlib = _matplotlib()
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "vllm-compat"
    batches = batches_of(record)
    figure, panels = pyplot.subplots(
        1, len(batches), figsize=(1.5 + 3.5 * len(batches), 4), squeeze=False, layout="constrained"
    )
    colors = dict(zip(PHASES, ("#4c78a8", "#e45756", "#f2cf5b", "#b279a2", "#9d9d9d"), strict=True))
    for panel, batch in zip(panels[0], batches, strict=True):
        names = [n for n in record["modes"] if speed(record, n, batch)]
        base = speed(record, "plain", batch)
        for place, name in enumerate(names):
            entry = record["modes"][name]["batches"][batch]
            total, bottom = statistics.median(entry["seconds"]), 0.0
            for phase, share in (shares_of(record, name, batch) or {"forward": 1.0}).items():
                panel.bar(place, share * total, bottom=bottom, color=colors[phase], width=0.7)
                bottom += share * total
            if base:
                ratio = f"{(speed(record, name, batch) or 0) / base:.2f}"
                panel.text(place, bottom, ratio, ha="center", va="bottom")
        if base:
            line = statistics.median(record["modes"]["plain"]["batches"][batch]["seconds"])
            panel.axhline(line, color="black", linewidth=0.8, linestyle="--")
        panel.set_xticks(range(len(names)), names)
        panel.set_title(f"{batch} tokens")
        panel.set_ylabel("seconds a call")
        panel.spines[["top", "right"]].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colors[phase]) for phase in PHASES]
    figure.legend(handles, PHASES, loc="outside lower center", ncols=len(PHASES), frameon=False)
    where = "CPU run" if record.get("device") == "cpu" else record.get("device")
    figure.suptitle(
        f"{record['model']}, vLLM {record.get('vllm')}, {where} (above the bars: of plain)", fontsize=10
    )
    metadata = {"Date": None} if target.suffix == ".svg" else None
    figure.savefig(target, metadata=metadata)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one mode, as a child of ``vllm-compat bench``."""
    parser = argparse.ArgumentParser(prog="python -m vllm_compat.commands.bench")
    add_arguments(parser)
    options = parser.parse_args(argv)
    measured = _measure(options)
    Path(options.out).write_text(json.dumps(measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
