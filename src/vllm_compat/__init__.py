"""Run stock speculators on the vLLM that is installed.

Usage, at the top of a program, before or after its other imports::

    import vllm_compat

    vllm_compat.apply()

or without touching the program: ``python -m vllm_compat run SCRIPT [ARGS…]``.

Importing this package imports nothing else: no wrapt, torch, vLLM or downstream.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` would cost more than all the rest of this module
if TYPE_CHECKING:
    from typing import Any

    from vllm_compat.process import Status, apply, revert, status

__version__ = "0.1.0.dev0"
__all__ = ["Status", "__version__", "apply", "revert", "status"]


def __getattr__(name: str) -> Any:
    if name in ("apply", "revert", "status", "Status"):
        from vllm_compat import process

        return getattr(process, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
