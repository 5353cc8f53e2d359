"""Decoder layers are found by looking; their residual stream is told from what they return."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_compat.capture.layers import decoder, leaves_the_sum, stream_reader
from vllm_compat.errors import GuardError

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def module(**children: Any) -> Any:
    """Make a module of the children; a number stands for that many layers."""
    made = torch.nn.Module()
    for name, child in children.items():
        if isinstance(child, int):
            child = torch.nn.ModuleList(torch.nn.Identity() for _ in range(child))
        setattr(made, name, child)
    return made


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (module(layers=4), "layers"),
        (module(model=module(layers=4)), "model.layers"),
        (module(transformer=module(h=4)), "transformer.h"),
        (
            module(language_model=module(layers=4), vision_tower=module(layers=2)),
            "language_model.layers",
        ),
        (
            module(language_model=module(model=module(layers=4)), vision_tower=module(layers=4)),
            "language_model.model.layers",
        ),
        (
            module(vision_tower=module(encoder=module(layers=4)), model=module(layers=4)),
            "model.layers",
        ),
        (module(visual=module(blocks=4), model=module(layers=4)), "model.layers"),
        (module(model=module(layers=4, head=module(layers=1))), "model.layers"),
        (module(model=module(layers=4, norms=4)), "model.layers"),
        (
            module(model=module(layers=torch.nn.ModuleList(module(experts=4) for _ in range(4)))),
            "model.layers",
        ),
    ],
)
def test_the_text_models_layers_are_found(model: Any, path: str) -> None:
    name, found = decoder(model, 4)
    assert name == path
    assert found is model.get_submodule(path)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (module(model=module(layers=3)), "none"),
        (module(), "none"),
        (module(one=module(layers=4), two=module(layers=4)), "'one.layers', 'two.layers'"),
        (
            module(language_model=module(one=module(layers=4), two=module(layers=4))),
            "'language_model.one.layers', 'language_model.two.layers'",
        ),
    ],
)
def test_layers_that_cannot_be_told_are_refused(model: Any, found: str) -> None:
    with pytest.raises(GuardError, match=f"one list of 4 layers, found .*{found}"):
        decoder(model, 4)


def test_a_list_that_is_no_module_list_is_no_layers() -> None:
    model = module(model=module(layers=4))
    model.layers = [1, 2, 3, 4]
    assert decoder(model, 4)[0] == "model.layers"


class Sum:
    """Leaves the sum to the next layer, as most of vLLM's layers do."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.norm(hidden_states)  # type: ignore[attr-defined]
        else:
            hidden_states, residual = self.norm(hidden_states, residual)  # type: ignore[attr-defined]
        return hidden_states, residual


class SumInPlace:
    def forward(self, hidden_states: Any, residual: Any) -> Any:
        residual += hidden_states
        return hidden_states, residual


class SumWithMore:
    def forward(self, hidden_states: Any, residual: Any, cache: Any) -> Any:
        hidden_states, residual = self.norm(hidden_states, residual)  # type: ignore[attr-defined]
        return hidden_states, residual, cache


class ResidualAsTheThird:
    """What Kimi-Linear's layers do on CUDA: the first and the third are the stream together."""

    def forward(self, hidden_states: Any, residual: Any, prefix_sum: Any = None) -> Any:
        hidden_states, prefix_sum, residual = self.norm(  # type: ignore[attr-defined]
            hidden_states, residual, prefix_sum
        )
        return hidden_states, prefix_sum, residual


class HandsOn(Sum):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Whole:
    """Has added the residual already, and returns it all the same, as Command-R does."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        residual = hidden_states
        hidden_states = residual + self.norm(hidden_states)  # type: ignore[attr-defined]
        return hidden_states, residual


class WholeWithoutParameter:
    def forward(self, positions: Any, hidden_states: Any) -> Any:
        residual = hidden_states
        return residual + hidden_states, residual


class One:
    def forward(self, hidden_states: Any) -> Any:
        return hidden_states


class Neither:
    """Reads what it is given on one way only."""

    def forward(self, hidden_states: Any, residual: Any) -> Any:
        if self.first:  # type: ignore[attr-defined]
            residual = hidden_states
        return hidden_states + residual, residual


class Expression:
    def forward(self, hidden_states: Any, residual: Any) -> Any:
        return hidden_states, residual + hidden_states


class TwoWays:
    def forward(self, hidden_states: Any, residual: Any, other: Any) -> Any:
        if residual is None:
            return hidden_states, other
        return hidden_states, residual


@pytest.mark.parametrize("layer", [Sum, SumInPlace, SumWithMore, HandsOn])
def test_a_residual_that_is_read_is_added_by_the_next_layer(layer: type) -> None:
    assert leaves_the_sum(layer) is True


@pytest.mark.parametrize("layer", [Whole, WholeWithoutParameter])
def test_a_residual_that_nobody_reads_has_been_added_already(layer: type) -> None:
    assert leaves_the_sum(layer) is False


@pytest.mark.parametrize("layer", [One, Neither, Expression, TwoWays, torch.nn.Identity, object])
def test_what_the_source_does_not_tell_is_not_guessed(layer: type) -> None:
    assert leaves_the_sum(layer) is None


def test_a_forward_without_source_is_not_guessed() -> None:
    space: dict[str, Any] = {}
    exec("class Made:\n    def forward(self, h, residual):\n        return h, residual", space)
    assert leaves_the_sum(space["Made"]) is None


@pytest.mark.parametrize("layer", [One, Sum, Whole, Neither])
def test_one_tensor_is_the_stream_and_is_kept_from_later_changes(layer: type) -> None:
    output = torch.ones(2, 3)
    stream = stream_reader(layer(), "0")(output)
    output += 1
    assert torch.equal(stream, torch.ones(2, 3))


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: (t,), lambda t: t[None], lambda t: (t[None],)])
def test_a_batch_dimension_and_a_lone_tuple_are_no_hindrance(wrap: Any) -> None:
    """What layers of vLLM's Transformers backend hand back."""
    stream = stream_reader(One(), "0")(wrap(torch.ones(2, 3)))
    assert torch.equal(stream, torch.ones(2, 3))


