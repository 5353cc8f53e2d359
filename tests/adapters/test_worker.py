"""The adapter of the downstream's worker extension; what it captures with is in tests/capture."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat.adapters import by_name, make_plan
from vllm_compat.adapters.base import Case
from vllm_compat.analysis.drift import FindingKind
from vllm_compat.analysis.plan import Plan
from vllm_compat.capture import slabs
from vllm_compat.capture import worker as capture
from vllm_compat.checks import SWITCHES
from vllm_compat.runtime import run, run_record
from vllm_compat.runtime.patching import Transaction

MakeCase = Callable[..., Case]
Install = Callable[[str, Case], Plan]

EXTENSION = "speculators.data_generation.custom_worker"
FILE = f"{EXTENSION.replace('.', '/')}.py"


@pytest.mark.parametrize("downstream", ["speculators_0_3", "speculators_0_4"])
@pytest.mark.parametrize("mode", ["auto", "hooks", "stock"])
def test_it_is_needed_where_the_models_forward_is_replaced(
    make_case: MakeCase, downstream: str, mode: str
) -> None:
    need = by_name("worker.capture").need(make_case(downstream, capture=mode))
    assert need is not None
    assert f"{FILE}:" in need.reason


def test_it_is_not_needed_where_forward_is_left_alone_or_there_is_no_extension(
    make_case: MakeCase,
) -> None:
    adapter = by_name("worker.capture")
    own = (FILE, "types.MethodType(_forward, base)", "None")
    assert adapter.need(make_case("speculators_0_4", own)) is None
    assert adapter.need(make_case("speculators_0_5")) is None


def test_what_the_replaced_forward_cannot_find_is_mended_with_it(make_case: MakeCase) -> None:
    gone = ("vllm/distributed.py", "    is_first_rank = True\n", "")
    case = make_case("speculators_0_4", gone)
    need = by_name("worker.capture").need(case)
    assert need is not None
    assert [(f.kind, f.name) for f in need.findings] == [
        (FindingKind.ATTRIBUTE_MISSING, "is_first_rank")
    ]
    assert make_plan(case.contract, case.surface, case.environment).unmet == ()


class Capture:
    """A FAKE capture that tells what it was made of and asked."""

    def __init__(self, extension: Any, layer_ids: Any, **options: Any) -> None:
        self.extension, self.layer_ids, self.options = extension, layer_ids, options
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1

    def states(self) -> str:
        return f"{self.layer_ids} after {self.resets} resets"


@pytest.fixture
def extension(fake_modules: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The FAKE worker extension, mixed into a worker of its own as vLLM does it."""
    fake_modules("vllm", "speculators_0_4", "transformers_4")
    monkeypatch.setattr(capture, "Capture", Capture)
    module = importlib.import_module(EXTENSION)

    class Worker(module.HiddenStatesWorkerExtension):  # type: ignore[misc, name-defined]
        model_runner = None

    return Worker


def made_of(worker: Any) -> Capture:
    (found,) = (value for value in vars(worker).values() if isinstance(value, Capture))
    return found


@pytest.mark.parametrize("by_name", [False, True])
def test_the_extensions_methods_are_those_of_the_capture(
    extension: Any, make_case: MakeCase, install: Install, by_name: bool
) -> None:
    install("worker.capture", make_case("speculators_0_4"))
    worker, other = extension(), extension()
    if by_name:
        worker._setup_hidden_states_capture(layer_ids=[2, 0])
    else:
        worker._setup_hidden_states_capture([2, 0])
    other._setup_hidden_states_capture([1])
    worker._reset_capture()
    assert worker._get_captured_states() == "[2, 0] after 1 resets"
    assert other._get_captured_states() == "[1] after 0 resets"
    assert made_of(worker).extension is worker
    assert made_of(worker).options["stock"] is None


