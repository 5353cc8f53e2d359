"""Rows through shared memory in real workers: the same bits as through replies, and nothing grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.e2e
Cell = Callable[..., dict[str, Any]]


def test_the_same_bits_through_both_ways_and_two_thousand_requests_in_a_row(cell: Cell) -> None:
    shared = cell("0.16.0", "0.4.0.1", "llama", "--requests", "2000")
    replies = cell("0.16.0", "0.4.0.1", "llama", "--transfer", "rpc")
    assert shared["outcome"] == replies["outcome"] == "right", (shared["error"], replies["error"])
    digests = [{n: s["digest"] for n, s in r["scenarios"].items()} for r in (shared, replies)]
    assert digests[0] == digests[1]
    run = shared["endurance"]
    assert run["different_results"] == 1, "the same batch gave the same bits every time"
    for early, late in zip(run["after_a_tenth"], run["at_the_end"], strict=True):
        # KiB; the rows of the 1,800 requests in between are 40 MiB.
        assert late["shared"] < early["shared"] + 2 * 1024
        assert late["descriptors"] < early["descriptors"] + 4
        assert late["resident"] < early["resident"] + 32 * 1024
