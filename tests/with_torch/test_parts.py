"""Where a forward goes: the time of each part of the decoder layers."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_compat.trial import parts


class FakePart(torch.nn.Module):
    """Takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, hidden: Any) -> Any:
        time.sleep(self.seconds)
        return hidden


class FakeLayer(torch.nn.Module):
    """Two parts, and something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = FakePart(0.02), FakePart(0.06)

    def forward(self, hidden: Any) -> Any:
        time.sleep(0.02)
        return self.mlp(self.self_attn(hidden))


def test_shares_follow_the_time_that_parts_take_and_nothing_stays_behind() -> None:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(FakeLayer() for _ in range(2))
    config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=2))
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=config),
        model_runner=SimpleNamespace(get_model=lambda: model),
    )
    before = set(vars(worker))
    parts.watch(worker)
    for layer in model.layers:
        layer(torch.zeros(1))
    found = parts.shares(parts.seconds(worker))
    assert next(iter(found)) == "mlp (FakePart)"
    assert found["mlp (FakePart)"] > 2 * found["self_attn (FakePart)"] > 0
    assert found["rest"] > 0
    assert sum(found.values()) == pytest.approx(1, abs=0.01)
    assert set(vars(worker)) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
