"""Which code of its own a model brings, read from its files; nothing of it is run.

The rule: remote code is run only of the model that the user has named, where the downstream or vLLM is
told to trust it; it is said before it happens; and ``--no-remote-code`` (``without=["remote_code"]``)
switches it off (:mod:`vllm_compat.checks.remote_code`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_compat.analysis.layer_ids import config_path
from vllm_compat.errors import UsageError

FILES = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files in which transformers looks for ``auto_map``."""


def remote_code_of(model: str | Path) -> tuple[str, ...]:
    """Return the classes that a model's files name as code of its own, as ``module.Class``, sorted.

    Empty where there are none, and where no file of the model is here to be read.
    """
    try:
        folder = config_path(model).parent
    except UsageError:
        return ()
    found: set[str] = set()
    for name in FILES:
        try:
            config = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(config, dict):
            found.update(_names(config.get("auto_map")))
    return tuple(sorted(found))


def _names(auto_map: Any) -> Iterator[str]:
    """Yield the classes of an ``auto_map``: a table, or what old image processors have, a string."""
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    for value in values:
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, str):
                yield one


def sentence(model: str | Path, names: tuple[str, ...]) -> str:
    """Return what is said before a model's code is run."""
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{model} brings code of its own, which is run ({listed}); --no-remote-code refuses it."
