"""Which layers the server flow takes, in the server's numbering, and what a token of them weighs.

Stock's launcher hands its ``--target-layer-ids`` to vLLM as they are: id *k* is the residual stream
before layer *k*, which is the in-process flow's *k - 1*, and *n* the one after the last of *n* layers,
before the final norm. Without ids it asks for ``[2, n // 2, n - 3, n]``; with ids it adds *n* unless
``--no-include-last-layer`` is given. Columns stand in ascending order. The server keeps a prompt's
states in a group of its KV cache until they are written: per token ids x width values in the model's
dtype, on every tensor parallel rank alike (``ExtractHiddenStatesModel`` in
``vllm/model_executor/models/extract_hidden_states.py``, 0.17 to 0.34).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_compat.analysis.layer_ids import read_config, shape_of
from vllm_compat.errors import UsageError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Column:
    """One column of a file's ``hidden_states``: the server's id, and the in-process one of the same.

    ``in_process`` is None for id 0, the input of the first layer, which that flow cannot take.
    """

    server_id: int
    in_process: int | None
    role: str


@dataclass(frozen=True)
class ServerLayers:
    """The layers of one run of the server flow.

    ``asked`` are the ids as given to the launcher, empty for its own choice; ``columns`` what a file
    then holds, in its order. ``bytes_per_token`` is the size of all columns of a token in the model's
    dtype, None where the configuration does not tell the width.
    """

    model: str
    layers: int
    hidden_size: int | None
    asked: tuple[int, ...]
    columns: tuple[Column, ...]
    bytes_per_token: int | None

    @property
    def ids(self) -> tuple[int, ...]:
        """The server's ids in the order of the columns."""
        return tuple(column.server_id for column in self.columns)


def server_layers_of(model: str | Path, layer_ids: Sequence[int] | None = None) -> ServerLayers:
    """Return which layers the server flow takes of a model, from its ``config.json`` alone.

    ``layer_ids`` are what the launcher is given as ``--target-layer-ids``, its own choice where None.

    Raises:
        UsageError: There is no configuration, or an id is not in 0 to the number of layers.
    """
    shape = shape_of(read_config(model), model)
    count = shape.layers
    chosen = tuple(layer_ids) if layer_ids is not None else (2, count // 2, count - 3)
    wrong = [k for k in chosen if not 0 <= k <= count]
    if wrong:
        raise UsageError(
            f"Layer id {wrong[0]} is not in 0 to {count}: in the server's numbering id k is the stream"
            f" before layer k, and {count} the one after the last of {count} layers."
        )
    ids = sorted({*chosen, count})
    columns = tuple(
        Column(k, k - 1 if k else None, "verifier's last" if k == count else "auxiliary") for k in ids
    )
    size = None if shape.value_bytes is None else shape.value_bytes * len(ids)
    return ServerLayers(str(model), count, shape.hidden_size, tuple(layer_ids or ()), columns, size)


def render_server(found: ServerLayers, form: str = "text") -> str:
    """Return the layers as ``text`` for people or as ``json`` for programs."""
    if form == "json":
        return json.dumps(
            {"schema_version": SCHEMA_VERSION, "flow": "server", **asdict(found)}, indent=2
        )
    asked = f"as given: {list(found.asked)}" if found.asked else "the launcher's own choice"
    weight = f", {found.bytes_per_token:,} bytes a token" if found.bytes_per_token else ""
    inner = [column.server_id for column in found.columns[:-1]]
    lines = [
        f"{found.model}: {found.layers} layers, server's ids 0 to {found.layers}",
        f"--target-layer-ids, {asked}{weight}",
        "",
        "column  server's id  in-process id",
        *(
            f"{at:6}  {c.server_id:11}  {'none' if c.in_process is None else c.in_process:>13}  {c.role}"
            for at, c in enumerate(found.columns)
        ),
        "",
        "Columns stand in ascending order, each layer once, the last layer's state last.",
        f"Give launcher and trainer the same ids: --target-layer-ids {' '.join(map(str, inner))}",
        f"The draft's eagle_aux_hidden_state_layer_ids are these as they are: {inner}.",
    ]
    if len(inner) != 3:
        lines.append(
            f"Stock's EAGLE-3 trainer is made for three auxiliary layers; these are {len(inner)}."
        )
    return "\n".join(lines) + "\n"
