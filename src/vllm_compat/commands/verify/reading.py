"""Read a folder and boil each file down to a `Sample`."""

from __future__ import annotations

import errno
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vllm_compat.commands.verify.model import (
    Broken,
    Difference,
    Entry,
    Kind,
    Listing,
    Pairing,
    Remedy,
    Sample,
)
from vllm_compat.errors import UsageError
from vllm_compat.runtime import numbering

if TYPE_CHECKING:
    import torch


_NAME = re.compile(r"(?P<kind>data|hs)_(?P<index>\d+)\.(?:pt|safetensors)")
_UNFINISHED = re.compile(r"\.?(?:data|hs)_\d+.*(?<!\.zst)|.*(?:\.tmp|\.part|\.partial|\.lock|~)")
_ARCHIVE_START, _ARCHIVE_END = b"PK\x03\x04", b"PK\x05\x06"
SCALES = "hidden_states_scales"
"""One factor a token, ``[tokens, 1, 1]``, by which float8 states are multiplied to be the model's
(``hs_connectors/fp8_utils.py`` of speculators 0.9.0)."""
_MOST_BELOW = 10_000  # names that are looked at in a folder's subfolders


def list_folder(folder: Path) -> Listing:
    """Return what stands in a folder, its samples in the order of their indices.

    Raises:
        UsageError: It is no folder, cannot be read, or holds no samples.
    """
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}: name the one with the data_<i>.pt files.")
    try:
        entries, others, below = _scan(folder)
    except OSError as error:
        raise UsageError(f"The folder {folder} cannot be read: {error}.") from error
    kind = _kind_of(folder, entries, below)
    strays = [name for name in others if name.endswith("pt")]
    strays += [str(path.relative_to(folder)) for path in below if path.name.endswith("pt")]
    return Listing(
        folder=folder,
        entries=tuple(sorted(entries, key=lambda entry: entry.index)),
        strays=tuple(sorted(strays)),
        unfinished=tuple(sorted(_unfinished(others, {entry.name for entry in entries}.union(others)))),
        lengths=_read_json(folder / "sample_lengths.json"),
        config=_read_json(folder / "data_config.json"),
        left_out=_left_out(folder),
        server_flow=kind == "hs",
    )


def _left_out(folder: Path) -> frozenset[int]:
    """Return which samples were left out on request; none where the list cannot be read."""
    try:
        return numbering.read_list(folder)
    except (OSError, ValueError):
        return frozenset()  # what it named is told as missing


def _unfinished(others: Iterable[str], names: Collection[str]) -> Iterator[str]:
    """Yield the names of writes that have not ended; the lock of a file that is there is none.

    ``names`` are all files of the folder; some programs hide the lock, ``.NAME.lock``.
    """
    for name in others:
        lock_of = name.removesuffix(".lock") if name.endswith(".lock") else ""
        locks = bool(lock_of) and (lock_of in names or lock_of.removeprefix(".") in names)
        if _UNFINISHED.fullmatch(name) and not name.endswith("pt") and not locks:
            yield name


def _kind_of(folder: Path, entries: Sequence[Entry], below: Sequence[Path]) -> str:
    """Return the one kind of samples that a folder has, ``data`` or ``hs``."""
    if not entries:
        nearest = next((path.parent for path in below if _NAME.fullmatch(path.name)), None)
        hint = f"; there are some in {nearest}" if nearest else ""
        raise UsageError(f"No data_<i>.pt or hs_<i>.safetensors stands in {folder}{hint}.")
    kinds = {entry.name.partition("_")[0] for entry in entries}
    if len(kinds) > 1:
        raise UsageError(
            f"The folder {folder} holds data_<i>.pt and hs_<i>.safetensors, results of two"
            " different flows: move one kind into a folder of its own."
        )
    return kinds.pop()


def _scan(folder: Path) -> tuple[list[Entry], list[str], list[Path]]:
    """Return the samples of a folder, the names of its other files, and the files further down."""
    entries: list[Entry] = []
    others: list[str] = []
    below: list[Path] = []
    with os.scandir(folder) as found:
        for item in found:
            match = _NAME.fullmatch(item.name)
            if item.is_dir():
                tree = (Path(at) / name for at, _, names in os.walk(item) for name in names)
                below += islice(tree, _MOST_BELOW)
            elif match and item.name.endswith("pt" if match["kind"] == "data" else "safetensors"):
                stat = item.stat()
                index = int(match["index"])
                entries.append(Entry(item.name, index, stat.st_size, stat.st_mtime_ns))
            else:
                others.append(item.name)
    return entries, others, below


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class _NotASample(Exception):
    """A file that holds no sample; carries kind, sentence and remedy."""

    def __init__(self, kind: Kind, message: str, remedy: Remedy = Remedy.SET_ASIDE) -> None:
        super().__init__(message)
        self.kind = kind
        self.remedy = remedy


