"""Print how far the targets of stock's draft are from the logits of its verifier, by transformers.

verifier_targets.py [--without ADAPTER] VERIFIER…: a line of JSON, verifier's name → largest difference
of a probability, or what was raised.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import vllm_compat

without = [sys.argv[2]] if sys.argv[1] == "--without" else []
vllm_compat.apply(without=without)

import torch  # noqa: E402
from speculators.config import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402


class Seen(Exception):
    """The targets have been made; nothing else of the forward is wanted."""


def reference(path: str, ids: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return a verifier's configuration, its last stream before the norm, and its logits."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    kept: list[torch.Tensor] = []
    norm = getattr(model.get_decoder(), "norm", None) or model.get_decoder().final_layernorm
    norm.register_forward_pre_hook(lambda module, given: kept.append(given[0]))
    with torch.no_grad():
        logits = model(ids).logits
    return model.config.get_text_config(), kept[-1], logits


def targets(path: str, config: Any, ids: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    """Return what stock's draft is trained towards."""
    layer = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    layer._attn_implementation = "simple_flex_attention"
    made = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=config.vocab_size,
        norm_before_residual=True,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=path, architectures=[]),
        ),
    )
    every = torch.ones(config.vocab_size, dtype=torch.bool)
    draft = Eagle3DraftModel(config=made, t2d=every, d2t=torch.zeros(config.vocab_size).long())
    seen: list[torch.Tensor] = []

    def keep(module: Any, given: Any, out: torch.Tensor) -> None:
        seen.append(out)
        raise Seen

    draft.verifier_lm_head.register_forward_hook(keep)
    with suppress(Seen):
        draft(
            hidden_states=torch.zeros(1, ids.shape[1], 3 * config.hidden_size),
            input_ids=ids,
            verifier_last_hidden_states=stream,
            ttt_steps=1,
        )
    return seen[0]


found: dict[str, Any] = {}
for path in sys.argv[1 + 2 * len(without) :]:
    torch.manual_seed(0)
    ids = torch.randint(0, 500, (1, 12))
    try:
        config, stream, logits = reference(path, ids)
        made = targets(path, config, ids, stream)
        found[Path(path).name] = float((made.softmax(-1) - logits.softmax(-1)).abs().max())
    except Exception as error:
        found[Path(path).name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
