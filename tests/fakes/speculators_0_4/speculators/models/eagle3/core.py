"""FAKE draft: reads the verifier's configuration and two of its weights."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from speculators.utils.loading import load_model_layers


class Eagle3DraftModel:
    def __init__(self, config: Any) -> None:
        self.config = config
        self._setup_embeddings_and_lm_heads(config)

    def _setup_embeddings_and_lm_heads(self, config: Any) -> None:
        self.verifier = AutoConfig.from_pretrained(config.name_or_path)
        if hasattr(self.verifier, "text_config"):
            self.verifier = self.verifier.text_config
        self.weights = load_model_layers(
            ["embed_tokens.weight", "lm_head.weight", "model.norm.weight"], config.name_or_path
        )
        self.verifier_norm = self.weights["model.norm.weight"]

    def forward(self, verifier_last_hidden_states: Any = None) -> Any:
        return verifier_last_hidden_states

    def save_pretrained(self, save_directory: Any) -> Any:
        return getattr(self.config, "eagle_aux_hidden_state_layer_ids", None)
