"""Faults put in on purpose, under ``apply()`` alone: each is stopped, and told with layer and file.

`FAULTS` is the table of docs/architecture.md, section "What is proven": a test holds it there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.with_torch import faulty
from tests.with_torch.faulty import LAYERS, PROMPTS, Runner, SecondRunner, batch, step

from vllm_compat.capture.rows import Span
from vllm_compat.capture.worker import Capture
from vllm_compat.errors import GuardError
from vllm_compat.trial.cell import describe_proofs

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
LAYER = r"Decoder layer \d, {} \(.*faulty.py:\d+\)"
OTHER = LAYER.format("DecoderLayer") + ", hands on something else"
WRONG_TOKEN = "the model was given other {} in this row"


@dataclass
class World:
    """One worker with a FAKE runner."""

    runner: Any
    capture: Any = None
    strategy: str = "auto"

    @property
    def model(self) -> Any:
        return self.runner.model


@dataclass(frozen=True)
class Fault:
    """What goes wrong, the identity that sees it, and the words with which it is stopped.

    ``before`` is done to the world before capture is set up, ``after`` then; ``run`` computes.
    """

    name: str
    identity: str
    words: str
    before: Callable[[World], Any] = lambda world: None
    after: Callable[[World], Any] = lambda world: None
    run: Callable[[Any], None] = batch
    runner: type = Runner


def layers_are(layer: type) -> Callable[[World], None]:
    return lambda world: world.model.replace_layers(layer)


def runner_has(**attributes: Any) -> Callable[[World], None]:
    return lambda world: world.runner.__dict__.update(attributes)


def model_has(**attributes: Any) -> Callable[[World], None]:
    return lambda world: world.model.__dict__.update(attributes)


def takes(change: Callable[[Any], Any]) -> Callable[[World], None]:
    """Return a fault that changes what was captured of the middle layer when a step ends."""

    def put(world: World) -> None:
        end = world.capture._end

        def faulty_end() -> None:
            captured = world.capture._captured
            if 1 in captured:
                captured[1] = change(captured[1])
            end()

        world.capture._end = faulty_end

    return put


def stale() -> Callable[[Any], Any]:
    held: list[Any] = []

    def change(rows: Any) -> Any:
        held.append(rows.clone())
        return rows if len(held) == 1 else _filled(held[-2], len(rows))

    return change


def _filled(rows: Any, count: int) -> Any:
    return torch.cat([rows, rows])[:count]


def reads(change: Callable[[Any, Any], Any]) -> Callable[[World], None]:
    """Return a fault in the reading of the middle layer's pair, in front of everything else."""

    def put(world: World) -> None:
        layer = world.model.model.layers[1]

        def hook(module: Any, inputs: Any, output: Any) -> None:
            world.capture._captured[1] = change(inputs, output).clone()

        layer.register_forward_hook(hook)

    return put


def next_layers_rows(world: World) -> None:
    end = world.capture._end

    def faulty_end() -> None:
        captured = world.capture._captured
        if captured:
            captured[0], captured[1] = captured[1], captured[0]
        end()

    world.capture._end = faulty_end


def spans_swapped(world: World) -> None:
    now = world.capture._spans_now

    def swapped() -> tuple[Span, ...]:
        one, other, *more = now()
        if (one.start, one.count) != (other.start, other.count):
            return (one, other, *more)
        return (
            Span(other.request_id, one.start, one.count),
            Span(one.request_id, one.start, one.count),
            *more,
        )

    world.capture._spans_now = swapped


def one_row_twice(rows: Any) -> Any:
    rows[1] = rows[0]
    return rows


def auxiliary(world: World) -> None:
    world.strategy = "auxiliary"


def off_by_one(world: World) -> None:
    auxiliary(world)
    ask = world.model.set_aux_hidden_state_layers
    world.model.set_aux_hidden_state_layers = lambda layers: ask(
        (*(i + 1 for i in layers if i < LAYERS), 1)
    )


def written_to_later(world: World) -> None:
    """Hand over the residual itself, to which the next layer's norm adds."""
    auxiliary(world)
    world.model.state_of = lambda hidden, residual: residual


