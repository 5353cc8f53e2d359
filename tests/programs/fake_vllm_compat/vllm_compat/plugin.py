"""A FAKE plugin: it patches nothing and only writes down that it was loaded."""

from __future__ import annotations

import os

from vllm_compat import note


def load() -> None:
    """Write down the call."""
    note("load")
    if os.environ.get("FAKE_LOAD") == "fail":
        raise ZeroDivisionError("a bug")
