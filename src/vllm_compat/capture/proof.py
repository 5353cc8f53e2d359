"""Proof, in the running model, that captured rows are the residual stream of the tokens asked for.

The source of a layer's ``forward`` says what it hands on (`vllm_compat.capture.layers`); these checks
ask the model that runs. They hold for any model and change nothing:

- *Tokens* (`TokenProof`, every step): the ids that the embedding was given and the positions that the
  model was given stand in the order in which the batch is said to hold its requests. A batch in another
  order, or padding in front of the rows, is found here.
- *Stream* (`StreamProof`): what is taken for the stream after a layer is what the next layer goes on
  with: its own input, or, of a pair, what its first norm is given (their sum, or one of them alone);
  after the last layer, what the model's last norm is given. A layer that has added its output already,
  hands on something else, or leaves a reduction to the next layer is found here.
- *Ranks* (`StreamProof`): a complete stream is the same on every tensor-parallel rank, a partial sum is
  not.
- *Logits* (`StreamProof`): the rows that the step computes logits from are those of the last norm, so
  that the forward that was watched is the one that the engine serves.

Stream, ranks and logits are proven by size (by powers of two), since kernels and reductions are chosen
by size, on some rows of a step: in the first step of each size, the second, the fourth and so on, and in
every 64th. What none of them can see is a fault that is the same in the model itself: wrong weights, or
a wrong attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_compat.capture.layers import where
from vllm_compat.capture.rows import Span
from vllm_compat.errors import GuardError

TOLERANCE = 0.01
"""Largest relative difference of two rows that are the same: a rounding in bfloat16 is 0.004 of a value.

Both sides come out of the same tensors, so they are equal to the bit nearly always; a wrong reading is
off by tens of per cent (47 % for a partial sum of two ranks, 63 % for a pair added twice)."""

EVERY = 64
"""Every so many steps of one size are watched, besides the 1st, 2nd, 4th, 8th and so on."""

SAMPLED = 64
"""Rows of a step that are compared, spread over it: a layer that is misread is wrong in all of them."""


def difference(found: Any, wanted: Any) -> float:
    """Return the largest relative difference of rows ``[rows, hidden]``, by the wanted rows' length."""
    found, wanted = found.detach().float(), wanted.detach().float()
    length = wanted.norm(dim=-1).clamp_min(1e-20)
    return float(((found - wanted).norm(dim=-1) / length).max()) if len(wanted) else 0.0


