"""The downstream's own loop on a live model is gone with the transaction; the model is a FAKE."""

from __future__ import annotations

import types
from types import ModuleType
from typing import Any

import pytest

from vllm_compat.capture import stock_loop
from vllm_compat.runtime.patching import Transaction


class Base:
    """A FAKE decoder that the downstream puts its own forward on."""

    def embed_input_ids(self) -> None:
        """Have the new name only."""

    def forward(self) -> str:
        return "the model's"


class Model:
    """A FAKE model with its decoder where the downstream looks for it."""

    def __init__(self) -> None:
        self.model = Base()

    def get_submodule(self, name: str) -> Any:
        return getattr(self, name)


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a worker extension over a FAKE model whose layers suit the loop."""
    monkeypatch.setattr(stock_loop, "decoder", lambda model, layers: ("model.layers", [object()]))
    monkeypatch.setattr(stock_loop, "leaves_the_sum", lambda kind: True)
    return types.SimpleNamespace(model_runner=types.SimpleNamespace(model=Model()))


def test_a_revert_gives_the_live_model_its_own_forward_back(
    extension: Any, transaction: Transaction
) -> None:
    base = extension.model_runner.model.model

    def setup() -> None:
        extension._layer_ids = frozenset([1])
        base._extension = extension
        base.forward = types.MethodType(lambda self: "the downstream's", base)

    stock_loop.bind(extension, ModuleType("worker"), setup, 1, transaction)
    assert base.forward() == "the downstream's"
    assert transaction.revert() == []
    assert base.forward() == "the model's"
    assert vars(base) == {}
    assert set(vars(extension)) == {"model_runner"}
