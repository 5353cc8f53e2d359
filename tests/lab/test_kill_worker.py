"""The script that kills a worker counts what that run has started, and nobody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu" / "kill_worker.py"

# In the place of the launcher: a driver with one worker, which share a slab and a named file, and which
# end, with the worker, in the launcher's way.
LAUNCHER = """
import os, sys, time
from multiprocessing import shared_memory

slab = os.memfd_create("vllm_compat")
named = shared_memory.SharedMemory(create=True, size=4096)
worker = os.fork()
if not worker:
    time.sleep(60)
    os._exit(0)
print("WORKERS", os.getpid(), worker, flush=True)
_, status = os.waitpid(worker, 0)
if {clean}:
    named.unlink()
else:
    from multiprocessing import resource_tracker
    resource_tracker.unregister(named._name, "shared_memory")
    print("LEFT", named.name)
print("rank 0 was killed by signal", status, flush=True)
sys.exit(1)
"""
FOREIGN = """
import os, sys
from multiprocessing import shared_memory

while sys.stdin.readline():
    slab = os.memfd_create("vllm_compat")
    other = shared_memory.SharedMemory(create=True, size=4096)
    print(other.name, flush=True)
other.unlink()
"""


@pytest.fixture
def foreign() -> Iterator[Any]:
    """Another program on the machine, which makes a file in shared memory when it is asked."""
    with subprocess.Popen(
        [sys.executable, "-c", FOREIGN], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.communicate("")


def end(folder: Path, foreign: Any, *, clean: bool) -> tuple[int, dict[str, Any]]:
    """Kill the worker of a stand-in while another program works; return status and record."""
    package = folder / "vllm_compat"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(LAUNCHER.format(clean=clean))
    (package / "trial").mkdir()
    (package / "trial" / "stamp.py").write_text("def made_by(): return {}\n")
    out = folder / "killed.json"
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "model", str(out), "1"],
        env={**os.environ, "PYTHONPATH": str(folder)}, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        time.sleep(0.5)  # the script is in the middle of its run
        foreign.stdin.write("more\n")
        foreign.stdin.flush()
        name = foreign.stdout.readline().strip()
        said, _ = process.communicate(timeout=60)
    assert Path("/dev/shm", name).exists(), "the other program went on all the while"
    record: dict[str, Any] = json.loads(out.read_text())
    assert record["processes_with_slabs_before"] == 2, said
    return process.returncode, record


def test_another_programs_shared_memory_is_not_counted(tmp_path: Path, foreign: Any) -> None:
    status, record = end(tmp_path, foreign, clean=True)
    assert record["shared_memory_left"] == record["processes_left"] == []
    assert record["processes_with_slabs_left"] == 0
    assert status == 0


def test_what_the_run_leaves_is_counted(tmp_path: Path, foreign: Any) -> None:
    status, record = end(tmp_path, foreign, clean=False)
    (left,) = record["shared_memory_left"]
    shared_memory.SharedMemory(left).unlink()
    assert status == 1
