"""Capture in one worker: hooks on decoder layers, rows attributed to requests."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from vllm_compat.capture import auxiliary, stock_loop
from vllm_compat.capture.layers import decoder, is_ambiguous, refuse_misread, stream_reader, where
from vllm_compat.capture.prover import Prover
from vllm_compat.capture.rows import RowStore, Span, spans_of
from vllm_compat.capture.transfer import SharedRowStore, SharedStates, Values
from vllm_compat.errors import GuardError
from vllm_compat.runtime.patching import Transaction

logger = logging.getLogger(__name__)

_TWICE = (
    "{} ran more than once in one step, and only one of these forwards can be the batch's: use a vLLM"
    " configuration without a second forward a step (speculative decoding, ubatching), or another"
    " release."
)


class Capture:
    """What one worker captures, from set-up to the answer to ``_get_captured_states``.

    With hooks the model's forward and its return value are left alone; only forward hooks on the layers
    asked for are added, on tensor-parallel rank 0, since every rank computes the same rows. A forward
    outside of a scheduled step (warm-up, profiling) is not captured.

    ``layer_ids`` are the downstream's: id *k* is the residual stream after layer *k*. They are
    returned in the order asked for, duplicates included. ``capture`` is the strategy: ``hooks``;
    ``auxiliary`` for the model's own auxiliary hidden states; ``auto`` for hooks, and the auxiliary
    states where hooks cannot tell the layers or their stream; ``stock`` for the downstream's loop, which
    needs ``stock`` (the downstream's worker module and its own set-up call). ``strategy`` is the one in
    force, ``prompts`` the token ids of each request of the batch so far. With ``prove`` what is captured
    is proven (`vllm_compat.capture.prover`). With ``alone`` no step holds more than one request, so that
    nothing is asked for an order. What is changed on the model and its runner is enlisted in
    ``transaction``.
    """

    def __init__(
        self,
        extension: Any,
        layer_ids: Sequence[int],
        *,
        capture: str = "auto",
        stock: tuple[ModuleType, Callable[[], Any]] | None = None,
        shared: bool = True,
        prove: bool = True,
        alone: bool = False,
        transaction: Transaction | None = None,
    ) -> None:
        self._transaction = transaction or Transaction()
        self.runner = extension.model_runner
        self.layer_ids = tuple(layer_ids)
        self.unique_ids = tuple(sorted(set(layer_ids)))
        self.path = ""
        self.active = self._captures()
        self._refuse_misread()
        self._step: Any = None
        self._captured: dict[int, Any] = {}
        self._ready: dict[int, Any] = {}
        self._spans: tuple[Span, ...] | None = None
        self._failure: str | None = None
        self.prompts: dict[str, Sequence[int]] = {}
        self.store: RowStore = (
            SharedRowStore(len(self.unique_ids), self.runner.device)
            if shared
            else RowStore(len(self.unique_ids))
        )
        self._values = Values()
        count = extension.vllm_config.model_config.hf_text_config.num_hidden_layers
        if stock:
            self.strategy = "stock"
            module, setup = stock
            self.path, deliver = stock_loop.bind(extension, module, setup, count, self._transaction)
            deliver(self._receive)
        else:
            self.strategy = self._capture_by(capture, count)
        self._prover = self._proofs(count) if prove else None
        if self.active:
            self._order = self._only if alone else batch_order(self.runner, self._transaction)
            logger.info(
                "vllm_compat captures layers %s of %s (%s).",
                list(self.layer_ids),
                self.path,
                self.strategy,
            )
        if self.active or (self._prover is not None and self._prover.meets):
            self._watch_steps()

    def _proofs(self, count: int) -> Prover:
        return Prover(
            self.runner.model,
            count,
            self.unique_ids,
            captures=self.active,
            spans=lambda: self._spans or self._spans_now(),
            transaction=self._transaction,
        )

    def _capture_by(self, capture: str, count: int) -> str:
        """Set hooks or ask for auxiliary states; return which. Every rank decides alike."""
        model = self.runner.model
        if capture == "auxiliary" or (capture == "auto" and self._hooks_cannot_tell(count)):
            self.path = type(model).__name__
            auxiliary.bind(model, self.unique_ids, self._receive, self._transaction)
            return "auxiliary"
        self.path, layers = decoder(model, count)
        if self.active:
            for layer_id in self.unique_ids:
                layer = layers[layer_id]
                self._transaction.hook(
                    layer, self._hook(layer_id, layer), f"forward hook of layer {layer_id}"
                )
        return "hooks"

    def _hooks_cannot_tell(self, count: int) -> bool:
        """Whether the layers or their stream are unclear, and the model has auxiliary states instead."""
        model = self.runner.model
        if not auxiliary.supported(model):
            return False
        try:
            layers = decoder(model, count)[1]
        except GuardError:
            return True
        return any(map(is_ambiguous, {type(layers[layer_id]) for layer_id in self.unique_ids}))

    @staticmethod
    def _captures() -> bool:
        from vllm.distributed import get_pp_group, get_tp_group

        if get_pp_group().world_size != 1:
            raise GuardError(
                "Pipeline parallelism splits the layers over ranks, which this capture does not"
                " serve: use tensor parallelism."
            )
        return bool(get_tp_group().rank_in_group == 0)

    def _refuse_misread(self) -> None:
        """Refuse layers that are known to be misread, whichever strategy is asked for."""
        from vllm.distributed import get_tp_group

        refuse_misread(self.runner.model, get_tp_group().world_size, _version())

    def _watch_steps(self) -> None:
        execute_model = self.runner.execute_model

        def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            # Model runner V2 warms up through this method.
            if kwargs.get("dummy_run") or not self._transaction.active:
                return execute_model(scheduler_output, *args, **kwargs)
            self._begin(scheduler_output)
            try:
                result = execute_model(scheduler_output, *args, **kwargs)
            except BaseException as error:
                self._break_off(error)
                raise
            self._end()
            return result

        self._transaction.set_attribute(self.runner, "execute_model", watched)

    def _begin(self, scheduler_output: Any) -> None:
        self._captured.clear()
        self._ready.clear()
        self._spans = None
        self._step = scheduler_output if scheduler_output.total_num_scheduled_tokens else None
        if self._step is None:
            return
        self.prompts.update((r.req_id, r.prompt_token_ids) for r in self._step.scheduled_new_reqs)
        if self._prover is not None:
            self._prover.begin(self._step)

    def _end(self) -> None:
        """End a step that has not raised."""
        step, self._step = self._step, None
        if step is None:
            return
        if self.active and not self._failure:
            self._add(step)
        if self._prover is not None:
            self._prover.end(self._spans, self._captured, self._failure is not None)
        self._captured.clear()

    def _break_off(self, error: BaseException) -> None:
        """Forget a step that has raised: nothing of it is looked at, on no rank."""
        if self._step is not None:
            self._failure = self._failure or f"A step has failed: {type(error).__name__}: {error}"
        self._step = None
        self._captured.clear()

    def _add(self, step: Any) -> None:
        """Add what one step has captured to the rows of its requests."""
        try:
            missing = [i for i in self.unique_ids if i not in self._captured]
            if missing:
                raise GuardError(f"A step ended without the layers {missing}.")
            assert self._spans is not None
            captured = [self._captured[i] for i in self.unique_ids]
            self._values.look(self._spans, captured)
            self.store.expect({r.req_id: _length(r) for r in step.scheduled_new_reqs})
            if isinstance(self.store, SharedRowStore):
                self.store.ready = [self._ready.get(i) for i in self.unique_ids]
            self.store.add(self._spans, captured)
        except GuardError as error:
            self._failure = str(error)

    def _receive(self, tensors: list[Any]) -> None:
        """Take what was captured in one forward by other means than hooks, by ascending layer id."""
        if not self.active:
            if self._prover is not None:
                self._prover.keep(tensors)
            return
        if self._step is None or self._failure:
            return
        try:
            if self._captured:
                raise GuardError(_TWICE.format(f"{type(self.runner.model).__name__}"))
            self._spans = self._spans_now()
        except GuardError as error:
            self._failure = str(error)
            return
        self._captured = dict(zip(self.unique_ids, tensors, strict=False))  # _end tells what is missing

    def _hook(self, layer_id: int, layer: Any) -> Callable[[Any, Any, Any], None]:
        stream = stream_reader(layer, str(layer_id))

        def hook(module: Any, inputs: Any, output: Any) -> None:
            if self._step is None or self._failure:
                return
            try:
                if layer_id in self._captured:
                    raise GuardError(_TWICE.format(f"Decoder layer {layer_id}, {where(layer)},"))
                if self._spans is None:
                    self._spans = self._spans_now()
                rows = stream(output)
                if rows.dim() != 2:
                    raise GuardError(
                        f"Decoder layer {layer_id}, {where(layer)}, hands on {list(rows.shape)}: a layer"
                        " of several residual streams a token, which has no one row for it."
                    )
                self._captured[layer_id] = rows
                if isinstance(self.store, SharedRowStore):
                    self._ready[layer_id] = self.store.mark()
            except GuardError as error:
                self._failure = str(error)

        return hook

    def _only(self) -> list[str]:
        """Return the one request of the step under way."""
        requests = list(self._step.num_scheduled_tokens)
        if len(requests) != 1:
            raise GuardError(
                f"A step holds the requests {sorted(requests)}, where one at a time was asked for: rows"
                " cannot be attributed."
            )
        return requests

    def _spans_now(self) -> tuple[Span, ...]:
        step = self._step
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return spans_of(self._order(), dict(step.num_scheduled_tokens), computed)

    def reset(self) -> None:
        """Forget what was captured; the next batch begins."""
        self.store.clear()
        self.prompts.clear()
        self._values = Values()
        if self._prover is not None:
            self._prover.clear()
        self._failure = None

    def _judge(self) -> str | None:
        """Return what is wrong with the steps of this batch, in words, or None."""
        if self._failure:
            return self._failure
        if not self.store.rows:
            return (
                "No step of this batch has reached the model, so no row was captured: leave empty"
                " batches out; if this one had prompts, the worker computes nothing when execute_model"
                " is called, as the downstream expects: use another vLLM release, and report it."
            )
        if fault := self._values.judge(self.unique_ids):  # said more plainly than any proof would
            return fault
        return self._prover.judge() if self._prover is not None else None

    def states(self) -> dict[str, list[Any]] | SharedStates | None:
        """Return ``{request id: [CPU tensor [tokens, hidden] per layer asked for]}``; forget it.

        None on ranks that do not capture.

        Raises:
            GuardError: What was noticed during the steps.
        """
        import torch

        # First of all, on every rank, whatever it has noticed: the others wait for it there.
        unequal = self._prover.meet() if self._prover is not None else None
        if not self.active:
            return None
        if fault := self._judge() or unequal:
            self.reset()
            raise GuardError(fault)
        place = {layer_id: i for i, layer_id in enumerate(self.unique_ids)}
        if isinstance(self.store, SharedRowStore):
            return self.store.shared([place[layer_id] for layer_id in self.layer_ids])
        # The rows leave the device here. vLLM may pickle a reply in another thread (asynchronous
        # scheduling), whose stream knows nothing of this one: a tensor still on the device would
        # be read there before it is written.
        collected = self.store.collect(lambda parts: torch.cat(list(parts)).cpu())
        return {
            request_id: [layers[place[layer_id]] for layer_id in self.layer_ids]
            for request_id, layers in collected.items()
        }


def _version() -> str:
    """Return the vLLM release as it names itself, for messages."""
    return str(getattr(sys.modules.get("vllm"), "__version__", ""))


def _length(request: Any) -> int:
    """Return the number of prompt tokens of a new request, as the scheduler hands it over."""
    return len(request.prompt_token_ids)


def tells_order(runner: Any) -> bool:
    """Tell whether a model runner tells the order of its batch in a way that is known here."""
    return hasattr(runner, "input_batch") or hasattr(runner, "prepare_inputs")


def batch_order(runner: Any, transaction: Transaction) -> Callable[[], list[str]]:
    """Return a function that tells the batch's request ids in row order, during a step.

    Model runner V1 holds them in ``input_batch.req_ids``. V2 has no ``input_batch``; it sorts
    requests by length and returns the order in ``prepare_inputs(…).req_ids``, which is watched.

    Raises:
        GuardError: The runner is of neither kind: rows could go to the wrong request.
    """
    if hasattr(runner, "input_batch"):
        return lambda: [r for r in runner.input_batch.req_ids if r is not None]
    if hasattr(runner, "prepare_inputs"):
        prepare = runner.prepare_inputs
        latest: list[list[str]] = [[]]

        def watched(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            latest[0] = list(batch.req_ids)
            return batch

        transaction.set_attribute(runner, "prepare_inputs", watched)
        return lambda: latest[0]
    raise GuardError(
        f"{type(runner).__module__}.{type(runner).__name__} tells the order of its batch in no way"
        " that is known here; set VLLM_USE_V2_MODEL_RUNNER=0 or use a release that `vllm-compat"
        " check` shows as usable."
    )
