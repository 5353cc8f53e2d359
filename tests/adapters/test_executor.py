"""Adapters of vllm.v1.executor, on a FAKE executor whose one worker lives in this process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat.adapters import by_name
from vllm_compat.adapters.base import Case
from vllm_compat.engine import call_of
from vllm_compat.errors import GuardError
from vllm_compat.plan import Plan

MakeCase = Callable[..., Case]
Install = Callable[[str, Case], Plan]

EXTENSION = "speculators.data_generation.custom_worker.HiddenStatesWorkerExtension"
EXECUTOR = "vllm/v1/executor/multiproc_executor.py"
ONE_PHASE = (EXECUTOR, "def sample_tokens(", "def _no_second_phase(")
LISTED = (
    EXECUTOR,
    "        unique_reply_rank: int | None = None,\n    ) -> Any:",
    "        unique_reply_rank: int | None = None,\n    ) -> list[Any]:",
)


@pytest.fixture
def make_executor(fake_modules: Callable[..., None]) -> Callable[..., Any]:
    """Make FAKE executors over one worker; ``calls`` lists what it was asked, in order."""
    fake_modules("vllm")
    module = importlib.import_module("vllm.v1.executor.multiproc_executor")
    worker_module = importlib.import_module("vllm.v1.worker.gpu_worker")

    def collective_rpc(
        self: Any, method: str, args: tuple[Any, ...] = (), unique_reply_rank: int | None = None
    ) -> Any:
        self.calls.append(method)
        answer = self.replies[method] if method in self.replies else getattr(self.worker, method)(*args)
        return [answer] if unique_reply_rank is None else answer

    module.MultiprocExecutor.collective_rpc = collective_rpc

    def make(extension: str = EXTENSION, **replies: Any) -> Any:
        executor = object.__new__(module.MultiprocExecutor)
        executor.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(worker_extension_cls=extension)
        )
        executor.worker = worker_module.Worker(executor.vllm_config, rank=0)
        executor.replies = replies
        executor.calls = []
        return executor

    return make


@pytest.mark.parametrize(
    ("downstream", "edits", "needed"),
    [
        ("speculators_0_3", (), True),
        ("speculators_0_3", (ONE_PHASE,), False),
        ("speculators_0_4", (), False),
    ],
    ids=["two phases, one called", "one phase", "two phases, both called"],
)
def test_a_step_is_completed_where_it_has_a_second_phase_that_is_never_called(
    make_case: MakeCase, downstream: str, edits: tuple[Any, ...], needed: bool
) -> None:
    need = by_name("executor.two_phase_step").need(make_case(downstream, *edits))
    assert (need is not None) is needed
    if need:
        assert [f.name for f in need.findings] == ["sample_tokens"]


def test_each_step_is_one_forward_and_one_sampling(
    make_executor: Callable[..., Any], make_case: MakeCase, install: Install
) -> None:
    executor = make_executor()
    install("executor.two_phase_step", make_case())
    for _ in range(3):
        assert executor.execute_model("step") == "output"
    assert executor.calls == ["execute_model", "sample_tokens"] * 3


def test_a_step_that_is_finished_already_is_not_sampled_again(
    make_executor: Callable[..., Any], make_case: MakeCase, install: Install
) -> None:
    executor = make_executor(execute_model="finished")
    install("executor.two_phase_step", make_case())
    assert executor.execute_model("step") == "finished"
    assert executor.calls == ["execute_model"]


def test_a_step_of_another_engine_is_left_to_its_owner(
    make_executor: Callable[..., Any], make_case: MakeCase, install: Install
) -> None:
    executor = make_executor("another.Extension")
    install("executor.two_phase_step", make_case())
    assert executor.execute_model("step") is None
    assert executor.calls == ["execute_model"]
    with pytest.raises(RuntimeError, match="State error"):
        executor.execute_model("step")


@pytest.mark.parametrize(
    ("downstream", "edits", "needed"),
    [
        ("speculators_0_3", (), True),
        ("speculators_0_3", (LISTED,), True),
        ("speculators_0_4", (), False),
    ],
    ids=["bare reply, indexed", "list of one", "bare reply, taken as it is"],
)
def test_states_by_request_are_put_by_layer_where_the_first_item_of_the_reply_is_taken(
    make_case: MakeCase, downstream: str, edits: tuple[Any, ...], needed: bool
) -> None:
    need = by_name("executor.unique_reply").need(make_case(downstream, *edits))
    assert (need is not None) is needed


def ask(executor: Any, method: str = "_get_captured_states", **more: Any) -> Any:
    return executor.collective_rpc(method, unique_reply_rank=0, **more)


def test_captured_states_are_one_list_of_layers_in_the_order_of_the_inputs(
    make_executor: Callable[..., Any], make_case: MakeCase, install: Install
) -> None:
    lengths = {f"req_0_{i}": n for i, n in enumerate((3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9))}
    states = {
        r: [[(r, layer, row) for row in range(n)] for layer in range(2)]
        for r, n in sorted(lengths.items(), reverse=True)
    }
    executor = make_executor(_get_captured_states=states)
    install("executor.unique_reply", make_case())
    with call_of(None) as call:
        call.prompts.update({r: [0] * n for r, n in lengths.items()})
        (layers,) = ask(executor)
    assert len(layers) == 2
    for layer, rows in enumerate(layers):
        assert len(rows) == sum(lengths.values())
        offset = 0
        for request_id, n in lengths.items():  # as the downstream cuts them
            assert rows[offset : offset + n] == states[request_id][layer]
            offset += n


def test_a_reply_that_is_a_list_already_is_not_listed_again(
    make_executor: Callable[..., Any], make_case: MakeCase, install: Install
) -> None:
    executor = make_executor()

    def as_0_11_0(
        self: Any, method: str, args: tuple[Any, ...] = (), unique_reply_rank: int | None = None
    ) -> list[Any]:
        return [{"a": ["rows"]}]

    type(executor).collective_rpc = as_0_11_0
    install("executor.unique_reply", make_case("speculators_0_3", LISTED))
    with call_of(None) as call:
        call.prompts["a"] = [0] * 4
        (layers,) = ask(executor)
    assert [layer[0:4] for layer in layers] == ["rows"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"a": [2, 2]}, "Request b has 3 prompt tokens, but its layers have no rows"),
        ({"a": [2, 2], "b": [3, 2]}, r"Request b has 3 prompt tokens.*\[3, 2\] rows"),
        ({"a": [1, 1], "b": [3, 3]}, r"Request a has 2 prompt tokens.*\[1, 1\] rows"),
        ({"a": [2, 2], "b": [4, 4]}, r"Request b has 3 prompt tokens.*\[4, 4\] rows"),
        ({"a": [], "b": [3, 3]}, "Request a has 2 prompt tokens, but its layers have no rows"),
    ],
)
def test_a_request_without_its_rows_is_named(
    make_executor: Callable[..., Any],
    make_case: MakeCase,
    install: Install,
    rows: dict[str, list[int]],
    words: str,
) -> None:
    states = {r: [[0] * n for n in layers] for r, layers in rows.items()}
    executor = make_executor(_get_captured_states=states)
    install("executor.unique_reply", make_case())
    with call_of(None) as call:
        call.prompts.update({"a": [1, 2], "b": [1, 2, 3]})
        with pytest.raises(GuardError, match=words):
            ask(executor)


def test_states_that_are_asked_for_outside_of_a_call_belong_to_nobody(
    make_executor: Callable[..., Any], make_case: MakeCase, install: Install
) -> None:
    executor = make_executor(_get_captured_states={})
    install("executor.unique_reply", make_case())
    with pytest.raises(GuardError, match="outside of a generate"):
        ask(executor)


@pytest.mark.parametrize("reply", [None, ["layer 0", "layer 1"]])
def test_a_reply_of_the_downstreams_own_kind_is_only_listed(
    make_executor: Callable[..., Any], make_case: MakeCase, install: Install, reply: object
) -> None:
    executor = make_executor(_get_captured_states=reply)
    install("executor.unique_reply", make_case())
    assert ask(executor) == [reply]


def test_other_replies_stay_as_they_are(
    make_executor: Callable[..., Any], make_case: MakeCase, install: Install
) -> None:
    executor = make_executor(get_kv_cache_spec={"a": 1}, execute_model=None)
    another = make_executor("another.Extension", _get_captured_states={"a": 1})
    install("executor.unique_reply", make_case())
    assert ask(executor, "get_kv_cache_spec") == {"a": 1}
    assert executor.collective_rpc("get_kv_cache_spec") == [{"a": 1}]
    assert executor.collective_rpc(method="get_kv_cache_spec") == [{"a": 1}]
    assert ask(another) == {"a": 1}
