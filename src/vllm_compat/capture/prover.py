"""The proofs of `vllm_compat.capture.proof` in one worker: when they look, and how ranks compare.

Nothing here meets another rank within a step. A step can raise, or be found wrong, on one rank alone,
and each of its forwards holds meetings of the model's own: whoever waited for the others there would
wait for ever. Ranks meet in one place, `Prover.meet`, when the driver asks for the rows of a batch.
That cannot hang, because

- the driver sends this question once to all workers, and each answers its messages one by one, in the
  order sent: at that time every rank has left its last step, by its end or by an error;
- every rank of the group takes part, whatever it has noticed, and one with nothing to show says so;
- nothing in front of the meeting can raise: hooks of the proofs keep what goes wrong as a sentence
  (`quietly`), and only behind it a rank refuses to answer.

A group that does not form, since one of the workers has died, is ended by vLLM's executor, which shuts
the others down.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from vllm_compat.capture.layers import decoder, stream_reader, where
from vllm_compat.capture.proof import StreamProof, TokenProof, quietly
from vllm_compat.capture.rows import Span
from vllm_compat.errors import GuardError
from vllm_compat.runtime.patching import Transaction

logger = logging.getLogger(__name__)

Spans = tuple[Span, ...]


class Prover:
    """Proves what one worker captures.

    ``count`` is the number of decoder layers, ``layer_ids`` those asked for, ascending; ``captures``
    whether this rank captures (rank 0); ``spans`` gives, within a step, the rows of each request, on the
    rank that captures. Hooks and wrappers are enlisted in ``transaction``. Where the layers cannot be
    told (their model hands over its own auxiliary states), tokens alone are proven.
    """

    def __init__(
        self,
        model: Any,
        count: int,
        layer_ids: Sequence[int],
        *,
        captures: bool,
        spans: Callable[[], Spans],
        transaction: Transaction,
    ) -> None:
        from vllm.distributed import get_tp_group

        self._group = get_tp_group()
        self._spans = spans
        self._captures = captures
        self._layer_ids = tuple(layer_ids)
        self._own: dict[int, Any] = {}  # what a rank that does not capture would have captured
        self._step = 0  # all ranks get the same steps, so their numbers are the same
        self._samples: dict[int, list[Any]] = {}  # of the steps watched since the last meeting
        self._handles: list[Any] = []
        self._fault: str | None = None
        self.unproven: set[int] = set()  # layers behind which no stream has shown
        self.tokens = TokenProof() if captures else None
        self.stream: StreamProof | None = None
        with suppress(GuardError):
            name, layers = decoder(model, count)
            ends = self._ends if captures else tuple
            self.stream = StreamProof(model, name, layers, layer_ids, ends)
        if self.tokens is not None:
            for handle in self.tokens.watch(model):
                transaction.did("forward pre-hook of the proof of tokens", _then(handle.remove))
            if self.stream is not None and hasattr(model, "compute_logits"):
                self._watch_logits(model, transaction)

    @property
    def meets(self) -> bool:
        """Whether there are other ranks to meet."""
        return bool(self._group.world_size > 1)

    def _watch_logits(self, model: Any, transaction: Transaction) -> None:
        compute_logits = model.compute_logits

        def watched(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if self.stream is not None and transaction.active:
                try:
                    self.stream.check_logits(hidden)
                except GuardError as error:
                    self._fault = self._fault or str(error)
            return compute_logits(*args, **kwargs)

        transaction.set_attribute(model, "compute_logits", watched)

    def _ends(self) -> list[int]:
        """Return the row of each request's last token in this step, on the rank that captures."""
        rows, ends = 0, []
        for span in self._spans():
            rows += span.count
            ends.append(rows - 1)
        return ends

    def begin(self, step: Any) -> None:
        """Begin a scheduled step; every rank calls it."""
        self._step += 1
        self._drop()
        if self.tokens is not None:
            self.tokens.begin(step)
        if self.stream is None or not self.stream.begin(step.total_num_scheduled_tokens):
            return
        for layer_id in () if self._captures else self.stream.layer_ids:
            layer = self.stream.layers[layer_id]
            self._handles.append(layer.register_forward_hook(self._keep(layer_id, layer)))

    def _keep(self, layer_id: int, layer: Any) -> Callable[..., None]:
        read = stream_reader(layer, str(layer_id))

        def hook(module: Any, inputs: Any, output: Any) -> None:
            with suppress(GuardError):  # rank 0 reads the same layer, and says so
                self._own[layer_id] = read(output)

        return quietly(self._tell, hook)

    def keep(self, states: Sequence[Any]) -> None:
        """Take auxiliary states on a rank that does not capture, by ascending layer id."""
        if self.stream is not None and self.stream.armed:
            self._own = dict(zip(self._layer_ids, states, strict=False))

    def _tell(self, sentence: str) -> None:
        self._fault = self._fault or sentence

    def end(self, spans: Spans | None, captured: Mapping[int, Any], failed: bool) -> None:
        """End a step that has not raised; what is wrong with it is kept for `judge`. Meets nobody.

        ``spans`` are its rows on the rank that captures, ``captured`` its layers; ``failed`` says that
        something has been found already.
        """
        try:
            if failed:
                return
            if self.tokens is not None and spans is not None:
                self.tokens.look(spans)
            if self.stream is None or not self.stream.armed:
                return
            sampled = self.stream.sample(captured if self._captures else self._own)
            self._samples[self._step] = sampled
            if self._captures:
                self.stream.check(sampled)
                self._warn(self.stream)
        except GuardError as error:
            self._tell(str(error))
        finally:
            self._drop()

    def _warn(self, stream: StreamProof) -> None:
        """Say once which layers are believed by their source alone."""
        for layer_id in set(stream.unproven) - self.unproven:
            self.unproven.add(layer_id)
            logger.warning(
                "vllm_compat: what follows decoder layer %s, %s, shows no residual stream; what is"
                " captured there rests on the source of its forward%s.",
                layer_id,
                where(stream.layers[layer_id]),
                " and on equal ranks" if self.meets else "",
            )

    def _drop(self) -> None:
        """Take the hooks of a watched step away, also of one that has raised."""
        if self.stream is not None:
            self.stream.end()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._own = {}

    def meet(self) -> str | None:
        """Meet the other ranks and compare the steps that all have watched; return what is wrong.

        Every rank of the group calls it once for each batch, in the answer to the driver's question for
        the rows, and nowhere else (see the module's first lines). Without other ranks it does nothing.
        """
        samples, self._samples = self._samples, {}
        if not self.meets:
            return None
        import torch

        mine = {step: [rows.float().cpu() for rows in sampled] for step, sampled in samples.items()}
        theirs: list[Any] = [None] * self._group.world_size
        torch.distributed.all_gather_object(theirs, mine, group=self._group.cpu_group)
        if self.stream is None or not self._captures:
            return None
        # A step that has raised or was found wrong on one rank is not there: that rank says so itself,
        # or, where it only follows rank 0, the model's own meetings have failed on rank 0 as well.
        for step in set(mine).intersection(*theirs):
            try:
                self.stream.check_ranks([rank[step] for rank in theirs])
            except GuardError as error:
                return str(error)
        return None

    def judge(self) -> str | None:
        """Return what is wrong with the steps since the last time, or None; waits for the device."""
        # Where rows are another token's, logits differ as well: the cause is told first.
        faults = [self.tokens.judge(), self.tokens.fault] if self.tokens is not None else []
        faults += [self.stream.fault if self.stream is not None else None, self._fault]
        self._fault = None
        for proof in (self.tokens, self.stream):
            if proof is not None:
                proof.fault = None
        return next(filter(None, faults), None)

    def clear(self) -> None:
        """Forget the requests and the steps that were not judged."""
        self._fault = None
        self._samples = {}
        self._drop()
        if self.tokens is not None:
            self.tokens.clear()
        if self.stream is not None:
            self.stream.fault = None


def _then(remove: Callable[[], Any]) -> Callable[[], str]:
    def undo() -> str:
        remove()
        return "reverted"

    return undo
