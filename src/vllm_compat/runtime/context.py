"""What one ``generate()`` call of the downstream has under way, for adapters and guards.

The downstream drives vLLM by hand: it builds requests, steps the scheduler and asks the workers for
what they captured. Adapters at these places need to know which engine is the downstream's own
(:func:`belongs`) and which requests the current call has added, in which order (:class:`Call`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


def belongs(vllm_config: Any, package: str) -> bool:
    """Whether this vLLM configuration was built by the downstream ``package``.

    An engine that somebody else starts in the same process is left alone.
    """
    return is_downstream(getattr(vllm_config, "parallel_config", None), package)


def is_downstream(parallel_config: Any, package: str) -> bool:
    """Whether ``parallel_config.worker_extension_cls`` is a class of the downstream."""
    given = getattr(parallel_config, "worker_extension_cls", None)
    name = f"{given.__module__}." if isinstance(given, type) else str(given or "")
    return name.partition(".")[0] == package


@dataclass
class Call:
    """One ``generate()`` call: its generator and the requests it has added so far, in order.

    ``prompts`` maps request ids to their prompt token ids; ``over`` is set when the call ends, so
    that what it left in the scheduler can be taken out.
    """

    generator: Any
    over: bool = False
    prompts: dict[str, list[int]] = field(default_factory=dict)


_current: ContextVar[Call | None] = ContextVar("vllm_compat_call", default=None)


def current_call() -> Call | None:
    """Return the ``generate()`` call that this thread is in, or None."""
    return _current.get()


@contextmanager
def call_of(generator: Any) -> Iterator[Call]:
    """Mark the block as one ``generate()`` call of ``generator``."""
    call = Call(generator)
    token = _current.set(call)
    try:
        yield call
    finally:
        _current.reset(token)


@dataclass(frozen=True)
class Build:
    """The construction of one generator: the object, half built, and the model it is for."""

    generator: Any
    model_path: str


_build: ContextVar[Build | None] = ContextVar("vllm_compat_build", default=None)


def current_build() -> Build | None:
    """Return the generator that this thread is constructing, or None."""
    return _build.get()


@contextmanager
def building(generator: Any, model_path: str) -> Iterator[None]:
    """Mark the block as the construction of ``generator`` for ``model_path``."""
    token = _build.set(Build(generator, model_path))
    try:
        yield
    finally:
        _build.reset(token)