def runs_twice(world: World) -> None:
    world.model.order = [0, 1, 1, 2, 3]


def other_rank(change: Callable[[Any], Any]) -> Callable[[World], None]:
    """Return a fault on a FAKE second rank, which holds what ``change`` makes of rank 0's rows."""

    def put(world: World) -> None:
        def gather(into: list[Any], mine: Any, group: Any) -> None:
            theirs = {number: [change(rows) for rows in rows_of] for number, rows_of in mine.items()}
            into[:] = [mine, theirs]

        world.gather = gather  # type: ignore[attr-defined]

    return put


def chunk_lost(runner: Any) -> None:
    runner.execute_model(step({"r1": 3, "r2": 2}))
    runner.execute_model(step({"r3": 4}, {"r1": (4, 1)}))


def second_half_first(ids: Any, positions: Any) -> tuple[Any, Any]:
    return ids.roll(2, 0), positions


def nothing(runner: Any) -> None:
    pass


def two_of_one_length(runner: Any) -> None:
    runner.execute_model(step({"r1": 2, "r2": 2}))
    runner.execute_model(step({"r3": 4}, {"r1": (2, 3)}))


FAULTS = (
    Fault(
        "rows lie in another order than `input_batch.req_ids` says (S2)",
        "tokens",
        WRONG_TOKEN.format("ids"),
        runner_has(tell=lambda order: order[::-1]),
    ),
    Fault(
        "`prepare_inputs` names requests in another order than the rows lie (S3)",
        "tokens",
        WRONG_TOKEN.format("ids"),
        runner_has(tell=lambda order: order[::-1]),
        runner=SecondRunner,
    ),
    Fault(
        "padding stands in front of the rows (S6)",
        "tokens",
        WRONG_TOKEN.format("ids"),
        runner_has(padding=2),
    ),
    Fault(
        "rows of another request",
        "tokens",
        WRONG_TOKEN.format("ids"),
        after=spans_swapped,
        run=two_of_one_length,
    ),
    Fault(
        "all tokens of a step shifted by one",
        "tokens",
        WRONG_TOKEN.format("ids"),
        runner_has(inputs=lambda ids, positions: (ids.roll(1, 0), positions.roll(1, 0))),
    ),
    Fault(
        "one token computed twice, another not",
        "tokens",
        WRONG_TOKEN.format("ids"),
        runner_has(
            inputs=lambda ids, positions: (ids.index_copy(0, torch.tensor([1]), ids[:1]), positions)
        ),
    ),
    Fault(
        "the second half of a prompt in the place of the first",
        "tokens",
        WRONG_TOKEN.format("ids"),
        runner_has(inputs=second_half_first),
    ),
    Fault(
        "positions counted from one",
        "tokens",
        WRONG_TOKEN.format("positions"),
        runner_has(inputs=lambda ids, positions: (ids, positions + 1)),
    ),
    Fault(
        "a later chunk's positions counted from zero",
        "tokens",
        WRONG_TOKEN.format("positions"),
        runner_has(
            inputs=lambda ids, positions: (ids, torch.where(positions > 2, positions - 3, positions))
        ),
    ),
    Fault(
        "a layer adds its output to the residual itself (S1)",
        "stream",
        LAYER.format("AddsItself") + ", hands on something else",
        layers_are(faulty.AddsItself),
    ),
    Fault("the residual dropped", "stream", OTHER, after=reads(lambda inputs, output: output[0])),
    Fault("the output dropped", "stream", OTHER, after=reads(lambda inputs, output: output[1])),
    Fault(
        "the residual added twice",
        "stream",
        OTHER,
        after=reads(lambda inputs, output: output[0] + 2 * output[1]),
    ),
    Fault(
        "a layer's input for its output", "stream", OTHER, after=reads(lambda inputs, output: inputs[1])
    ),
    Fault(
        "normed rows for the stream",
        "stream",
        OTHER,
        after=takes(lambda rows: rows / rows.norm(dim=-1, keepdim=True) * 4),
    ),
    Fault("captured rows reversed", "stream", OTHER, after=takes(lambda rows: rows.flip(0))),
    Fault("captured rows shifted by one", "stream", OTHER, after=takes(lambda rows: rows.roll(1, 0))),
    Fault("one captured row twice", "stream", OTHER, after=takes(one_row_twice)),
    Fault("layer k captured as k + 1", "stream", OTHER, after=next_layers_rows),
    Fault("a buffer of the step before", "stream", OTHER, after=lambda world: takes(stale())(world)),
    Fault("rows scaled by 1.05", "stream", OTHER, after=takes(lambda rows: rows * 1.05)),
    Fault(
        "rows rounded to eight bits",
        "stream",
        OTHER,
        after=takes(lambda rows: rows.to(torch.float8_e4m3fn).float()),
    ),
    Fault(
        "rows rounded to bfloat16",
        "stream",
        LAYER.format("DecoderLayer") + ": rows were captured as torch.bfloat16",
        # of all layers: rows of two kinds in one step are refused before anything is compared
        after=takes(lambda rows: rows.bfloat16()),
    ),
    Fault("layers run in another order than they stand", "stream", OTHER, model_has(order=[0, 2, 1, 3])),
    Fault("auxiliary states off by one", "stream", OTHER, off_by_one),
    Fault("an auxiliary state that the next layer writes to", "stream", OTHER, written_to_later),
    Fault(
        "several streams a token (hyper-connections)",
        "reading",
        LAYER.format("Streams") + r", hands on \[5, 4, 16\]: a layer of several",
        layers_are(faulty.Streams),
    ),
    Fault(
        "each step ends with a second forward of the same size (S5)",
        "once",
        LAYER.format("DecoderLayer") + ", ran more than once in one step",
        runner_has(again=True),
    ),
    Fault(
        "a layer runs twice in a forward, or its hook fires twice",
        "once",
        LAYER.format("DecoderLayer") + ", ran more than once in one step",
        runs_twice,
    ),
    Fault(
        "a step is computed in two halves (ubatching)",
        "once",
        LAYER.format("DecoderLayer") + ", ran more than once in one step",
        runner_has(halves=True),
    ),
    Fault("a layer is left out", "once", r"without the layers \[1\]", model_has(order=[0, 2, 3])),
    Fault(
        "logits are computed from another forward",
        "logits",
        "TinyForCausalLM computes logits from rows that its last norm has not made",
        runner_has(serve=lambda rows: rows.flip(0)),
    ),
    Fault(
        "layers see the rows in another order, which is undone in front of the head",
        "logits",
        "TinyForCausalLM computes logits from rows that its last norm has not made",
        lambda world: model_has(
            behind_the_embedding=lambda rows: rows.flip(0), behind_the_norm=lambda rows: rows.flip(0)
        )(world),
    ),
    Fault(
        "partial sums left to the next norm (S15)",
        "ranks",
        LAYER.format("DecoderLayer") + r": ranks 0 and 1 hold different rows \(by up to 70%\)",
        other_rank(lambda rows: rows * 0.3),
    ),
    Fault(
        "rank 1 has other rows",
        "ranks",
        LAYER.format("DecoderLayer") + ": ranks 0 and 1 hold different rows",
        other_rank(lambda rows: rows.flip(0)),
    ),
    Fault(
        "ranks have shards of the rows",
        "ranks",
        LAYER.format("DecoderLayer") + ": ranks 0 and 1 hold different rows",
        other_rank(lambda rows: rows[:1]),
    ),
    Fault(
        "the residual handed on as the third, behind None (Kimi-Linear)",
        "reading",
        LAYER.format("ThirdElement") + ", returned tuple, which is neither",
        layers_are(faulty.ThirdElement),
    ),
    Fault(
        "a dictionary handed on",
        "reading",
        LAYER.format("InDictionary") + ", returned dict",
        layers_are(faulty.InDictionary),
    ),
    Fault(
        "a pair whose meaning the source does not tell",
        "reading",
        LAYER.format("DoesNotTell") + ", returned a pair of tensors, and the source",
        lambda world: (layers_are(faulty.DoesNotTell)(world), setattr(world, "strategy", "hooks")),
    ),
    Fault("a chunk lost", "bookkeeping", "Request r1 continues at token 4, but only 3", run=chunk_lost),
    Fault(
        "rows cut (sequence parallelism)",
        "bookkeeping",
        "rows are sharded or cut",
        after=takes(lambda rows: rows[: len(rows) // 2]),
    ),
    Fault(
        "no step reaches the model",
        "bookkeeping",
        "No step of this batch has reached the model",
        run=nothing,
    ),
    Fault("rows overflow", "values", "not finite", after=takes(lambda rows: rows * float("inf"))),
    Fault("rows of zeros", "values", "all zero", after=takes(lambda rows: rows * 0)),
)

NOT_SEEN = (
    Fault("rows off by less than 1 %", "none", "", after=takes(lambda rows: rows * 1.005)),
    Fault(
        "other weights, or an attention that sees what it should not",
        "none",
        "",
        lambda world: [torch.nn.init.ones_(layer.mlp.weight) for layer in world.model.model.layers],
    ),
)


@pytest.fixture
def world(
    request: pytest.FixtureRequest, fake_modules: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> World:
    """Return a worker with the fault put in, captured as ``apply()`` alone captures."""
    fault: Fault = request.param
    fake_modules("vllm")
    found = World(fault.runner())
    fault.before(found)
    if hasattr(found, "gather"):
        ranks = SimpleNamespace(world_size=2, rank_in_group=0, cpu_group=None)
        monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: ranks)
        monkeypatch.setattr(torch.distributed, "all_gather_object", found.gather)
    config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=LAYERS))
    extension = SimpleNamespace(
        model_runner=found.runner, vllm_config=SimpleNamespace(model_config=config)
    )
    found.capture = Capture(extension, [0, 1, 3], capture=found.strategy, shared=False)
    fault.after(found)
    return found


