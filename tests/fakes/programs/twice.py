"""Use one feature, revert, and use it again, in one interpreter: each round is to be as the first.

    twice.py FOLDER FEATURE

Prints what it has seen, a JSON line a round. torch is FAKE, and so are the generator's rows; the
checks, which want real tensors, are left out.
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import pickle
import sys
import threading
import time
import types
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
from vllm.model_executor.model_loader import weight_utils
from vllm.v1.executor.multiproc_executor import WorkerProc

import vllm_compat
from vllm_compat import checks
from vllm_compat.checks import batch
from vllm_compat.errors import GuardError
from vllm_compat.features import atomic_save, end_orphans, save_backlog
from vllm_compat.runtime import context, run_record

FOLDER = Path(sys.argv[1])
ROUNDS = 3


class Tensor:
    """FAKE: a number of bytes on the CPU."""

    device = types.SimpleNamespace(type="cpu")
    layout = "strided"

    def __init__(self, size: int) -> None:
        self.size = size

    def untyped_storage(self) -> Any:
        return types.SimpleNamespace(data_ptr=lambda: id(self), nbytes=lambda: self.size)


class Layer:
    """FAKE rows of one layer."""

    shape = (3, 8)
    dtype = "float32"


def save(obj: Any, f: Any) -> None:
    """FAKE: write, as far as the disk has room; what was written of it stays."""
    with open(f, "wb") as file:
        file.write(b"begun")
        if disk["full"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        file.write(pickle.dumps(obj))


def computed(self: Any, token_ids: list[list[int]]) -> list[Any]:
    """FAKE: answer with the name of the answer."""
    return ["computed"] * len(token_ids)


class Generator(VllmHiddenStatesGenerator):
    """The FAKE downstream's, without an engine."""

    def __init__(self) -> None:
        self.layer_ids = [0]
        self.vllm_config = types.SimpleNamespace(model_config=types.SimpleNamespace(max_model_len=100))


disk = {"full": False}
torch.Tensor, torch.strided, torch.save = Tensor, "strided", save
torch.empty, torch.long = (lambda *shape, dtype=None: []), "int64"
torch.load = lambda path, **kwargs: pickle.loads(Path(path).read_bytes()[len(b"begun") :])
VllmHiddenStatesGenerator.generate = computed
VllmHiddenStatesGenerator.__init__ = lambda self: None
checks.install = lambda *args: None
batch.look_at = batch.check_layers = lambda *args: None
atomic_save.PATIENCE = 0.01
save_backlog.BOUND = 1000


def answer(*prompts: list[int]) -> Any:
    """Return what a batch is answered with, or why it is refused."""
    try:
        return Generator().generate(list(prompts))
    except GuardError as error:
        return str(error).partition(":")[0]


def put(folder: Path, number: int) -> str:
    """Save a sample; return what came of it."""
    sample = {"input_ids": array("i", [number, 1]), "hidden_states": [b"rows"]}
    try:
        torch.save(sample, folder / f"data_{number}.pt")
    except GuardError as error:
        return str(error).partition(" ")[0] + (" refused" if "behind it" in str(error) else " failed")
    return "saved"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def record() -> dict[str, Any]:
    found = json.loads(Path(os.environ["VLLM_COMPAT_RECORD"]).read_text())
    return {name: found[name] for name in ("samples", "calls", "saved", "from_files", "failed")}


def use_atomic_save(number: int) -> list[Any]:
    """A disk gets full, and has room again only after the revert."""
    folder = FOLDER / "samples"  # the same in each round: what failed once is not held against it
    folder.mkdir(exist_ok=True)
    first = 2 * number
    seen: list[Any] = [put(folder, first), answer([1])]
    disk["full"] = True
    seen += [put(folder, first + 1).replace(str(first + 1), "N"), answer([1])]
    disk["full"] = False
    seen += [put(folder, first + 2).replace(str(first + 2), "N+1"), record()]
    vllm_compat.revert()
    seen += [len(names(folder)) - first, answer([1])]
    vllm_compat.apply()
    seen += [put(folder, first + 1), answer([1]), record()["failed"]]
    return seen


def use_clean_scheduler(number: int) -> list[Any]:
    """What a batch has left in the scheduler is ended while the feature is in force."""

    def ended() -> list[Any]:
        generator, found = Generator(), []
        generator.scheduler = types.SimpleNamespace(finish_requests=lambda ids, how: found.append(ids))
        with context.call_of(generator) as call:
            call.prompts["r0"] = [1]
            generator.generate([[1]])
        return found

    seen = [ended()]
    vllm_compat.revert()
    seen.append(ended())
    vllm_compat.apply()
    return [*seen, ended()]


def use_shut_down(number: int) -> list[Any]:
    """What waits for the interpreter's end goes with the revert."""
    waiting: list[Any] = []
    born = atexit.register, atexit.unregister

    def forget(function: Any) -> None:
        waiting[:] = [each for each in waiting if each is not function]

    def count() -> int:
        return sum(function.__name__ == "shut_down" for function in waiting)

    atexit.register, atexit.unregister = waiting.append, forget
    try:
        VllmHiddenStatesGenerator()
        seen = [count()]
        vllm_compat.revert()
        seen.append(count())
        VllmHiddenStatesGenerator()
        seen.append(count())
        vllm_compat.apply()
        VllmHiddenStatesGenerator()
        seen.append(count())
        vllm_compat.revert()
        vllm_compat.apply()
    finally:
        atexit.register, atexit.unregister = born
    return seen


