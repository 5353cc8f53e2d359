"""The guards look into real tensors: each fault is caught with its sample and layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_compat.checks.batch import check_prompts, check_results, look_at
from vllm_compat.errors import GuardError

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PROMPTS = [[5, 6, 7], [8], [5, 6, 7, 9, 9], [1, 2]]
LAYERS = 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Batch = list[dict[str, Any]]


def clean(dtype: Any = torch.float32) -> Batch:
    """Return a right batch: input ids as a tensor, one tensor ``[tokens, width]`` a layer."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.tensor(prompt),
            "hidden_states": [
                torch.randn(len(prompt), 16, generator=generator).to(dtype) for _ in range(LAYERS)
            ],
            "loss_mask": None,
        }
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("everything", [True, False])
def test_clean_data_raises_nothing(dtype: Any, everything: bool) -> None:
    check_results(clean(dtype), PROMPTS, LAYERS, everything=everything)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_large_values_nor_single_zeros_are_a_fault(dtype: Any) -> None:
    batch = clean(dtype)
    tensor = batch[2]["hidden_states"][1]
    tensor[1] = 0
    tensor[1, 3] = torch.finfo(dtype).tiny
    tensor[2] = torch.finfo(dtype).max
    tensor[3] = torch.finfo(dtype).min
    check_results(batch, PROMPTS, LAYERS)


def shift_rows(batch: Batch) -> None:
    """Give each request the rows of the next, as a wrong offset does."""
    for layer in range(LAYERS):
        tensors = [sample["hidden_states"][layer] for sample in batch]
        for sample, tensor in zip(batch, [*tensors[1:], tensors[0]], strict=True):
            sample["hidden_states"][layer] = tensor


def swap(batch: Batch) -> None:
    batch[1], batch[2] = batch[2], batch[1]


def change(sample: int, layer: int, how: Callable[[Any], Any]) -> Callable[[Batch], None]:
    def apply(batch: Batch) -> None:
        states = batch[sample]["hidden_states"]
        states[layer] = how(states[layer].clone())

    return apply


def put(row: int, column: Any, value: float) -> Callable[[Any], Any]:
    def how(tensor: Any) -> Any:
        tensor[row, column] = value
        return tensor

    return how


def drop_layer(batch: Batch) -> None:
    del batch[2]["hidden_states"][1]


def tokens_as_layers(batch: Batch) -> None:
    """What stock speculators 0.3.0 saved on vLLM 0.16: a tensor ``[width]`` for each token."""
    for sample in batch:
        sample["hidden_states"] = list(sample["hidden_states"][0])


def other_ids(batch: Batch) -> None:
    batch[3]["input_ids"][1] += 1


