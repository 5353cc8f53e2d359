#!/usr/bin/env python3
"""Extract faster than results can be saved, with and without the bound on what waits.

usage: slow_saves.py OUT.json [GB_PER_SECOND] [BATCHES]
A Llama of four wide layers with random weights; four threads "save" each sample at a fixed rate, as a
slow disk would. Prints and writes, for both runs: the most bytes that waited to be saved, the driver's
own memory, the shared memory, and the seconds for extraction and all saves.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_compat.trial.stamp import made_by

WIDE = {"hidden_size": 4096, "intermediate_size": 4096, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip


def main(out: str, rate: str = "0.4", batches: str = "12", child: str = "") -> int:
    """Run both children, or be one of them."""
    if child:
        print("RESULT " + json.dumps(measure(float(rate) * 1e9, int(batches), child)), flush=True)
        return 0
    record: dict[str, Any] = {
        "kind": "save backlog",
        "vllm_compat": made_by(),
        "disk_bytes_per_second": float(rate) * 1e9,
    }
    for how in ("bounded", "unbounded"):
        command = [sys.executable, __file__, out, rate, batches, how]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        record[how] = json.loads(lines[-1][7:]) if lines else {"failed": done.returncode}
        print(how, record[how], flush=True)
    Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    bounded, unbounded = record["bounded"], record["unbounded"]
    right = (
        "failed" not in {**bounded, **unbounded}
        and bounded["most_waiting"] <= bounded["bound"] + bounded["batch_bytes"]
        and unbounded["most_waiting"] > bounded["most_waiting"]
    )
    return 0 if right else 1


def measure(rate: float, batches: int, how: str) -> dict[str, Any]:
    """Extract and save; count what waits from outside of vllm_compat."""
    import vllm_compat
    from vllm_compat.commands import bench
    from vllm_compat.features import save_backlog

    without = ["save_backlog"] if how == "unbounded" else []
    vllm_compat.apply(without=without)
    import wrapt
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
    from vllm.config import LoadConfig

    def dummy(wrapped: Any, instance: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **{**kwargs, "load_format": "dummy"})

    wrapt.wrap_function_wrapper(LoadConfig, "__init__", dummy)
    lock, counts = threading.Lock(), SimpleNamespace(waiting=0, most=0, memory=0)

    def save(sample: dict[str, Any], size: int) -> None:
        time.sleep(size / (rate / 4))

    with tempfile.TemporaryDirectory() as folder:
        bench._write_model(Path(folder), WIDE)
        generator = VllmHiddenStatesGenerator(
            folder, layer_ids=[0, 1, 2, 3], max_model_len=2049, gpu_memory_utilization=0.2
        )
        generator.generate(bench._tokens("8x2048"))
        begin = time.perf_counter()
        futures: list[Future[None]] = []
        with ThreadPoolExecutor(4) as pool:
            for batch in range(batches):
                results = generator.generate(bench._tokens("8x2048", batch))
                size = 0
                for result in results:
                    mine = sum(t.nbytes for t in result["hidden_states"])
                    size += mine
                    with lock:
                        counts.waiting += mine
                        counts.most = max(counts.most, counts.waiting)

                    def ended(future: Future[None], mine: int = mine) -> None:
                        with lock:
                            counts.waiting -= mine

                    futures.append(pool.submit(save, result, mine))
                    futures[-1].add_done_callback(ended)
                counts.memory = max(counts.memory, _anonymous())
                del results, result
            extracted = time.perf_counter() - begin
            for future in futures:
                future.result()
    total = time.perf_counter() - begin
    facts = bench._handover()
    generator.executor.shutdown()
    return {
        "batches": batches,
        "batch_bytes": size,
        "bound": save_backlog.bound(),
        "most_waiting": counts.most,
        "most_shared_memory": facts["largest_slabs_bytes"],
        "most_driver_memory": counts.memory,
        "copied": facts["copied_bytes"],
        "seconds_of_extraction": round(extracted, 1),
        "seconds_with_saves": round(total, 1),
        "facts": bench._facts(),
    }


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