def read_sample(folder: Path, entry: Entry) -> Sample | Broken:
    """Read one file and boil it down; what is wrong with it is returned, never raised."""
    try:
        return _summarise(entry, load_sample(folder / entry.name))
    except _NotASample as error:
        return Broken(entry, error.kind, str(error), error.remedy)
    except Exception as error:
        # One odd file (a sparse tensor, an exotic dtype) must not end the reading of all others.
        said = f"cannot be judged: {type(error).__name__}: {_first_line(error)}."
        return Broken(entry, Kind.STRUCTURE, said, Remedy.NONE)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:160].rstrip(".")


def load_sample(path: Path, *, again: bool = False) -> dict[str, Any]:
    """Return the tensors of a file, mapped into memory; ``again`` for one that was read before."""
    import torch

    try:
        zipped = again or _pull(path).startswith(_ARCHIVE_START)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:
        # torch and safetensors raise a dozen types for a damaged file; each is this file's fault.
        raise _diagnosed(path, error) from error
    if not isinstance(found, dict):
        raise _NotASample(Kind.STRUCTURE, f"holds a {type(found).__name__}, a sample is a dictionary.")
    return found


def open_sample(folder: Path, entry: Entry, *, again: bool = False) -> dict[str, Any] | Broken:
    """Return the tensors of a file that holds a sample; what is wrong with it is returned."""
    try:
        found = load_sample(folder / entry.name, again=again)
        _parts(entry, found)
    except _NotASample as error:
        return Broken(entry, error.kind, str(error), error.remedy)
    return found


def _pull(path: Path) -> bytes:
    """Read a file through, into the system's cache, and return how it begins.

    Mapping is a quarter of the work of reading, but a disk error in a mapped file ends the whole
    process; after this it does not occur, and here it is an OSError.
    """
    with path.open("rb", buffering=0) as file, open(os.devnull, "wb", buffering=0) as nowhere:
        head = file.read(8)
        at = 0
        try:
            while sent := os.sendfile(nowhere.fileno(), file.fileno(), at, 1 << 24):
                at += sent
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSOCK, errno.ENOTSUP):
                raise
            file.seek(0)
            while file.read(1 << 22):
                pass
    return head