def test_the_downstreams_own_loop_is_handed_on_where_it_is_asked_for(
    extension: Any, make_case: MakeCase, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    own = sys.modules[EXTENSION].HiddenStatesWorkerExtension
    monkeypatch.setattr(
        own, "_setup_hidden_states_capture", lambda self, layer_ids: asked.append(layer_ids)
    )
    install("worker.capture", make_case("speculators_0_4", capture="stock"))
    worker = extension()
    worker._setup_hidden_states_capture([3])
    module, setup = made_of(worker).options["stock"]
    assert module is sys.modules[EXTENSION]
    assert asked == []
    setup()
    assert asked == [[3]]


def test_vllms_worker_gets_no_attribute_that_it_could_have_itself(
    extension: Any, make_case: MakeCase, install: Install, transaction: Transaction
) -> None:
    own = sys.modules[EXTENSION].HiddenStatesWorkerExtension
    before = dict(vars(own))
    install("worker.capture", make_case("speculators_0_4"))
    assert set(vars(own)) == set(before), "vLLM refuses extensions with names of the worker's own"
    worker = extension()
    worker._setup_hidden_states_capture([0])
    assert all(name.startswith("_vllm_compat") for name in vars(worker))
    transaction.revert()
    assert all(vars(own)[name] is value for name, value in before.items())


@pytest.fixture
def executor(extension: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return ``executor(extension class)``: a FAKE one whose single worker is this process."""
    config = importlib.import_module("vllm.config")
    module = importlib.import_module("vllm.v1.executor.multiproc_executor")
    monkeypatch.setattr(module.MultiprocExecutor, "_init_executor", lambda self: None)
    monkeypatch.setattr(
        module.MultiprocExecutor,
        "collective_rpc",
        lambda self, method, args=(): [method(None, *args)],
    )

    def make(extension: str) -> Any:
        parallel = config.ParallelConfig(worker_extension_cls=extension)
        return module.MultiprocExecutor(config.VllmConfig(parallel_config=parallel))

    return make


OURS = "speculators.data_generation.custom_worker.HiddenStatesWorkerExtension"


def test_driver_and_worker_agree_on_shared_memory_before_it_is_used(
    executor: Callable[[str], Any], make_case: MakeCase, install: Install
) -> None:
    plan = install("worker.capture", make_case("speculators_0_4"))
    run_record.open_for(plan)
    executor("another.Extension")
    assert slabs.refused(), "an engine that is not the downstream's is not asked"
    executor(OURS)
    assert slabs.refused() == ""
    assert told_of()["how"] == "shared memory"


@pytest.mark.parametrize("why", ["memfds are forbidden", "another process namespace"])
def test_where_memory_cannot_be_shared_rows_go_through_replies_and_the_record_says_why(
    executor: Callable[[str], Any],
    make_case: MakeCase,
    install: Install,
    extension: Any,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
) -> None:
    if why == "memfds are forbidden":

        def forbidden(*arguments: object) -> int:
            raise OSError(1, why)

        monkeypatch.setattr("os.memfd_create", forbidden)
    else:
        monkeypatch.setattr(slabs, "try_offer", lambda offered: why)
    plan = install("worker.capture", make_case("speculators_0_4"))
    run_record.open_for(plan)
    executor(OURS)
    worker = extension()
    worker._setup_hidden_states_capture([0])
    assert made_of(worker).options["shared"] is False
    told = told_of()
    assert told["how"] == "replies"
    assert why in told["reason"]


def test_another_executor_is_never_asked_and_rows_go_through_replies(
    extension: Any, make_case: MakeCase, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = install("worker.capture", make_case("speculators_0_4"))
    run_record.open_for(plan)
    worker = extension()
    worker._setup_hidden_states_capture([0])
    assert made_of(worker).options["shared"] is False
    told = told_of()
    assert told == {"how": "replies", "reason": "the executor is not vLLM's MultiprocExecutor"}


def told_of() -> dict[str, Any]:
    """Return what the record says of the way out of the worker."""
    account = run.current().find(run_record.Account)
    assert account is not None
    return run_record._transfer(account)


@pytest.mark.parametrize("left_out", [False, True])
def test_what_is_captured_is_proven_unless_that_is_left_out_and_the_record_says_so(
    extension: Any, make_case: MakeCase, transaction: Transaction, left_out: bool
) -> None:
    case = make_case("speculators_0_4")
    off = SWITCHES if left_out else ()
    plan = make_plan(case.contract, case.surface, case.environment, switched_off=off, features=SWITCHES)
    by_name("worker.capture").install(transaction, plan)
    worker = extension()
    worker._setup_hidden_states_capture([0])
    assert made_of(worker).options["prove"] is not left_out
    assert plan.switched_off == off
    run_record.open_for(plan)
    states = SimpleNamespace(shape=(2, 4), dtype="float32")
    run_record.add([{"input_ids": [1, 2], "hidden_states": [states]}])
    assert ("residual stream NOT proven (proofs left out)" in run_record.summary()) is left_out
