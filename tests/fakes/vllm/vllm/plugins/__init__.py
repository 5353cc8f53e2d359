"""FAKE plugin loader: all entry points of the group, unless VLLM_PLUGINS names others."""

from __future__ import annotations

import os
from importlib.metadata import entry_points

plugins_loaded = False


def load_general_plugins() -> None:
    global plugins_loaded
    if plugins_loaded:
        return
    plugins_loaded = True
    allowed = os.environ.get("VLLM_PLUGINS")
    for plugin in entry_points(group="vllm.general_plugins"):
        if allowed is None or plugin.name in allowed.split(","):
            plugin.load()()