@pytest.mark.parametrize(("layer", "value"), [(Sum, 3.0), (HandsOn, 3.0), (Whole, 1.0)])
def test_a_pair_is_read_as_its_layer_means_it(layer: type, value: float) -> None:
    hidden, residual = torch.ones(2, 3), torch.full((2, 3), 2.0)
    stream = stream_reader(layer(), "0")((hidden, residual))
    hidden += 1
    residual += 1
    assert torch.equal(stream, torch.full((2, 3), value))


def test_more_than_a_pair_is_read_where_the_sum_is_sure() -> None:
    output = (torch.ones(2, 3), torch.ones(2, 3), None)
    assert torch.equal(stream_reader(SumWithMore(), "0")(output), torch.full((2, 3), 2.0))
    with pytest.raises(GuardError, match=r"Decoder layer 0, Whole .*, returned tuple"):
        stream_reader(Whole(), "0")(output)


def test_something_behind_a_residual_that_is_none_is_refused() -> None:
    assert leaves_the_sum(ResidualAsTheThird) is True, "its source looks like that of a sum"
    for third in (torch.full((2, 3), 10.0), [torch.ones(2, 3)]):
        with pytest.raises(GuardError, match=r"layer 6, ResidualAsTheThird \(.*\), returned None"):
            stream_reader(ResidualAsTheThird(), "6")((torch.ones(2, 3), None, third))


def test_nothing_behind_a_residual_that_is_none_is_no_hindrance() -> None:
    stream = stream_reader(SumWithMore(), "0")((torch.ones(2, 3), None, None))
    assert torch.equal(stream, torch.ones(2, 3))


@pytest.mark.parametrize("more", [torch.ones(4, 2), (torch.ones(4, 2), torch.ones(4, 2)), None])
def test_keys_and_values_behind_a_pair_are_no_hindrance(more: Any) -> None:
    """What HunYuan's layers hand on to those that share their keys and values."""
    output = (torch.ones(2, 3), torch.full((2, 3), 2.0), more)
    assert torch.equal(stream_reader(SumWithMore(), "0")(output), torch.full((2, 3), 3.0))


@pytest.mark.parametrize("second", [torch.ones(2, 1), torch.ones(2, 2, 3), torch.ones(1, 3)])
def test_a_pair_of_two_shapes_is_no_sum(second: Any) -> None:
    """Zaya hands on its router's states there, DeepSeek-V4 several streams; adding would broadcast."""
    with pytest.raises(GuardError, match=r"Decoder layer 3, Sum \(.*of the shapes \[2, 3\] and"):
        stream_reader(Sum(), "3")((torch.ones(2, 3), second))


def test_a_pair_that_the_source_does_not_explain_is_refused() -> None:
    with pytest.raises(GuardError, match=r"Decoder layer 5, Neither .* does not tell"):
        stream_reader(Neither(), "5")((torch.ones(1, 3), torch.ones(1, 3)))


@pytest.mark.parametrize("layer", [One, Sum, Whole, Neither])
def test_a_pair_without_a_residual_is_the_stream(layer: type) -> None:
    hidden = torch.ones(2, 3)
    stream = stream_reader(layer(), "0")((hidden, None))
    hidden += 1
    assert torch.equal(stream, torch.ones(2, 3))


@pytest.mark.parametrize(
    "output",
    [
        None,
        (),
        (torch.ones(1), torch.ones(1), torch.ones(1)),
        (None, torch.ones(1)),
        [torch.ones(1), torch.ones(1)],
        {"hidden": torch.ones(1)},
        (torch.ones(1), "residual"),
    ],
)
def test_anything_else_is_refused_with_the_layer(output: Any) -> None:
    with pytest.raises(GuardError, match=r"Decoder layer 7, Whole \(.*\), returned"):
        stream_reader(Whole(), "7")(output)
