"""Under the launcher, a run says how far it is: shards loaded, samples to do, the first error.

What is seen is written by :mod:`vllm_compat.runtime.heartbeat`. The places are vLLM's weight loading
(``tqdm`` as ``weight_utils`` names it, one iteration a shard, in every release from 0.11.0 to 0.33.0),
the worker's construction, what the downstream and vLLM's workers log, and the error that ends the
program.
"""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from vllm_compat.features.base import Feature
from vllm_compat.runtime import env, heartbeat
from vllm_compat.runtime.run import DRIVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction

_TOTAL = re.compile(r"Processing (\d+)/(\d+) samples")


class Progress(Feature):
    """Say how far a run is, and what it met first."""

    name = "progress"
    does = (
        "Counts the shards of vLLM's progress bar, reads the number of samples and workers' errors from"
        " log records, keeps the error that ends the program, for the launcher, and writes the stacks"
        " of a process's threads when the launcher asks for them."
    )
    why = (
        "A run of hours says nothing while it loads and extracts, and vLLM's worker answers an error"
        " with a text of its own, or not at all."
    )
    targets = (
        "vllm.model_executor.model_loader.weight_utils.tqdm",
        "vllm.v1.executor.multiproc_executor.WorkerProc.__init__",
        "logging.Logger.makeRecord",
        "sys.excepthook",
        "signal SIGRTMAX-2",
    )
    needs_launcher = True
    processes = frozenset({"driver", "worker"})

    def applies(self, plan: Plan) -> bool:
        """Whether the launcher has named a folder for what is said."""
        return env.status_directory() is not None

    def install(self, transaction: Transaction, plan: Plan, role: str) -> None:
        """Enlist what tells the phases of vLLM's workers, the number of samples and the first error."""
        executor = "vllm.v1.executor.multiproc_executor"
        transaction.wrap(f"{executor}:WorkerProc.__init__", _worker, optional=True)
        loading = "vllm.model_executor.model_loader.weight_utils:tqdm"
        transaction.wrap(loading, _shards, optional=True)
        transaction.wrap("logging:Logger.makeRecord", _read_log, optional=True)
        transaction.did("signal SIGRTMAX-2", heartbeat.listen())
        if role == DRIVER:
            hook, driver = sys.excepthook, os.getpid()

            def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
                # A forked child has this hook until it takes the plan over, and is no driver.
                if isinstance(error, Exception) and transaction.active and os.getpid() == driver:
                    heartbeat.fail(error, "program")
                hook(kind, error, trace)

            transaction.set_attribute(sys, "excepthook", excepthook, "sys.excepthook")


def _worker(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    heartbeat.phase("starting", role="worker", rank=kwargs.get("rank"))
    try:
        result = wrapped(*args, **kwargs)
    except Exception as error:
        heartbeat.fail(error, "worker")
        raise
    heartbeat.phase("ready")
    return result


def _shards(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bar = wrapped(*args, **kwargs)
    if not args and "iterable" not in kwargs:
        return bar  # counts something else than shards, by hand
    return _Counted(bar)


class _Counted:
    """A progress bar that also tells the launcher where it is."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)

    def __iter__(self) -> Iterator[Any]:
        begin = time.monotonic()
        heartbeat.phase("loading", shards=0, of=getattr(self._bar, "total", None))
        for count, item in enumerate(self._bar, start=1):
            yield item
            heartbeat.note(shards=count, loading_seconds=round(time.monotonic() - begin, 2))
        heartbeat.phase("loaded")


def _read_log(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    record = wrapped(*args, **kwargs)
    if not isinstance(record.msg, str):
        return record
    # speculators' own logger gives the sentence as an argument.
    said = record.args[0] if isinstance(record.args, tuple) and record.args else record.msg
    if isinstance(said, str) and (match := _TOTAL.match(said)):
        heartbeat.note(samples_to_do=int(match[1]), samples_in_all=int(match[2]))
    # vLLM's worker logs what it meets and answers with a text of its own, or, on other ranks than
    # the one asked, not at all.
    elif record.msg.startswith("WorkerProc ") and record.exc_info and record.exc_info[1]:
        heartbeat.fail(record.exc_info[1], "worker")
    return record
