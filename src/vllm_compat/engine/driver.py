"""What stands behind the downstream's generator in the driver: ``vllm.LLM``, asked for one batch a time.

Of vLLM five names are used, and none of its internals: ``LLM`` with the arguments of :func:`arguments`,
``LLM.generate``, ``LLM.collective_rpc``, ``SamplingParams`` with three arguments, and ``request_id`` and
``prompt_token_ids`` of a ``RequestOutput``.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from vllm_compat.engine.worker import ModelFacts, Reply, digest, reset, setup, states
from vllm_compat.errors import GuardError, UsageError
from vllm_compat.runtime import identity

logger = logging.getLogger(__name__)

EXTENSION = "vllm_compat.engine.worker.Extension"
MAX_NUM_SEQS = 32
"""Requests a step, as the downstream has it (``MAX_NUM_SEQS``): more take more memory to warm up."""
LEAST_STEP_TOKENS = 8192
"""Tokens a step where the caller gives none, as the downstream has it (``MIN_MAX_BATCHED_TOKENS``)."""
SECONDS_TO_END = 10.0
"""How long :meth:`PublicExecutor.shutdown` waits for vLLM's processes."""

DEFAULTS: dict[str, Any] = {
    "layer_ids": None,
    "max_model_len": 2048,
    "gpu_memory_utilization": 0.8,
    "tensor_parallel_size": 1,
    "max_num_batched_tokens": None,
}
"""What is taken where the generator has no such argument: the defaults of speculators 0.4.0.1."""

_SHUT_DOWN = "This generator's engine has been shut down: build a new generator."


