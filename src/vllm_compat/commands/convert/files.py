"""Read one sample of either flow, and write it in the other's form. Everything that needs torch.

What stock's own readers do, which these files are made for:

- ``ArrowDataset`` (``speculators/train/data.py``, 0.5 to 0.9) loads ``hs_<row>.safetensors``, wants
  ``token_ids`` equal to the data set's ``input_ids`` (a tensor of int64), and takes columns ``[:-1]``
  side by side as the draft's input, column ``[-1]`` as the verifier's last state.
- ``Eagle3SampleFileDataset`` (0.3, 0.4) takes every file whose name ends in "pt", at any depth, and of
  its dictionary ``input_ids``, ``loss_mask`` and the list ``hidden_states``, split in the same way.
- ``FP8Transfer`` (hs-connectors 0.9) multiplies states by their scales, one a token, both in bfloat16.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.commands.convert.model import ConversionError, Flow, Head, Layers, Origin
from vllm_compat.commands.verify.model import Broken, Entry
from vllm_compat.commands.verify.reading import SCALES, open_sample
from vllm_compat.errors import UsageError

if TYPE_CHECKING:
    import torch

KEY = "vllm_compat"
"""Where a ``.pt`` file keeps its origin; stock picks its own keys and leaves this one alone."""
_PLAIN = ("bfloat16", "float16", "float32", "float64")
_FP8 = ("float8_e4m3fn", "float8_e5m2")


def need_libraries(*names: str) -> None:
    """Import what reading and writing need.

    Raises:
        UsageError: One is not installed; says which.
    """
    import importlib

    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            package = name.partition(".")[0]
            raise UsageError(
                f"Converting needs {package}, which is not installed here: pip install {package}, or run"
                " vllm-compat in the environment that trains."
            ) from error


def read_header(path: Path) -> Mapping[str, Any]:
    """Return the ``__metadata__`` of a safetensors file, empty where there is none."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                return {}
            found = json.loads(file.read(length)).get("__metadata__", {})
    except (OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def load(folder: Path, entry: Entry, *, again: bool = False) -> dict[str, Any]:
    """Return a file's tensors.

    Raises:
        ConversionError: It is cut off, cannot be read, holds no sample, or is being written.
    """
    stat = (folder / entry.name).stat()
    if (stat.st_size, stat.st_mtime_ns) != (entry.size, entry.modified):
        raise ConversionError(
            f"{entry.name} has changed since the folder was listed: convert it when nothing writes it."
        )
    found = open_sample(folder, entry, again=again)
    if isinstance(found, Broken):
        raise ConversionError(
            f"{entry.name} {found.message.rstrip('.')}. Nothing is converted until it is whole:"
            " `vllm-compat verify` says what can be done."
        )
    return found


def head_of(
    folder: Path, entry: Entry, data: Mapping[str, Any], mask: torch.Tensor | None = None
) -> Head:
    """Return what a file holds, without reading its states.

    ``data`` is what `load` gave; ``mask`` is the data set's where the file has none of its own.

    Raises:
        ConversionError: It is no whole sample, or cannot be trained on by the other flow.
    """
    import torch

    name = entry.name
    in_process = name.endswith(".pt")
    header = data.get(KEY) if in_process else read_header(folder / name)
    tokens, states = tokens_of(name, data), data["hidden_states"]
    mask = data["loss_mask"] if in_process else mask
    if in_process and isinstance(states, torch.Tensor):
        raise ConversionError(
            f"{name} holds one tensor of states, the in-process flow has one a layer: it is of"
            " neither flow."
        )
    tensors = list(states) if in_process else [states[:, place] for place in range(states.shape[1])]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    if len(shapes) > 1 or len(dtypes) > 1 or tensors[0].dim() != 2 or len(tensors[0]) != len(tokens):
        raise ConversionError(
            f"{name} has {len(tokens)} tokens and layers of shapes {sorted(shapes)} in"
            f" {', '.join(sorted(dtypes))}: all must have one row a token and be alike; verify"
            " the folder."
        )
    dtype = dtypes.pop()
    _refuse_dtype(name, dtype, data.get(SCALES))
    if mask is None or mask.dim() != 1 or len(mask) != len(tokens):
        length = "no loss mask" if mask is None else f"a loss mask of {len(mask)}"
        raise ConversionError(
            f"{name} has {len(tokens)} tokens and {length}: each token needs its own; verify the folder."
        )
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ConversionError(f"The loss mask of {name} holds other values than 0 and 1.")
    width = 2 if dtype in _FP8 else tensors[0].element_size()
    hidden = int(tensors[0].shape[1])
    return Head(
        name=name,
        index=entry.index,
        size=entry.size,
        modified=entry.modified,
        tokens=len(tokens),
        layers=len(tensors),
        hidden_size=hidden,
        states_dtype=dtype,
        token_dtype=str(tokens.dtype).removeprefix("torch."),
        mask_dtype=str(mask.dtype).removeprefix("torch."),
        states_bytes=len(tokens) * len(tensors) * hidden * width,
        origin=_checked(name, Origin.from_header(header), len(tensors)),
    )


def tokens_of(name: str, data: Mapping[str, Any]) -> torch.Tensor:
    """Return the token ids of a sample under the name that its own flow has for them."""
    key = "input_ids" if name.endswith(".pt") else "token_ids"
    if key not in data:
        raise ConversionError(f"{name} has no {key}, where stock's trainer looks for the tokens.")
    tokens: torch.Tensor = data[key]
    return tokens


def _refuse_dtype(name: str, dtype: str, scales: Any) -> None:
    """Refuse states that no trainer takes; `load` has seen that scales are there and fit."""
    if dtype in _FP8:
        if name.endswith(".pt"):
            raise ConversionError(
                f"{name} holds {dtype} states without their scales ({SCALES}), so their values are lost."
            )
    elif dtype not in _PLAIN:
        raise ConversionError(f"{name} holds states in {dtype}, which no trainer takes.")
    elif scales is not None:
        raise ConversionError(f"{name} holds {dtype} states and scales, which only fp8 states have.")


def _checked(name: str, origin: Origin | None, layers: int) -> Origin | None:
    if origin is None:
        return None
    flow = Flow.IN_PROCESS if name.endswith(".pt") else Flow.SERVER
    if origin.flow is not flow or len(origin.layer_ids) != layers:
        raise ConversionError(
            f"{name} says that it holds the layers {list(origin.layer_ids)} ({origin.flow.numbering}),"
            f" but has {layers} of them in a file of the {flow.value} flow."
        )
    return origin


def trained_tokens(tokens: torch.Tensor, mask: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the ids of the tokens that are trained on, and how often each stands there."""
    ids, counts = tokens[mask.bool()].unique(return_counts=True)
    return ids.tolist(), counts.tolist()


def origin_of_file(path: Path) -> Origin | None:
    """Return the origin that a new file states, or None where it is torn or of somebody else."""
    stat = path.stat()
    found = open_sample(path.parent, Entry(path.name, 0, stat.st_size, stat.st_mtime_ns), again=True)
    if isinstance(found, Broken):
        return None
    return Origin.from_header(found.get(KEY) if path.suffix == ".pt" else read_header(path))


def write_server(target: Path, folder: Path, entry: Entry, head: Head, layers: Layers) -> None:
    """Write ``hs_<i>.safetensors`` from an in-process sample."""
    import torch
    from safetensors.torch import save_file

    data = load(folder, entry)
    states = data["hidden_states"]
    tensors = {
        "hidden_states": torch.stack([states[place] for place in layers.order], dim=1),
        "token_ids": data["input_ids"].to(torch.int64, copy=True),
    }
    header = head.origin_of_target(layers).as_header()
    _put(target, lambda part: save_file(tensors, part, metadata=header))


def write_in_process(
    target: Path, folder: Path, entry: Entry, head: Head, layers: Layers, mask: torch.Tensor
) -> None:
    """Write ``data_<i>.pt`` from a sample of the server flow and its loss mask."""
    import torch

    data = load(folder, entry)
    states = data["hidden_states"]
    if SCALES in data:
        # As hs-connectors decodes them, so that both trainers see the same bits.
        scales = data[SCALES].to(torch.bfloat16).reshape(-1, 1, 1)
        states = states.to(torch.bfloat16) * scales
    sample = {
        "input_ids": data["token_ids"].to(getattr(torch, head.target_token_dtype), copy=True),
        # A view would take the whole tensor into the file with it.
        "hidden_states": [
            states[:, place].clone(memory_format=torch.contiguous_format) for place in layers.order
        ],
        "loss_mask": mask.to(getattr(torch, head.target_mask_dtype), copy=True),
        KEY: head.origin_of_target(layers).as_header(),
    }
    _put(target, lambda part: torch.save(sample, part))


def _put(target: Path, write: Any) -> None:
    """Write a file under another name first: under its own it is whole or absent.

    The other name begins with a dot and does not end in "pt": the in-process trainer takes whatever
    does for a sample.
    """
    part = target.with_name(f".{target.name}.part")
    try:
        write(part)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
    except Exception as error:  # OSError, or what torch and safetensors make of it
        said = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConversionError(f"{target} could not be written: {said}.") from error
    finally:
        with suppress(OSError):
            part.unlink()


def put_text(target: Path, text: str) -> None:
    _put(target, lambda part: part.write_text(text, encoding="utf-8"))


def put_object(target: Path, value: Any) -> None:
    import torch

    _put(target, lambda part: torch.save(value, part))


def load_object(path: Path) -> Any:
    """Return what ``torch.save`` has written, or None where it cannot be read."""
    import torch

    try:
        return torch.load(path, weights_only=True)
    except Exception:  # torch raises a dozen types for a damaged file
        return None
