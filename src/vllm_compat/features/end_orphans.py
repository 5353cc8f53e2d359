"""A worker whose driver is gone ends itself, where vLLM's own watch over the driver does not end it."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_compat.features.base import Feature
from vllm_compat.runtime import identity
from vllm_compat.runtime.context import belongs

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction

GRACE = 30.0
"""Seconds for which the driver has to be gone; vLLM's workers end by themselves within a few of them."""
LOOK = 1.0
"""Seconds from one look to the next."""
THREAD = "vllm_compat: is the driver alive?"

_EXECUTOR = "vllm.v1.executor.multiproc_executor"


class EndOrphans(Feature):
    """End a worker when its driver has been gone for a while."""

    name = "end_orphans"
    does = (
        "In each worker of the downstream's engine a thread looks once a second for the process that has"
        " started it; when that has been gone for 30 seconds, the worker ends. A worker that ends after"
        " its driver, whichever way, frees the shared memory of their queues."
    )
    why = (
        "vLLM's worker asks for the end of its driver only between steps: one whose driver was killed"
        " while it loaded waits for ever in MessageQueue.wait_until_ready (0.16.0), with the model and"
        " its queues in memory."
    )
    targets = (f"{_EXECUTOR}.WorkerProc.__init__", f"{_EXECUTOR}.WorkerWrapperBase.init_device")
    processes = frozenset({"driver", "worker"})  # a forked worker has what its driver has put in force

    def install(self, transaction: Transaction, plan: Plan, role: str) -> None:
        """Enlist the wrappers of the worker's construction.

        The second is for a worker that takes the plan over in the middle of the first: vLLM loads its
        plugins there, before it makes the device ready.
        """
        watches: list[Watch] = []

        def watch(config: Any, queues: Callable[[], list[Any]]) -> None:
            parent = multiprocessing.parent_process()
            if parent is None or watches or not belongs(config, plan.roles.package):
                return
            watches.append(Watch(parent, queues))
            transaction.did("thread of one worker", watches[0].stop)
            watches[0].begin()

        def built(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            names = ("rpc_broadcast_mq", "worker_response_mq")
            watch(
                args[0] if args else kwargs.get("vllm_config"),
                lambda: [getattr(instance, name, None) for name in names],
            )
            return wrapped(*args, **kwargs)

        def readied(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            watch(vars(instance).get("vllm_config"), list)
            return wrapped(*args, **kwargs)

        transaction.wrap(f"{_EXECUTOR}:WorkerProc.__init__", built, optional=True)
        transaction.wrap(f"{_EXECUTOR}:WorkerWrapperBase.init_device", readied, optional=True)


class Watch:
    """A thread that ends this process when its parent has been gone for :data:`GRACE` seconds.

    ``parent`` is the process that multiprocessing knows as the parent; ``queues`` returns vLLM's queues
    whose shared memory is to be freed then.
    """

    def __init__(self, parent: Any, queues: Callable[[], list[Any]]) -> None:
        self.parent, self.queues = parent, queues
        self.start = identity.start_of(parent.pid)
        self.over = threading.Event()
        self.memory: set[str] = set()
        self.at_exit: Any = None

    def begin(self) -> None:
        """Look from now on, until it is stopped."""
        from multiprocessing import util

        threading.Thread(target=self._look, name=THREAD, daemon=True).start()
        # Children of multiprocessing end without `atexit`.
        self.at_exit = util.Finalize(None, self._leave, exitpriority=0)

    def stop(self) -> str:
        """Look no more; return the state of what is taken back."""
        self.over.set()
        self.at_exit.cancel()
        return "reverted"

    def _look(self) -> None:
        since = None
        while not self.over.wait(LOOK):
            self._note_memory()
            if not self.is_gone():
                since = None
            elif since is None:
                since = time.monotonic()
            elif time.monotonic() - since >= GRACE:
                self._end()

    def is_gone(self) -> bool:
        """Whether the parent has ended, for certain.

        A process has another parent only when its own has ended, or when a fork server has started it;
        then the parent's id and start tell, or, where they cannot be had, multiprocessing's own pipe.
        """
        if os.getppid() == self.parent.pid:
            return False
        if self.start is None:
            return not self.parent.is_alive()
        return identity.start_of(self.parent.pid) != self.start

    def _note_memory(self) -> None:
        """Remember the names of the queues' memory: a worker that ends forgets its queues first."""
        for queue in self.queues():
            name = getattr(getattr(getattr(queue, "buffer", None), "shared_memory", None), "name", "")
            if name:
                self.memory.add(name)

    def _free(self) -> None:
        """Free the queues' memory: its names go, and who has it mapped keeps it until the end."""
        from multiprocessing import shared_memory

        for name in self.memory:
            with suppress(Exception):  # the other ranks free the driver's queue too
                memory = shared_memory.SharedMemory(name)
                memory.close()
                memory.unlink()

    def _leave(self) -> None:
        """Free what a driver that is gone cannot, where the worker ends in order."""
        if self.is_gone():
            self._free()

    def _end(self) -> None:
        """Free what is shared, say why, and end without anything that could wait for somebody."""
        self._free()
        with suppress(Exception):  # whoever reads it may be gone as well
            print(
                f"vllm_compat: process {self.parent.pid}, which started this vLLM worker (pid"
                f" {os.getpid()}), has been gone for {GRACE:g} seconds, so the worker ends.",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)