EVERY = slice(None)
NAN, INF = float("nan"), float("inf")
FAULTS = {
    "rows shifted by one request": (
        shift_rows,
        r"^Sample 0, layer number 0: shape \[1, 16\] for 3",
    ),
    "two requests swapped": (swap, "^Result 1 belongs to another prompt: its 5 token ids are not"),
    "other token ids": (other_ids, "^Result 3 belongs to another prompt"),
    "a row is zero": (
        change(2, 1, put(3, EVERY, 0.0)),
        "^Sample 2, layer number 1: 1 of 5 rows are all zero, the first is row 3",
    ),
    "all rows are zero": (
        change(2, 1, torch.zeros_like),
        "^Sample 2, layer number 1: 5 of 5 rows are all zero, the first is row 0",
    ),
    "a NaN": (
        change(2, 2, put(4, 7, NAN)),
        "^Sample 2, layer number 2: 1 of 5 rows are not finite, the first is row 4",
    ),
    "a row of NaN": (
        change(0, 0, put(1, EVERY, NAN)),
        "^Sample 0, layer number 0: 1 of 3 rows are not",
    ),
    "an infinity": (
        change(1, 0, put(0, 15, INF)),
        "^Sample 1, layer number 0: 1 of 1 rows are not",
    ),
    "a negative infinity": (
        change(3, 2, put(1, 0, -INF)),
        "^Sample 3, layer number 2: 1 of 2 rows are not finite, the first is row 1",
    ),
    "a layer dropped": (drop_layer, "^Sample 2 has 2 layers, 3 were asked for"),
    "tokens saved as layers": (
        tokens_as_layers,
        r"^Sample 1 has 1 layers|^Sample 0, layer.*\[16\]",
    ),
    "rows cut": (
        change(2, 0, lambda t: t[:4]),
        r"^Sample 2, layer number 0: shape \[4, 16\] for 5",
    ),
    "a row too many": (
        change(1, 1, lambda t: torch.cat([t, t])),
        r"^Sample 1, layer number 1: shape \[2, 16\] for 1",
    ),
    "no rows": (change(1, 1, lambda t: t[:0]), r"^Sample 1, layer number 1: shape \[0, 16\] for 1"),
    "another dtype": (
        change(1, 2, lambda t: t.double()),
        r"^Sample 1, layer number 2: width and dtype \(16, 'float64'\), the model and other",
    ),
    "another width": (
        change(3, 0, lambda t: t[:, :8]),
        r"^Sample 3, layer number 0: width and dtype \(8, 'float32'\), the model and other",
    ),
    "a batch dimension": (
        change(0, 1, lambda t: t[None]),
        r"^Sample 0, layer number 1: shape \[1, 3, 16\] for 3",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_with_its_sample_and_layer(fault: str) -> None:
    inject, words = FAULTS[fault]
    batch = clean()
    inject(batch)
    with pytest.raises(GuardError, match=words):
        check_results(batch, PROMPTS, LAYERS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("row", range(5))
def test_every_row_is_looked_at_whatever_the_dtype(dtype: Any, value: float, row: int) -> None:
    batch = clean(dtype)
    batch[2]["hidden_states"][0][row, 9] = value
    with pytest.raises(GuardError, match=rf"1 of 5 rows are not finite, the first is row {row}\."):
        check_results(batch, PROMPTS, LAYERS)


@pytest.mark.parametrize(("row", "seen"), [(0, True), (2, False), (4, True)])
def test_where_the_worker_has_looked_the_first_and_last_rows_are_enough(row: int, seen: bool) -> None:
    batch = clean()
    batch[2]["hidden_states"][1][row] = 0
    if not seen:
        check_results(batch, PROMPTS, LAYERS, everything=False)
        return
    with pytest.raises(GuardError, match=rf"rows are all zero, the first is row {row}\."):
        check_results(batch, PROMPTS, LAYERS, everything=False)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_first_and_last_rows_may_be_the_same(rows: int) -> None:
    tensor = torch.ones(rows, 4)
    assert look_at(tensor, everything=False).zero is None
    tensor[-1] = 0
    assert look_at(tensor, everything=False).zero == (1, rows - 1)


def test_looking_changes_nothing() -> None:
    tensor = torch.randn(4, 4)
    before = tensor.clone()
    found = look_at(tensor)
    assert (found.shape, found.dtype, found.not_finite, found.zero) == (
        (4, 4),
        "float32",
        None,
        None,
    )
    assert torch.equal(tensor, before)


def test_rows_that_were_not_taken_over_are_refused() -> None:
    from vllm_compat.capture import handover

    batch = clean()
    states = batch[1]["hidden_states"]
    states[0] = handover._handed(states[0], False)
    with pytest.raises(GuardError, match=r"^Sample 1 is no plain tensor"):
        check_results(batch, PROMPTS, LAYERS)


numpy: Any = pytest.importorskip("numpy")
IDS = [0, 7, 1023]
FORMS = {
    "a tensor of prompts": lambda ids: torch.tensor([[1, 1, 1], ids]),
    "tensors": lambda ids: [torch.tensor([1]), torch.tensor(ids)],
    "elements of a tensor": lambda ids: [[1], list(torch.tensor(ids))],
    "an array": lambda ids: [[1], numpy.array(ids)],
    "elements of an array": lambda ids: [[1], list(numpy.array(ids))],
}


@pytest.mark.parametrize("form", FORMS)
def test_ids_in_tensors_and_arrays_are_checked(form: str) -> None:
    check_prompts(FORMS[form](IDS), 1024)
    with pytest.raises(GuardError, match=r"^Prompt 1, token 2: id 1023, the model has 1023 \(ids 0"):
        check_prompts(FORMS[form](IDS), 1023)
    with pytest.raises(GuardError, match=r"^Prompt 1, token 1: id -7, the model has 1024"):
        check_prompts(FORMS[form]([0, -7, 3]), 1024)
    with pytest.raises(GuardError, match=r"^Prompt [01], token 0: .* is no token id"):
        check_prompts(FORMS[form]([0.5, 1.0, 2.0]), 1024)


@pytest.mark.parametrize("mask", [torch.tensor([True, False]), numpy.array([True, False])])
def test_a_mask_is_no_prompt(mask: Any) -> None:
    for form in (mask, list(mask)):
        with pytest.raises(GuardError, match=r"^Prompt 0, token 0: True is no token id"):
            check_prompts([form], 1024)
