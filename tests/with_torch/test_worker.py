"""Capture in a worker: real modules with real hooks under FAKE model runners of both kinds.

The model's rows tell what they are: ``[request, position]`` plus 10 for each layer passed.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat.capture.worker import Capture
from vllm_compat.errors import GuardError

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

LAYERS = 4


class Layer(torch.nn.Module):  # type: ignore[misc]
    """Returns a pair whose sum is the stream, as vLLM's layers do; works in place on its inputs."""

    def forward(self, hidden: Any, residual: Any) -> tuple[Any, Any]:
        residual = hidden if residual is None else residual.add_(hidden)
        return torch.full_like(residual, 10.0), residual


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.skip: int | None = None

    def forward(self, rows: Any) -> Any:
        hidden, residual = rows, None
        for number, layer in enumerate(self.model.layers):
            if number != self.skip:
                hidden, residual = layer(hidden, residual)
        return hidden + residual


class RunnerV1:
    """Holds its batch in an order of its own, with gaps, and pads its forward."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.model = Model()
        self.input_batch = SimpleNamespace(req_ids=[])
        self.stale: list[str] = []  # told to be in the batch, although it is not

    def execute_model(self, output: Any) -> Any:
        order = sorted(output.num_scheduled_tokens, reverse=True)
        self.input_batch.req_ids = [*order[:1], None, *order[1:], *self.stale]
        return self.forward(order, output)

    def forward(self, order: list[str], output: Any) -> Any:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        rows = [
            [float(r[1:]), float(computed[r] + i)]
            for r in order
            for i in range(output.num_scheduled_tokens[r])
        ]
        return self.model(torch.tensor([*rows, [-1.0, -1.0]]))

    def dummy_run(self) -> None:
        self.model(torch.full((8, 2), 99.0))


class RunnerV2(RunnerV1):
    """Has no batch to ask, sorts it by length, and warms up through ``execute_model``."""

    def __init__(self) -> None:
        self.model = Model()
        self.stale = []

    def prepare_inputs(self, output: Any) -> Any:
        counts = output.num_scheduled_tokens
        return SimpleNamespace(req_ids=[*sorted(counts, key=counts.__getitem__), *self.stale])

    def execute_model(self, output: Any, *, dummy_run: bool = False) -> Any:
        if dummy_run:
            return super().dummy_run()
        order = self.prepare_inputs(output).req_ids
        return self.forward([r for r in order if r not in self.stale], output)

    def dummy_run(self) -> None:
        output = step({"r9": (0, 3, 3)})
        self.execute_model(output, dummy_run=True)


def step(new: dict[str, tuple[int, int, int]], cached: dict[str, tuple[int, int]] | None = None) -> Any:
    """Make a scheduler output.

    ``new`` maps request ids to (computed, scheduled, prompt length), ``cached`` to (computed,
    scheduled).
    """
    cached = cached or {}
    scheduled = {r: n for r, (_, n, _) in new.items()} | {r: n for r, (_, n) in cached.items()}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r, num_computed_tokens=start, prompt_token_ids=[0] * length)
            for r, (start, _, length) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[start for start, _ in cached.values()]
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
    )


def rows(request: int, count: int, layer: int) -> Any:
    """Return the stream of a request after a layer."""
    return torch.tensor([[request, i] for i in range(count)]) + 10.0 * (layer + 1)


@pytest.fixture(params=[True, False], ids=["shared memory", "pickled"])
def shared(request: pytest.FixtureRequest) -> bool:
    """How the rows leave the worker."""
    return bool(request.param)


@pytest.fixture(params=[RunnerV1, RunnerV2])
def extension(request: pytest.FixtureRequest, fake_modules: Callable[..., None]) -> Any:
    """A worker with a FAKE runner, in process groups of one rank."""
    fake_modules("vllm")
    config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=LAYERS))
    return SimpleNamespace(
        model_runner=request.param(), vllm_config=SimpleNamespace(model_config=config)
    )


def fetch(capture: Capture) -> Any:
    """Return the states as the driver gets them."""
    return pickle.loads(pickle.dumps(capture.states()))


def same(found: Any, expected: dict[str, list[Any]]) -> None:
    assert set(found) == set(expected)
    for request_id, layers in expected.items():
        assert len(found[request_id]) == len(layers)
        for one, other in zip(found[request_id], layers, strict=True):
            assert torch.equal(one, other), request_id


def test_rows_go_to_their_requests_whatever_the_batchs_order(extension: Any, shared: bool) -> None:
    capture = Capture(extension, [0, 2], shared=shared)
    runner = extension.model_runner
    output = runner.execute_model(step({"r1": (0, 3, 3), "r2": (0, 1, 1), "r3": (0, 2, 2)}))
    assert output.shape[0] == 7, "the model's own result is its own"
    same(
        fetch(capture),
        {f"r{r}": [rows(r, n, layer) for layer in (0, 2)] for r, n in ((1, 3), (2, 1), (3, 2))},
    )


def test_layers_come_as_they_were_asked_for(extension: Any, shared: bool) -> None:
    capture = Capture(extension, [3, 0, 3], shared=shared)
    extension.model_runner.execute_model(step({"r1": (0, 2, 2)}))
    same(fetch(capture), {"r1": [rows(1, 2, layer) for layer in (3, 0, 3)]})


def test_chunks_and_what_is_computed_again(extension: Any, shared: bool) -> None:
    capture = Capture(extension, [1], shared=shared)
    runner = extension.model_runner
    runner.execute_model(step({"r1": (0, 2, 5)}))
    runner.execute_model(step({"r2": (0, 3, 3)}, {"r1": (2, 1)}))
    runner.execute_model(step({}, {"r1": (0, 4)}))  # preempted in between
    runner.execute_model(step({"r3": (0, 1, 1)}, {"r1": (4, 1)}))
    same(fetch(capture), {f"r{r}": [rows(r, n, 1)] for r, n in ((1, 5), (2, 3), (3, 1))})


def test_each_call_has_its_own_rows(extension: Any, shared: bool) -> None:
    capture = Capture(extension, [1], shared=shared)
    for request in (1, 2, 3):
        capture.reset()
        extension.model_runner.execute_model(step({f"r{request}": (0, 4, 4)}))
        same(fetch(capture), {f"r{request}": [rows(request, 4, 1)]})


def test_warm_up_and_steps_without_tokens_are_not_captured(extension: Any, shared: bool) -> None:
    capture = Capture(extension, [0], shared=shared)
    runner = extension.model_runner
    runner.dummy_run()
    runner.execute_model(step({}))
    runner.execute_model(step({"r1": (0, 2, 2)}))
    runner.dummy_run()
    same(fetch(capture), {"r1": [rows(1, 2, 0)]})


def test_a_layer_that_never_ran_is_told_once(extension: Any, shared: bool) -> None:
    capture = Capture(extension, [0, 2], shared=shared)
    runner = extension.model_runner
    runner.model.skip = 2
    runner.execute_model(step({"r1": (0, 2, 2)}))
    with pytest.raises(GuardError, match=r"without the layers \[2\]"):
        capture.states()
    runner.model.skip = None
    capture.reset()
    runner.execute_model(step({"r2": (0, 2, 2)}))
    same(fetch(capture), {"r2": [rows(2, 2, layer) for layer in (0, 2)]})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_row_is_told_with_its_request_layer_and_token(
    extension: Any, shared: bool, value: float
) -> None:
    capture = Capture(extension, [0, 1], shared=shared)
    runner = extension.model_runner

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        hidden, residual = output
        return hidden.index_fill(0, torch.tensor([1]), value), residual

    # In front of the capture's own hook, as if the layer itself had returned it.
    runner.model.model.layers[1].register_forward_hook(spoil, prepend=True)
    runner.execute_model(step({"r1": (0, 2, 2)}))
    with pytest.raises(GuardError, match=r"Request r1, layer 1: 1 rows .*the first is token 1\."):
        capture.states()


def test_a_hole_is_told(extension: Any, shared: bool) -> None:
    capture = Capture(extension, [0], shared=shared)
    extension.model_runner.execute_model(step({"r1": (16, 2, 18)}))
    with pytest.raises(GuardError, match="Request r1 continues at token 16, but only 0"):
        capture.states()


def test_a_batch_of_other_requests_is_told(extension: Any, shared: bool) -> None:
    capture = Capture(extension, [0], shared=shared)
    extension.model_runner.stale = ["r7"]
    extension.model_runner.execute_model(step({"r1": (0, 2, 2)}))
    with pytest.raises(GuardError, match=r"holds the requests \['r1', 'r7'\].*planned \['r1'\]"):
        capture.states()


def test_a_step_that_fails_does_not_spoil_the_next_call(extension: Any, shared: bool) -> None:
    capture = Capture(extension, [0], shared=shared)
    runner = extension.model_runner

    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    hook = runner.model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.execute_model(step({"r1": (0, 2, 2)}))
    hook.remove()
    capture.reset()
    runner.execute_model(step({"r2": (0, 1, 1)}))
    same(fetch(capture), {"r2": [rows(2, 1, 0)]})


def groups(monkeypatch: pytest.MonkeyPatch, name: str, **changed: int) -> None:
    module = importlib.import_module("vllm.distributed")
    group = SimpleNamespace(world_size=1, rank_in_group=0)
    group.__dict__.update(changed)
    monkeypatch.setattr(module, name, lambda: group)


def test_other_ranks_capture_nothing_and_have_no_hooks(
    extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups(monkeypatch, "get_tp_group", rank_in_group=1)
    runner = extension.model_runner
    capture = Capture(extension, [0])
    assert not any(layer._forward_hooks for layer in runner.model.model.layers)
    assert "execute_model" not in vars(runner)
    assert capture.states() is None
    capture.reset()


def test_pipeline_parallelism_is_refused(extension: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups(monkeypatch, "get_pp_group", world_size=2)
    with pytest.raises(GuardError, match=r"Pipeline parallelism.*use tensor parallelism"):
        Capture(extension, [0])


def test_a_runner_of_another_kind_is_refused(extension: Any) -> None:
    extension.model_runner = SimpleNamespace(model=Model(), device=torch.device("cpu"))
    with pytest.raises(GuardError, match="tells the order of its batch in no way"):
        Capture(extension, [0])


class Auxiliary(Model):
    """Hands over auxiliary states, as vLLM's models do for EAGLE-3: id k is the input of layer k."""

    supports_eagle3 = True
    last = True

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.asked = layers

    def forward(self, rows: Any) -> Any:
        hidden, residual, states = rows, None, []
        for number, layer in enumerate(self.model.layers):
            if number in self.asked:
                states.append(hidden + residual)
            hidden, residual = layer(hidden, residual)
        if LAYERS in self.asked and self.last:
            states.append(hidden + residual)
        return hidden + residual, states


