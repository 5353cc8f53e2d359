"""FAKE executor with real worker processes, one a rank, asked through pipes."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.abstract import Executor


class MultiprocExecutor(Executor):
    def __init__(self, vllm_config: VllmConfig, monitor_workers: bool = True) -> None:
        self.monitor_workers = monitor_workers
        super().__init__(vllm_config)

    def _init_executor(self) -> None:
        context: Any = multiprocessing.get_context(
            os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        )
        self.workers: list[Any] = []
        for rank in range(self.vllm_config.parallel_config.tensor_parallel_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=worker_main, args=(theirs, self.vllm_config, rank), daemon=True
            )
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> str | None:
        answer: str | None = self.collective_rpc(
            "execute_model", args=(scheduler_output,), unique_reply_rank=0
        )
        return answer

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> str:
        answer: str = self.collective_rpc("sample_tokens", args=(grammar_output,), unique_reply_rank=0)
        return answer

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
    ) -> Any:
        for _, pipe in self.workers:
            pipe.send((method, args, kwargs or {}))
        replies = [pipe.recv() for _, pipe in self.workers]
        for ok, reply in replies:
            if not ok:
                raise RuntimeError(reply)
        answers = [reply for _, reply in replies]
        return answers if unique_reply_rank is None else answers[unique_reply_rank]

    def shutdown(self) -> None:
        for process, pipe in self.workers:
            pipe.send(None)
            process.join(10)
            pipe.close()
        self.workers = []


def worker_main(pipe: Any, vllm_config: VllmConfig, rank: int) -> None:
    """Answer the driver until it says that it is over; plugins come before anything else."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.v1.worker.gpu_worker import Worker

    module, _, name = vllm_config.parallel_config.worker_extension_cls.rpartition(".")
    bases: tuple[type, ...] = (Worker,)
    if module:
        bases = (Worker, getattr(importlib.import_module(module), name))
    worker = type("ExtendedWorker", bases, {})(vllm_config, rank)
    while True:
        asked = pipe.recv()
        if asked is None:
            return
        method, args, kwargs = asked
        try:
            if callable(method):
                answer = method(worker, *args, **kwargs)
            else:
                answer = getattr(worker, method)(*args, **kwargs)
            pipe.send((True, answer))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
