"""Decoder layers are found by looking; their residual stream is told from what they return."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_compat.capture.layers import decoder, residual_stream
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
        (module(layers=4), ""),
        (module(model=module(layers=4)), "model"),
        (module(language_model=module(layers=4), vision_tower=module(layers=2)), "language_model"),
        (
            module(language_model=module(model=module(layers=4)), vision_tower=module(layers=4)),
            "language_model.model",
        ),
        (
            module(vision_tower=module(encoder=module(layers=4)), model=module(layers=4)),
            "model",
        ),
        (module(model=module(layers=4, head=module(layers=1))), "model"),
    ],
)
def test_the_text_models_layers_are_found(model: Any, path: str) -> None:
    name, found = decoder(model, 4)
    assert name == path
    assert found is (model.get_submodule(path) if path else model)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (module(model=module(layers=3)), "none"),
        (module(), "none"),
        (module(one=module(layers=4), two=module(layers=4)), "'one', 'two'"),
        (
            module(language_model=module(one=module(layers=4), two=module(layers=4))),
            "'language_model.one', 'language_model.two'",
        ),
    ],
)
def test_layers_that_cannot_be_told_are_refused(model: Any, found: str) -> None:
    with pytest.raises(GuardError, match=f"one module with 4 layers, found .*{found}"):
        decoder(model, 4)


def test_a_list_that_is_no_module_list_is_no_layers() -> None:
    model = module(model=module(layers=4))
    model.layers = [1, 2, 3, 4]
    assert decoder(model, 4)[0] == "model"


def test_one_tensor_is_the_stream_and_is_kept_from_later_changes() -> None:
    output = torch.ones(2, 3)
    stream = residual_stream(output, "0")
    output += 1
    assert torch.equal(stream, torch.ones(2, 3))


def test_a_pair_is_summed() -> None:
    hidden, residual = torch.ones(2, 3), torch.full((2, 3), 2.0)
    stream = residual_stream((hidden, residual), "0")
    hidden += 1
    residual += 1
    assert torch.equal(stream, torch.full((2, 3), 3.0))


def test_a_pair_without_a_residual_is_the_stream() -> None:
    hidden = torch.ones(2, 3)
    stream = residual_stream((hidden, None), "0")
    hidden += 1
    assert torch.equal(stream, torch.ones(2, 3))


@pytest.mark.parametrize(
    "output",
    [
        None,
        (),
        (torch.ones(1),),
        (torch.ones(1), torch.ones(1), torch.ones(1)),
        (None, torch.ones(1)),
        [torch.ones(1), torch.ones(1)],
        {"hidden": torch.ones(1)},
        (torch.ones(1), "residual"),
    ],
)
def test_anything_else_is_refused_with_the_layer(output: Any) -> None:
    with pytest.raises(GuardError, match="Decoder layer 7 returned"):
        residual_stream(output, "7")
