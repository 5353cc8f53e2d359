"""apply(engine="public") on FAKE packages: its processes hold the plan, and give it back.

The FAKE ``vllm.LLM`` has real worker processes; what captures needs torch, and is left out here.
"""

from __future__ import annotations

import json
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Site

LLM = '''
"""FAKE of vLLM's front end: its engine core is in this process, its workers are not."""

from __future__ import annotations

import os
from typing import Any

from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class LLM:
    def __init__(
        self, model: str, *, tensor_parallel_size: int = 1, worker_extension_cls: str = "", **kwargs: Any
    ) -> None:
        parallel = ParallelConfig(tensor_parallel_size, worker_extension_cls)
        if os.environ.get("FORGET"):
            os.environ.pop("VLLM_COMPAT_PLAN")
        self.executor = MultiprocExecutor(VllmConfig(parallel_config=parallel))
        self.llm_engine = type("Engine", (), {"engine_core": self.executor})()

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        return self.executor.collective_rpc(method, timeout, args, kwargs)

    def generate(self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True) -> list[Any]:
        raise NotImplementedError
'''

ASKED = """
import os

def where(worker):
    import vllm_compat
    status = vllm_compat.status()
    owners = [patch.owner for patch in status.patches]
    return [os.getpid(), status.plan and status.plan.digest, status.role, owners]
"""

PROGRAM = """
import json, os, sys
import vllm_compat
from vllm_compat.errors import VllmCompatError
from vllm_compat.engine import driver
from vllm_compat.runtime import identity
from vllm_compat.engine.worker import ModelFacts
from asked import where

if __name__ == "__main__":
    driver._layer_ids = lambda config, asked: asked
    driver._set_up = lambda executor, layer_ids: ModelFacts(8, 100, "torch.float32", 64)
    vllm_compat.apply(engine="public")
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
    try:
        made = VllmHiddenStatesGenerator("a/model", [0, 2], tensor_parallel_size=2)
    except VllmCompatError as error:
        import multiprocessing
        alive = [child.pid for child in multiprocessing.active_children()]
        print(json.dumps([type(error).__name__, str(error), alive]))
        sys.exit()
    status = vllm_compat.status()
    owners = sorted({patch.owner for patch in status.patches})
    print(json.dumps([os.getpid(), status.plan.digest, status.plan.engine, owners]))
    print(json.dumps(made.executor.collective_rpc(where)))
    pids = [answer[0] for answer in made.executor.collective_rpc(where)]
    print(json.dumps([rank.state for rank in vllm_compat.revert().ranks]))
    try:
        made.generate([[1]])
    except VllmCompatError as error:
        print(json.dumps(str(error)))
    made.executor.shutdown()
    print(json.dumps([pid for pid in pids if identity.is_alive(pid)]))
"""


@pytest.fixture
def public(site: Site) -> Site:
    """An environment whose FAKE vLLM has a front end."""
    package = site.folder / "vllm"
    (package / "entrypoints").mkdir()
    (package / "entrypoints/__init__.py").write_text("")
    (package / "entrypoints/llm.py").write_text(LLM)
    init = package / "__init__.py"
    names = "from vllm.entrypoints.llm import LLM\nfrom vllm.sampling_params import SamplingParams\n"
    init.write_text(init.read_text().replace("__version__", f"{names}\n__version__", 1))
    last = "    temperature: float = 1.0"
    site.edit("vllm/sampling_params.py", last, f"{last}\n    detokenize: bool = True")
    (site.folder / "asked.py").write_text(ASKED)
    (site.folder / "program.py").write_text(dedent(PROGRAM))
    return site


def run(site: Site, **environ: str) -> list[Any]:
    done = site.run(str(site.folder / "program.py"), **environ)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_every_rank_holds_the_plan_and_takes_its_patches_back(public: Site, method: str) -> None:
    driver, workers, ranks, said, alive = run(public, VLLM_WORKER_MULTIPROC_METHOD=method)
    pid, digest, engine, owners = driver
    assert engine == "public"
    assert {"engine.public", "check: batch", "check: ranks"} <= set(owners)
    assert "clean_scheduler" not in owners
    assert len({pid, *(worker[0] for worker in workers)}) == 3
    assert [(worker[1], worker[2]) for worker in workers] == [(digest, "worker")] * 2
    assert all("engine.public" in worker[3] for worker in workers)
    assert ranks == ["reverted", "reverted"]
    assert "Build a new generator" in said
    assert alive == []


def test_a_rank_without_the_plan_is_refused_and_the_engine_ended(public: Site) -> None:
    ((kind, said, alive),) = run(public, VLLM_WORKER_MULTIPROC_METHOD="spawn", FORGET="1")
    assert kind == "GuardError"
    assert said.startswith("Rank 0 (pid ")
    assert "runs without the plan" in said
    assert alive == []


def test_options_that_exclude_each_other_are_refused(public: Site) -> None:
    code = "import vllm_compat; vllm_compat.apply(engine={!r}, capture={!r})"
    for engine, capture, words in (
        ("public", "stock", "capture='stock' is the loop of the downstream's own worker"),
        ("alone", "stock", "(engine='alone') does not use"),
        ("other", "auto", "it must be one of auto, stock, public, alone"),
    ):
        done = public.run("-c", code.format(engine, capture))
        assert done.returncode == 1
        assert words in done.stderr


def test_a_vllm_without_such_an_interface_is_refused(site: Site) -> None:
    done = site.run("-c", "import vllm_compat; vllm_compat.apply(engine='public')")
    assert "IncompatibleError: The second engine does not fit vLLM" in done.stderr