class UnclearLayer(Layer):
    """Is a layer whose source does not tell what its pair means."""

    def forward(self, hidden: Any, residual: Any) -> tuple[Any, Any]:
        if hidden is None:
            residual = hidden
        return super().forward(hidden, residual)[0], residual


@pytest.mark.parametrize("capture", ["auxiliary", "hooks", "auto"])
def test_auxiliary_states_and_hooks_agree(extension: Any, capture: str) -> None:
    runner = extension.model_runner
    runner.model = Auxiliary()
    runner.model.set_aux_hidden_state_layers(())
    made = Capture(extension, [3, 0, 0, 2], capture=capture, shared=False)
    assert made.strategy == ("auxiliary" if capture == "auxiliary" else "hooks")
    runner.execute_model(step({"r1": (0, 2, 3), "r2": (0, 1, 1)}))
    output = runner.execute_model(step({}, {"r1": (2, 1)}))
    assert torch.is_tensor(output) == (capture == "auxiliary"), "the states are taken out"
    asked = (3, 0, 0, 2)
    same(
        fetch(made),
        {"r1": [rows(1, 3, k) for k in asked], "r2": [rows(2, 1, k) for k in asked]},
    )


@pytest.mark.parametrize("why", ["nested where nobody looks", "layers that do not tell"])
def test_auxiliary_states_serve_where_hooks_do_not(extension: Any, why: str) -> None:
    model = extension.model_runner.model = Auxiliary()
    if why.startswith("nested"):
        model.model.layers = torch.nn.ModuleList([*model.model.layers[:LAYERS], torch.nn.Identity()])
    else:
        model.model.layers[2] = UnclearLayer()
    assert Capture(extension, [1], shared=False).strategy == (
        "auxiliary" if why.startswith("nested") else "hooks"
    )
    assert Capture(extension, [2], shared=False).strategy == "auxiliary"
    with pytest.raises(GuardError) if why.startswith("nested") else nullcontext():
        Capture(extension, [2], capture="hooks", shared=False)


