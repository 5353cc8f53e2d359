#!/usr/bin/env python3
"""Kill one worker, or the driver, in mid-run and see how the run ends: how soon, in which words, what it
leaves.

usage: kill_worker.py MODEL_FOLDER OUT.json [RANKS] [worker|driver]
Prints and writes: seconds from the kill to the end of the launcher, its exit status and last line,
processes, files in /dev/shm, processes that hold our shared memory and GPU memory that are left over.
Of processes and shared memory it sees only what the run has started: other programs may come and go. GPU
memory is that of the whole device.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from vllm_compat.trial.stamp import made_by

MARK = "KILL_WORKER_RUN"
"""The variable by which processes of this run are told from all others."""
PROGRAM = """
import sys
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
if __name__ == "__main__":
    generator = VllmHiddenStatesGenerator(
        sys.argv[1], layer_ids=[0, 1, 3], max_model_len=256, gpu_memory_utilization=0.3,
        tensor_parallel_size=int(sys.argv[2]))
    generator.generate([[5] * 64])
    pids = generator.executor.collective_rpc(lambda worker: __import__("os").getpid())
    print("WORKERS", __import__("os").getpid(), *pids, flush=True)
    while True:
        generator.generate([[5 + i for i in range(64)] for _ in range(8)])
"""


def main() -> int:
    """Run it; return 0 where the end was clear, soon and clean."""
    model, out, ranks = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "2"
    program = out.with_suffix(".program.py")
    program.write_text(PROGRAM)
    whom = sys.argv[4] if len(sys.argv) > 4 else "worker"
    mark = uuid.uuid4().hex
    run = subprocess.Popen(
        [sys.executable, "-m", "vllm_compat", "run", str(program), model, ranks],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, MARK: mark},
    )
    assert run.stdout
    lines, workers, held, files, killed = [], [], [], set(), 0.0
    for line in run.stdout:
        lines.append(line.rstrip())
        if line.startswith("WORKERS"):
            workers = [int(pid) for pid in line.split()[1:]]
            time.sleep(2)
            held = sorted(_with_slabs() & set(workers))
            files = shared_files(marked(mark))
            killed = time.monotonic()
            os.kill(workers[0] if whom == "driver" else workers[-1], signal.SIGKILL)
    status = run.wait()
    seconds = time.monotonic() - killed
    time.sleep(1)
    left = sorted(marked(mark) & set(workers))
    shared = sorted(name for name in files | shared_files(left) if Path("/dev/shm", name).exists())
    record = {
        "kind": f"killed {whom}",
        "vllm_compat": made_by(),
        "ranks": int(ranks),
        "seconds_to_the_end": round(seconds, 1),
        "exit_status": status,
        "verdict": lines[-1] if lines else "",
        "processes_left": left,
        "shared_memory_left": shared,
        "processes_with_slabs_before": len(held),
        "processes_with_slabs_left": len(_with_slabs() & set(held) & set(left)),
        "gpu_memory_left": _gpu_memory(),
    }
    out.write_text(json.dumps(record, indent=1))
    print(json.dumps(record, indent=1))
    if not workers:
        print("\n".join(lines[-20:]))
    nothing = not left and not record["processes_with_slabs_left"] and (not shared or whom == "driver")
    return 0 if workers and held and status != 0 and seconds < 30 and nothing else 1


def marked(mark: str) -> set[int]:
    """Return the living processes of one run: those that have its mark from birth."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parts[2]))
        except OSError:
            continue
    return found


def shared_files(pids: Iterable[int]) -> set[str]:
    """Return the names in /dev/shm that these processes have mapped and that still are there."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        found.update(re.findall(r" /dev/shm/(\S+)$", maps, flags=re.MULTILINE))
    return found


def _with_slabs() -> set[int]:
    """Return the processes that hold shared memory of vllm_compat."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "memfd:vllm_compat" in os.readlink(link):
                found.add(int(link.parts[2]))
        except OSError:
            continue
    return found


def _gpu_memory() -> list[str]:
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return []
    return answer.stdout.split("\n")[:-1]


if __name__ == "__main__":
    sys.exit(main())
