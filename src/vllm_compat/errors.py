"""The errors that vllm_compat raises: one sentence each, saying what, where and what to do.

Example:
    >>> try:
    ...     vllm_compat.apply()
    ... except vllm_compat.errors.IncompatibleError as error:
    ...     sys.exit(f"This vLLM cannot be used: {error}")
"""

from __future__ import annotations


class VllmCompatError(Exception):
    """Base of every error of this library."""


class UsageError(VllmCompatError):
    """What the caller asked for cannot be read or makes no sense (exit status 2)."""


class IncompatibleError(VllmCompatError):
    """A drift has no adapter: running would fail, or give wrong data (exit status 1)."""


class PatchError(VllmCompatError):
    """A patch did not go in; everything that was in force has been taken back."""


class GuardError(VllmCompatError):
    """What must hold of processes or data does not: nothing of this batch may be used."""


class CapacityError(VllmCompatError):
    """A request can never fit into the KV cache that this run has."""
