"""Which layers an extraction takes, and what vLLM and the draft's configuration call them.

Two numberings meet in one pipeline, one apart:

- **In-process** (speculators 0.3.0 to 0.4.0.1): id *k* is the residual stream *after* layer *k*
  (``_patched_forward`` in ``speculators/data_generation/custom_worker.py``). Without ``layer_ids``
  ``VllmHiddenStatesGenerator.__init__`` takes ``[2, n // 2, n - 3, n - 1]`` of *n* layers.
- **vLLM**: auxiliary id *k* is the *input* of layer *k*, so the stream after layer *k - 1*
  (``LlamaModel.forward`` in ``vllm/model_executor/models/llama.py``: up to 0.17 captured before
  layer ``idx``; from 0.18 on by ``_maybe_add_hidden_state(…, idx + 1, …)`` after it, the same
  numbering).

In-process *k* is therefore vLLM's *k + 1*. A draft's ``eagle_aux_hidden_state_layer_ids`` are in
vLLM's numbering: ``GPUModelRunner._get_eagle3_aux_layers_from_config`` (0.11.1 to 0.33.0,
``vllm/v1/worker/gpu_model_runner.py``) hands them on as they are, and so does ``update_eagle3``
with a speculators checkpoint (``vllm/transformers_utils/configs/speculators/algos.py``). Only the
``target_layer_ids`` of DFlash drafts are raised by one there, from 0.22 on (vllm#40727). The model
hands its auxiliary states over in the order of the layers, each once, however the list is ordered.

Without the field vLLM takes the model's ``get_eagle3_aux_hidden_state_layers()``, ``(2, n // 2,
n - 3)`` in its own numbering. ``Eagle3DraftModel.from_training_args`` of speculators 0.4 (and the
training script of 0.3) leaves the field out: a draft trained on in-process data is then served with
every auxiliary state from one layer too low, unless somebody writes the field. From 0.5 on it is
written, and in that flow the data come from vLLM and are in its numbering already.

What the trainer makes of a file's ``hidden_states`` list: all entries but the last are auxiliary,
side by side, the last is the verifier's last (``standardize_data_v1`` in
``speculators/train/data.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_compat.analysis.streams import refusal, streams_of
from vllm_compat.errors import UsageError

SCHEMA_VERSION = 1

_BYTES = {"float32": 4, "float64": 8}


@dataclass(frozen=True)
class Layer:
    """One entry of a sample's ``hidden_states``, and what it is called where.

    ``layer_id`` is the downstream's in-process id, ``vllm_id`` vLLM's auxiliary id; ``role`` is
    ``auxiliary`` or ``verifier's last``.
    """

    entry: int
    layer_id: int
    vllm_id: int
    role: str


@dataclass(frozen=True)
class LayerMap:
    """The layers of one extraction.

    ``layers`` is the number of decoder layers, ``selection`` is ``auto`` or ``given``, ``asked``
    the ids in the order asked for. ``draft_ids`` is what ``eagle_aux_hidden_state_layer_ids`` must
    be for a draft trained on these data, ``vllm_default_ids`` what vLLM takes where it is absent.
    ``streams`` is how many residual streams the model carries; with more than one, nothing is extracted.
    ``bytes_per_token`` is the size of a token's states in the model's dtype, None where the
    configuration does not tell the width.
    """

    model: str
    architecture: str
    layers: int
    hidden_size: int | None
    selection: str
    asked: tuple[int, ...]
    entries: tuple[Layer, ...]
    draft_ids: tuple[int, ...]
    vllm_default_ids: tuple[int, ...]
    bytes_per_token: int | None
    notes: tuple[str, ...] = ()
    streams: int = 1


def layers_of(
    model: str | Path,
    layer_ids: Sequence[int] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> LayerMap:
    """Return the mapping of a model's layer ids, from its ``config.json`` alone.

    ``model`` is a folder, a configuration file, or the id of a model in the local hub cache;
    nothing is downloaded and no remote code runs. ``layer_ids`` are in-process ids, stock's own
    choice where None. Entries stand in the order asked for, as vllm_compat returns them.

    Raises:
        UsageError: There is no configuration, it does not tell the number of layers, or an id is
            negative or out of range.
    """
    config = read_config(model, environ)
    count = number_of_layers(config, model)
    asked = tuple(layer_ids) if layer_ids is not None else auto_selected(count)
    selection = "given" if layer_ids is not None else "auto"
    _validate(asked, count, selection)
    last = len(asked) - 1
    entries = tuple(
        Layer(entry, k, k + 1, "verifier's last" if entry == last else "auxiliary")
        for entry, k in enumerate(asked)
    )
    shape = shape_of(config, model)
    architectures = config.get("architectures") or ["unknown architecture"]
    streams = streams_of(config).number
    several = refusal(config, str(model))
    return LayerMap(
        model=str(model),
        architecture=str(architectures[0]),
        layers=count,
        hidden_size=shape.hidden_size,
        selection=selection,
        asked=asked,
        entries=entries,
        draft_ids=tuple(layer.vllm_id for layer in entries[:-1]),
        vllm_default_ids=(2, count // 2, count - 3),
        bytes_per_token=shape.value_bytes * streams * len(asked) if shape.value_bytes else None,
        notes=(*([several] if several else []), *_notes(asked, count, selection)),
        streams=streams,
    )


@dataclass(frozen=True)
class Shape:
    """What a configuration says of a model's residual stream; None where it does not tell the width.

    ``value_bytes`` is the size of one layer's state of one token, in the model's dtype.
    """

    layers: int
    hidden_size: int | None
    value_bytes: int | None


def shape_of(config: Mapping[str, Any], model: str | Path = "the model") -> Shape:
    """Return number of layers, width and weight of a model's residual stream.

    Raises:
        UsageError: The configuration does not tell the number of layers.
    """
    text = _text_config(config)
    width = text.get("hidden_size", config.get("hidden_size"))
    width = width if isinstance(width, int) else None
    dtype = next((c[k] for c in (text, config) for k in ("dtype", "torch_dtype") if c.get(k)), "")
    size = None if width is None else width * _BYTES.get(str(dtype), 2)
    return Shape(number_of_layers(config, model), width, size)


def auto_selected(count: int) -> tuple[int, ...]:
    """Return the in-process ids that stock takes of ``count`` layers when it is given none."""
    return (2, count // 2, count - 3, count - 1)


def read_config(model: str | Path, environ: Mapping[str, str] = os.environ) -> Mapping[str, Any]:
    """Return a model's configuration from a folder, a file or the local hub cache.

    Raises:
        UsageError: There is none, or it is no JSON object.
    """
    path = config_path(model, environ)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"{path.parent} has no {path.name}, so it is no model's folder: name the folder that holds"
            " a model's configuration, or the file itself."
        ) from error
    except (OSError, ValueError, RecursionError) as error:  # the last: brackets without end
        raise UsageError(
            f"{path} cannot be read as a configuration ({error}):"
            " name a model's folder, or its config.json."
        ) from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no configuration, which is a JSON object.")
    if not isinstance(config.get("architectures") or [], list):
        raise UsageError(f"{path} holds no list of names under architectures.")
    return config


def config_path(model: str | Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a model's configuration: in its folder, itself, or in the hub cache.

    Raises:
        UsageError: The name is no file, no folder and not in the cache.
    """
    path = Path(model)
    if path.is_dir():
        return path / "config.json"
    return path if path.is_file() else _cached(str(model), environ)


