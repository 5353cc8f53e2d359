"""What a file of hidden states says of itself, in the header of its safetensors.

Stock's connector writes ``hidden_states`` and ``token_ids`` without a word of which layers they are, of
which model, or of whose request; stock's loader ignores whatever else the header holds. Ours writes one
JSON text under one key there, so that client, trainer and ``verify`` can compare it with what was asked.
Nothing here imports torch, safetensors or vLLM: the header of the format is eight bytes of length and a
JSON text (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

KEY = "vllm_compat"
"""The key of the file's ``__metadata__`` under which the text stands."""

_LONGEST = 16 * 2**20


@dataclass(frozen=True)
class StatesHeader:
    """What one file says of itself.

    Attributes:
        request: The name that vLLM gave the request.
        tokens: The number of rows and of token ids.
        layer_ids: The ids in the order of the file's columns. Id k is the residual stream before decoder
            layer k, and n, the number of layers, the stream after the last one and before the final norm
            (vLLM's numbering, as in its ``eagle_aux_hidden_state_layer_ids``).
        hidden_size: The width of a row.
        dtype: torch's name of the rows' type as the model computed them, without the leading ``torch.``.
        model: The model as the server was told it, a name or a path.
        model_digest: SHA-256 of the model's configuration as JSON with sorted keys, in hexadecimal.
        vllm: The release of vLLM that made the rows.
        vllm_compat: The release of this library.
        checksum: :func:`checksum` of the file's tensors.
    """

    request: str
    tokens: int
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    model: str
    model_digest: str
    vllm: str
    vllm_compat: str
    checksum: str

    def metadata(self) -> dict[str, str]:
        """Return the mapping that ``safetensors.torch.save_file`` takes as ``metadata``."""
        return {KEY: json.dumps(asdict(self), sort_keys=True)}


def checksum(*tensors: bytes | memoryview) -> str:
    """Return eight hexadecimal digits: CRC-32 of the given bytes, one after the other.

    For a file they are the bytes of ``hidden_states``, of ``hidden_states_scales`` where the file has
    them, and of ``token_ids``, in this order.
    """
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor, value)
    return f"{value:08x}"


def from_metadata(metadata: Mapping[str, str] | None) -> StatesHeader | None:
    """Return what a file's metadata say of it; None where this library did not write them.

    Raises:
        ValueError: The text is there and is not one of ours.
    """
    text = (metadata or {}).get(KEY)
    if text is None:
        return None
    try:
        value = json.loads(text)
        header = StatesHeader(**{field.name: value[field.name] for field in fields(StatesHeader)})
        whole = StatesHeader(**{**asdict(header), "layer_ids": tuple(int(k) for k in header.layer_ids)})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its header's {KEY!r} is not a text of this library: {error!r}") from None
    return whole


def read_header(path: Path) -> StatesHeader | None:
    """Return what the file at ``path`` says of itself, read from its first bytes alone.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not a safetensors file, or its text is not one of ours.
    """
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LONGEST + 1
        if length > _LONGEST:
            raise ValueError(
                f"{path} is not a safetensors file: it does not begin with the length of a header"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError:
        raise ValueError(f"{path} is not a safetensors file: its header is not JSON") from None
    return from_metadata(header.get("__metadata__") if isinstance(header, dict) else None)
