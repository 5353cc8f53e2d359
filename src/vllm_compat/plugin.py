"""The entry point that vLLM's processes load (group ``vllm.general_plugins``).

vLLM guards the import of a plugin but not its call: an exception here would kill the worker. So
nothing is raised; what went wrong is kept and reported when the driver compares the ranks.
"""

from __future__ import annotations

import os
import sys


def load() -> None:
    """Put the parent's plan in force, if a parent has opened this door; else do nothing."""
    try:
        from vllm_compat.runtime import env

        text = env.plan_from_environment(os.environ)
        if text is None:
            return
        from vllm_compat.entry import apply
    except Exception as error:  # a broken installation must not end somebody's vLLM
        try:  # noqa: SIM105 (contextlib would cost every process more than all the rest here)
            print(f"vllm_compat: the plugin could not be loaded: {error}", file=sys.stderr)
        except Exception:
            pass  # stderr may be closed
        return
    try:
        apply.adopt(text)
    except Exception as error:
        apply.remember(f"{type(error).__name__}: {error}")
