"""Run stock speculators on the vLLM that is installed.

Usage, at the top of a program, before or after its other imports::

    import vllm_compat

    vllm_compat.apply()

or without touching the program: ``python -m vllm_compat run SCRIPT [ARGS…]``.

Importing this package imports nothing else: no wrapt, torch, vLLM or downstream.
"""

from __future__ import annotations

from vllm_compat._version import __version__

TYPE_CHECKING = False  # `typing` would cost more than all the rest of this module
if TYPE_CHECKING:
    from typing import Any

    from vllm_compat.entry.apply import Status, apply, revert, status

__all__ = ["Status", "__version__", "apply", "revert", "status"]


def __getattr__(name: str) -> Any:
    if name in ("apply", "revert", "status", "Status"):
        from vllm_compat.entry import apply

        return getattr(apply, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
