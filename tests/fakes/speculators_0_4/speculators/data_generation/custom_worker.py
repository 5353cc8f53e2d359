"""FAKE worker extension of the second in-process generation: rows by request."""

from __future__ import annotations

import types
from typing import Any

from vllm.distributed import get_pp_group, get_tp_group
from vllm.sequence import IntermediateTensors


def _forward(self: Any, input_ids: Any, positions: Any) -> Any:
    if not get_pp_group().is_first_rank:
        return IntermediateTensors({})
    hidden = self.embed_input_ids(input_ids)
    if get_tp_group().rank_in_group == 0:
        self._extension._store_captured_states([hidden])
    return hidden


class HiddenStatesWorkerExtension:
    model_runner: Any

    def _store_captured_states(self, states: list[Any]) -> None:
        order = self.model_runner.input_batch.req_id_to_index
        for request_id in sorted(self._metadata, key=order.__getitem__):
            self._captured_states[request_id] = states

    def _setup_hidden_states_capture(self, layer_ids: list[int]) -> None:
        base = self.model_runner.model.get_language_model().model
        base.forward = types.MethodType(_forward, base)

    def _set_request_metadata(self, metadata: dict[str, int]) -> None:
        self._metadata = metadata

    def _reset_capture(self) -> None:
        self._captured_states: dict[str, Any] = {}

    def _get_captured_states(self) -> dict[str, Any]:
        return self._captured_states
