"""FAKE base of executors."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig


class Executor:
    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self._init_executor()

    def _init_executor(self) -> None:
        raise NotImplementedError

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        raise NotImplementedError

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        self.collective_rpc("initialize_from_config", args=(kv_cache_configs,))
