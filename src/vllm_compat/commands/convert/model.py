"""What a conversion knows: flows, a file's origin, and the layers in both numberings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import vllm_compat
from vllm_compat.errors import VllmCompatError

SCHEMA_VERSION = 1
RECORD = "vllm_compat_convert.json"
"""The file in the new folder that says what the conversion did; stock does not look at it."""


class ConversionError(VllmCompatError):
    """The data cannot be converted as they are (exit status 1)."""


class UnknownError(VllmCompatError):
    """What the conversion must know cannot be found out here (exit status 3)."""


class Flow(str, Enum):
    """How hidden states came about."""

    IN_PROCESS = "in-process"
    """speculators 0.3 and 0.4: ``data_<i>.pt``; layer id *k* is the stream after layer *k*."""
    SERVER = "server"
    """speculators 0.5 to 0.9: ``hs_<i>.safetensors``; id *k* is the stream before layer *k*."""

    @property
    def other(self) -> Flow:
        return Flow.SERVER if self is Flow.IN_PROCESS else Flow.IN_PROCESS

    @property
    def numbering(self) -> str:
        """Return in words what a layer id means."""
        where = "after" if self is Flow.IN_PROCESS else "before"
        return f"{self.value}: id k is the residual stream {where} layer k"

    def file_name(self, index: int) -> str:
        return f"data_{index}.pt" if self is Flow.IN_PROCESS else f"hs_{index}.safetensors"

    def vllm_id(self, layer_id: int) -> int:
        """Return the id of the same state in vLLM's numbering."""
        return layer_id + 1 if self is Flow.IN_PROCESS else layer_id


@dataclass(frozen=True)
class Origin:
    """What a converted file says about itself: where it comes from, and what its layers are.

    ``layer_ids`` are those of the file's own entries in its own flow's numbering, ``token_dtype``,
    ``mask_dtype`` and ``states_dtype`` what the source had, so that the way back restores them.
    """

    flow: Flow
    layer_ids: tuple[int, ...]
    num_layers: int
    source: str
    source_bytes: int
    source_modified: int
    source_layer_ids: tuple[int, ...]
    token_dtype: str
    mask_dtype: str
    states_dtype: str

    def as_header(self) -> dict[str, str]:
        """Return what stands in the safetensors header, or beside the tensors of a ``.pt`` file."""
        fields = asdict(self) | {"flow": self.flow.value}
        header = {
            key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()
        }
        return header | {"vllm_compat": vllm_compat.__version__, "layer_numbering": self.flow.numbering}

    @classmethod
    def from_header(cls, header: Any) -> Origin | None:
        """Return the origin that a header states, or None where it states none."""
        if not isinstance(header, Mapping) or "vllm_compat" not in header:
            return None
        try:
            return cls(
                flow=Flow(header["flow"]),
                layer_ids=tuple(map(int, json.loads(header["layer_ids"]))),
                num_layers=int(header["num_layers"]),
                source=str(header["source"]),
                source_bytes=int(header["source_bytes"]),
                source_modified=int(header["source_modified"]),
                source_layer_ids=tuple(map(int, json.loads(header["source_layer_ids"]))),
                token_dtype=str(header["token_dtype"]),
                mask_dtype=str(header["mask_dtype"]),
                states_dtype=str(header["states_dtype"]),
            )
        except (KeyError, ValueError, TypeError):
            return None


@dataclass(frozen=True)
class Layers:
    """The layers of a conversion, entry by entry.

    Entry *j* of a new file is entry ``order[j]`` of the old one; ``source_ids`` and ``target_ids``
    name the entries of both, each in its own flow's numbering. ``num_layers`` is the number of the
    model's decoder layers.
    """

    source: Flow
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    order: tuple[int, ...]
    num_layers: int

    @property
    def vllm_ids(self) -> tuple[int, ...]:
        """Return the new file's ids in vLLM's numbering."""
        return tuple(self.source.other.vllm_id(k) for k in self.target_ids)


@dataclass(frozen=True)
class Head:
    """What is known of one old file before its states are read.

    ``states_bytes`` is what its states take in the new form.
    """

    name: str
    index: int
    size: int
    modified: int
    tokens: int
    layers: int
    hidden_size: int
    states_dtype: str
    token_dtype: str
    mask_dtype: str
    states_bytes: int
    origin: Origin | None

    @property
    def target_mask_dtype(self) -> str:
        """Return the dtype of the new mask: what it was before an earlier conversion, else int64."""
        return self.origin.mask_dtype if self.origin else "int64"

    @property
    def target_token_dtype(self) -> str:
        """Return the dtype of the new ``input_ids`` of a ``.pt`` file; the server flow's is int64."""
        return self.origin.token_dtype if self.origin else "int64"

    def origin_of_target(self, layers: Layers) -> Origin:
        """Return what the new file says about itself."""
        return Origin(
            flow=layers.source.other,
            layer_ids=layers.target_ids,
            num_layers=layers.num_layers,
            source=self.name,
            source_bytes=self.size,
            source_modified=self.modified,
            source_layer_ids=layers.source_ids,
            token_dtype=self.token_dtype,
            mask_dtype=self.mask_dtype,
            states_dtype=self.states_dtype,
        )


@dataclass(frozen=True)
class Report:
    """What a conversion did, or would do.

    ``written`` and ``kept`` count samples; ``bytes_needed`` is what was still to be written,
    ``bytes_free`` what the disk had before it.
    """

    source: str
    target: str
    flow: Flow
    layers: Layers
    samples: int
    written: int
    kept: int
    tokens: int
    hidden_size: int
    dtypes: tuple[str, ...]
    bytes_needed: int
    bytes_free: int
    token_freq: str
    dry_run: bool
    speculators: str
    notes: tuple[str, ...] = ()
