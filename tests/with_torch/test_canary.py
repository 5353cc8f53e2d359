"""The canary against a FAKE extraction whose rows depend on nothing but the prompt up to there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat.canary import PROMPTS, check_canary, has_router
from vllm_compat.errors import GuardError

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

LAYERS, WIDTH = 2, 64
GIVEN = [[3, 1, 4, 1, 5, 9], [2], [6, 5, 3], [5, 8, 9], [3, 1, 4, 1, 5, 9]]
Batch = list[list[int]]


def rows(prompt: list[int], layer: int, dtype: Any) -> Any:
    """Return rows of which each is a function of the tokens up to there."""
    made = []
    for end in range(1, len(prompt) + 1):
        seed = hash((layer, *prompt[:end])) % 2**31
        made.append(torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)))
    return torch.stack(made).to(dtype)


def extract(batch: Batch, dtype: Any = torch.float32) -> list[dict[str, Any]]:
    return [{"hidden_states": [rows(p, layer, dtype) for layer in range(LAYERS)]} for p in batch]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_depends_on_the_prompt_alone_passes(dtype: Any) -> None:
    seen = check_canary(lambda batch: extract(batch, dtype), GIVEN, extract(GIVEN, dtype), routed=False)
    assert (seen.prompts, seen.worst, seen.median) == (len(GIVEN), 0.0, 0.0)


def test_what_the_dtype_explains_passes() -> None:
    def again(batch: Batch) -> Any:
        found = extract(batch, torch.bfloat16)
        for result in found:
            result["hidden_states"] = [layer * (1 + 1 / 128) for layer in result["hidden_states"]]
        return found

    seen = check_canary(again, GIVEN, extract(GIVEN, torch.bfloat16), routed=False)
    assert 0 < seen.median <= seen.worst < 0.02


def test_a_large_batch_is_repeated_in_part() -> None:
    asked: list[Batch] = []

    def again(batch: Batch) -> Any:
        asked.append(batch)
        return extract(batch)

    given = [[i, i + 1] for i in range(1000)]
    assert check_canary(again, given, extract(given), routed=False).prompts == PROMPTS
    assert len(asked) == PROMPTS + 1
    assert [len(batch) for batch in asked] == [1] * PROMPTS + [2 * PROMPTS]
    assert asked[0][0] == given[0]
    assert asked[-2][0][0] > 900, "spread over the batch"


def shifted(batch: Batch) -> Any:
    found = extract(batch)
    for layer in range(LAYERS):
        whole = torch.cat([result["hidden_states"][layer] for result in found]).roll(1, 0)
        parts = whole.split([len(prompt) for prompt in batch])
        for result, part in zip(found, parts, strict=True):
            result["hidden_states"][layer] = part
    return found


def swapped(batch: Batch) -> Any:
    found = extract(batch)
    if len(found) > 3:
        found[2], found[3] = found[3], found[2]
    return found


def one_row_of_the_last_layer(batch: Batch) -> Any:
    found = extract(batch)
    if len(batch) > 1:
        found[0]["hidden_states"][-1][-1] = found[1]["hidden_states"][-1][-1]
    return found


def stale(batch: Batch) -> Any:
    """Give what the whole batch's first prompt gave, whatever was asked."""
    found = extract(batch)
    if len(batch) == 1:
        found[0]["hidden_states"] = [
            layer[: len(batch[0])] for layer in extract(GIVEN)[0]["hidden_states"]
        ]
    return found


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("fault", [shifted, swapped, one_row_of_the_last_layer])
def test_a_fault_of_batches_is_seen(fault: Callable[[Batch], Any], routed: bool) -> None:
    with pytest.raises(GuardError, match=r"Canary: prompt \d+ of the first batch has other rows"):
        check_canary(fault, GIVEN, fault(GIVEN), routed=routed)


def test_rows_of_another_call_are_seen_with_their_place() -> None:
    given = [[2, 7], *GIVEN]
    with pytest.raises(
        GuardError, match=r"prompt 0 .* computed alone: layer number 0, row \d of 2 differs by 1\.\d"
    ):
        check_canary(stale, given, stale(given), routed=True)


def test_values_that_are_not_numbers_are_no_agreement() -> None:
    def again(batch: Batch) -> Any:
        found = extract(batch)
        found[0]["hidden_states"][0][0] = float("nan")
        return found

    with pytest.raises(GuardError, match="Canary"):
        check_canary(again, GIVEN, extract(GIVEN), routed=True)


@pytest.mark.parametrize(
    ("fields", "routed"),
    [
        ({"n_routed_experts": 384}, True),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, True),
        ({"num_experts": 0, "num_experts_per_tok": 2}, False),
        ({"n_routed_experts": None}, False),
        ({"hidden_size": 64}, False),
    ],
)
def test_experts_are_told_by_the_configuration(fields: dict[str, Any], routed: bool) -> None:
    assert has_router(fields) is routed
    assert has_router(SimpleNamespace(**fields)) is routed
