"""Run stock speculators on the vLLM that is installed.

Usage, at the top of a program, before or after its other imports::

    import vllm_compat

    vllm_compat.apply()

or without touching the program: ``python -m vllm_compat run SCRIPT [ARGS…]``.

Importing this package imports nothing else: no wrapt, torch, vLLM or downstream. Each public name is
imported from its home in the moment it is asked for. ``docs/api.md`` says what each is good for;
whatever is not in ``__all__`` may change without notice.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` would cost more than all the rest of this module
if TYPE_CHECKING:
    from typing import Any

    import vllm_compat.errors as errors
    from vllm_compat._version import __version__
    from vllm_compat.commands.check import check, diff
    from vllm_compat.commands.preflight import preflight
    from vllm_compat.commands.preflight.judge import Report as PreflightReport
    from vllm_compat.commands.report.changes import Difference
    from vllm_compat.commands.report.model import Report as CheckReport
    from vllm_compat.commands.verify import verify_directory as verify
    from vllm_compat.commands.verify.model import Report as VerifyReport
    from vllm_compat.entry.apply import Status, apply, revert, status

__all__ = [
    "CheckReport",
    "Difference",
    "PreflightReport",
    "Status",
    "VerifyReport",
    "__version__",
    "apply",
    "check",
    "diff",
    "errors",
    "preflight",
    "revert",
    "status",
    "verify",
]

# Beside the imports above, which are for type checkers: a test holds the two equal.
_HOMES = {
    "CheckReport": "vllm_compat.commands.report.model:Report",
    "Difference": "vllm_compat.commands.report.changes:Difference",
    "PreflightReport": "vllm_compat.commands.preflight.judge:Report",
    "Status": "vllm_compat.entry.apply:Status",
    "VerifyReport": "vllm_compat.commands.verify.model:Report",
    "__version__": "vllm_compat._version:__version__",
    "apply": "vllm_compat.entry.apply:apply",
    "check": "vllm_compat.commands.check:check",
    "diff": "vllm_compat.commands.check:diff",
    "errors": "vllm_compat.errors:",
    "preflight": "vllm_compat.commands.preflight:preflight",
    "revert": "vllm_compat.entry.apply:revert",
    "status": "vllm_compat.entry.apply:status",
    "verify": "vllm_compat.commands.verify:verify_directory",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = home.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
