"""Models of several residual streams are known by their configuration, and refused before loading."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat.analysis.streams import Streams, refusal, streams_of
from vllm_compat.checks import misread
from vllm_compat.errors import IncompatibleError

DEEPSEEK_V4 = {"hidden_size": 4096, "num_hidden_layers": 43, "hc_mult": 4}
GEMMA_3N = {"text_config": {"hidden_size": 2048, "num_hidden_layers": 30, "altup_num_inputs": 4}}


@pytest.mark.parametrize(
    ("config", "streams"),
    [
        (DEEPSEEK_V4, Streams(4, "hc_mult")),
        (GEMMA_3N, Streams(4, "altup_num_inputs")),
        (SimpleNamespace(text_config=SimpleNamespace(hc_count=2)), Streams(2, "hc_count")),
        ({"hc_mult": 1}, Streams(1, "")),
        ({"hc_mult": None, "hidden_size": 8}, Streams(1, "")),
        (None, Streams(1, "")),
    ],
)
def test_a_configuration_tells_the_streams(config: Any, streams: Streams) -> None:
    assert streams_of(config) == streams
    assert (refusal(config, "m") is None) is (streams.number == 1)


def test_a_model_of_several_streams_is_refused_when_vllm_has_its_configuration() -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(**DEEPSEEK_V4), model="the/model"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    with pytest.raises(
        IncompatibleError, match=r"^the/model carries 4 residual streams a token \(hc_mult"
    ):
        misread.refuse_configured(config, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {"attn_res_block_size": 4}},
        SimpleNamespace(block_attn_res_block_size=4),
    ],
)
def test_attention_over_earlier_blocks_is_refused_before_loading(config: Any) -> None:
    """Kimi-K3: behind its layers no norm shows a stream, so nothing would stop wrong rows."""
    sentence = refusal(config, "the/model")
    assert sentence is not None
    assert sentence.startswith("the/model has attention residuals (")
    assert refusal({"attn_res_block_size": None}, "the/model") is None  # Kimi-Linear


def parallel(**sizes: Any) -> SimpleNamespace:
    """Return vLLM's configuration of an ordinary model on ranks of some kind."""
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=[]), model="the/model"),
        parallel_config=SimpleNamespace(**{"tensor_parallel_size": 2, **sizes}),
    )


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"pipeline_parallel_size": 2}, r"^Pipeline parallelism \(pipeline_parallel_size=2\)"),
        ({"prefill_context_parallel_size": 2}, r"^Context parallelism of prompts"),
        ({"data_parallel_size": 2}, r"^Data parallelism \(data_parallel_size=2\)"),
        ({"enable_dbo": True}, r"^Ubatching \(enable_dbo=True\)"),
        ({"ubatch_size": 2}, r"^Ubatching \(ubatch_size=2\)"),
    ],
)
def test_ranks_that_have_not_every_row_of_every_layer_are_refused_before_loading(
    sizes: dict[str, Any], words: str
) -> None:
    with pytest.raises(IncompatibleError, match=words) as found:
        misread.refuse_configured(parallel(**sizes), None)  # type: ignore[arg-type]
    assert "use tensor_parallel_size alone" in str(found.value)


def test_a_model_that_would_be_compiled_is_refused_before_loading() -> None:
    config = parallel()
    config.model_config = SimpleNamespace(enforce_eager=False)
    with pytest.raises(IncompatibleError, match=r"compiled model \(enforce_eager=False\)"):
        misread.refuse_configured(config, None)  # type: ignore[arg-type]


def test_tensor_parallelism_alone_is_not() -> None:
    misread.refuse_parallel(
        parallel(
            pipeline_parallel_size=1, prefill_context_parallel_size=1, enable_dbo=False, ubatch_size=0
        )
    )