def test_a_state_that_the_model_leaves_out_is_an_error(extension: Any) -> None:
    model = extension.model_runner.model = Auxiliary()
    model.last = False
    Capture(extension, [1, 3], capture="auxiliary", shared=False)
    with pytest.raises(GuardError, match=r"after the layers \[1, 3\] and handed over 1"):
        extension.model_runner.execute_model(step({"r1": (0, 1, 1)}))


def test_a_model_without_auxiliary_states_is_told(extension: Any) -> None:
    with pytest.raises(GuardError, match="Model hands over no auxiliary hidden states"):
        Capture(extension, [1], capture="auxiliary", shared=False)


def pretend(model: Any, name: str, module: str, **attributes: Any) -> None:
    """Give the layers of a model a class of that name, as if from that module."""
    made = type(name, (Layer,), {"__module__": module, **attributes})
    model.model.layers = torch.nn.ModuleList(made() for _ in range(LAYERS))


V32 = ("DeepseekV32DecoderLayer", "vllm.models.deepseek_v32.nvidia.model")


@pytest.mark.parametrize("capture", ["auto", "hooks", "auxiliary"])
@pytest.mark.parametrize("rank", [0, 1])
def test_layers_that_leave_their_reduction_are_refused_with_several_ranks(
    extension: Any, monkeypatch: pytest.MonkeyPatch, capture: str, rank: int
) -> None:
    pretend(extension.model_runner.model, *V32)
    ranks = SimpleNamespace(world_size=2, rank_in_group=rank)
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: ranks)
    with pytest.raises(GuardError, match=r"^Decoder layer DeepseekV32DecoderLayer \(vllm.*\) with 2"):
        Capture(extension, [0], capture=capture)


