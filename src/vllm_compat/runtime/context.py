"""What one ``generate()`` call of the downstream has under way, for adapters and guards.

The downstream drives vLLM by hand: it builds requests, steps the scheduler and asks the workers for
what they captured. Adapters at these places need to know which engine is the downstream's own
(:func:`belongs`) and which requests the current call has added, in which order (:class:`Call`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_compat.runtime import run


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


@dataclass(eq=False)
class Call:
    """One ``generate()`` call: its generator and the requests it has added so far, in order.

    ``prompts`` maps request ids to their prompt token ids; ``over`` is set by the feature
    ``clean_scheduler`` when the call ends, so that what it left in the scheduler can be taken out.
    """

    generator: Any
    over: bool = False
    prompts: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Build:
    """The construction of one generator: the object, half built, and the model it is for."""

    generator: Any
    model_path: str


@dataclass(frozen=True)
class _Now:
    """What this thread is in the middle of, for one run: a forked child is in the middle of nothing."""

    run: run.Run | None = None
    call: Call | None = None
    build: Build | None = None
    draft: bool = False


# A context variable must stand in a module; what it holds names the run that it belongs to.
_NOTHING = _Now()
_variable: ContextVar[_Now] = ContextVar("vllm_compat_now", default=_NOTHING)


def _now() -> _Now:
    found, mine = _variable.get(), run.current()
    return found if found.run is mine else _Now(mine)


@contextmanager
def _while(now: _Now) -> Iterator[None]:
    token = _variable.set(now)
    try:
        yield
    finally:
        _variable.reset(token)


def current_call() -> Call | None:
    """Return the ``generate()`` call that this thread is in, or None."""
    return _now().call


@contextmanager
def call_of(generator: Any) -> Iterator[Call]:
    """Mark the block as one ``generate()`` call of ``generator``."""
    call, calls = Call(generator), run.current().part(_Calls)
    calls.under_way.append(call)
    try:
        with _while(replace(_now(), call=call)):
            yield call
    finally:
        calls.under_way.remove(call)


class _Calls:
    """The ``generate()`` calls that all threads are in; a revert does not end them."""

    outlives = True

    def __init__(self) -> None:
        self.under_way: list[Call] = []


def is_under_way(generator: Any) -> bool:
    """Whether any thread is in a ``generate()`` call of this generator."""
    calls = run.current().find(_Calls)
    return calls is not None and any(call.generator is generator for call in list(calls.under_way))


def current_build() -> Build | None:
    """Return the generator that this thread is constructing, or None."""
    return _now().build


@contextmanager
def building(generator: Any, model_path: str) -> Iterator[None]:
    """Mark the block as the construction of ``generator`` for ``model_path``."""
    with _while(replace(_now(), build=Build(generator, model_path))):
        yield


def is_making_draft() -> bool:
    """Whether this thread is making the downstream's draft model."""
    return _now().draft


def making_draft() -> AbstractContextManager[None]:
    """Mark the block as the making of the downstream's draft model."""
    return _while(replace(_now(), draft=True))
