"""After a revert every process is what it was before, object by object; each case runs on FAKES."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Site

PROGRAM = str(Path(__file__).parents[1] / "fakes" / "programs" / "same.py")
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
LOADING = "vllm.model_executor.model_loader.weight_utils"

IMPORTABLE_BEFORE = (
    "vllm.config",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.request",
    LOADING,
    "torch",
    "transformers.configuration_utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.configuration_auto",
)
DOWNSTREAM = (
    GENERATOR,
    "speculators.data_generation.custom_worker",
    "speculators.data_generation.preprocessing",
    "speculators.train.vocab_mapping",
    "speculators.models.eagle3.core",
)


@pytest.fixture
def watched(empty_site: Site, tmp_path: Path) -> tuple[Site, dict[str, str]]:
    """Return a FAKE environment with all that any feature watches, and a launcher's variables."""
    site = empty_site.add("vllm", "0.16.0+cpu").add("torch", "2.10.0").add_loading()
    (tmp_path / "status").mkdir()
    return site, {
        "VLLM_COMPAT_STATUS": str(tmp_path / "status"),
        "VLLM_COMPAT_RECORD": str(tmp_path / "record.json"),
        "VLLM_COMPAT_RESUME": json.dumps(
            {"folder": str(tmp_path), "next": 0, "kept": True, "left_out": [1]}
        ),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def rounds(site: Site, what: str, environ: dict[str, str], *modules: str) -> list[dict[str, Any]]:
    """Run the program; return what it found in each of its two rounds of apply() and revert()."""
    done = site.run(PROGRAM, what, MODULES=",".join(modules), **environ)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 2
    return found


def places(targets: Iterable[str]) -> set[str]:
    """Return the attributes among targets, as the program names them; modules are supplied whole."""
    named = {target.replace("sys.excepthook", "sys:excepthook") for target in targets}
    return {target for target in named if ":" in target and not target.endswith(":*")}


NOTHING: dict[str, Any] = {"others": [], "environment": [], "finders": [], "handlers": 0, "signals": 0}

OF_FEATURES = {
    "sys.excepthook",
    "logging:Logger.makeRecord",
    "torch:save",
    "concurrent.futures.thread:ThreadPoolExecutor.submit",
    "vllm.v1.executor.multiproc_executor:WorkerProc.__init__",
    f"{LOADING}:tqdm",
    f"{GENERATOR}:VllmHiddenStatesGenerator.generate",
    f"{GENERATOR}:VllmHiddenStatesGenerator.__init__",
}


@pytest.mark.parametrize(
    ("downstream", "transformers", "early"),
    [
        ("speculators_0_3", "transformers_4", True),
        ("speculators_0_4", "transformers_4", True),
        ("speculators_0_4", "transformers_5", False),  # cannot be imported before apply()
    ],
)
def test_every_attribute_of_the_driver_is_the_identical_object_again(
    watched: tuple[Site, dict[str, str]], downstream: str, transformers: str, early: bool
) -> None:
    site, environ = watched
    site.add(downstream, {"3": "0.3.0", "4": "0.4.0.1"}[downstream[-1]])
    site.add(transformers, {"4": "4.57.0", "5": "5.19.0"}[transformers[-1]])
    modules = IMPORTABLE_BEFORE + (DOWNSTREAM if early else ())
    first, second = rounds(site, "driver", environ, *modules)
    for found in (first, second):
        assert found["left"] == []
        assert found["after"] == NOTHING
        assert found["during"]["environment"] == ["VLLM_COMPAT_ORIGIN", "VLLM_COMPAT_PLAN"]
        assert found["during"]["signals"] == 1, "the launcher may ask for the stacks"
    targets = {target for _, target in first["patched"]}
    changed = set(first["during"]["others"])
    # What is patched differs while it is in force, so that the comparison after it says something.
    assert places(targets) - changed == set()
    assert OF_FEATURES - targets == (set() if early else {t for t in OF_FEATURES if GENERATOR in t})
    assert first["patched"] == second["patched"]
    assert first["during"] == second["during"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("downstream", ["speculators_0_3", "speculators_0_4"])
def test_every_attribute_of_a_worker_is_the_identical_object_again(
    watched: tuple[Site, dict[str, str]], downstream: str, method: str
) -> None:
    site, environ = watched
    site.add(downstream, {"3": "0.3.0", "4": "0.4.0.1"}[downstream[-1]])
    site.add("transformers_4", "4.57.0")
    environ = {**environ, "VLLM_WORKER_MULTIPROC_METHOD": method}
    for found in rounds(site, "ranks", environ, *IMPORTABLE_BEFORE, *DOWNSTREAM):
        assert found["states"] == ["reverted", "reverted"]
        for worker in found["during"]:
            assert (worker["in_force"], worker["role"]) == (True, "worker")
            assert places(worker["patched"]) - set(worker["others"]) == set()
            assert "logging:Logger.makeRecord" in worker["patched"]
            extension = "speculators.data_generation.custom_worker:HiddenStatesWorkerExtension"
            assert f"{extension}._setup_hidden_states_capture" in worker["patched"]
            assert "torch:save" not in worker["others"], "what is the driver's alone is not there"
            assert not worker["own_hook"], "a worker's error is not the program's"
            assert "sys.excepthook" not in worker["patched"]
        for worker in found["after"]:
            assert (worker["in_force"], worker["patched"], worker["own"]) == (False, [], [])
            assert worker["others"] == []
            assert {"VLLM_COMPAT_PLAN", "VLLM_COMPAT_ORIGIN"}.isdisjoint(worker["environment"])
            assert worker["finders"] == []
            assert worker["signals"] == 0
        assert found["driver"] == NOTHING


ENDED = f"""
import json, os, signal, sys, threading
import vllm_compat
from vllm.config import ModelConfig
from vllm_compat.errors import UsageError
from {GENERATOR} import VllmHiddenStatesGenerator

def states(status):
    return [rank.state for rank in status.ranks]

def patched(worker):
    return vllm_compat.status().in_force

def stay(self, token_ids):
    inside.set()
    over.wait(20)
    return []

def say(status, generator):
    try:
        generator.generate([[1]])
    except UsageError as error:
        print(json.dumps([[rank.state for rank in status.ranks], status.in_force, str(error)]))

if __name__ == "__main__":
    inside, over = threading.Event(), threading.Event()
    if sys.argv[1] == "under way":
        VllmHiddenStatesGenerator.generate = stay
        ModelConfig.get_vocab_size = lambda self: 100
    vllm_compat.apply()
    generator = VllmHiddenStatesGenerator("model", [0], tensor_parallel_size=2)
    (first, _), (second, _) = generator.executor.workers
    if sys.argv[1] == "under way":
        thread = threading.Thread(target=generator.generate, args=([[1]],))
        thread.start()
        assert inside.wait(20)
    for process in dict(one=[first], both=[first, second]).get(sys.argv[1], ()):
        process.kill()
        process.join()
    say(vllm_compat.revert(), generator)
    if sys.argv[1] == "under way":
        seen = [states(vllm_compat.status()), states(vllm_compat.revert())]
        seen.append(generator.executor.collective_rpc(patched))
        over.set()
        thread.join()
        if sys.argv[2] == "apply":
            seen.append(states(vllm_compat.apply()))
        else:
            seen.append(states(vllm_compat.revert()))
        seen += [generator.executor.collective_rpc(patched), states(vllm_compat.status())]
        print(json.dumps(seen))
    for process in (first, second):
        process.kill()
"""


@pytest.mark.parametrize(
    ("what", "states"),
    [
        ("nothing", ["reverted", "reverted"]),
        ("one", ["gone", "busy"]),
        ("both", ["gone", "gone"]),
        ("under way", ["busy", "busy"]),
    ],
)
def test_the_status_says_of_each_rank_what_became_of_it(
    site: Site, what: str, states: list[str]
) -> None:
    path = site.folder / "program.py"
    path.write_text(ENDED)
    done = site.run(str(path), what, "revert", VLLM_CPU_KVCACHE_SPACE="1")
    assert done.returncode == 0, done.stderr
    found, in_force, said = json.loads(done.stdout.splitlines()[0])
    assert (found, in_force) == (states, False)
    assert said.endswith("Build a new generator.")


@pytest.mark.parametrize(("how", "answer"), [("revert", ["reverted", "reverted"]), ("apply", [])])
def test_workers_that_were_busy_are_told_as_patched_and_asked_again(
    site: Site, how: str, answer: list[str]
) -> None:
    path = site.folder / "program.py"
    path.write_text(ENDED)
    done = site.run(str(path), "under way", how, VLLM_CPU_KVCACHE_SPACE="1")
    assert done.returncode == 0, done.stderr
    told, again, meanwhile, after, patched, nobody = json.loads(done.stdout.splitlines()[1])
    busy = ["busy", "busy"]
    assert (told, again) == (busy, busy), "the batch under way is not disturbed"
    assert meanwhile == [True, True]
    assert (after, patched, nobody) == (answer, [False, False], [])
