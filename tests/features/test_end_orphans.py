"""A worker whose driver was killed ends itself: a real multiprocessing child, all of vLLM is FAKE."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from vllm_compat.features import end_orphans
from vllm_compat.runtime import identity

if TYPE_CHECKING:
    from conftest import Site

SOURCE = Path(end_orphans.__file__).parents[2]
PROGRAM = '''
"""driver.py METHOD EXTENSION DOOR WITHOUT ENDING: a driver, and a FAKE worker that waits for it."""
import multiprocessing, os, signal, sys, time
from multiprocessing import resource_tracker, shared_memory
from types import SimpleNamespace

import vllm_compat
from vllm_compat.features import end_orphans

end_orphans.GRACE, end_orphans.LOOK = 1.0, 0.05
method, extension, door, without, ending = sys.argv[1:]
if door == "import":
    vllm_compat.apply(without=[each for each in [without] if each])


def work(config, ready):
    """FAKE worker_main: makes a queue's memory, says so, and waits for a driver."""
    if door == "import":
        from vllm.v1.executor.multiproc_executor import WorkerProc

        class FakeProc(WorkerProc):
            pass

        proc = FakeProc(vllm_config=config)
    else:  # vLLM loads its plugins inside WorkerProc.__init__, which is under way then
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        from vllm.v1.executor.multiproc_executor import WorkerWrapperBase

        WorkerWrapperBase(config).init_device()
        proc = SimpleNamespace()
    memory = shared_memory.SharedMemory(create=True, size=64)
    proc.worker_response_mq = SimpleNamespace(buffer=SimpleNamespace(shared_memory=memory))
    ready.send((os.getpid(), memory.name))
    while ending == "never" or os.getppid() == multiprocessing.parent_process().pid:
        time.sleep(0.05)
    # FAKE: as vLLM's worker that has seen its driver's end between two steps.
    proc.worker_response_mq = None
    memory.close()


if __name__ == "__main__":
    if door != "import":
        vllm_compat.apply()
    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=extension))
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    context.Process(target=work, args=(config, theirs), daemon=True).start()
    print(*ours.recv(), flush=True)
    if ending == "orderly":
        os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
        print("killed", flush=True)
    time.sleep(60)
'''
OURS = "speculators.data_generation.custom_worker.HiddenStatesWorkerExtension"


class Family:
    """A driver and its worker, started as real processes."""

    def __init__(
        self,
        site: Site,
        method: str = "spawn",
        of: str = OURS,
        door: str = "import",
        without: str = "",
        ending: str = "never",
    ) -> None:
        (site.folder / "driver.py").write_text(PROGRAM)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHON"))}
        path = os.pathsep.join([str(site.folder), str(SOURCE)])
        self.driver = subprocess.Popen(
            [sys.executable, "driver.py", method, of, door, without, ending],
            env={**clean, "PYTHONPATH": path, "VLLM_COMPAT_CACHE": "off"},
            cwd=site.folder, stdout=subprocess.PIPE, stderr=(site.folder / "said").open("w"), text=True,
        )  # fmt: skip
        assert self.driver.stdout is not None
        pid, name = self.driver.stdout.readline().split() or (0, "")
        self.worker, self.memory = int(pid), Path("/dev/shm") / str(name)
        assert self.worker, (site.folder / "said").read_text()
        self.said = site.folder / "said"

    def lives(self, seconds: float) -> bool:
        """Whether the worker still runs after so many seconds; return at once when it does not."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if identity.start_of(self.worker) is None:
                return False
            time.sleep(0.05)
        return True

    def end(self) -> None:
        for pid in (self.driver.pid, self.worker):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.driver.wait(10)


@pytest.fixture
def family(site: Site) -> Iterator[Any]:
    """Start a driver and a worker; both are gone after the test."""
    started: list[Family] = []

    def start(*args: Any, **kwargs: Any) -> Family:
        started.append(Family(site.add_loading(), *args, **kwargs))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_worker_ends_and_frees_its_memory_when_its_driver_was_killed(family: Any, method: str) -> None:
    mine = family(method)
    assert mine.memory.exists()
    os.kill(mine.driver.pid, signal.SIGKILL)
    assert mine.lives(0.5), "vLLM's own way of ending comes first"
    assert not mine.lives(10)
    assert not mine.memory.exists()
    said = mine.said.read_text()
    assert f"process {mine.driver.pid}, which started this vLLM worker (pid {mine.worker})" in said
    assert "Traceback" not in said


def test_a_worker_that_takes_the_plan_over_while_it_starts_ends_too(family: Any) -> None:
    mine = family("spawn", door="plugin")
    os.kill(mine.driver.pid, signal.SIGKILL)
    assert not mine.lives(10)


def test_a_worker_whose_driver_lives_is_left_alone(family: Any) -> None:
    mine = family()
    assert mine.lives(3)
    os.kill(mine.driver.pid, signal.SIGSTOP)
    assert mine.lives(2), "a driver that stands still is not gone"
    os.kill(mine.driver.pid, signal.SIGCONT)


def test_a_worker_of_another_engine_is_left_alone(family: Any) -> None:
    mine = family("spawn", "")
    os.kill(mine.driver.pid, signal.SIGKILL)
    assert mine.lives(3)


def test_without_the_feature_the_worker_stays(family: Any) -> None:
    mine = family(without="end_orphans")
    os.kill(mine.driver.pid, signal.SIGKILL)
    assert mine.lives(3)


def test_a_process_that_was_not_started_by_multiprocessing_is_not_watched(site: Site) -> None:
    done = site.add_loading().run(
        "-c",
        f"""
import threading, types, vllm_compat
vllm_compat.apply()
from vllm.v1.executor.multiproc_executor import WorkerProc
config = types.SimpleNamespace(worker_extension_cls={OURS!r})
WorkerProc(vllm_config=types.SimpleNamespace(parallel_config=config))
print([thread.name for thread in threading.enumerate()])
""",
    )
    assert done.stdout.strip() == "['MainThread']", done.stderr


@pytest.mark.parametrize("without", ["", "end_orphans"])
def test_a_worker_that_ends_by_itself_frees_what_nobody_else_will(family: Any, without: str) -> None:
    """Seen: driver and multiprocessing's tracker were killed, and a piece of shared memory stayed."""
    mine = family(ending="orderly", without=without)
    assert mine.driver.stdout.readline() == "killed\n"
    time.sleep(0.3)
    os.kill(mine.driver.pid, signal.SIGKILL)
    assert not mine.lives(10)
    assert mine.memory.exists() is bool(without)
    mine.memory.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("parent", "start", "alive", "gone"),
    [
        (os.getppid(), 1, False, False),  # our real parent lives, whatever anything else says
        (os.getpid(), None, True, False),  # a fork server stands between, the pipe says that it lives
        (os.getpid(), None, False, True),
        (os.getpid(), identity.start_of(os.getpid()), False, False),
        (os.getpid(), 1, True, True),  # the id belongs to another process by now
    ],
)
def test_only_a_parent_that_has_ended_for_certain_is_gone(
    parent: int, start: int | None, alive: bool, gone: bool
) -> None:
    watch = end_orphans.Watch(SimpleNamespace(pid=parent, is_alive=lambda: alive), list)
    watch.start = start
    assert watch.is_gone() is gone
