"""Find out which layers a folder holds, and what the other flow calls them. Reads, never guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_compat.analysis.layer_ids import auto_selected, number_of_layers, read_config
from vllm_compat.commands.convert.model import ConversionError, Flow, Head, Layers, UnknownError
from vllm_compat.errors import UsageError


def map_layers(
    flow: Flow,
    heads: Sequence[Head],
    config: Mapping[str, Any],
    *,
    given: Sequence[int] | None = None,
    model: str | None = None,
    num_layers: int | None = None,
) -> Layers:
    """Return the layers of a folder in both numberings.

    ``given`` are the ids of the files' entries in their order and in the old flow's numbering,
    ``config`` is the folder's ``data_config.json``.

    Raises:
        UsageError: What was given contradicts the files.
        ConversionError: The ids cannot be right for the other flow.
        UnknownError: The ids, or the number of the model's layers, are nowhere.
    """
    count = _number_of_layers(heads, config, model, num_layers)
    ids = _source_ids(flow, heads, config, given, count)
    entries = heads[0].layers
    if len(ids) != entries:
        raise ConversionError(
            f"The layer ids are {list(ids)}, but the files have {entries} layers: give the ids of the"
            " files' entries with --layers."
        )
    _refuse_wrong(flow, ids, count)
    vllm_ids = [flow.vllm_id(k) for k in ids]
    if flow is Flow.IN_PROCESS:
        # vLLM's connector writes a request's layers in ascending order, whatever was asked for.
        order = sorted(range(entries), key=vllm_ids.__getitem__)
        target = [vllm_ids[place] for place in order]
    else:
        target = [k - 1 for k in ids]
        origin = heads[0].origin
        before = list(origin.source_layer_ids) if origin else target
        if sorted(before) == target:
            target = before
        order = [ids.index(k + 1) for k in target]
    return Layers(flow, tuple(ids), tuple(target), tuple(order), count)


def _number_of_layers(
    heads: Sequence[Head], config: Mapping[str, Any], model: str | None, given: int | None
) -> int:
    """Return the number of the model's decoder layers; every source that knows it must agree."""
    known: dict[str, int] = {}
    if given is not None:
        if given < 1:
            raise UsageError(f"A model of {given} layers makes no sense: correct --num-layers.")
        known["--num-layers"] = given
    if model is not None:
        known[f"the configuration of {model}"] = number_of_layers(read_config(model), model)
    origin = heads[0].origin
    if origin is not None:
        known["the files"] = origin.num_layers
    recorded = _part(config, "model").get("target_model_path")
    if not known and isinstance(recorded, str):
        try:
            known[recorded] = number_of_layers(read_config(recorded), recorded)
        except UsageError:
            recorded = f"{recorded}, which data_config.json names, is not here, so"
    if not known:
        raise UnknownError(
            f"{recorded if isinstance(recorded, str) else 'No file tells the model, so'} nothing"
            " tells whether the last entry is the model's last layer, which the trainer takes it for:"
            " give --model, or --num-layers."
        )
    if len(set(known.values())) > 1:
        said = " and ".join(f"{name} says {count}" for name, count in known.items())
        raise UsageError(f"The number of the model's layers is not clear: {said}.")
    return next(iter(known.values()))


def _source_ids(
    flow: Flow,
    heads: Sequence[Head],
    config: Mapping[str, Any],
    given: Sequence[int] | None,
    count: int,
) -> tuple[int, ...]:
    """Return the ids of the old files' entries, in their order."""
    chosen = tuple(given) if given is not None else None
    origin = heads[0].origin
    if origin is not None:
        if chosen not in (None, origin.layer_ids):
            raise UsageError(
                f"The files say that their layers are {list(origin.layer_ids)} ({flow.numbering}),"
                f" --layers says {list(chosen or ())}: leave --layers out."
            )
        return origin.layer_ids
    if flow is Flow.SERVER:
        if chosen is None:
            n = count
            raise UnknownError(
                "The server flow's files do not say which layers they hold: give the ids that the"
                f" server was started with, in vLLM's numbering (stock's own choice for {n} layers:"
                f" --layers 2 {n // 2} {n - 3} {n})."
            )
        if list(chosen) != sorted(chosen):
            raise UsageError(
                "vLLM's connector writes layers in ascending order, whatever order was asked for:"
                f" give --layers {' '.join(map(str, sorted(chosen)))}."
            )
        return chosen
    recorded = _part(config, "hidden_states").get("layer_ids")
    if not isinstance(recorded, list) or not all(isinstance(k, int) for k in recorded):
        if chosen is None:
            raise UnknownError(
                "There is no data_config.json that tells the layer ids: give those of the files'"
                " entries with --layers, in-process (stock's own choice for"
                f" {count} layers: {' '.join(map(str, auto_selected(count)))})."
            )
        return chosen
    if chosen is None and recorded != sorted(recorded):
        raise UnknownError(
            f"data_config.json records the layer ids {recorded}: stock alone writes them in the order"
            " of the layers, with vllm_compat in the order asked for, and the files do not tell which;"
            " give the ids of their entries, in order, with --layers."
        )
    if chosen is not None and sorted(chosen) != sorted(recorded):
        raise UsageError(
            f"data_config.json records the layer ids {recorded} (in-process), --layers says"
            f" {list(chosen)}: one of them is of another run."
        )
    return chosen if chosen is not None else tuple(recorded)


def _refuse_wrong(flow: Flow, ids: Sequence[int], count: int) -> None:
    """Refuse layers that the other flow's trainer would take for something else."""
    last = count - 1 if flow is Flow.IN_PROCESS else count
    first = 0 if flow is Flow.IN_PROCESS else 1
    words = f"({flow.numbering})"
    if 0 in ids and flow is Flow.SERVER:
        raise ConversionError(
            "Layer id 0 of the server flow is the embeddings, which the in-process flow has no id for."
        )
    wrong = [k for k in ids if not first <= k <= last]
    if wrong:
        raise ConversionError(
            f"Layer id {wrong[0]} is not in {first} to {last}, which a model of {count} layers has"
            f" {words}: the ids are of the other numbering, or of another model."
        )
    if len(set(ids)) < len(ids):
        raise ConversionError(
            f"The layers {list(ids)} name one twice, and vLLM hands a draft each layer once: a draft"
            " that is trained on them cannot be served; extract with other ids."
        )
    if ids[-1] != last:
        raise ConversionError(
            f"The last entry is layer {ids[-1]}, not the model's last, {last} {words}: the trainer"
            " takes the last entry for the verifier's last state, so its targets would be wrong;"
            " extract with the last layer at the end."
        )
    if len(ids) < 2:
        raise ConversionError(
            "The files hold the last layer alone: a draft's trainer needs at least one layer before it."
        )


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}