class PublicExecutor:
    """An engine of vLLM's own, asked in the words of the executor that the downstream has.

    ``workers`` is empty: vLLM's engine core has started them, and it alone knows when one has ended.
    """

    workers: tuple[Any, ...] = ()

    def __init__(self, given: Mapping[str, Any]) -> None:
        from vllm import LLM

        self._llm: Any = LLM(**given)
        self._unclean = False
        self._pids: tuple[int, ...] = ()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Run a function of the worker, or a method by its name, on every rank; return their answers.

        With ``unique_reply_rank`` only that rank's answer is returned; ``timeout`` is in seconds.

        Raises:
            VllmCompatError: What a worker has raised of ours, as it was.
            RuntimeError: Anything else that it has raised, in words.
            TimeoutError: Not all have answered in time.
        """
        packed = _packed(method, args, dict(kwargs or {}))
        replies = _within(timeout, lambda: self._ask("vllm_compat_call", timeout, (packed,)))
        outcomes = [pickle.loads(bytes(reply)) for reply in replies]
        for right, answer in outcomes:
            if not right:
                raise answer
        answers = [answer for _, answer in outcomes]
        return answers if unique_reply_rank is None else answers[unique_reply_rank]

    def _ask(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> Any:
        if self._llm is None:
            raise UsageError(_SHUT_DOWN)
        return self._llm.collective_rpc(method, timeout, args)

    def compute(self, prompts: Sequence[Sequence[int]], *, alone: bool = False) -> list[Any]:
        """Let vLLM compute each prompt to its end, and one token; return its outputs, in order.

        With ``alone`` the next prompt is sent when the one before has been computed.
        """
        from vllm import SamplingParams

        if self._llm is None:
            raise UsageError(_SHUT_DOWN)
        self._unclean = True
        once = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        given = [{"prompt_token_ids": list(ids)} for ids in prompts]
        batches = [[prompt] for prompt in given] if alone else [given]
        outputs = [
            output for batch in batches for output in self._llm.generate(batch, once, use_tqdm=False)
        ]
        self._unclean = False
        return outputs

    def clean(self) -> None:
        """Let vLLM end what a call that was broken off has left in its engine.

        ``LLM.generate`` returns when nothing is left, whoever has asked for it: one token is asked for.

        Raises:
            GuardError: The engine has ended with that call.
        """
        if not self._unclean:
            return
        try:
            self.compute([[0]])
        except Exception as error:
            raise GuardError(
                "vLLM's engine has not come back from an earlier batch that failed"
                f" ({type(error).__name__}: {error}): build a new generator."
            ) from error

    def know(self, pids: Sequence[int]) -> None:
        """Take in which processes the workers are, so that they can be waited for."""
        self._pids = tuple(pid for pid in pids if pid != os.getpid())

    def shutdown(self) -> None:
        """End vLLM's engine and its processes; a second time does nothing."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        core: Any = getattr(getattr(llm, "llm_engine", None), "engine_core", None)
        if hasattr(core, "shutdown"):
            with suppress(Exception):
                core.shutdown()
        del llm, core  # where vLLM has no such method, its finalizers do the same
        gc.collect()
        self._wait_for_the_end()

    def _wait_for_the_end(self) -> None:
        """Wait for the workers' processes, and end those that stay."""
        until = time.monotonic() + SECONDS_TO_END
        left = list(self._pids)
        while left and time.monotonic() < until:
            left = [pid for pid in left if identity.is_alive(pid)]
            time.sleep(0.05 if left else 0)
        for pid in left:
            logger.warning("vllm_compat: vLLM's process %s did not end by itself.", pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _packed(method: Any, *arguments: Any) -> bytes:
    """Return a call as bytes; a function of the program's own file goes as it is, not by its name."""
    if getattr(method, "__module__", "") == "__main__":
        import cloudpickle  # vLLM needs it as well

        packed: bytes = cloudpickle.dumps((method, *arguments))
        return packed
    return pickle.dumps((method, *arguments))


def _within(seconds: float | None, ask: Callable[[], Any]) -> Any:
    """Return what a call returns; where it takes longer, raise and let it go on by itself.

    vLLM hands a time limit to the workers' executor only; an engine core that hangs keeps the caller.
    """
    if seconds is None:
        return ask()
    outcome: list[tuple[bool, Any]] = []

    def answer() -> None:
        try:
            outcome.append((True, ask()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=answer, name="vllm_compat asks", daemon=True)
    thread.start()
    thread.join(seconds + 1)
    if not outcome:
        raise TimeoutError(f"vLLM's engine core has not answered in {seconds:g} seconds.")
    right, value = outcome[0]
    if not right:
        raise value
    return value


def build(generator: Any, construct: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Do what the generator's constructor does, with an engine of vLLM's own.

    ``construct`` is that constructor, for its arguments and their defaults. The generator gets the
    attributes that the downstream gives it: ``model_path``, ``tensor_parallel_size``, ``tokenizer``,
    ``layer_ids``, ``vllm_config`` (of it only what `ModelFacts` has) and ``executor``.

    Raises:
        UsageError: An argument that is not known here is given a value of its own.
        ValueError: A layer id is out of bounds, in the downstream's words.
    """
    from transformers import AutoConfig, AutoTokenizer

    from vllm_compat.runtime import run_record

    given = _bound(construct, args, kwargs)
    path = given["model_path"]
    generator.model_path, generator.tensor_parallel_size = path, given["tensor_parallel_size"]
    generator.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    generator.layer_ids = _layer_ids(config, given["layer_ids"])
    executor = PublicExecutor(arguments(given))
    try:
        generator.executor = executor
        facts = _set_up(executor, generator.layer_ids)
        generator.vllm_config = _Config(facts)
        if facts.alone:
            run_record.note("one prompt a step, since no order of a batch is relied on")
            logger.warning(
                "vllm_compat: each prompt is computed in steps of its own, so that no order of a batch"
                " is relied on. The shorter prompts are, the more time that takes."
            )
    except BaseException:
        executor.shutdown()
        raise


class _Config:
    """What the generator keeps of vLLM's configuration."""

    def __init__(self, model_config: ModelFacts) -> None:
        self.model_config = model_config


def _bound(construct: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(construct).bind(*args, **kwargs)
    foreign = sorted(
        name
        for name, value in bound.arguments.items()
        if name not in ("model_path", *DEFAULTS)
        and value is not inspect.signature(construct).parameters[name].default
    )
    if foreign:
        raise UsageError(
            f"The second engine (vLLM's public interface) does not know the generator's argument"
            f" {', '.join(foreign)}: leave it out, or use engine='stock'."
        )
    bound.apply_defaults()
    return DEFAULTS | dict(bound.arguments)


def _layer_ids(config: Any, asked: Sequence[int] | None) -> list[int]:
    """Return the layers to capture, by the downstream's rule (its ``__init__``, 0.3.0 to 0.4.0.1)."""
    if hasattr(config, "num_hidden_layers"):
        layers = int(config.num_hidden_layers)
    elif hasattr(config, "text_config"):
        layers = int(config.text_config.num_hidden_layers)
    else:
        raise ValueError("Cannot determine num_layers from config")
    ids = list(asked) if asked is not None else [2, layers // 2, layers - 3, layers - 1]
    for layer_id in ids:
        if layer_id < 0 or layer_id >= layers:
            raise ValueError(f"Layer index {layer_id} out of bounds [0, {layers - 1}]")
    return ids


def arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for those of the generator.

    They are the downstream's own settings, but for the KV cache: ``gpu_memory_utilization`` is the share
    of the device that vLLM may take for weights, activations and cache together, where the downstream
    gives the cache a fifth of that share of what is free after loading.
    """
    length = given["max_model_len"]
    return {
        "model": given["model_path"],
        "tokenizer": given["model_path"],
        "trust_remote_code": True,
        "dtype": "auto",
        "max_model_len": length,
        "enforce_eager": True,
        "gpu_memory_utilization": given["gpu_memory_utilization"],
        "enable_prefix_caching": False,
        "tensor_parallel_size": given["tensor_parallel_size"],
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": given["max_num_batched_tokens"] or max(LEAST_STEP_TOKENS, length),
        "worker_extension_cls": EXTENSION,
    }


def _set_up(executor: PublicExecutor, layer_ids: Sequence[int]) -> ModelFacts:
    """Agree with the workers on how rows come here, and let them capture."""
    from vllm_compat.capture import slabs
    from vllm_compat.runtime import run, run_record

    plan = run.current().plan
    if plan is not None and plan.environment.transfer != "rpc":
        refused = slabs.agree(executor.collective_rpc)
        run_record.tell_transfer("replies" if refused else "shared memory", refused)
    facts: list[ModelFacts] = executor.collective_rpc(setup, args=(list(layer_ids),))
    return facts[0]


def generate(generator: Any, token_ids: Any) -> list[dict[str, Any]]:
    """Return what the generator's ``generate()`` returns: ids, a tensor a layer, no mask; in order.

    ``token_ids`` are lists or a tensor; prompts are cut where the downstream cuts them, one token short
    of the model's longest. Each layer is ``[tokens, width]``, in the order in which ids were asked for.

    Raises:
        GuardError: Rows are missing, or a worker has noticed that some are wrong.
        ValueError: There are no prompts, in the downstream's words.
    """
    import torch

    from vllm_compat.runtime import context

    given = token_ids.tolist() if isinstance(token_ids, torch.Tensor) else token_ids
    if not given:
        raise ValueError("token_ids cannot be empty")
    longest = generator.vllm_config.model_config.max_model_len - 1
    prompts = [_plain(ids)[:longest] for ids in given]
    call = context.current_call()
    book: dict[str, list[int]] = call.prompts if call is not None else {}
    book.update((f"prompt {place}", ids) for place, ids in enumerate(prompts))
    executor: PublicExecutor = generator.executor
    executor.clean()
    executor.collective_rpc(reset)
    outputs = executor.compute(prompts, alone=generator.vllm_config.model_config.alone)
    replies: list[Reply] = executor.collective_rpc(states)
    reply = next((r for r in replies if r.states is not None or r.fault), replies[0])
    requests = paired([str(output.request_id) for output in outputs], prompts, reply.prompts)
    book.clear()
    book.update(
        (request or f"prompt {place}", ids)
        for place, (request, ids) in enumerate(zip(requests, prompts, strict=True))
    )
    for told in replies:
        if told.fault:
            raise GuardError(told.fault)
    results = []
    for place, (output, request, ids) in enumerate(zip(outputs, requests, prompts, strict=True)):
        if list(output.prompt_token_ids) != ids or request is None or request not in reply.states:
            raise GuardError(
                f"Prompt {place} of this batch has no rows that are surely its own: vLLM's output"
                f" {output.request_id} and the requests that workers have seen do not pair up."
            )
        rows = [layer.clone().cpu() for layer in reply.states[request]]
        results.append(
            {
                "input_ids": torch.as_tensor(ids, dtype=torch.long),
                "hidden_states": rows,
                "loss_mask": None,
            }
        )
    return results


def _plain(ids: Any) -> list[int]:
    return list(ids.tolist() if hasattr(ids, "tolist") else ids)


def paired(
    outputs: Sequence[str], prompts: Sequence[Sequence[int]], seen: Mapping[str, str]
) -> list[str | None]:
    """Return the request that the workers have seen for each prompt, None where there is none.

    ``outputs`` are the requests' ids in the front end, in the order of ``prompts``; ``seen`` maps those
    in the workers to their prompts' digests. A worker's id is the front end's, in newer releases (0.16.0
    among them) with ``-`` and eight hexadecimal digits behind it. The tokens decide; ids tell prompts of
    the same tokens apart, and where they do not, such prompts have the same right to the rows.
    """
    free: dict[str, list[str]] = {}
    for request, of_prompt in seen.items():
        free.setdefault(of_prompt, []).append(request)
    found: list[str | None] = []
    for output, ids in zip(outputs, prompts, strict=True):
        same = free.get(digest(ids), [])
        named = [r for r in same if r == output or r.startswith(f"{output}-")]
        chosen = next(iter(named or same), None)
        if chosen is not None:
            same.remove(chosen)
        found.append(chosen)
    return found