def quietly(tell: Callable[[str], None], hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that never raises into the model: what goes wrong in it is told in words.

    A forward that ends on one rank alone leaves the others waiting in the model's own reductions.
    """

    def quiet(module: Any, *args: Any) -> None:
        try:
            hook(module, *args)
        except Exception as error:
            tell(
                f"{where(module)} could not be looked at while it ran ({type(error).__name__}: {error}),"
                " so its rows are not proven: report this model; apply(without=['proofs']) extracts"
                " without these proofs, and the record of the run says so."
            )

    return quiet


# -- tokens, every step -----------------------------------------------------------------------------


@dataclass
class TokenProof:
    """Compares ids and positions of each step with the prompts, in the order the batch is said to have.

    ``prompts`` holds the token ids of the requests under way. What was `seen` is compared when the rows
    leave the worker, so that no step waits for the device.
    """

    prompts: dict[str, Any] = field(default_factory=dict)
    ids: Any = None
    positions: Any = None
    seen: list[tuple[tuple[Span, ...], str, Any, Any]] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    fault: str | None = None

    def watch(self, model: Any) -> list[Any]:
        """Set hooks on a model and its embedding; return their handles."""
        given = quietly(self._tell, self._model)
        handles = [model.register_forward_pre_hook(given, with_kwargs=True)]
        embedding = embedding_of(model)
        if embedding is not None:
            embedded = quietly(self._tell, self._embedding)
            handles.append(embedding.register_forward_pre_hook(embedded))
        return handles

    def _tell(self, sentence: str) -> None:
        self.fault = self.fault or sentence

    def _model(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _arguments(module.forward, args, kwargs)
        positions, ids = given.get("positions"), given.get("input_ids")
        if self.positions is None and positions is not None:
            # Multimodal rope gives one row of positions for each of its axes; text has the same in all.
            self.positions = (positions[0] if positions.dim() == 2 else positions).clone()
        if self.ids is None and ids is not None:
            self.ids = ids.clone()

    def _embedding(self, module: Any, args: tuple[Any, ...]) -> None:
        if self.ids is None and args:
            self.ids = args[0].clone()

    def begin(self, step: Any) -> None:
        """Forget the last step; learn the prompts of new requests."""
        import torch

        self.ids = self.positions = None
        for new in step.scheduled_new_reqs:
            if new.prompt_token_ids is not None:
                self.prompts[new.req_id] = torch.tensor(new.prompt_token_ids, dtype=torch.int64)

    def look(self, spans: tuple[Span, ...]) -> None:
        """Note what one step was given; nothing waits for the device."""
        import torch

        total = sum(span.count for span in spans)
        known = all(
            span.request_id in self.prompts
            and span.start + span.count <= len(self.prompts[span.request_id])
            for span in spans
        )
        if known and _is_row_of(self.ids, total):
            wanted = torch.cat([self._part(span) for span in spans])
            self._compare(spans, "ids", self.ids[:total], wanted)
        if _is_row_of(self.positions, total):
            ranges = [torch.arange(span.start, span.start + span.count) for span in spans]
            self._compare(spans, "positions", self.positions[:total], torch.cat(ranges))
        self.ids = self.positions = None

    def _part(self, span: Span) -> Any:
        return self.prompts[span.request_id][span.start : span.start + span.count]

    def _compare(self, spans: tuple[Span, ...], what: str, found: Any, wanted: Any) -> None:
        self.told.add(what)
        self.seen.append((spans, what, found, wanted))

    def judge(self) -> str | None:
        """Return the first row of another token, in words, or None; waits for the device."""
        seen, self.seen = self.seen, []
        for spans, what, found, wanted in seen:
            bad = found.cpu().to(wanted.dtype) != wanted
            if not bool(bad.any()):
                continue
            first, offset = int(bad.nonzero()[0]), 0
            for span in spans:
                if first < offset + span.count:
                    return (
                        f"Request {span.request_id}, token {span.start + first - offset}: the model was"
                        f" given other {what} in this row ({int(bad.sum())} rows of the step differ)."
                        " The batch does not hold its requests in the order that the model runner tells:"
                        " rows would go to the wrong request. Use another vLLM release, and report this"
                        " one."
                    )
                offset += span.count
        return None

    def clear(self) -> None:
        """Forget all requests and all steps that were not judged."""
        self.prompts.clear()
        self.seen.clear()
        self.ids = self.positions = None
        self.fault = None


def embedding_of(model: Any) -> Any | None:
    """Return the module that turns token ids into rows, or None where it cannot be told.

    vLLM's models use ``VocabParallelEmbedding`` for it, once in the text model; ``ParallelLMHead`` is a
    subclass and is none.
    """
    found = [
        module
        for name, module in model.named_modules()
        if type(module).__name__ == "VocabParallelEmbedding"
        and not any(part.startswith(("vision", "visual", "audio", "mtp")) for part in name.split("."))
    ]
    return found[0] if len(found) == 1 else None


def _is_row_of(tensor: Any, total: int) -> bool:
    return tensor is not None and tensor.dim() == 1 and len(tensor) >= total


def _arguments(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(inspect.signature(function).bind_partial(*args, **kwargs).arguments)
    except TypeError:
        return dict(kwargs)


# -- the stream, in the first step of each size ------------------------------------------------------


@dataclass
class _Behind:
    """Rows given to what comes behind a layer: the next layer's inputs, and its first norm's.

    ``norm_gave`` is what that norm handed back. Most norms add a second input to the first and hand the
    sum back beside the normed rows; Command-R's hands the second back as it was.
    """

    given: list[Any] | None = None
    norm: list[Any] | None = None
    norm_gave: list[Any] | None = None


class StreamProof:
    """Watches scheduled steps: what is behind each layer asked for, and what logits are made of.

    ``layers`` are the decoder's, ``name`` their dotted name in ``model``, ``layer_ids`` those asked for,
    ascending. ``ends`` tells, within a step, the row of each request's last token, in the batch's order.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        layers: Sequence[Any],
        layer_ids: Sequence[int],
        ends: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self.model = model
        self.layers = layers
        self.layer_ids = tuple(layer_ids)
        self.armed = False
        parent = model.get_submodule(name.rpartition(".")[0])
        self._last_norms = [child for _, child in parent.named_children() if _is_norm(child)]
        self._ends = ends
        self.fault: str | None = None
        self.unproven: tuple[int, ...] = ()  # layers behind which the last step did not show the stream
        self.watched = 0  # steps so far
        self._steps: dict[int, int] = {}  # so far, by the number of bits of their tokens
        self._total = 0
        self._behind: dict[int, _Behind] = {}
        self._served: Any = None  # what the last norm made of each request's last token
        self._after_last = False
        self._handles: list[Any] = []

    def begin(self, tokens: int) -> bool:
        """Watch the step that begins, where it is due; return whether it does.

        Every rank decides alike, since all of them get the same steps.
        """
        self._served = None
        number = self._steps[tokens.bit_length()] = self._steps.get(tokens.bit_length(), 0) + 1
        if number & (number - 1) and number % EVERY:
            return False
        self._total, self.armed, self._after_last = tokens, True, False
        self.watched += 1
        self._behind = {layer_id: _Behind() for layer_id in self.layer_ids}
        count = len(self.layers)
        for layer_id in self.layer_ids:
            if layer_id + 1 < count:
                self._watch(self._behind[layer_id], self.layers[layer_id + 1])
        self._handles.append(self.layers[count - 1].register_forward_hook(self._last_layer))
        for norm in self._last_norms:
            given = quietly(self._tell, self._last_norm_given)
            gave = quietly(self._tell, self._last_norm_gave)
            self._handles.append(norm.register_forward_pre_hook(given, with_kwargs=True))
            self._handles.append(norm.register_forward_hook(gave))
        return True

    def _tell(self, sentence: str) -> None:
        self.fault = self.fault or sentence

    def end(self) -> None:
        """Take the hooks away."""
        self.armed = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self, behind: _Behind, layer: Any) -> None:
        def given(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if behind.given is None:
                named = _arguments(module.forward, args, kwargs)
                behind.given = self._rows(named.values())

        def normed(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if behind.norm is None and behind.given is not None:
                behind.norm = self._rows([*args, *kwargs.values()])

        def gave(module: Any, args: Any, output: Any) -> None:
            if behind.norm is not None and behind.norm_gave is None:
                behind.norm_gave = self._rows(output if isinstance(output, tuple) else [output])

        quiet = quietly(self._tell, given)
        self._handles.append(layer.register_forward_pre_hook(quiet, with_kwargs=True))
        before, after = quietly(self._tell, normed), quietly(self._tell, gave)
        for module in layer.modules():
            if module is not layer and _is_norm(module):
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(after))

    def _last_layer(self, module: Any, args: Any, output: Any) -> None:
        self._after_last = True

    def _last_norm_given(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        behind = self._behind.get(len(self.layers) - 1)
        if self._after_last and behind is not None and behind.norm is None:
            behind.norm = self._rows([*args, *kwargs.values()])

    def _last_norm_gave(self, module: Any, args: Any, output: Any) -> None:
        behind = self._behind.get(len(self.layers) - 1)
        if self._after_last and behind is not None and behind.norm_gave is None:
            behind.norm_gave = self._rows(output if isinstance(output, tuple) else [output])
        if self._after_last and self._served is None:
            rows = _by_token(output[0] if isinstance(output, tuple) else output)
            ends = list(self._ends())
            if rows.dim() == 2 and ends and ends[-1] < len(rows):
                self._served = rows[ends]

    def _rows(self, values: Iterable[Any]) -> list[Any]:
        """Return some rows of each tensor among values that has a row for each token, in their order."""
        return [rows for value in values if (rows := self._sampled(value)) is not None]

    def _sampled(self, value: Any) -> Any | None:
        import torch

        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return None
        value = _by_token(value)
        if value.dim() != 2 or len(value) < self._total:
            return None
        return value[: self._total : -(-self._total // SAMPLED)].clone()

    def sample(self, captured: Mapping[int, Any]) -> list[Any]:
        """Return some rows of each captured layer, ``[rows, hidden]``, where it has one for each token.

        Raises:
            GuardError: A layer was not captured in this step, or has fewer rows than it has tokens.
        """
        found = []
        for layer_id in self.layer_ids:
            rows = self._sampled(captured.get(layer_id))
            if rows is None:
                raise GuardError(
                    f"Decoder layer {layer_id}, {where(self.layers[layer_id])}, gave no row for each of"
                    f" the {self._total} tokens of a step: its rows are sharded, cut or of several"
                    " streams, which this capture does not serve."
                )
            found.append(rows)
        return found

    def check(self, sampled: Sequence[Any]) -> None:
        """Compare captured rows, as `sample` gave them, with what the model went on with in this step.

        Raises:
            GuardError: Names the layer, its class and file, and how far off its rows are.
        """
        self.unproven = ()
        for layer_id, found in zip(self.layer_ids, sampled, strict=True):
            wanted, as_handed_on = self._wanted(layer_id, found)
            if wanted is None:
                self.unproven += (layer_id,)
                continue
            if as_handed_on and found.dtype != wanted.dtype:
                raise GuardError(
                    f"Decoder layer {layer_id}, {where(self.layers[layer_id])}: rows were captured as"
                    f" {found.dtype}, and the model goes on with {wanted.dtype}: digits are lost. Use"
                    " another vLLM release, and report this one."
                )
            off = difference(found, wanted)
            if not off <= TOLERANCE:  # not a number is no proof either
                behind = "the next layer" if layer_id + 1 < len(self.layers) else "the last norm"
                raise GuardError(
                    f"Decoder layer {layer_id}, {where(self.layers[layer_id])}, hands on something else"
                    f" than its source was read to: {behind} goes on with rows that differ by up to"
                    f" {off:.0%}. Its residual stream cannot be told: use another vLLM release or"
                    " capture='auxiliary', and report this model."
                )

    def _wanted(self, layer_id: int, found: Any) -> tuple[Any | None, bool]:
        """Return the stream that the model goes on with behind a layer; None where it does not show.

        The second value says whether it is what the layer has handed on, to the type of its numbers: a
        norm may be given a copy of another type.
        """
        behind = self._behind[layer_id]
        given = [rows for rows in behind.given or () if rows.shape == found.shape]
        norm = [rows for rows in behind.norm or () if rows.shape == found.shape]
        if len(given) == 1:
            return given[0], True
        if len(norm) == 2:
            gave = [rows for rows in behind.norm_gave or () if rows.shape == found.shape]
            return _normed(norm[0], norm[1], gave), True
        if len(norm) == 1 and (not given or any(_same(norm[0], rows) for rows in given)):
            return norm[0], False
        return None, False

    def check_ranks(self, samples: Sequence[Sequence[Any]]) -> None:
        """Compare the same rows of all ranks, as `sample` gave them, moved to one device.

        Raises:
            GuardError: A layer's rows differ: they are a partial sum, or shards.
        """
        first, *others = samples
        for rank, other in enumerate(others, start=1):
            for layer_id, wanted, found in zip(self.layer_ids, first, other, strict=True):
                off = difference(found, wanted) if found.shape == wanted.shape else float("inf")
                if not off <= TOLERANCE:
                    raise GuardError(
                        f"Decoder layer {layer_id}, {where(self.layers[layer_id])}: ranks 0 and {rank}"
                        f" hold different rows (by up to {off:.0%}). Each holds a part of the sum that"
                        " the next layer makes, so this is not the residual stream: use one rank or"
                        " another vLLM release, and report this model."
                    )

    def check_logits(self, hidden: Any) -> None:
        """Check that logits are computed from the rows of the forward that was watched, in its order.

        ``hidden`` are the rows ``[samples, hidden]`` that the model computes logits from.

        Raises:
            GuardError: They are others.
        """
        served, self._served = self._served, None
        if served is None or getattr(hidden, "shape", None) != served.shape:
            return
        # Some models scale what they hand to the head (MiniCPM): the direction is what counts.
        off = difference(_unit(hidden), _unit(served))
        if not off <= TOLERANCE:
            raise GuardError(
                f"{type(self.model).__name__} computes logits from rows that its last norm has not made"
                f" of the requests' last tokens (they differ by up to {off:.0%}): the captured rows are"
                " not those that the engine serves: use another vLLM release, and report this one."
            )


def _normed(first: Any, second: Any, gave: Sequence[Any]) -> Any | None:
    """Return what a norm of two inputs has normed, by what it handed back; None if that is no help."""
    if len(gave) != 2:
        return None
    total = first + second
    if _same(gave[1], total):
        return total
    return first if _same(gave[1], second) else None


def _unit(rows: Any) -> Any:
    rows = rows.detach().float()
    return rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-20)


def _is_norm(module: Any) -> bool:
    return "norm" in type(module).__name__.lower()


def _by_token(tensor: Any) -> Any:
    return tensor.squeeze(0) if tensor.dim() == 3 and tensor.shape[0] == 1 else tensor


def _same(a: Any, b: Any) -> bool:
    return difference(a, b) <= TOLERANCE