def test_the_same_layers_are_captured_with_one_rank(extension: Any) -> None:
    pretend(extension.model_runner.model, *V32)
    capture = Capture(extension, [0], shared=False)
    extension.model_runner.execute_model(step({"r1": (0, 2, 2)}))
    same(fetch(capture), {"r1": [rows(1, 2, 0)]})


def test_layers_of_that_name_from_another_file_are_captured_with_several_ranks(
    extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CPU builds have: the class of that name that reduces its own sums."""
    pretend(extension.model_runner.model, "Qwen3_5DecoderLayer", "vllm.model_executor.models.qwen3_5")
    other_rank(monkeypatch, lambda mine: mine)
    capture = Capture(extension, [0], shared=False)
    extension.model_runner.execute_model(step({"r1": (0, 2, 2)}))
    same(fetch(capture), {"r1": [rows(1, 2, 0)]})


class RMSNorm(torch.nn.Identity):  # type: ignore[misc]
    """Is the last norm by its name."""


def other_rank(monkeypatch: pytest.MonkeyPatch, holds: Callable[[Any], Any], rank: int = 0) -> None:
    """Give this process, a rank, a FAKE second one that holds what ``holds`` makes of its rows."""
    ranks = SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group="the ranks")
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: ranks)

    def gather(into: list[Any], mine: Any, group: str) -> None:
        assert group == "the ranks"
        into[:] = [mine, holds(mine)]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)


def test_a_partial_sum_is_found_by_comparing_ranks(
    extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_rank(monkeypatch, lambda mine: {step: [rows * 0.5 for rows in mine[step]] for step in mine})
    capture = Capture(extension, [0], shared=False)
    extension.model_runner.execute_model(step({"r1": (0, 2, 2)}))
    with pytest.raises(GuardError, match=r"layer 0, Layer .*ranks 0 and 1 hold different rows"):
        capture.states()


def test_a_rank_that_has_failed_still_meets_the_others(
    extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[Any] = []
    other_rank(monkeypatch, lambda mine: met.append(mine) or {})
    extension.model_runner.model.skip = 0
    capture = Capture(extension, [0], shared=False)
    extension.model_runner.execute_model(step({"r1": (0, 2, 2)}))
    assert met == [], "not within the step"
    with pytest.raises(GuardError, match="without the layers"):
        capture.states()
    assert met == [{}]


def test_a_step_that_raises_meets_nobody_and_is_compared_with_nothing(
    extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[Any] = []
    other_rank(monkeypatch, lambda mine: met.append(mine) or {1: []})
    capture = Capture(extension, [0], shared=False)

    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    hook = extension.model_runner.model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        extension.model_runner.execute_model(step({"r1": (0, 2, 2)}))
    hook.remove()
    assert met == []
    with pytest.raises(GuardError, match="A step has failed: RuntimeError: out of memory"):
        capture.states()
    assert met == [{}]
    assert not any(m._forward_pre_hooks for m in extension.model_runner.model.model.modules())


@pytest.mark.parametrize("strategy", ["hooks", "auxiliary"])
def test_a_rank_that_does_not_capture_shows_the_same_rows_and_never_asks_for_the_order(
    extension: Any, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    other_rank(monkeypatch, lambda mine: mine, rank=1)
    shown: list[Any] = []

    def gather(into: list[Any], mine: Any, group: str) -> None:
        shown.append(mine)
        into[:] = [mine, mine]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    runner = extension.model_runner
    runner.model = Auxiliary()
    runner.model.set_aux_hidden_state_layers(())
    runner.model.norm = RMSNorm()
    capture = Capture(extension, [0, 2], capture=strategy, shared=False)
    runner.execute_model(step({"r1": (0, 2, 2)}))
    assert not any(layer._forward_hooks for layer in runner.model.model.layers), "outside of a step"
    assert capture.states() is None
    ((number, sampled),) = shown[0].items()
    assert number == 1
    assert all(torch.equal(one, rows(1, 2, k)) for one, k in zip(sampled, (0, 2), strict=True))


def test_a_hook_of_a_proof_never_raises_into_the_model(
    extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise LookupError("what is this")

    monkeypatch.setattr("vllm_compat.capture.proof.StreamProof._rows", fail)
    capture = Capture(extension, [0], shared=False)
    extension.model_runner.execute_model(step({"r1": (0, 2, 2)}))
    with pytest.raises(
        GuardError, match=r"Layer \(.*\) could not be looked at .*what is this.*without="
    ):
        capture.states()


def test_without_proofs_a_wrong_stream_passes_and_no_rank_is_met(
    extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[Any] = []
    other_rank(monkeypatch, lambda mine: met.append(mine) or {})
    capture = Capture(extension, [0], shared=False, prove=False)
    extension.model_runner.execute_model(step({"r1": (0, 2, 2)}))
    same(fetch(capture), {"r1": [rows(1, 2, 0)]})
    assert met == []


def test_a_second_forward_in_a_step_is_refused(extension: Any) -> None:
    forward = extension.model_runner.model.forward
    capture = Capture(extension, [0], shared=False)
    extension.model_runner.model.forward = lambda rows: (forward(rows), forward(rows * 2))[0]
    extension.model_runner.execute_model(step({"r1": (0, 2, 2)}))
    with pytest.raises(GuardError, match=r"Decoder layer 0, Layer .* ran more than once in one step"):
        capture.states()


def test_a_batch_without_any_step_is_an_error_in_words(extension: Any) -> None:
    capture = Capture(extension, [0])
    capture.reset()
    with pytest.raises(GuardError, match="No step of this batch has reached the model"):
        capture.states()


def test_a_residual_as_the_third_is_refused_on_one_rank(extension: Any) -> None:
    pretend(
        extension.model_runner.model,
        "KimiDecoderLayer",
        "vllm.models.kimi_k3.nvidia.model",
        use_attn_res=False,
    )
    with pytest.raises(GuardError, match=r"KimiDecoderLayer \(vllm/models/kimi_k3/nvidia/model.py"):
        Capture(extension, [0])


def test_an_unknown_layer_with_its_residual_as_the_third_gives_no_rows(extension: Any) -> None:
    class Third(Layer):
        def forward(self, hidden: Any, residual: Any, prefix: Any = None) -> Any:
            hidden, residual = super().forward(hidden, residual)
            return hidden, prefix, residual

    class Three(Model):
        def forward(self, rows: Any) -> Any:
            hidden, residual = rows, None
            for layer in self.model.layers:
                hidden, _, residual = layer(hidden, residual)
            return hidden + residual

    extension.model_runner.model = Three()
    extension.model_runner.model.model.layers = torch.nn.ModuleList(Third() for _ in range(LAYERS))
    capture = Capture(extension, [1], shared=False)
    extension.model_runner.execute_model(step({"r1": (0, 2, 2)}))
    with pytest.raises(GuardError, match=r"Decoder layer 1, Third .* returned None as its residual"):
        capture.states()
