"""What must hold of the processes: every rank has the driver's plan, and forked workers can use CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_compat.checks import misread
from vllm_compat.errors import GuardError
from vllm_compat.runtime import context, env, run
from vllm_compat.runtime.engines import Engines

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Wrapper


def compared(plan: Plan, report_rank: Callable[[Any], dict[str, Any]]) -> Wrapper:
    """Return the wrapper that compares the plans of all ranks when an executor has started.

    ``report_rank`` runs in each worker and returns what is in force there.
    """

    def started(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[0] if args else kwargs.get("vllm_config")
        ours = context.belongs(given, plan.roles.package)
        if ours:
            misread.refuse_configured(given, plan)
        if ours and plan.environment.device == "cuda":
            check_fork()
        result = wrapped(*args, **kwargs)
        if ours:
            _compare(instance, plan, report_rank)
        return result

    return started


def compared_in_public(plan: Plan, report_rank: Callable[[Any], dict[str, Any]]) -> Wrapper:
    """Return the wrapper that does the same for the second engine, all of which is ours."""

    def started(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plan.environment.device == "cuda":
            check_fork()
        wrapped(*args, **kwargs)
        instance.know([report["pid"] for report in _compare(instance, plan, report_rank)])

    return started


def _compare(
    executor: Any, plan: Plan, report_rank: Callable[[Any], dict[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Compare the ranks of an executor that has started; return their reports."""
    reports: Sequence[Mapping[str, Any]] = executor.collective_rpc(report_rank)
    compare_ranks(reports, plan.digest, os.environ)
    run.current().part(Engines).add(executor, reports)
    return reports


def check_fork() -> None:
    """Check, before a model is loaded, that forked workers can use CUDA.

    Raises:
        GuardError: This process has initialised CUDA and its workers would be forked.
    """
    import torch
    from vllm import envs

    if envs.VLLM_WORKER_MULTIPROC_METHOD != "fork" or torch.cuda.is_initialized():
        return  # vLLM itself switches to spawn where torch says that CUDA is initialised
    child = os.fork()
    if child == 0:
        os._exit(1 if torch._C._cuda_isInBadFork() else 0)
    _, status = os.waitpid(child, 0)
    if status:
        raise GuardError(
            "CUDA has been touched in this process, so forked workers could not use it (Cannot"
            " re-initialize CUDA in forked subprocess): call vllm_compat.apply() before speculators"
            " is imported, or set VLLM_WORKER_MULTIPROC_METHOD=spawn and guard the program with"
            " `if __name__ == '__main__':`."
        )


def compare_ranks(reports: Sequence[Mapping[str, Any]], digest: str, environ: Mapping[str, str]) -> None:
    """Check that every rank holds the driver's plan, all of it.

    Raises:
        GuardError: Names the rank and why it does not.
    """
    if not reports:
        raise GuardError("No rank has answered which plan it holds.")
    for index, report in enumerate(reports):
        rank = index if report.get("rank") is None else report["rank"]
        if report.get("error"):
            raise GuardError(f"Rank {rank} (pid {report['pid']}) could not patch: {report['error']}")
        if report.get("digest") is None:
            why = env.allow_list_shuts_us_out(environ) or (
                "its vllm_compat plugin did not load; install vllm_compat into that environment or"
                " start the program with `python -m vllm_compat run`."
            )
            raise GuardError(f"Rank {rank} (pid {report['pid']}) runs without the plan: {why}")
        if report["digest"] != digest:
            raise GuardError(
                f"Rank {rank} (pid {report['pid']}) holds plan {report['digest']}, the driver"
                f" {digest}: the processes see different installations or environments."
            )