def _cached(model: str, environ: Mapping[str, str]) -> Path:
    """Return the path of a cached model's configuration, on its main branch."""
    home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(
        environ.get("HF_HUB_CACHE")
        or environ.get("HUGGINGFACE_HUB_CACHE")
        or Path(environ.get("HF_HOME") or Path(home) / "huggingface") / "hub"
    ).expanduser()
    folder = cache / f"models--{model.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except OSError as error:
        raise UsageError(
            f"{model} is no folder and no model in the hub cache {cache}, and nothing is"
            " downloaded here: name a folder with a config.json in it."
        ) from error
    return folder / "snapshots" / revision / "config.json"


def number_of_layers(config: Mapping[str, Any], model: str | Path = "the model") -> int:
    """Return the number of decoder layers, where stock looks for it.

    That is ``num_hidden_layers`` of the configuration, else of its ``text_config``; ``n_layer`` and
    ``n_layers`` are what older families write for it.

    Raises:
        UsageError: The configuration does not say.
    """
    for part in (config, _text_config(config)):
        for key in ("num_hidden_layers", "n_layer", "n_layers"):
            count = part.get(key)
            if isinstance(count, int) and count > 0:
                return count
    raise UsageError(
        f"The configuration of {model} does not tell the number of layers: stock looks for"
        " num_hidden_layers, in it or in its text_config; name the folder of a language model."
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def _validate(asked: Sequence[int], count: int, selection: str) -> None:
    if not asked:
        raise UsageError("No layer ids are given: give at least one, or leave the option out.")
    wrong = [k for k in asked if not 0 <= k < count]
    if not wrong:
        return
    if selection == "auto":
        raise UsageError(
            f"Stock's own choice {list(asked)} does not fit a model of {count} layers: {wrong[0]}"
            f" is not in 0 to {count - 1}, and stock stops there; give layer ids."
        )
    backwards = f"; the last layer is {count - 1}" if wrong[0] < 0 else ""
    raise UsageError(
        f"Layer id {wrong[0]} is not in 0 to {count - 1}: the model has {count} layers, and ids"
        f" count from the first{backwards}."
    )


def _notes(asked: Sequence[int], count: int, selection: str) -> list[str]:
    """Say what of a valid selection goes wrong later, or differs between stock and vllm_compat."""
    notes = []
    stock = sorted(set(asked))
    if len(stock) < len(asked):
        whose = "Stock's own choice" if selection == "auto" else "The selection"
        notes.append(
            f"{whose} {list(asked)} names a layer twice: stock captures each once and writes"
            f" {len(stock)} entries, {stock}; vllm_compat writes {len(asked)}."
        )
    elif stock != list(asked):
        notes.append(
            f"Stock writes entries in the order of the layers, {stock}; vllm_compat in the order"
            " asked for."
        )
    auxiliary = list(asked[:-1])
    if auxiliary != sorted(set(auxiliary)):
        notes.append(
            "vLLM hands auxiliary states over in the order of the layers, each once: a draft that"
            f" is trained on {auxiliary} is served with {sorted(set(auxiliary))}."
        )
    if asked[-1] != count - 1:
        notes.append(
            f"The last entry is taken for the verifier's last hidden state, which is that of layer"
            f" {count - 1}, not {asked[-1]}: logits computed from it are not the verifier's."
        )
    if len(asked) != 4:
        notes.append(
            f"Stock's EAGLE-3 trainer is made for three auxiliary entries and the verifier's last;"
            f" these are {len(asked) - 1} and one."
        )
    return notes


def render(layer_map: LayerMap, form: str = "text") -> str:
    """Return the mapping as ``text`` for people or as ``json`` for programs."""
    if form == "json":
        record = {"schema_version": SCHEMA_VERSION, **asdict(layer_map)}
        return json.dumps(record, indent=2) + "\n"
    if form != "text":
        raise UsageError(f"There is no form {form!r} of the layers: choose text or json.")
    m = layer_map
    width = f" of {m.hidden_size}" if m.hidden_size else ""
    if m.streams > 1:
        width += f", {m.streams} streams a token"
    chosen = "stock's own choice" if m.selection == "auto" else "given"
    weight = f", {m.bytes_per_token:,} bytes a token" if m.bytes_per_token else ""
    below = [k - 1 for k in m.vllm_default_ids]
    lines = [
        f"{m.model} ({m.architecture}): {m.layers} layers{width}, ids 0 to {m.layers - 1}",
        f"layer ids {list(m.asked)}, {chosen}{weight}",
        "",
        "entry  layer id  vLLM id  hidden_states[entry]",
        *(
            f"{layer.entry:5}  {layer.layer_id:8}  {layer.vllm_id:7}  residual stream after layer"
            f" {layer.layer_id}, {layer.role}"
            for layer in m.entries
        ),
        "",
        "vLLM's auxiliary id k is the input of layer k, that is, the stream after layer k - 1.",
        "A draft that is trained on these data needs in its configuration:",
        f"    eagle_aux_hidden_state_layer_ids: {list(m.draft_ids)}",
        f"Without it vLLM takes {list(m.vllm_default_ids)}, which are layer ids {below} here.",
        *m.notes,
    ]
    return "\n".join(lines) + "\n"
