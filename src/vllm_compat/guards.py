"""What must hold of processes and data, always: checked, never changed.

The guards are in force with every plan. They keep the book of each ``generate()`` call
(:mod:`vllm_compat.engine`), compare the plans of all ranks before the first batch, and look at every
result before the caller gets it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_compat import engine
from vllm_compat.errors import GuardError

if TYPE_CHECKING:
    from vllm_compat.patching import Transaction
    from vllm_compat.plan import Plan


SAMPLE_TOKENS = "vllm.v1.executor.multiproc_executor.MultiprocExecutor.sample_tokens"


def install(transaction: Transaction, plan: Plan) -> None:
    """Enlist the guards of a plan. Call it after the adapters, so that guards see what they did."""
    transaction.owned_by("guard")
    module, _, cls = plan.roles.generator.partition(":")
    transaction.wrap(f"{module}:{cls}.__init__", _while_building)
    transaction.wrap(f"{module}:{cls}.generate", _checked_generate)
    transaction.wrap("vllm.v1.core.sched.scheduler:Scheduler.add_request", _book_request)

    if SAMPLE_TOKENS in plan.guarded:
        transaction.wrap(
            "vllm.v1.executor.multiproc_executor:MultiprocExecutor.sample_tokens", _grammar_or_none
        )

    def compared(
        wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        ours = engine.belongs(args[0] if args else kwargs.get("vllm_config"), plan.roles.package)
        if ours and plan.environment.device == "cuda":
            check_fork()
        result = wrapped(*args, **kwargs)
        if ours:
            try:
                compare_ranks(instance.collective_rpc(report_rank), plan.digest, os.environ)
            except GuardError:
                instance.shutdown()
                raise
        return result

    transaction.wrap(
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor.__init__", compared
    )


def _grammar_or_none(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Refuse a model output where a grammar output belongs: vLLM would take it as one."""
    given = args[0] if args else kwargs.get("grammar_output")
    if given is not None and type(given).__name__ != "GrammarOutput":
        raise GuardError(
            f"sample_tokens was called with a {type(given).__name__}, it takes a GrammarOutput or"
            " None: the step before it has returned a finished output, which the downstream does not"
            " expect of this vLLM."
        )
    return wrapped(*args, **kwargs)


def _while_building(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    path = kwargs.get("model_path", args[0] if args else "")
    with engine.building(instance, str(path)):
        return wrapped(*args, **kwargs)


def _book_request(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    call = engine.current_call()
    if call is not None and getattr(call.generator, "scheduler", None) is instance:
        request = args[0] if args else kwargs["request"]
        call.prompts.setdefault(request.request_id, list(request.prompt_token_ids))
    return wrapped(*args, **kwargs)


def _checked_generate(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = args[0] if args else kwargs.get("token_ids")
    for index, prompt in enumerate(given if given is not None else ()):
        if len(prompt) == 0:
            raise GuardError(f"Prompt {index} has no tokens; leave empty prompts out of the batch.")
    with engine.call_of(instance) as call:
        try:
            results = wrapped(*args, **kwargs)
            check_results(results, list(call.prompts.values()), len(instance.layer_ids))
            return results
        finally:
            call.over = True
            _abandon(instance.scheduler, call)


def _abandon(scheduler: Any, call: engine.Call) -> None:
    """Take out of the scheduler what a call has left there, whole or failed."""
    from vllm.v1.request import RequestStatus

    scheduler.finish_requests(list(call.prompts), RequestStatus.FINISHED_ABORTED)


def check_results(
    results: Sequence[Mapping[str, Any]], prompts: Sequence[Sequence[int]], layers: int
) -> None:
    """Check one batch: order, rows, layers, shape, dtype, finite, not all zero.

    ``prompts`` are the token ids in the order of the inputs.

    Raises:
        GuardError: Names the sample, the layer and what is wrong with it.
    """
    if len(results) != len(prompts):
        raise GuardError(f"{len(prompts)} prompts gave {len(results)} results.")
    expected: tuple[Any, ...] | None = None
    for sample, (result, prompt) in enumerate(zip(results, prompts, strict=True)):
        if list(result["input_ids"]) != list(prompt):
            raise GuardError(
                f"Result {sample} belongs to another prompt: its {len(result['input_ids'])} token"
                f" ids are not the {len(prompt)} of prompt {sample}."
            )
        states = result["hidden_states"]
        if len(states) != layers:
            raise GuardError(f"Sample {sample} has {len(states)} layers, {layers} were asked for.")
        for layer, tensor in enumerate(states):
            if tensor.dim() != 2 or len(tensor) != len(prompt):
                raise GuardError(
                    f"Sample {sample}, layer number {layer}: shape {list(tensor.shape)} for"
                    f" {len(prompt)} tokens, one row a token is needed."
                )
            kind = (tensor.shape[1], tensor.dtype)
            if expected is None:
                expected = kind
            if kind != expected:
                raise GuardError(
                    f"Sample {sample}, layer number {layer}: width and dtype {kind}, other layers"
                    f" have {expected}."
                )
            _check_values(tensor, sample, layer)


def _check_values(tensor: Any, sample: int, layer: int) -> None:
    import torch

    low, high = torch.aminmax(tensor, dim=1)
    finite = torch.isfinite(low) & torch.isfinite(high)
    if not bool(finite.all()):
        bad = int((~finite).sum())
        raise GuardError(
            f"Sample {sample}, layer number {layer}: {bad} of {len(tensor)} rows are not finite,"
            f" the first is row {int((~finite).nonzero()[0])}."
        )
    zero = (low == 0) & (high == 0)
    if bool(zero.any()):
        raise GuardError(
            f"Sample {sample}, layer number {layer}: {int(zero.sum())} of {len(tensor)} rows are all"
            f" zero, the first is row {int(zero.nonzero()[0])}."
        )


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


def report_rank(worker: Any) -> dict[str, Any]:
    """Return what this worker process has in force; runs in the worker, sent by the driver."""
    from vllm_compat import process

    return {"rank": getattr(worker, "rank", None), "pid": os.getpid(), **process.report()}


def compare_ranks(
    reports: Sequence[Mapping[str, Any]], digest: str, environ: Mapping[str, str]
) -> None:
    """Check that every rank holds the driver's plan, all of it.

    Raises:
        GuardError: Names the rank and why it does not.
    """
    for index, report in enumerate(reports):
        rank = report.get("rank", index)
        if report.get("error"):
            raise GuardError(f"Rank {rank} (pid {report['pid']}) could not patch: {report['error']}")
        if report.get("digest") is None:
            allowed = environ.get("VLLM_PLUGINS")
            why = (
                f"VLLM_PLUGINS={allowed!r} shuts the vllm_compat plugin out; add vllm_compat to it"
                if allowed is not None
                else "its vllm_compat plugin did not load; install vllm_compat into that environment"
                " or start the program with `python -m vllm_compat run`"
            )
            raise GuardError(f"Rank {rank} (pid {report['pid']}) runs without the plan: {why}.")
        if report["digest"] != digest:
            raise GuardError(
                f"Rank {rank} (pid {report['pid']}) holds plan {report['digest']}, the driver"
                f" {digest}: the processes see different installations or environments."
            )
