"""FAKE of the server flow: nothing of vLLM is imported but its version."""

from __future__ import annotations


def command(model: str) -> list[str]:
    import vllm

    return ["vllm", "serve", model, vllm.__version__]
