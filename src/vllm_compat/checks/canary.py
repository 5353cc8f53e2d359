"""The canary: the first batch once more, alone, in part and in another order, before a run goes on.

Rows of a prompt depend on nothing but the prompt up to there. So whatever else is in a batch, a
prompt's rows must come out the same, and a prompt's beginning must give the beginning of its rows. Rows
of another request, another token or another call break this. Differences that the arithmetic explains
are allowed for, by dtype: `TOLERANCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_compat.errors import GuardError

PROMPTS = 16
"""How many prompts of the first batch are repeated, spread over it: a batch may hold thousands."""

TOLERANCES = {"float32": (1e-3, 1e-4), "float16": (0.05, 0.01), "bfloat16": (0.15, 0.04)}
"""Largest relative difference of one row, and of the median row of a tensor, that the dtype explains.

A batch of another size is computed in another order. bfloat16 keeps 8 bits, and rounding adds up over
layers: records/gpu show up to 1.2e-2 against float32 for dense models.
"""

ROUTED = 1.0
"""The same for one row where a router may choose otherwise in a tie; unrelated rows differ by 1.4."""

Results = Sequence[Mapping[str, Any]]
Again = Callable[[list[list[int]]], Results]


@dataclass(frozen=True)
class Canary:
    """What the canary saw: prompts repeated, largest relative difference of a row and of a median."""

    prompts: int
    worst: float
    median: float

    def __str__(self) -> str:
        return f"canary agreed on {self.prompts} prompts (worst row {self.worst:.1e})"


def check_canary(
    again: Again, prompts: Sequence[Sequence[int]], results: Results, *, routed: bool
) -> Canary:
    """Repeat prompts of a batch one by one and mixed; compare each row with the batch's.

    ``again`` extracts a batch, ``prompts`` are token ids as they were computed, ``results`` what the
    batch gave for them. ``routed`` says that the model has experts.

    Raises:
        GuardError: Names the prompt, the layer and the row that came out otherwise, and how.
    """
    step = max(1, -(-len(prompts) // PROMPTS))
    chosen = range(0, len(prompts), step)
    differences = [
        _compare(index, results[index], again([list(prompts[index])])[0], "alone", routed)
        for index in chosen
    ]
    # Whole prompts in the opposite order between beginnings of the same prompts.
    mixed: list[tuple[int, list[int]]] = []
    for index in reversed(chosen):
        whole = list(prompts[index])
        mixed += [(index, whole), (index, whole[: (len(whole) + 1) // 2])]
    for (index, _), found in zip(mixed, again([ids for _, ids in mixed]), strict=True):
        differences.append(_compare(index, results[index], found, "mixed with others", routed))
    return Canary(
        len(chosen), max(worst for worst, _ in differences), max(median for _, median in differences)
    )


def _compare(
    index: int, expected: Mapping[str, Any], found: Mapping[str, Any], how: str, routed: bool
) -> tuple[float, float]:
    """Return the largest difference of a row and of a layer's median row, if both can be explained."""
    worst, median = 0.0, 0.0
    pairs = zip(expected["hidden_states"], found["hidden_states"], strict=True)
    for layer, (one, other) in enumerate(pairs):
        rows = difference(one[: len(other)], other)
        row_limit, median_limit = _tolerance(str(one.dtype).removeprefix("torch."))
        if routed:
            row_limit = max(row_limit, ROUTED)
        at = int(rows.argmax())
        here, middle = float(rows[at]), float(rows.median())
        if not (here <= row_limit and middle <= median_limit):
            raise GuardError(
                f"Canary: prompt {index} of the first batch has other rows when it is computed {how}:"
                f" layer number {layer}, row {at} of {len(other)} differs by {here:.2g} (relative; the"
                f" dtype explains {row_limit:g}), the median row by {middle:.2g} ({median_limit:g})."
                " Nothing of this run should be used."
            )
        worst, median = max(worst, here), max(median, middle)
    return worst, median


def _tolerance(dtype: str) -> tuple[float, float]:
    return TOLERANCES.get(dtype, TOLERANCES["bfloat16"])


def difference(one: Any, other: Any) -> Any:
    """Return ``|one - other| / |other|`` of each row of two tensors ``[rows, width]``, as ``[rows]``.

    It is not finite where a row of ``other`` is zero.
    """
    one, other = one.double(), other.double()
    return (one - other).norm(dim=1) / other.norm(dim=1)


def has_router(text_config: Any) -> bool:
    """Whether a configuration has experts that a router chooses from."""
    fields = text_config if isinstance(text_config, Mapping) else vars(text_config)
    return any(
        name.endswith("experts") and "per_tok" not in name and isinstance(value, int) and value > 1
        for name, value in fields.items()
    )