def use_end_orphans(number: int) -> list[Any]:
    """The thread that looks for the driver goes with the revert; nothing starts one without the plan."""
    config = types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(worker_extension_cls="speculators.Extension")
    )
    born = end_orphans.multiprocessing
    # This process pretends to be a worker, and its own parent, which lives, to be the driver.
    parent = types.SimpleNamespace(pid=os.getppid())
    end_orphans.multiprocessing = types.SimpleNamespace(parent_process=lambda: parent)

    def watched() -> int:
        WorkerProc(vllm_config=config)
        deadline = time.monotonic() + 5  # a thread that was told to stop needs a moment
        while time.monotonic() < deadline and not vllm_compat.status().in_force and count():
            time.sleep(0.01)
        return count()

    def count() -> int:
        return sum(thread.name == end_orphans.THREAD for thread in threading.enumerate())

    try:
        seen = [watched()]
        vllm_compat.revert()
        seen += [watched(), watched()]
        vllm_compat.apply()
        seen.append(watched())
        vllm_compat.revert()
        watched()
        vllm_compat.apply()
    finally:
        end_orphans.multiprocessing = born
    return seen


def use_save_backlog(number: int) -> list[Any]:
    """More waits to be saved than may; a revert ends the count of it, not the work."""
    gate, waited = threading.Event(), threading.Event()
    free = answer([1])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda rows: gate.wait(30), Tensor(5000))
        thread = threading.Thread(target=lambda: (answer([1]), waited.set()))
        thread.start()
        held = not waited.wait(0.3)
        facts = save_backlog.facts()
        vllm_compat.revert()
        pool.submit(lambda rows: None, Tensor(7000))  # nobody counts it
        vllm_compat.apply()
        zero = save_backlog.facts()["most_bytes"]
        again = answer([1])  # would wait for good, if the work of before still counted
        pool.submit(lambda rows: None, Tensor(900))
        new = save_backlog.facts()["most_bytes"]
        gate.set()
    thread.join(30)
    after = save_backlog.facts()["waited_seconds"]
    return [free, held, facts["most_bytes"], facts["bound_bytes"], zero, again, new, after]


def use_resume_samples(number: int) -> list[Any]:
    """The answers are counted from the first number that the launcher has told, in each run."""
    seen = []
    for prompts in ([[2, 1], [3, 1]], [[4, 1], [5, 1]]):
        found = answer(*prompts)
        seen.append(["file" if isinstance(each, dict) else each for each in found])
    vllm_compat.revert()
    seen.append(record()["from_files"])
    seen.append(answer([2, 1]))
    vllm_compat.apply()
    return seen


def use_leave_out(number: int) -> list[Any]:
    """Samples are counted from the first number that the launcher has told, in each run."""
    seen: list[Any] = []
    for prompts in ([[2, 1], [3, 1]], [[4, 1], [5, 1]]):
        found = answer(*prompts)
        seen.append([len(each["input_ids"]) if isinstance(each, dict) else each for each in found])
    vllm_compat.revert()
    told = json.loads((FOLDER / "left_out.json").read_text())["left_out"]
    seen.append(told)
    seen.append(answer([2, 1]))
    vllm_compat.apply()
    return seen


def use_run_record(number: int) -> list[Any]:
    """What was extracted and saved is counted anew; the record of the ended run is written first."""
    seen = [record()]
    folder = FOLDER / f"round {number}"
    folder.mkdir()
    for _ in range(2):
        run_record.add([{"input_ids": [1, 2, 3], "hidden_states": [Layer()]}] * 2)
    put(folder, 0)
    run_record.fail(f"a cause of round {number}")
    run_record.note("a note")
    vllm_compat.revert()
    seen.append(record())
    run_record.add([{"input_ids": [1], "hidden_states": [Layer()]}])  # nobody's
    ended = record()
    vllm_compat.apply()
    return [*seen, ended == seen[-1], record(), run_record.summary()]


def use_progress(number: int) -> list[Any]:
    """The first error of each run is kept, and none that comes while nothing is in force."""

    def said() -> dict[str, Any]:
        path = Path(os.environ["VLLM_COMPAT_STATUS"]) / f"{os.getpid()}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def met(text: str) -> Any:
        try:
            raise ValueError(text)
        except ValueError as error:
            logging.getLogger("vllm").error("WorkerProc hit an exception.", exc_info=error)
        return said().get("error")

    seen = [said().get("error"), met(f"first of {number}"), met("second"), said()["error_where"]]
    list(weight_utils.tqdm(["a", "b"]))
    WorkerProc(rank=3)
    seen += [said()["shards"], said()["phase"], said()["rank"]]
    vllm_compat.revert()
    seen += [met("between"), sys.excepthook is BORN_HOOK, list(weight_utils.tqdm(["a"]))]
    seen.append(said()["shards"])
    vllm_compat.apply()
    sys.excepthook(RuntimeError, RuntimeError(f"end of {number}"), None)
    seen += [said()["error"], said()["error_where"]]
    vllm_compat.revert()
    vllm_compat.apply()
    return [each.replace(str(number), "N") if isinstance(each, str) else each for each in seen]


BORN_HOOK = sys.excepthook

if __name__ == "__main__":
    logging.getLogger("vllm").propagate = False
    logging.getLogger("vllm").addHandler(logging.NullHandler())
    vllm_compat.apply()
    for number in range(ROUNDS):
        print(json.dumps(globals()[f"use_{sys.argv[2]}"](number)), flush=True)
        if number < ROUNDS - 1:
            vllm_compat.revert()
            vllm_compat.apply()
