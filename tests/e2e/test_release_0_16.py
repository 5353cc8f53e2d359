"""vLLM 0.16.0: stock fails, the shim makes it right, and each adapter is needed for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.e2e
beyond = pytest.mark.beyond
"""More of what its neighbours show; the records of the matrix have them all."""
Cell = Callable[..., dict[str, Any]]

STOCK_FAILS = {
    "0.3.0": "is_encoder_decoder",
    "0.4.0": "Found no NVIDIA driver",
    "0.4.0.1": "Found no NVIDIA driver",
}


@pytest.mark.parametrize("speculators", ["0.3.0", pytest.param("0.4.0", marks=beyond), "0.4.0.1"])
def test_stock_fails_as_reported(cell: Cell, speculators: str) -> None:
    record = cell("0.16.0", speculators, "llama", "--stock")
    assert record["outcome"] == "failed"
    assert STOCK_FAILS[speculators] in record["output"] + record["error"]


@pytest.mark.parametrize("speculators", ["0.3.0", pytest.param("0.4.0", marks=beyond), "0.4.0.1"])
def test_every_scenario_is_right_with_15_kv_blocks(cell: Cell, speculators: str) -> None:
    record = cell("0.16.0", speculators, "llama", "--kv-blocks", "15")
    assert record["outcome"] == "right", record["error"]
    assert record["kv_blocks"] == 15
    assert "240 tokens and needs 15 KV cache blocks" in record["too_long"]


@pytest.mark.parametrize(
    ("speculators", "model", "ranks", "launcher"),
    [
        ("0.3.0", "kimi_k25", 1, True),
        ("0.4.0.1", "kimi_k25", 2, False),
        ("0.3.0", "deepseek_v3", 2, True),
        pytest.param("0.4.0.1", "deepseek_v3", 1, False, marks=beyond),
        ("0.4.0.1", "llama", 2, False),
    ],
)
def test_models_and_ranks(cell: Cell, speculators: str, model: str, ranks: int, launcher: bool) -> None:
    record = cell("0.16.0", speculators, model, ranks=ranks, launcher=launcher)
    assert record["outcome"] == "right", record["error"]
    assert "shows no residual stream" not in record["output"], "every layer asked for is proven"
    assert len(record["workers"]) == ranks


def test_apply_after_the_imports(cell: Cell) -> None:
    record = cell("0.16.0", "0.4.0.1", "llama", "--late")
    assert record["outcome"] == "right", record["error"]


def test_stock_loop_agrees_with_hooks(cell: Cell) -> None:
    record = cell("0.16.0", "0.4.0.1", "llama", "--capture", "stock")
    assert record["outcome"] == "right", record["error"]


# Without an adapter the run must fail, in words that only its absence brings about.
ABLATION = [
    ("0.3.0", "config.prefix_caching", "AssertionError"),
    ("0.3.0", "executor.unique_reply", "KeyError: 0"),
    ("0.3.0", "worker.capture", "get_input_embeddings"),
    ("0.4.0.1", "generator.input_order", "belongs to another prompt"),
    ("0.4.0.1", "scheduler.whole_prompts", "not found in captured states"),
]
# Those that end in an error in any case, before a row is made.
LOUD = [
    ("0.3.0", "config.is_encoder_decoder", "is_encoder_decoder"),
    ("0.3.0", "device.mem_get_info", "Found no NVIDIA driver"),
    ("0.3.0", "executor.two_phase_step", "sample_tokens() must be called"),
    ("0.3.0", "kv_cache.specs_argument", "kv_cache_specs"),
    ("0.3.0", "scheduler.block_size", "block_size"),
    ("0.4.0.1", "device.mem_get_info", "Found no NVIDIA driver"),
]


@pytest.mark.parametrize(
    ("speculators", "adapter", "words"), [*ABLATION, *(pytest.param(*row, marks=beyond) for row in LOUD)]
)
def test_without_one_adapter_llama_fails(cell: Cell, speculators: str, adapter: str, words: str) -> None:
    record = cell("0.16.0", speculators, "llama", "--without", adapter)
    assert record["outcome"] == "failed"
    assert words in record["output"] + record["error"], record["error"]


@pytest.mark.parametrize("speculators", ["0.3.0", pytest.param("0.4.0.1", marks=beyond)])
def test_without_trust_kimis_tokenizer_is_refused(cell: Cell, speculators: str) -> None:
    record = cell("0.16.0", speculators, "kimi_k25", "--without", "tokenizer.trust_remote_code")
    assert record["outcome"] == "failed"
    assert "trust_remote_code" in record["error"]