def _diagnosed(path: Path, error: Exception) -> _NotASample:
    """Say what is wrong with a file that torch or safetensors refuse."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            cut_off = size < _whole_size(path.suffix, head, file, size)
    except OSError as failure:
        return _NotASample(Kind.UNREADABLE, f"cannot be read: {failure}.", Remedy.NONE)
    if cut_off:
        return _NotASample(
            Kind.TRUNCATED,
            f"is cut off after {size:,} bytes: it was not written or copied to its end.",
        )
    if isinstance(error, (OSError, MemoryError)):
        return _NotASample(Kind.UNREADABLE, f"cannot be read: {error}.", Remedy.NONE)
    cause = _first_line(error)
    if path.suffix == ".pt" and not head.startswith(_ARCHIVE_START):
        cause = "it is no file that torch.save writes"
    elif path.suffix == ".pt" and "global" in str(error).lower():
        cause = "it holds more than tensors, and opening such a file can run code"
    return _NotASample(Kind.UNREADABLE, f"cannot be read: {cause}.")


def _whole_size(suffix: str, head: bytes, file: BinaryIO, size: int) -> int:
    """Return the least size in bytes that a whole file with this beginning has."""
    if suffix == ".pt":
        file.seek(max(0, size - 65_600))
        ended = _ARCHIVE_END in file.read() or not head.startswith(_ARCHIVE_START)
        return max(1, size) if ended else size + 1
    if size < 8:
        return 8
    length = int.from_bytes(head, "little")
    try:
        header = json.loads(file.read(length)) if length < size else {}
        header.pop("__metadata__", None)
        return 8 + length + max(int(item["data_offsets"][1]) for item in header.values())
    except (ValueError, TypeError, AttributeError, LookupError):
        # No header that can be read: cut off in it if it was to be of a sensible length.
        return 8 + length if length < 100_000_000 else size


def _summarise(entry: Entry, data: Mapping[str, Any]) -> Sample:
    tokens, states, mask = _scaled_parts(entry, data)
    zero, not_finite, sums = [], [], []
    for layer, tensor in enumerate(states):
        if tensor.dim() != 2 or not tensor.is_floating_point():
            continue
        zero_rows, bad_rows = _bad_rows(tensor)
        if len(zero_rows):
            zero.append((layer, len(zero_rows), int(zero_rows[0])))
        if len(bad_rows):
            not_finite.append((layer, len(bad_rows), int(bad_rows[0])))
        sums.append(_row_sums(tensor))
    whole = len(sums) == len(states) and all(len(rows) == len(tokens) for rows in sums)
    sample = Sample(
        entry=entry,
        tokens=len(tokens),
        mask=None if mask is None else len(mask),
        shapes=tuple(tuple(tensor.shape) for tensor in states),
        dtypes=(_dtype_of(data),) * len(states) if SCALES in data else tuple(map(_name_of, states)),
        members=tuple(sorted(map(str, data))),
        zero=tuple(zero),
        not_finite=tuple(not_finite),
        token_key=_digest([tokens]),
        state_key=_digest(sums) if whole else "",
        first_token=int(tokens[0]),
    )
    if whole and not zero and not not_finite:
        row = states[-1][0]
        sample = replace(
            sample,
            repeated=_repeated_rows(tokens, states, sums),
            first_row=tuple(row[:: max(1, len(row) // 16)][:16].float().tolist()),
        )
    return sample if mask is None else _with_mask(sample, tokens, mask)


def _name_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtype_of(data: Mapping[str, Any]) -> str:
    """Return the dtype of states that are stored with scales, as reports name it."""
    return f"{_name_of(data['hidden_states'])} with scales"


def _with_mask(sample: Sample, tokens: torch.Tensor, mask: torch.Tensor) -> Sample:
    """Add what judging needs to know of the loss mask."""
    import torch

    starts = _span_starts(mask)
    starts = starts[starts <= len(tokens)]
    before = torch.where(starts > 0, tokens[(starts - 1).clamp(min=0)], -1)
    return replace(
        sample,
        trained=int((mask == 1).sum()),
        odd_mask=bool(((mask != 0) & (mask != 1)).any()),
        before_spans=tuple(Counter(before.tolist()).items()),
    )


def _parts(
    entry: Entry, data: Mapping[str, Any]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
    """Return token ids, one tensor a layer, and the loss mask (None in the server flow's files).

    The states are as they are stored; scales are checked, and multiplied by in `_scaled_parts`.

    Raises:
        _NotASample: Something that a sample needs is missing or does not fit.
    """
    import torch

    tokens = data.get("input_ids", data.get("token_ids"))
    states = data.get("hidden_states")
    mask = data.get("loss_mask")
    if isinstance(states, torch.Tensor) and states.dim() == 3:
        _check_scales(states, data)
        states = list(states.unbind(1))
    elif isinstance(states, (list, tuple)) and SCALES not in data:
        for tensor in states:
            _check_scales(tensor, data)
    if (
        not isinstance(tokens, torch.Tensor)
        or not isinstance(states, (list, tuple))
        or not all(isinstance(tensor, torch.Tensor) for tensor in states)
    ):
        raise _NotASample(
            Kind.STRUCTURE,
            f"holds {', '.join(sorted(map(str, data))) or 'nothing'}: input_ids and hidden_states,"
            " one tensor a layer, are needed.",
        )
    if tokens.dim() != 1 or tokens.is_floating_point() or not len(tokens) or not states:
        raise _NotASample(
            Kind.STRUCTURE,
            f"has {len(states)} layers and token ids of shape {list(tokens.shape)} and"
            f" {tokens.dtype}: at least one layer and one token are needed.",
        )
    if isinstance(mask, torch.Tensor) and mask.dim() == 1:
        return tokens.long(), list(states), mask
    if entry.name.endswith(".pt"):
        raise _NotASample(
            Kind.STRUCTURE,
            "has no loss mask of its own: stock's trainer stops there; add the data set's.",
            Remedy.NONE,
        )
    return tokens.long(), list(states), None


def _scaled_parts(
    entry: Entry, data: Mapping[str, Any]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
    """Return what `_parts` does, states by their scales, in float32, where the file has them.

    Raises:
        _NotASample: As `_parts`.
    """
    import torch

    tokens, states, mask = _parts(entry, data)
    stored = data["hidden_states"]
    if data.get(SCALES) is not None and isinstance(stored, torch.Tensor):
        states = list((stored.float() * data[SCALES].float().reshape(-1, 1, 1)).unbind(1))
    return tokens, states, mask


def _check_scales(states: object, data: Mapping[str, Any]) -> None:
    """Refuse states whose values nothing tells.

    Raises:
        _NotASample: float8 without scales, scales that fit no token, or one below zero.
    """
    import torch

    scales = data.get(SCALES)
    if not isinstance(states, torch.Tensor):
        return  # told as no tensor
    if scales is None:
        if states.is_floating_point() and states.element_size() == 1:
            raise _NotASample(
                Kind.STRUCTURE,
                f"has states of {_name_of(states)} and no {SCALES}: nothing tells which values they"
                " stand for.",
            )
        return
    if (
        not isinstance(scales, torch.Tensor)
        or not scales.is_floating_point()
        or scales.numel() != len(states)
        or scales.shape[:1] != states.shape[:1]
    ):
        shape = list(scales.shape) if isinstance(scales, torch.Tensor) else type(scales).__name__
        raise _NotASample(
            Kind.STRUCTURE,
            f"has {SCALES} of shape {shape} for {len(states)} tokens: one scale a token is needed.",
        )
    below = (scales.reshape(-1) < 0).nonzero().flatten()
    if len(below):
        raise _NotASample(
            Kind.STRUCTURE,
            f"has {len(below)} {SCALES} below zero, the first for token {int(below[0])}: they turn the"
            " signs of their rows over.",
        )


def _bad_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of the rows that are all zero, and of those that are not finite.

    A row's norm is the one figure that torch computes as fast as memory gives bfloat16 rows (ten
    times faster than minimum and maximum); the rows that it makes suspicious are looked at exactly.
    """
    import torch

    norms = torch.linalg.vector_norm(tensor if tensor.element_size() > 1 else tensor.float(), dim=1)
    suspects = (~torch.isfinite(norms) | (norms == 0)).nonzero().flatten()
    rows = tensor[suspects].float()
    return suspects[(rows == 0).all(1)], suspects[~torch.isfinite(rows).all(1)]


def _row_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit checksum a row: the sum of its bytes, read as words."""
    import torch

    if (tensor.shape[1] * tensor.element_size()) % 8 or tensor.stride(1) != 1:
        return tensor.contiguous().view(torch.uint8).long().sum(1)
    return tensor.view(torch.int64).sum(1)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    from hashlib import blake2b

    digest = blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _repeated_rows(
    tokens: torch.Tensor, states: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]
) -> tuple[int, int, int] | None:
    """Find rows of different tokens that are equal in every layer.

    Equal rows under the same token are no fault: a sample that opens with the same token several
    times has them.
    """
    import torch

    key = torch.zeros_like(sums[0])
    for rows in sums:
        key = key * 0x5851F42D4C957F2D + rows
    ordered, row = key.sort(stable=True)
    pairs = (ordered[1:] == ordered[:-1]).nonzero().flatten()
    pairs = pairs[tokens[row[pairs]] != tokens[row[pairs + 1]]]
    if not len(pairs):
        return None
    first = pairs[row[pairs + 1].argmin()]
    earlier, later = int(row[first]), int(row[first + 1])
    if not all(torch.equal(tensor[earlier], tensor[later]) for tensor in states):
        return None
    return len(pairs), later, earlier


def _span_starts(mask: torch.Tensor) -> torch.Tensor:
    """Return the places at which a run of ones begins."""
    import torch

    trained = mask == 1
    return (trained & ~torch.cat([trained.new_zeros(1), trained[:-1]])).nonzero().flatten()


def difference_of(folder: Path) -> Difference:
    import torch

    def relative_distance(one: str, other: str) -> float:
        pairs = zip(
            *(_scaled_parts(Entry(n, 0, 0, 0), load_sample(folder / n))[1] for n in (one, other)),
            strict=True,
        )
        worst = 0.0
        for left, right in pairs:
            scale = torch.linalg.vector_norm(right.float()).clamp(min=1e-30)
            apart = torch.linalg.vector_norm(left.float() - right.float())
            worst = max(worst, float(apart / scale))
        return worst

    return relative_distance


def pairing_of(listing: Listing) -> Pairing:
    names = {entry.index: entry.name for entry in listing.entries}

    def tokens_and_mask(index: int) -> tuple[Sequence[int], Sequence[int]] | None:
        try:
            data = load_sample(listing.folder / names[index], again=True)
            return data["input_ids"].tolist(), data["loss_mask"].tolist()
        except (KeyError, AttributeError, _NotASample):
            return None

    return tokens_and_mask