def rows_of(world: World, run: Callable[[Any], None]) -> Any:
    run(world.runner)
    return world.capture.states()


def faults(found: tuple[Fault, ...]) -> Any:
    return pytest.mark.parametrize(
        ("world", "fault"), [(f, f) for f in found], indirect=["world"], ids=[f.name for f in found]
    )


@faults(FAULTS)
def test_a_fault_is_stopped(world: World, fault: Fault) -> None:
    with pytest.raises(GuardError, match=fault.words):
        rows_of(world, fault.run)


@faults(NOT_SEEN)
def test_what_no_identity_sees_is_known(world: World, fault: Fault) -> None:
    assert set(rows_of(world, fault.run)) == set(PROMPTS)


CLEAN = tuple(
    Fault(f"{runner.__name__}, {name}", "", "", before, runner=runner)
    for runner in (Runner, SecondRunner)
    for name, before in (
        ("one rank", lambda world: None),
        ("auxiliary states", auxiliary),
        ("two ranks", other_rank(lambda rows: rows.clone())),
        ("rows behind", runner_has(inputs=lambda i, p: (torch.cat([i, i[:3]]), torch.cat([p, p[:3]])))),
    )
)


@faults(CLEAN)
def test_without_a_fault_rows_are_handed_over(world: World, fault: Fault) -> None:
    for _ in range(5):
        world.capture.reset()
        states = rows_of(world, fault.run)
        assert {name: len(layers[0]) for name, layers in states.items()} == {"r1": 5, "r2": 2, "r3": 4}
    proofs = describe_proofs(SimpleNamespace(_vllm_compat_capture=world.capture))
    assert proofs is not None
    assert proofs["steps_watched"] > 0
    assert not proofs["unproven_layers"]


def test_the_page_has_this_table() -> None:
    rows = re.findall(
        r"^\| (.+) \| (tokens|stream|once|logits|ranks|reading|bookkeeping|values|none) \|$",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    wanted = [(fault.name, fault.identity) for fault in (*FAULTS, *NOT_SEEN)]
    assert rows == wanted, "\n".join(f"| {name} | {identity} |" for name, identity in wanted)
