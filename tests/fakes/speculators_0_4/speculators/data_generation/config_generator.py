"""FAKE description of extracted data."""

from __future__ import annotations

from speculators.utils.util import get_device_name


def describe() -> dict[str, str]:
    import vllm

    return {"vllm": vllm.__version__, "device": get_device_name(0)}
