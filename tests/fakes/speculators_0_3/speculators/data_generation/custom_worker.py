"""FAKE worker extension of the first in-process generation: rows by offset."""

from __future__ import annotations

import types
from typing import Any

from vllm.distributed import get_pp_group, get_tp_group
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.sequence import IntermediateTensors


def _forward(self: Any, input_ids: Any, positions: Any) -> Any:
    if not get_pp_group().is_first_rank:
        return IntermediateTensors({})
    hidden = self.get_input_embeddings(input_ids)
    if get_tp_group().rank_in_group == 0:
        self._extension._store_captured_states([hidden])
    return hidden


class HiddenStatesWorkerExtension:
    model_runner: Any

    def _store_captured_states(self, states: list[Any]) -> None:
        self._captured_states.append(states)

    def _setup_hidden_states_capture(self, layer_ids: list[int]) -> None:
        model = self.model_runner.model
        if not supports_eagle3(model):
            raise ValueError("does not support hidden state extraction")
        model.model.forward = types.MethodType(_forward, model.model)

    def _reset_capture(self) -> None:
        self._captured_states: list[Any] = []

    def _get_captured_states(self) -> list[Any]:
        return self._captured_states
