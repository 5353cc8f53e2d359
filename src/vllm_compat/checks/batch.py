"""What must hold of one batch: each request's prompt, and every row of every result.

These checks keep the book of each ``generate()`` call (:mod:`vllm_compat.runtime.context`) and look at
every result before the caller gets it.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from vllm_compat.analysis.remote_code import remote_code_of, sentence
from vllm_compat.checks import misread
from vllm_compat.checks.canary import check_canary, has_router
from vllm_compat.errors import GuardError, VllmCompatError
from vllm_compat.runtime import context, heartbeat, numbering, run, run_record

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Wrapper

logger = logging.getLogger(__name__)


class Agreed:
    """The generators of this run whose canary has agreed."""

    def __init__(self) -> None:
        self.generators: WeakSet[Any] = WeakSet()


def grammar_or_none(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse a model output where a grammar output belongs: vLLM would take it as one."""
    given = args[0] if args else kwargs.get("grammar_output")
    if given is not None and type(given).__name__ != "GrammarOutput":
        raise GuardError(
            f"sample_tokens was called with a {type(given).__name__}, it takes a GrammarOutput or"
            " None: the step before it has returned a finished output, which the downstream does"
            " not expect of this vLLM."
        )
    return wrapped(*args, **kwargs)


def while_building(plan: Plan) -> Wrapper:
    """Return the wrapper of a generator's construction."""

    def build(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = kwargs.get("model_path", args[0] if args else "")
        run_record.open_here()
        if "remote_code" not in plan.switched_off and (names := remote_code_of(str(path))):
            logger.warning("vllm_compat: %s", sentence(str(path), names))
        heartbeat.phase("building", model=str(path))
        try:
            misread.refuse(str(path), _ranks(wrapped, args, kwargs), plan)
            with context.building(instance, str(path)):
                result = wrapped(*args, **kwargs)
        except Exception as error:
            run_record.fail(f"Building the generator: {heartbeat.describe(error)}")
            raise
        heartbeat.phase("ready", layer_ids=getattr(instance, "layer_ids", ()))
        return result

    return build


def _ranks(construct: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the tensor parallel size that a generator is constructed with; 1 where it is not told."""
    try:
        given = inspect.signature(construct).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # it will say itself what is wrong with its arguments
        given = dict(kwargs)
    ranks = given.get("tensor_parallel_size", 1)
    return ranks if isinstance(ranks, int) else 1


def book_request(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = context.current_call()
    if call is not None and getattr(call.generator, "scheduler", None) is instance:
        request = args[0] if args else kwargs["request"]
        call.prompts.setdefault(request.request_id, list(request.prompt_token_ids))
    return wrapped(*args, **kwargs)


def checked_generate(*, everything: bool, canary: bool) -> Wrapper:
    """Return the wrapper that checks inputs and results of each ``generate()`` call.

    With ``canary``, the first call of a generator is followed by that check before its results are
    handed over.
    """

    def generate(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        workers = list(getattr(instance.executor, "workers", None) or ())

        def once(batch: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[list[int]]]:
            try:
                check_prompts(batch, vocabulary_of(instance))
            except GuardError as error:
                if batch is given:
                    named = name_prompt(str(error), dict(enumerate(_plain(batch))))
                    raise GuardError(f"{str(error).rstrip('.')}. {named}") from None
                raise
            with context.call_of(instance) as call:
                try:
                    results = wrapped(*args, **kwargs)
                    prompts = list(call.prompts.values())
                    check_requests(batch, prompts)
                    check_results(
                        results,
                        prompts,
                        len(instance.layer_ids),
                        kind=model_kind(instance),
                        everything=everything,
                    )
                    return results, prompts
                except Exception as error:
                    if batch is given and (named := name_prompt(str(error), call.prompts)):
                        kind = type(error) if isinstance(error, VllmCompatError) else GuardError
                        raise kind(f"{str(error).rstrip('.')}. {named}") from error
                    raise

        given = args[0] if args else kwargs.get("token_ids")
        given = () if given is None else given
        heartbeat.phase("extracting", call_since=time.monotonic())
        try:
            results, prompts = once(given, *args, **kwargs)
            agreed = run.current().part(Agreed).generators
            if canary and instance not in agreed:

                def again(batch: list[list[int]]) -> Any:
                    if args:
                        return once(batch, batch, *args[1:], **kwargs)[0]
                    return once(batch, **{**kwargs, "token_ids": batch})[0]

                seen = check_canary(again, prompts, results, routed=_has_router(instance))
                agreed.add(instance)
                run_record.note(str(seen))
            run_record.add(results)
            return results
        except Exception as error:
            run_record.fail(f"{_dead(workers)}{type(error).__name__}: {error}")
            raise
        finally:
            heartbeat.note(call_since=None)

    return generate


def name_prompt(error: str, prompts: Mapping[Any, Any]) -> str:
    """Return which prompt of a call an error is about, in words, or nothing; the account notes it.

    The error names a request, as the worker does, or the sample's place in the batch, as the checks of
    prompts and of results do; people know neither. ``prompts`` are those of the call, in order, by their
    request's id where they have one.
    """
    for place, (request_id, ids) in enumerate(prompts.items()):
        named = isinstance(request_id, str) and re.search(
            rf"(?<![\w-]){re.escape(request_id)}(?![\w-])", error
        )
        if named or re.match(rf"(Sample|Prompt) {place}\b", error):
            number = numbering.numbers_of(len(prompts))[place]
            return f"That is prompt {place} of this generate() call{_begin(ids)}, {_by_file(number)}"
    return ""


def _begin(ids: Any) -> str:
    """Return how a prompt begins, in words; nothing where it is no row of tokens."""
    ids = _plain(ids)
    if not isinstance(ids, list | tuple) or not ids:
        return ""
    begin = ", ".join(str(_plain(token))[:20] for token in ids[:8])
    return f" ({len(ids)} tokens: {begin}{', …' if len(ids) > 8 else ''})"


def _by_file(number: int) -> str:
    """Return which sample of the run that is, and how to go on without it."""
    if numbering.current().folder is None:
        return (
            f"sample {number} of this run counted from 0. To go on without it, take that conversation"
            " out of the data."
        )
    run_record.blame(number)
    return (
        f"which belongs to data_{number}.pt. To do the rest without it, run the same again with"
        f" `vllm-compat run --leave-out {number}`; every other sample keeps its number."
    )


def model_kind(generator: Any) -> tuple[int, str] | None:
    """Return width and dtype of the model's rows, from the generator's vLLM configuration.

    None where the downstream keeps none.
    """
    config = getattr(getattr(generator, "vllm_config", None), "model_config", None)
    if config is None:
        return None
    return int(config.get_hidden_size()), str(config.dtype).removeprefix("torch.")


def vocabulary_of(generator: Any) -> int | None:
    """Return how many ids the model's embedding has, from the generator's vLLM configuration.

    None where the downstream keeps none, or vLLM does not know.
    """
    config = getattr(getattr(generator, "vllm_config", None), "model_config", None)
    return int(config.get_vocab_size()) or None if config is not None else None


def _has_router(generator: Any) -> bool:
    config = getattr(getattr(generator, "vllm_config", None), "model_config", None)
    return config is None or has_router(config.hf_text_config)


def _dead(workers: Sequence[Any]) -> str:
    """Return which worker processes have ended, in words; nothing where all are alive."""
    ended = []
    for rank, worker in enumerate(workers):
        process = getattr(worker, "proc", None)
        code = getattr(process, "exitcode", None)
        if process is not None and code is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
            ended.append(f"the worker of rank {rank} (pid {process.pid}) {how}")
    return f"{', '.join(ended)}; " if ended else ""


def check_prompts(given: Any, vocabulary: int | None = None) -> None:
    """Check, before a batch starts, that each prompt is a row of ids that the model has.

    vLLM's own front end checks ids, and the downstream goes past it: over several ranks the embedding
    takes an id that the model does not have for a row of zeros, and says nothing. ``vocabulary`` is how
    many ids the model has, where that is known. Prompts may be lists or tensors.

    Raises:
        GuardError: Names the first prompt, the token and what is wrong with it.
    """
    prompts = _plain(given)
    if not isinstance(prompts, Iterable):
        return  # the downstream says what it takes
    for index, prompt in enumerate(prompts):
        ids = _plain(prompt)
        if isinstance(ids, (str, bytes, Mapping)) or not hasattr(ids, "__len__"):
            raise GuardError(
                f"Prompt {index} is no list of token ids (it is of type {type(prompt).__name__});"
                " generate() takes a list of prompts, each a list of the model's token ids."
            )
        if len(ids) == 0:
            raise GuardError(f"Prompt {index} has no tokens; leave empty prompts out of the batch.")
        if not _are_ids(ids, vocabulary):
            raise GuardError(f"Prompt {index}, {_wrong_id(ids, vocabulary)}")


def _plain(value: Any) -> Any:
    """Return a tensor's or an array's content as Python's own objects; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _are_ids(ids: Sequence[Any], vocabulary: int | None) -> bool:
    """Tell whether all are ids that the model has, without a loop of Python's over them."""
    try:
        array("I", ids)  # the quickest way to see that all are whole numbers and none is negative
    except (TypeError, OverflowError):
        return False
    highest = max(ids)
    if highest <= 1 and all(isinstance(_plain(token), bool) for token in ids):
        return False  # a mask, given for ids
    return vocabulary is None or bool(highest < vocabulary)


def _wrong_id(ids: Sequence[Any], vocabulary: int | None) -> str:
    """Return which token of a prompt is no id that the model has, and what to do."""
    for place, token in enumerate(map(_plain, ids)):
        if isinstance(token, bool) or not isinstance(token, Integral):
            return (
                f"token {place}: {token!r} is no token id (it is of type {type(token).__name__}); give"
                " whole numbers, as the model's own tokenizer makes them."
            )
        if not 0 <= int(token) < (vocabulary or 2**32):
            known = f"the model has {vocabulary} (ids 0 to {vocabulary - 1})" if vocabulary else ""
            return (
                f"token {place}: id {token}, {known or 'no model has such an id'}. It comes from another"
                " tokenizer, or marks padding or a token that the model's embedding was not made larger"
                " for: tokenize with the model's own tokenizer, or leave this prompt out."
            )
    return "what it holds are no token ids; give whole numbers."


def check_requests(given: Sequence[Any], prompts: Sequence[Sequence[int]]) -> None:
    """Check that each prompt that was given, possibly cut at its end, became one request, in order.

    Raises:
        GuardError: Names the first prompt that did not.
    """
    if len(given) != len(prompts):
        raise GuardError(f"{len(given)} prompts became {len(prompts)} requests.")
    for index, (wanted, prompt) in enumerate(zip(given, prompts, strict=True)):
        if _ids(wanted)[: len(prompt)] != list(prompt):
            raise GuardError(f"The request for prompt {index} holds other tokens than the prompt.")


@dataclass(frozen=True)
class Rows:
    """What the guards need to know of one tensor: its shape, its dtype, its bad rows.

    ``not_finite`` and ``zero`` are ``(number of such rows, the first of them)`` among those that
    were looked at, or None.
    """

    shape: tuple[int, ...]
    dtype: str
    not_finite: tuple[int, int] | None = None
    zero: tuple[int, int] | None = None

    @property
    def kind(self) -> tuple[int, str]:
        """What all layers of a batch have in common: width and dtype."""
        return self.shape[-1], self.dtype


def check_results(
    results: Sequence[Mapping[str, Any]],
    prompts: Sequence[Sequence[int]],
    layers: int,
    *,
    kind: tuple[int, str] | None = None,
    everything: bool = True,
) -> None:
    """Check one batch: order, rows, layers, shape, dtype, finite, not all zero.

    ``prompts`` are the token ids in the order of the inputs, ``kind`` the model's width and dtype. With
    ``everything`` off, the values of only the first and last row of each tensor are looked at here: the
    worker has looked at all of them, on the device.

    Raises:
        GuardError: Names the sample, the layer and what is wrong with it.
    """
    handover = sys.modules.get("vllm_compat.capture.handover")
    if len(results) != len(prompts):
        raise GuardError(f"{len(prompts)} prompts gave {len(results)} results.")
    expected = kind
    if kind and results and str(results[0]["hidden_states"][0].dtype) == "torch.float32":
        expected = kind[0], "float32"  # some models keep a more exact residual stream than their dtype
    for sample, (result, prompt) in enumerate(zip(results, prompts, strict=True)):
        check_tokens(sample, result["input_ids"], prompt)
        if handover and any(isinstance(t, handover.Handed) for t in result["hidden_states"]):
            raise GuardError(
                f"Sample {sample} is no plain tensor: this downstream no longer copies what it returns;"
                " use transfer='rpc'."
            )
        rows = [look_at(tensor, everything) for tensor in result["hidden_states"]]
        expected = check_layers(sample, rows, len(prompt), layers, expected)


def check_tokens(sample: int, found: Any, prompt: Sequence[int]) -> None:
    """Check that a result belongs to its prompt, by the token ids (a list or a tensor)."""
    ids = _ids(found)
    if ids != list(prompt):
        raise GuardError(
            f"Result {sample} belongs to another prompt: its {len(ids)} token ids are not the"
            f" {len(prompt)} of prompt {sample}."
        )


def _ids(tokens: Any) -> list[int]:
    return tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)


def check_layers(
    sample: int,
    found: Sequence[Rows],
    tokens: int,
    layers: int,
    expected: tuple[int, str] | None = None,
) -> tuple[int, str] | None:
    """Check the layers of one sample of ``tokens`` tokens.

    ``expected`` is the width and dtype of the batch, where an earlier sample has told them; they
    are returned.
    """
    if len(found) != layers:
        raise GuardError(f"Sample {sample} has {len(found)} layers, {layers} were asked for.")
    for layer, rows in enumerate(found):
        where = f"Sample {sample}, layer number {layer}"
        if len(rows.shape) != 2 or rows.shape[0] != tokens:
            raise GuardError(
                f"{where}: shape {list(rows.shape)} for {tokens} tokens, one row a token is needed."
            )
        expected = expected or rows.kind
        if rows.kind != expected:
            raise GuardError(
                f"{where}: width and dtype {rows.kind}, the model and other layers have {expected}."
            )
        for bad, what in ((rows.not_finite, "not finite"), (rows.zero, "all zero")):
            if bad:
                raise GuardError(
                    f"{where}: {bad[0]} of {tokens} rows are {what}, the first is row {bad[1]}."
                )
    return expected


def look_at(tensor: Any, everything: bool = True) -> Rows:
    """Look at every row of a tensor ``[rows, width]``, or only at its first and its last.

    Of a tensor of another shape only the shape and the dtype are told.
    """
    import torch

    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if tensor.dim() != 2 or not tensor.numel():
        return Rows(shape, dtype)
    step = 1 if everything else max(len(tensor) - 1, 1)
    low, high = torch.aminmax(tensor[::step], dim=1)
    finite = torch.isfinite(low) & torch.isfinite(high)
    return Rows(shape, dtype, _some(~finite, step), _some((low == 0) & (high == 0), step))


def _some(rows: Any, step: int) -> tuple[int, int] | None:
    return (int(rows.sum()), int(rows.nonzero()[0]) * step) if bool(rows.any()) else None
