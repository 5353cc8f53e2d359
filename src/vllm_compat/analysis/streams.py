"""Models that carry several residual streams a token: hyper-connections, AltUp.

A row of extracted data is one vector of ``hidden_size``, and so is what an EAGLE-3 draft is fed. Where
a model carries several streams (``[tokens, streams, hidden_size]``, or the streams first), there is no
such row after a layer, and nothing that one could take for it is what vLLM serves a draft with.

The names of the configuration are those that vLLM 0.34.0 reads: ``hc_mult`` (below ``vllm/models``:
``deepseek_v4``, ``deepseek_v41``, ``hy_v4``, ``glm5next``), ``hc_count`` (``qwen4_exp`` there) and
``altup_num_inputs`` (``vllm/model_executor/models/gemma3n.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

KEYS = ("hc_mult", "hc_count", "altup_num_inputs")

BLOCKS = ("attn_res_block_size", "block_attn_res_block_size")
"""Entries of models with attention residuals: Kimi-K3 (``vllm/models/kimi_k3``), AliceAI (``alice_ai``).

Each of their layers goes on with a learned mixture of the streams of all earlier blocks of layers, so
that none of what a layer hands on is the stream; vLLM 0.34.0 has two answers for its own drafts, by an
option (``_capture_aux_hidden_stream``).
"""


class Streams(NamedTuple):
    """How many residual streams a model carries, and the entry of its configuration that says so."""

    number: int
    key: str


def streams_of(config: Any) -> Streams:
    """Return how many streams a token has, by a model's configuration: a mapping or vLLM's object.

    One, and no key, where nothing says otherwise.
    """
    for part in (_get(config, "text_config"), config):
        for key in KEYS:
            count = _get(part, key)
            if isinstance(count, int) and count > 1:
                return Streams(count, key)
    return Streams(1, "")


def refusal(config: Any, model: str) -> str | None:
    """Return the sentence that refuses a model of several streams or attention residuals, or None."""
    for part in (_get(config, "text_config"), config):
        for key in BLOCKS:
            if isinstance(_get(part, key), int):
                return (
                    f"{model} has attention residuals ({key} of its configuration): each layer goes on"
                    " with a mixture of the streams of all earlier blocks of layers, and nothing that a"
                    " layer hands on is the one row for a token that speculators writes and an EAGLE-3"
                    " draft is fed. Hidden states of this model cannot be extracted."
                )
    streams = streams_of(config)
    if streams.number == 1:
        return None
    return (
        f"{model} carries {streams.number} residual streams a token ({streams.key} of its"
        " configuration): a layer has no one row of hidden_size for a token, which is what speculators"
        " writes and an EAGLE-3 draft is fed. Hidden states of this model cannot be extracted."
    )


def _get(part: Any, key: str) -> Any:
    return part.get(key) if isinstance(part, Mapping) else getattr(part, key, None)
