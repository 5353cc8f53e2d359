"""Read a folder of extracted hidden states and say what in it must not be trained on.

Stock's offline script writes one ``data_<i>.pt`` a sample (``torch.save`` of ``input_ids``,
``hidden_states``, one tensor a layer, and ``loss_mask``); speculators 0.5 and later write
``hs_<i>.safetensors`` (``token_ids`` and ``hidden_states`` of shape [tokens, layers, hidden size],
the loss mask stays in the data set)::

    report = verify_directory("output", progress=Progress(sys.stderr))
    print(render(report))

Reading needs torch and boils each file down to a :class:`Sample`; all judging is done on these
small records (:func:`judge`), needs nothing, and keeps apart what is *certain* (no right run gives
such a file), what is *suspected*, and what is only worth a *note*. No check finds rows that are
well-formed and were computed in a wrong context from the second token on.

Most faults are local. One is not: speculators 0.4.0 and 0.4.0.1 return a batch in the order of its
*sorted* request ids (``req_0_0, req_0_1, req_0_10, req_0_11, req_0_2 …``), the script pairs result
*j* with loss mask *j* and cuts the mask to the tokens' length. From eleven samples a batch on, the
file at place *p* so holds the tokens and rows of prompt ``stock_order(n)[p]`` and the loss mask of
prompt *p* (public: speculators#365; the order came with pull request 283). Two things give it away:
lengths, and where the folder has them the tokens that a chat template puts before each answer.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from enum import Enum
from functools import cache
from heapq import heappop, heappush
from itertools import islice, pairwise, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from vllm_compat.errors import UsageError, VllmCompatError

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1

SETTLED_S = 60.0
"""A folder that changed less than this many seconds ago may still be written: no repair then."""

STOCK_BATCHES = range(11, 33)
"""Batch sizes that stock 0.4 puts out of order: up to ten, text order is number order; above 32
(its ``max_num_seqs``) its ``generate()`` fails."""

_NAME = re.compile(r"(?P<kind>data|hs)_(?P<index>\d+)\.(?:pt|safetensors)")
_UNFINISHED = re.compile(r"\.?(?:data|hs)_\d+.*(?<!\.zst)|.*(?:\.tmp|\.part|\.partial|\.lock|~)")
_BATCH_SIZE = re.compile(r"--batch-size[ =](\d+)")
_ARCHIVE_START, _ARCHIVE_END = b"PK\x03\x04", b"PK\x05\x06"
_COMPARISONS = 200  # pairs of files with equal tokens that are read again
_MOST_BELOW = 10_000  # names that are looked at in a folder's subfolders


class Kind(str, Enum):
    """What is wrong; the value is the word in reports."""

    UNREADABLE = "unreadable"
    TRUNCATED = "truncated"
    STRUCTURE = "structure"
    SHAPE = "shape"
    ROWS = "rows"
    LAYERS = "layers"
    HIDDEN_SIZE = "hidden size"
    DTYPE = "dtype"
    MASK = "loss mask"
    ORDER = "order of loss masks"
    ZERO = "zero rows"
    NOT_FINITE = "non-finite rows"
    REPEATED = "repeated rows"
    FOREIGN = "foreign rows"
    CONTRADICTION = "contradiction"
    DUPLICATE = "duplicate"
    GAP = "gap"
    STRAY = "stray file"
    RECORD = "record"


class Certainty(str, Enum):
    """How sure a finding is; certain and suspected ones count as faults, notes do not."""

    CERTAIN = "certain"
    SUSPECTED = "suspected"
    NOTE = "note"


class Remedy(str, Enum):
    """What :func:`repair` does about a finding."""

    NONE = "none"
    SET_ASIDE = "set aside"
    REORDER = "reorder"


@dataclass(frozen=True)
class Fault:
    """One finding: what, how sure, in which files, in a sentence, and what a repair would do."""

    kind: Kind
    certainty: Certainty
    files: tuple[str, ...]
    message: str
    remedy: Remedy = Remedy.NONE


@dataclass(frozen=True)
class Entry:
    """A sample's file: name, index in its name, size in bytes, time of change in nanoseconds."""

    name: str
    index: int
    size: int
    modified: int


@dataclass(frozen=True)
class Sample:
    """What judging needs to know of one readable file.

    ``tokens`` and ``mask`` are the lengths of the token ids and of the loss mask (None where the
    format has no mask), ``trained`` counts the ones in the mask, ``shapes`` and ``dtypes`` have one
    item a tensor. ``zero`` and ``not_finite`` hold (layer, rows, first row); ``repeated`` (rows,
    row, earlier row) where rows of different tokens are equal bit for bit in every layer. The keys
    are digests, of the token ids and of all rows. ``first_row`` is a fixed choice of components of
    the last layer's first row, ``before_spans`` counts the tokens that stand before a span that is
    trained on (-1 where the span opens the sample).
    """

    entry: Entry
    tokens: int
    mask: int | None
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    trained: int = 0
    odd_mask: bool = False
    zero: tuple[tuple[int, int, int], ...] = ()
    not_finite: tuple[tuple[int, int, int], ...] = ()
    repeated: tuple[int, int, int] | None = None
    token_key: str = ""
    state_key: str = ""
    first_token: int = -1
    first_row: tuple[float, ...] = ()
    before_spans: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """The file's name."""
        return self.entry.name

    @property
    def layout(self) -> tuple[int, ...]:
        """The widths of the layers, one item a layer."""
        return tuple(shape[-1] for shape in self.shapes if shape)

    @property
    def well_formed(self) -> bool:
        """Whether every layer is a matrix with one row a token."""
        return all(len(shape) == 2 and shape[0] == self.tokens for shape in self.shapes)


@dataclass(frozen=True)
class Broken:
    """A file that could not be read as a sample, and why."""

    entry: Entry
    kind: Kind
    message: str
    remedy: Remedy = Remedy.SET_ASIDE


@dataclass(frozen=True)
class Listing:
    """What stands in a folder beside and as samples.

    ``strays`` end in "pt" and are no samples, ``unfinished`` look like writes that did not end;
    ``lengths`` is ``sample_lengths.json``, ``config`` is ``data_config.json`` (empty where absent).
    """

    folder: Path
    entries: tuple[Entry, ...]
    strays: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    lengths: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    server_flow: bool = False

    @property
    def batch_size(self) -> int | None:
        """The batch size in the command that ``data_config.json`` records, or None."""
        command = str(_look(self.config, "reproducibility", "command") or "")
        found = _BATCH_SIZE.search(command)
        return int(found.group(1)) if found else None

    @property
    def resumes_at(self) -> int:
        """The index at which stock's in-process script goes on: the highest one, plus one."""
        return max(entry.index for entry in self.entries) + 1


@dataclass(frozen=True)
class Batch:
    """Files ``start`` to ``start + files - 1``: results of one call for ``size`` prompts.

    ``evidence`` counts masks that are cut exactly where the out-of-order pairing cuts them, or that
    fit so and not as stored. ``fit_before`` and ``fit_after`` are the shares of moved masks whose
    spans begin behind usual tokens, as stored and reordered (None where there are none). ``sure``
    are the indices whose mask is certainly not theirs and whose own is that of :meth:`mask_of`.
    """

    start: int
    size: int
    files: int
    evidence: int
    fit_before: float | None = None
    fit_after: float | None = None
    sure: tuple[int, ...] = ()

    def mask_of(self, index: int) -> int:
        """Return the index of the file that holds the loss mask of this file's tokens."""
        return self.start + stock_order(self.size)[index - self.start]

    @property
    def indices(self) -> range:
        """The indices of its files."""
        return range(self.start, self.start + self.files)

    @property
    def moved(self) -> tuple[int, ...]:
        """The indices that have another file's mask."""
        return tuple(index for index in self.indices if self.mask_of(index) != index)

    @property
    def borne_out(self) -> bool:
        """Whether the tokens before the spans say that reordering is right."""
        return (
            self.fit_before is not None
            and self.fit_after is not None
            and self.fit_before <= 0.6
            and self.fit_after >= 0.9
        )


@dataclass(frozen=True)
class Report:
    """What a folder holds and what is wrong with it.

    ``seconds`` is the time from the first read to the last, ``size`` the bytes read; ``layers``,
    ``hidden_size`` and ``dtype`` are those of most files.
    """

    folder: str
    files: int
    size: int
    seconds: float
    tokens: int
    trained: int | None
    layers: int
    hidden_size: int
    dtype: str
    faults: tuple[Fault, ...]
    batches: tuple[Batch, ...]
    notes: tuple[str, ...]
    entries: tuple[Entry, ...] = ()
    server_flow: bool = False

    @property
    def clean(self) -> bool:
        """Whether nothing is certain or suspected to be wrong."""
        return all(fault.certainty is Certainty.NOTE for fault in self.faults)

    @property
    def exit_status(self) -> int:
        """0 for a clean folder, 1 for faults."""
        return 0 if self.clean else 1


Pairing = Callable[[int], "tuple[Sequence[int], Sequence[int]] | None"]
"""Gives the token ids and the loss mask in the file of an index, or None where there is none."""

Difference = Callable[[str, str], float]
"""Gives the largest relative distance between two files' states, over their layers."""


# The folder


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
    strays = [name for name in others if name.endswith("pt")]
    strays += [str(path.relative_to(folder)) for path in below if path.name.endswith("pt")]
    return Listing(
        folder=folder,
        entries=tuple(sorted(entries, key=lambda entry: entry.index)),
        strays=tuple(sorted(strays)),
        unfinished=tuple(
            sorted(n for n in others if _UNFINISHED.fullmatch(n) and not n.endswith("pt"))
        ),
        lengths=_read_json(folder / "sample_lengths.json"),
        config=_read_json(folder / "data_config.json"),
        server_flow=kinds == {"hs"},
    )


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


def _look(record: Any, *keys: str) -> Any:
    """Return the value under nested keys, or None where the way there ends."""
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


# Reading: the only part that needs torch


class _NotASample(Exception):
    """A file that holds no sample; carries kind, sentence and remedy."""

    def __init__(self, kind: Kind, message: str, remedy: Remedy = Remedy.SET_ASIDE) -> None:
        super().__init__(message)
        self.kind = kind
        self.remedy = remedy


def read_sample(folder: Path, entry: Entry) -> Sample | Broken:
    """Read one file and boil it down; what is wrong with it is returned, never raised."""
    try:
        return _summarise(entry, _load(folder / entry.name))
    except _NotASample as error:
        return Broken(entry, error.kind, str(error), error.remedy)
    except Exception as error:
        # One odd file (a sparse tensor, an exotic dtype) must not end the reading of all others.
        said = f"cannot be judged: {type(error).__name__}: {_first_line(error)}."
        return Broken(entry, Kind.STRUCTURE, said, Remedy.NONE)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:160].rstrip(".")


def _load(path: Path, *, again: bool = False) -> dict[str, Any]:
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
        raise _NotASample(
            Kind.STRUCTURE, f"holds a {type(found).__name__}, a sample is a dictionary."
        )
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
    import torch

    tokens, states, mask = _parts(entry, data)
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
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in states),
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
    if mask is None:
        return sample
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
    """Return token ids, one tensor a layer, and the loss mask (None in the server flow's files)."""
    import torch

    tokens = data.get("input_ids", data.get("token_ids"))
    states = data.get("hidden_states")
    mask = data.get("loss_mask")
    if isinstance(states, torch.Tensor) and states.dim() == 3:
        states = list(states.unbind(1))
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


def _bad_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of the rows that are all zero, and of those that are not finite.

    A row's norm is the one figure that torch computes as fast as memory gives bfloat16 rows (ten
    times faster than minimum and maximum); the rows that it makes suspicious are looked at exactly.
    """
    import torch

    norms = torch.linalg.vector_norm(
        tensor if tensor.element_size() > 1 else tensor.float(), dim=1
    )
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


def _difference(folder: Path) -> Difference:
    import torch

    def relative_distance(one: str, other: str) -> float:
        pairs = zip(
            *(_parts(Entry(n, 0, 0, 0), _load(folder / n))[1] for n in (one, other)), strict=True
        )
        worst = 0.0
        for left, right in pairs:
            scale = torch.linalg.vector_norm(right.float()).clamp(min=1e-30)
            apart = torch.linalg.vector_norm(left.float() - right.float())
            worst = max(worst, float(apart / scale))
        return worst

    return relative_distance


def _pairing(listing: Listing) -> Pairing:
    names = {entry.index: entry.name for entry in listing.entries}

    def tokens_and_mask(index: int) -> tuple[Sequence[int], Sequence[int]] | None:
        try:
            data = _load(listing.folder / names[index], again=True)
            return data["input_ids"].tolist(), data["loss_mask"].tolist()
        except (KeyError, AttributeError, _NotASample):
            return None

    return tokens_and_mask


# Judging: pure, on the records


def judge(
    listing: Listing,
    readings: Sequence[Sample | Broken],
    *,
    batch_size: int | None = None,
    pairing: Pairing = lambda index: None,
    difference: Difference = lambda one, other: 0.0,
) -> tuple[list[Fault], list[Batch], list[str]]:
    """Return the faults, the batches whose masks are out of order, and notes on what was tested.

    ``batch_size`` is the ``--batch-size`` of the extraction, where it is known for all runs.
    ``pairing`` and ``difference`` look into files again.
    """
    samples = [reading for reading in readings if isinstance(reading, Sample)]
    faults = [
        Fault(
            reading.kind,
            Certainty.CERTAIN,
            (reading.entry.name,),
            f"{reading.entry.name} {reading.message}",
            reading.remedy,
        )
        for reading in readings
        if isinstance(reading, Broken)
    ]
    notes: list[str] = []
    for sample in samples:
        faults += _own_faults(sample)
    faults += _odd_ones_out(samples)
    sizes = [batch_size] if batch_size else [*STOCK_BATCHES]
    if not batch_size and (listing.batch_size or 0) not in range(33):
        sizes.append(listing.batch_size or 0)
    batches, usual, order_note = judge_masks(samples, sizes, pairing)
    faults += _mask_faults(samples, batches, usual)
    faults += _twins(samples, difference, notes)
    faults += _first_rows(samples, notes)
    faults += _surroundings(listing, samples)
    return faults, batches, [*notes, order_note]


def _own_faults(sample: Sample) -> Iterator[Fault]:
    """Judge one file on its own."""

    def certain(kind: Kind, message: str) -> Fault:
        sentence = f"{sample.name} {message}"
        return Fault(kind, Certainty.CERTAIN, (sample.name,), sentence, Remedy.SET_ASIDE)

    if any(len(shape) != 2 for shape in sample.shapes):
        shapes = Counter(sample.shapes).most_common(2)
        seen = " and ".join(f"{count} tensors of shape {list(shape)}" for shape, count in shapes)
        yield certain(
            Kind.SHAPE,
            f"has {seen} for {sample.tokens} tokens; a layer is one matrix [tokens, hidden size]"
            " (one layer's rows were taken for layers: speculators 0.3.0 on vLLM 0.11.1 or later"
            " does that).",
        )
    elif not sample.well_formed:
        rows = sorted({shape[0] for shape in sample.shapes})
        yield certain(
            Kind.ROWS,
            f"has {' or '.join(map(str, rows))} rows for {sample.tokens} tokens; one row a token is"
            " needed (a prompt that was cut into chunks, preempted or found in the prefix cache).",
        )
    elif any("float" not in dtype for dtype in sample.dtypes):
        yield certain(Kind.DTYPE, f"has states of {sample.dtypes[0]}, which is no floating type.")
    for kind, found, words in (
        (Kind.NOT_FINITE, sample.not_finite, "not finite"),
        (Kind.ZERO, sample.zero, "all zero"),
    ):
        for layer, count, first in found[:1]:
            also = f" (and {len(found) - 1} more layers)" if len(found) > 1 else ""
            yield certain(
                kind,
                f"has {count} of {sample.shapes[layer][0]} rows {words} in layer number"
                f" {layer}{also}, the first is row {first}.",
            )
    if sample.repeated:
        count, row, earlier = sample.repeated
        yield certain(
            Kind.REPEATED,
            f"has {count} rows that repeat another token's row in every layer, the first is row"
            f" {row}, equal to row {earlier}.",
        )
    if len(sample.shapes) > 1 and len(set(sample.shapes)) > 1 and sample.well_formed:
        widths = sorted({shape[1] for shape in sample.shapes})
        yield certain(Kind.HIDDEN_SIZE, f"has layers of different hidden sizes, {widths}.")
    if sample.odd_mask:
        sentence = f"{sample.name} has a loss mask with values other than 0 and 1."
        yield Fault(Kind.MASK, Certainty.SUSPECTED, (sample.name,), sentence)


def _odd_ones_out(samples: Sequence[Sample]) -> Iterator[Fault]:
    """Find files that differ from most in layers, hidden size or dtype."""
    usual = [sample for sample in samples if sample.well_formed]
    for kind, of in (
        (Kind.LAYERS, lambda sample: len(sample.shapes)),
        (Kind.HIDDEN_SIZE, lambda sample: sample.shapes[0][1]),
        (Kind.DTYPE, lambda sample: "/".join(sorted(set(sample.dtypes)))),
    ):
        counts = Counter(of(sample) for sample in usual)
        for sample in usual if len(counts) > 1 else ():
            most, count = counts.most_common(1)[0]
            if of(sample) != most:
                yield Fault(
                    kind,
                    Certainty.CERTAIN,
                    (sample.name,),
                    f"{sample.name} is odd in {kind.value}: {of(sample)}, where {count} of"
                    f" {len(usual)} files have {most}.",
                )


def _twins(
    samples: Sequence[Sample], difference: Difference, notes: list[str]
) -> Iterator[Fault]:
    """Compare files with the same rows or the same tokens."""
    sound = [sample for sample in samples if sample.well_formed and not sample.zero]
    for group in _groups(sound, lambda sample: sample.state_key):
        prompts = {sample.token_key: sample for sample in group}
        if len(prompts) > 1:
            names = tuple(sample.name for sample in prompts.values())
            yield Fault(
                Kind.FOREIGN,
                Certainty.CERTAIN,
                names,
                f"{_listed(names)} hold the same rows for different tokens: all but one of them,"
                " at least, are wrong.",
            )
    copies: list[tuple[Sample, Sample]] = []
    compared = 0
    for group in _groups(sound, lambda sample: sample.token_key):
        first = group[0]
        for other in group[1:]:
            if other.state_key == first.state_key:
                copies.append((first, other))
            elif compared < _COMPARISONS and other.shapes == first.shapes:
                compared += 1
                apart = difference(first.name, other.name)
                if apart > 0.5:
                    yield Fault(
                        Kind.CONTRADICTION,
                        Certainty.CERTAIN,
                        (first.name, other.name),
                        f"{first.name} and {other.name} hold the same tokens, and rows that differ"
                        f" by {apart:.0%} of their norm: at least one of them is wrong.",
                    )
    if compared == _COMPARISONS:
        notes.append(f"Of the files with equal tokens, {_COMPARISONS} pairs were compared.")
    offsets = Counter(other.entry.index - first.entry.index for first, other in copies)
    for first, other in copies:
        offset = other.entry.index - first.entry.index
        stretch = offsets[offset] >= 3
        yield Fault(
            Kind.DUPLICATE,
            Certainty.SUSPECTED if stretch else Certainty.NOTE,
            (first.name, other.name),
            f"{other.name} repeats {first.name}, tokens and rows"
            + (
                f", as {offsets[offset]} files do at a distance of {offset}: a stretch of the data"
                " set was extracted twice."
                if stretch
                else ": the data set probably has the conversation twice."
            ),
        )


def _first_rows(samples: Sequence[Sample], notes: list[str]) -> Iterator[Fault]:
    """Compare first rows: they depend on the first token only, so equal tokens give equal rows.

    That holds for every causal model, within what the dtype explains; a row of another token is
    typically as far away as its own norm.
    """
    tested = 0
    candidates = [sample for sample in samples if sample.first_row]
    for group in _groups(candidates, lambda s: f"{s.first_token} {s.layout}", least=4):
        chosen = group[:: max(1, len(group) // 99)]
        usual = [median(values) for values in zip(*(s.first_row for s in chosen), strict=True)]
        norm = sum(value * value for value in usual) ** 0.5
        far = [sample for sample in group if _distance(sample.first_row, usual) > 0.5 * norm]
        tested += len(group)
        token = group[0].first_token
        if len(far) > len(group) / 2:
            yield Fault(
                Kind.FOREIGN,
                Certainty.SUSPECTED,
                tuple(sample.name for sample in far),
                f"{len(group)} files begin with token {token}, and their first rows have nothing in"
                " common, although a first row depends on the first token only: many of them hold"
                " rows of other tokens (speculators#279: rows cut by offset, or missing because"
                " the prefix cache had them).",
            )
            continue
        for sample in far:
            yield Fault(
                Kind.FOREIGN,
                Certainty.SUSPECTED,
                (sample.name,),
                f"{sample.name} begins with token {token} like {len(group) - len(far)} files whose"
                " first rows agree, and has another first row: its rows are shifted or another"
                " sample's.",
            )
    notes.append(
        f"First rows could be compared in {tested} of {len(candidates)} files (those that share"
        " their first token with three others)."
    )


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return float(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5)


def _groups(
    samples: Sequence[Sample], key: Callable[[Sample], str], least: int = 2
) -> Iterator[list[Sample]]:
    """Yield the lists of at least ``least`` samples that have the same, non-empty key."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        found[key(sample)].append(sample)
    return (group for name, group in found.items() if name and len(group) >= least)


def _surroundings(listing: Listing, samples: Sequence[Sample]) -> Iterator[Fault]:
    """Judge the sequence of indices, other files, and stock's own records of the folder."""
    indices = sorted({entry.index for entry in listing.entries})
    expected = _look(listing.config, "data", "num_samples")
    if isinstance(expected, int) and not listing.server_flow:
        indices.append(max(expected, indices[-1] + 1))
    missing = [
        range(before + 1, after)
        for before, after in pairwise(indices)
        if after > before + 1
    ]
    if missing:
        filled = (
            "the server flow's script makes what is missing when it is run again"
            if listing.server_flow
            else f"stock's script goes on at {listing.resumes_at} and never fills them"
        )
        yield Fault(
            Kind.GAP,
            Certainty.CERTAIN,
            (),
            f"{_counted(sum(map(len, missing)), 'index', 'indices')} missing,"
            f" {_listed_runs(missing)}: {filled}.",
        )
    if listing.strays and not listing.server_flow:
        yield Fault(
            Kind.STRAY,
            Certainty.CERTAIN,
            listing.strays,
            f"stock's trainer takes every file under the folder whose name ends in 'pt' for a"
            f" sample, {_listed(listing.strays)} too: move what is none out of the folder.",
        )
    for name in listing.unfinished:
        yield Fault(
            Kind.STRAY,
            Certainty.SUSPECTED,
            (name,),
            f"{name} looks like a write that has not ended.",
            Remedy.SET_ASIDE,
        )
    yield from _records(listing, samples)


def _records(listing: Listing, samples: Sequence[Sample]) -> Iterator[Fault]:
    lengths = listing.lengths
    wrong = [s for s in samples if lengths.get(str(s.entry.index), s.tokens) != s.tokens]
    if wrong:
        first = wrong[0]
        yield Fault(
            Kind.RECORD,
            Certainty.CERTAIN,
            tuple(sample.name for sample in wrong),
            f"sample_lengths.json is wrong on {len(wrong)} files ({first.name}:"
            f" {lengths[str(first.entry.index)]} for {first.tokens} tokens), and the trainer packs"
            " its batches by it: delete it, and lengths are estimated from file sizes.",
        )
    absent = sum(str(sample.entry.index) not in lengths for sample in samples)
    if lengths and absent:
        yield Fault(
            Kind.RECORD,
            Certainty.NOTE,
            (),
            f"sample_lengths.json lacks {absent} of {len(samples)} files (it is written when a run"
            " ends): the trainer then estimates all lengths from file sizes.",
        )
    layers = Counter(len(s.shapes) for s in samples if s.well_formed).most_common(1)
    asked = _look(listing.config, "hidden_states", "layer_ids")
    if layers and isinstance(asked, list) and len(asked) != layers[0][0]:
        yield Fault(
            Kind.RECORD,
            Certainty.CERTAIN,
            (),
            f"data_config.json records layer ids {asked}, the files have {layers[0][0]} layers.",
        )
    if layers and layers[0][0] != 4:
        yield Fault(
            Kind.LAYERS,
            Certainty.NOTE,
            (),
            f"Files have {layers[0][0]} layers; stock's EAGLE-3 trainer is made for four, three"
            " auxiliary ones and the verifier's last.",
        )
    untrained = [s.name for s in samples if s.mask is not None and not s.trained]
    if untrained:
        yield Fault(
            Kind.MASK,
            Certainty.NOTE,
            tuple(untrained),
            f"{len(untrained)} files have a loss mask without a one: nothing is learnt from them.",
        )


# Loss masks and their order


@cache
def stock_order(size: int) -> tuple[int, ...]:
    """Return the prompts of a batch in the order in which speculators 0.4 returns their results.

    Request ids are sorted as text, so that prompt 10 comes before prompt 2.
    """
    return tuple(sorted(range(size), key=str))


@dataclass(frozen=True)
class Masks:
    """All that is known of a folder's loss masks.

    ``lengths`` maps indices to (tokens, length of the mask). ``usual`` are the tokens that trained
    spans usually begin behind: a chat template puts the same few before each answer. ``fitting``
    maps (index of tokens, index of a mask) to whether every span of that mask begins behind a usual
    token there, for near indices where that was looked at and the mask has a span.
    """

    lengths: Mapping[int, tuple[int, int]]
    usual: frozenset[int] = frozenset()
    fitting: Mapping[tuple[int, int], bool] = field(default_factory=dict)

    def odd(self, index: int) -> bool:
        """Whether a mask is not as long as its tokens, or has spans in unusual places."""
        tokens, mask = self.lengths[index]
        return tokens != mask or self.fitting.get((index, index)) is False


def explained(masks: Masks, start: int, size: int, files: int) -> tuple[int, int] | None:
    """Count the oddities of a would-be batch that its order explains, and those that it does not.

    A prompt's mask stands in the file at the prompt's own place and is cut to that file's tokens,
    so it is as long as the shorter of the prompt and that file; and it fits the prompt's tokens, at
    ``stock_order``'s place, no worse than the mask that stands there. None where a file contradicts
    that. ``files`` of the batch's ``size`` results are there, the first ones.
    """
    count = left = 0
    for place, holder in enumerate(stock_order(size)):
        if holder >= files or start + holder not in masks.lengths:
            continue
        room, mask = masks.lengths[start + holder]
        prompt = masks.lengths.get(start + place) if place < files else None
        if prompt is None:
            if mask > room:
                return None
            continue
        if mask != min(prompt[0], room):
            return None
        stored = masks.fitting.get((start + place, start + place))
        moved = masks.fitting.get((start + place, start + holder))
        if stored and moved is False:
            return None
        count += mask < room or (stored is False and bool(moved))
        left += stored is False and moved is False
    return count, left


def find_batches(masks: Masks, sizes: Iterable[int] = STOCK_BATCHES) -> list[Batch]:
    """Cut a folder into the batches that explain its odd loss masks.

    One size for the whole folder is looked for; a run that was resumed starts a new batch at any
    index, its last batch is smaller, and a run that was killed leaves the front of a batch. Returns
    the batches of the cheapest such reading; it is a proposal, for :func:`weigh` to settle.
    """
    odd = sorted(filter(masks.odd, masks.lengths))
    score: Counter[int] = Counter()
    for size in sizes:
        starts = {index - place for index in odd[:200] for place in range(size)}
        for start, files in product(starts, (size, size * 3 // 4, size // 2)):
            count, left = explained(masks, start, size, files) or (0, 0)
            score[size] += max(0, count - 3 * left)
    best: tuple[int, list[Batch]] | None = None
    for size, count in score.most_common(4):
        cut = _cut(masks, odd, size, None if best is None else best[0]) if count else None
        if cut is not None and (best is None or cut[0] < best[0]):
            best = cut
    return best[1] if best else []


# What a step of a reading costs: the fewer assumptions, the cheaper.
_NO_EVIDENCE, _PLAIN_FILE, _UNUSUAL_FILE = 1, 10, 300
_LAST_OF_RUN, _KILLED_RUN, _WRONG_LENGTH = 1000, 2000, 5000


def _cut(
    masks: Masks, odd: Sequence[int], size: int, limit: int | None
) -> tuple[int, list[Batch]] | None:
    """Return cost and batches of the cheapest reading with that batch size, up to a cost."""
    present = [*sorted(masks.lengths), max(masks.lengths) + 1]
    begin, end = present[0], present[-1]
    queue: list[tuple[int, int]] = [(0, begin)]
    reached: dict[int, tuple[int, int, Batch | None]] = {begin: (0, begin, None)}
    while queue:
        cost, at = heappop(queue)
        if limit is not None and cost > limit:
            return None
        if cost > reached[at][0]:
            continue
        if at == end:
            break
        for price, batch in _steps(masks, odd, at, end, size):
            to = batch.indices.stop if batch else present[bisect_right(present, at)]
            if to not in reached or cost + price < reached[to][0]:
                reached[to] = (cost + price, at, batch)
                heappush(queue, (cost + price, to))
    batches = []
    at = end
    while at != begin:
        _, at, step = reached[at]
        if step is not None:
            batches.append(step)
    return reached[end][0], batches[::-1]


def _steps(
    masks: Masks, odd: Sequence[int], at: int, end: int, size: int
) -> Iterator[tuple[int, Batch | None]]:
    """Yield what may stand at an index, and its price: at most one file (None) or a batch."""
    tokens, mask = masks.lengths.get(at, (0, 0))
    plain = _WRONG_LENGTH if mask != tokens else _PLAIN_FILE
    yield (_UNUSUAL_FILE if masks.fitting.get((at, at)) is False else plain), None
    near = bisect_left(odd, at) < bisect_left(odd, at + size)
    for files in range(2 if near else size, min(size, end - at) + 1):
        for of, price in ((files, _LAST_OF_RUN), (size, _KILLED_RUN)):
            found = explained(masks, at, of, files) if of > 10 else None
            if found is None or (files < size and not found[0]):
                continue
            if files == size:
                price = 0 if found[0] else _NO_EVIDENCE
            yield price + _UNUSUAL_FILE * found[1], Batch(at, of, files, found[0])


def weigh(batches: Sequence[Batch], masks: Masks) -> list[Batch]:
    """Settle of which files the right mask is certain, and drop batches that nothing speaks for.

    Where the folder has usual tokens before its spans they decide, file by file: the new mask must
    fit and the old one must not, or one of them have no span and the rest speak for it. Where it
    has none, lengths alone decide, and only for a whole batch between whole batches, with three
    masks cut as foretold and no other place to read it.
    """
    whole = {batch.start for batch in batches if batch.evidence and batch.files == batch.size}
    outside = {min(masks.lengths), max(masks.lengths) + 1}
    settled: list[Batch] = []
    for batch in batches:
        sure: tuple[int, ...] = ()
        moved = [index for index in batch.moved if index in masks.lengths]
        before = [masks.fitting.get((index, index)) for index in moved]
        after = [masks.fitting.get((index, batch.mask_of(index))) for index in moved]
        if masks.usual and any(fit is not None for fit in after):
            batch = replace(batch, fit_before=_share(before), fit_after=_share(after))
            if batch.borne_out:
                triples = zip(moved, before, after, strict=True)
                sure = tuple(
                    index
                    for index, stored, new in triples
                    if (new and not stored) or (new is not False and masks.odd(index))
                )
        elif (
            not masks.usual
            and batch.evidence >= 3
            and batch.start in whole
            and (batch.start in outside or batch.start - batch.size in whole)
            and (batch.indices.stop in outside or batch.indices.stop in whole)
            and not _read_elsewhere(batch, masks)
        ):
            sure = tuple(moved)
        settled.append(replace(batch, sure=sure))
    # Without a sign of its own a batch stands only where it touches one that is out of order.
    ends = {batch.indices.stop for batch in settled if batch.sure}
    starts = {batch.start for batch in settled if batch.sure}
    return [
        batch
        for batch in settled
        if batch.sure
        or batch.evidence
        or (batch.fit_after is None and (batch.start in ends or batch.indices.stop in starts))
    ]


def _read_elsewhere(batch: Batch, masks: Masks) -> bool:
    """Whether lengths also allow a batch of that size that begins inside or ends inside of it."""
    near = range(batch.start - batch.size + 1, batch.start + batch.size)
    found = (explained(masks, at, batch.size, batch.size) for at in near if at != batch.start)
    return any(counts is not None and counts[0] for counts in found)


def _share(fits: Iterable[bool | None]) -> float:
    known = [fit for fit in fits if fit is not None]
    return sum(known) / max(1, len(known))


def usual_tokens(
    samples: Sequence[Sample], sizes: Iterable[int], pairing: Pairing
) -> tuple[frozenset[int], float]:
    """Return the tokens that spans usually begin behind, and the share of spans that do.

    Usual is what stands before many spans and hardly anywhere else. In a folder that is all out of
    order that shows only in the order that a batch size gives, so that sizes are tried as well, on
    the first files; the share is that of the reading in which it is largest.
    """
    if not samples:
        return frozenset(), 0.0
    indices = [sample.entry.index for sample in samples]
    chosen = {*indices[:512], *indices[:: max(1, len(indices) // 64)]}
    pairs = {index: pairing(index) for index in sorted(chosen)}
    everywhere: Counter[int] = Counter()
    for pair in pairs.values():
        everywhere.update(pair[0] if pair else ())
    stored: Counter[int] = Counter()
    for sample in samples:
        stored.update(dict(sample.before_spans))
    readings = [stored]
    last = indices[min(511, len(indices) - 1)]
    for size in sizes if last < indices[0] + 1024 else ():
        moved: Counter[int] = Counter()
        for start in range(indices[0], last + 1, size):
            batch = Batch(start, min(size, last + 1 - start), size, 0)
            for index in range(start, start + batch.size):
                tokens, mask = pairs.get(index), pairs.get(batch.mask_of(index))
                if tokens and mask:
                    moved.update(_before(tokens[0], _starts(mask[1])))
        readings.append(moved)
    best: tuple[frozenset[int], float] = (frozenset(), 0.0)
    for counts in readings:
        usual = _usual(counts, everywhere)
        share = sum(counts[token] for token in usual) / max(1, counts.total())
        if share > best[1]:
            best = usual, share
    return best if best[1] >= 0.2 else (frozenset(), best[1])


def _usual(counts: Counter[int], everywhere: Counter[int]) -> frozenset[int]:
    """Return what stands before one span in 25 at least, and eight times as often as elsewhere."""
    spans, tokens = max(1, counts.total()), max(1, everywhere.total())
    return frozenset(
        token
        for token, count in counts.items()
        if count >= 4 and count / spans >= 0.04 and count / spans >= 8 * everywhere[token] / tokens
    )


def _starts(mask: Sequence[int]) -> list[int]:
    """Return the places at which a run of ones begins."""
    ones = [place for place, value in enumerate(mask) if value == 1]
    return [place for place in ones if not place or mask[place - 1] != 1]


def _before(tokens: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Return the tokens before these places, -1 where there is none."""
    return [tokens[place - 1] if place else -1 for place in starts if place <= len(tokens)]


def _fitting(
    samples: Sequence[Sample], usual: frozenset[int], reach: int, pairing: Pairing
) -> dict[tuple[int, int], bool]:
    """Try masks on the tokens of near files, where several masks of a neighbourhood look odd."""
    odd = [
        sample.entry.index
        for sample in samples
        if sample.mask != sample.tokens or not usual.issuperset(dict(sample.before_spans))
    ]
    many = {i for i, j in zip(odd, odd[3:], strict=False) if j - i < 2 * reach} if usual else set()
    wanted = {near for index in many for near in range(index - 2 * reach, index + 4 * reach)}
    fitting: dict[tuple[int, int], bool] = {}
    window: deque[tuple[int, Sequence[int], list[int]]] = deque()
    for sample in samples:
        index = sample.entry.index
        pair = pairing(index) if index in wanted else None
        if pair is None:
            continue
        tokens, starts = pair[0], _starts(pair[1])
        window.append((index, tokens, starts))
        while window[0][0] <= index - reach:
            window.popleft()
        for other, their_tokens, their_starts in window:
            for (one, text), (two, places) in (
                ((index, tokens), (other, their_starts)),
                ((other, their_tokens), (index, starts)),
            ):
                before = _before(text, places)
                if before:
                    fitting[one, two] = usual.issuperset(before)
    return fitting


def judge_masks(
    samples: Sequence[Sample], sizes: Sequence[int], pairing: Pairing
) -> tuple[list[Batch], frozenset[int], str]:
    """Find batches whose loss masks stand with other tokens.

    Returns the batches, the usual tokens before spans, and a note on what was tested.
    """
    masked = sorted(
        (sample for sample in samples if sample.mask is not None),
        key=lambda sample: sample.entry.index,
    )
    if not masked:
        return [], frozenset(), "These files carry no loss masks: the data set does, untested."
    usual, share = usual_tokens(masked, sizes, pairing)
    masks = Masks(
        {sample.entry.index: (sample.tokens, sample.mask or 0) for sample in masked},
        usual,
        _fitting(masked, usual, max(sizes), pairing),
    )
    batches = weigh(find_batches(masks, sizes), masks)
    misfits = sum(tokens != mask for tokens, mask in masks.lengths.values())
    note = f"{misfits or 'No'} loss masks differ from their tokens in length; "
    if usual:
        named = ", ".join(str(token) for token in sorted(usual)[:4])
        note += f"{share:.0%} of the trained spans begin behind usual tokens ({named})"
        note += ", as stored or in the order of a batch" if batches else ""
    else:
        note += "trained spans begin behind no usual token, so that their places say nothing"
    return batches, usual if batches else frozenset(), f"{note}."


def _mask_faults(
    samples: Sequence[Sample], batches: Sequence[Batch], usual: frozenset[int]
) -> Iterator[Fault]:
    names = {sample.entry.index: sample.name for sample in samples}
    suspects = {index for batch in batches for index in batch.moved}
    settled = {index for batch in batches for index in batch.sure}
    for batch in batches:
        why = f"that order explains {batch.evidence} oddities"
        if batch.fit_after is not None and batch.fit_before is not None:
            why += (
                f"; {batch.fit_before:.0%} of the masks begin their spans behind usual tokens as"
                f" stored, {batch.fit_after:.0%} reordered"
            )
        for certainty, indices, remedy in (
            (Certainty.CERTAIN, set(batch.sure), Remedy.REORDER),
            (Certainty.SUSPECTED, set(batch.moved) - settled, Remedy.NONE),
        ):
            files = tuple(names[index] for index in sorted(indices) if index in names)
            if files:
                yield Fault(
                    Kind.ORDER,
                    certainty,
                    files,
                    f"{len(files)} of the files {batch.start} to {batch.indices.stop - 1} hold one"
                    f" another's loss masks (a batch of {batch.size} in the order of its sorted"
                    f" request ids): {why}.",
                    remedy,
                )
    for sample in samples:
        i = sample.entry.index
        if sample.mask is None or i in settled:
            continue
        spans = Counter(dict(sample.before_spans))
        if sample.mask != sample.tokens:
            yield Fault(
                Kind.MASK,
                Certainty.CERTAIN,
                (sample.name,),
                f"{sample.name} has a loss mask of {sample.mask} for {sample.tokens} tokens: it"
                " does not belong to them.",
                Remedy.NONE if i in suspects else Remedy.SET_ASIDE,
            )
        elif usual and spans and i not in suspects and usual.isdisjoint(spans):
            yield Fault(
                Kind.MASK,
                Certainty.SUSPECTED,
                (sample.name,),
                f"{sample.name} has no trained span behind a token that spans begin behind"
                " elsewhere: its loss mask may be another sample's.",
            )


# The whole of it


def verify_directory(
    folder: str | Path,
    *,
    batch_size: int | None = None,
    jobs: int | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Report:
    """Read every sample of a folder, in parallel, and judge it.

    ``batch_size`` is the ``--batch-size`` that all runs of the extraction had; without it, every
    size that stock can do is tried. ``jobs`` is the number of reading threads. ``progress`` is
    called with files read, files in all and bytes read, at least once.

    Raises:
        UsageError: There is no such folder, it holds no samples, or torch is not installed.
    """
    for name, number in (("batch size", batch_size), ("number of jobs", jobs)):
        if number is not None and number < 1:
            raise UsageError(f"A {name} of {number} makes no sense: give a positive number.")
    listing = list_folder(Path(folder))
    try:
        import torch

        if listing.server_flow:
            import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "Reading samples needs torch: run vllm-compat in the environment that trains on them."
        ) from error
    threads = torch.get_num_threads()
    begin = time.perf_counter()
    readings: list[Sample | Broken] = []
    size = 0
    try:
        for reading in _read_all(listing, jobs or min(16, 2 * (os.cpu_count() or 1))):
            readings.append(reading)
            size += reading.entry.size
            if progress is not None:
                progress(len(readings), len(listing.entries), size)
    finally:
        torch.set_num_threads(threads)
    seconds = time.perf_counter() - begin
    faults, batches, notes = judge(
        listing,
        readings,
        batch_size=batch_size,
        pairing=_pairing(listing),
        difference=_difference(listing.folder),
    )
    samples = [reading for reading in readings if isinstance(reading, Sample)]
    usual = [sample for sample in samples if sample.well_formed] or samples
    return Report(
        folder=str(listing.folder),
        files=len(readings),
        size=size,
        seconds=seconds,
        tokens=sum(sample.tokens for sample in samples),
        trained=None if listing.server_flow else sum(sample.trained for sample in samples),
        layers=_most_common([len(sample.shapes) for sample in usual], 0),
        hidden_size=_most_common([sample.shapes[0][-1] for sample in usual if sample.shapes[0]], 0),
        dtype=_most_common([sample.dtypes[0] for sample in usual], "unknown"),
        faults=tuple(faults),
        batches=tuple(batches),
        notes=tuple(notes),
        entries=listing.entries,
        server_flow=listing.server_flow,
    )


def _read_all(listing: Listing, jobs: int) -> Iterator[Sample | Broken]:
    """Yield the readings in order, with a few files under way and no more."""
    import torch

    waiting: deque[Future[Sample | Broken]] = deque()
    entries = iter(listing.entries)
    # OpenMP counts threads per calling thread: each reader has to be told to compute alone.
    with ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for entry in islice(entries, 2 * jobs):
                waiting.append(pool.submit(read_sample, listing.folder, entry))
            while waiting:
                reading = waiting.popleft().result()
                for entry in islice(entries, 1):
                    waiting.append(pool.submit(read_sample, listing.folder, entry))
                yield reading
        finally:
            for future in waiting:
                future.cancel()


def _most_common(values: Sequence[Any], otherwise: Any) -> Any:
    return Counter(values).most_common(1)[0][0] if values else otherwise


class Progress:
    """Shows how far reading has come: a bar on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begin = self._last = time.monotonic()
        self._terminal = stream.isatty()

    def __call__(self, done: int, total: int, size: int) -> None:
        """Take note of files done, files in all and bytes read."""
        now = time.monotonic()
        if now - self._last < (0.1 if self._terminal else 10.0) and done < total:
            return
        self._last = now
        rate = size / max(now - self._begin, 1e-6)
        words = f"{done} of {total} files, {size / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s"
        if not self._terminal:
            self._stream.write(f"verify: {words}\n")
        else:
            bar = "█" * (30 * done // total)
            self._stream.write(f"\r\x1b[K{bar:░<30} {words}" + ("\n" if done == total else ""))
        self._stream.flush()


# Repair


@dataclass(frozen=True)
class Action:
    """One step of a repair: ``set aside`` or ``reorder``, a file, and why.

    ``lost`` counts the tokens at the end of a reordered mask that the extraction had cut away; they
    are masked out.
    """

    action: str
    file: str
    why: str
    lost: int = 0


@dataclass(frozen=True)
class Repair:
    """What a repair did, or would do (``backup`` is None then), and what is left to people."""

    folder: str
    backup: str | None
    actions: tuple[Action, ...]
    left: tuple[Fault, ...]
    resume: str

    @property
    def exit_status(self) -> int:
        """0 where every fault was repaired, 1 where some are left or nothing was done."""
        return 0 if self.backup and not self.left else 1


def repair(
    report: Report,
    *,
    backup: str | Path | None = None,
    dry_run: bool = False,
    settled_s: float = SETTLED_S,
) -> Repair:
    """Do what is certain to be right, and nothing else; every original is kept in ``backup``.

    Files that are certainly wrong are moved to the backup folder. In batches that are certainly out
    of order each file gets the loss mask of its own tokens; of a mask that the extraction cut
    shorter than its tokens the rest is filled with zeros, that is, not trained on, and a file whose
    mask is nowhere is moved to the backup too. The backup lies beside the folder unless given,
    never in it, because stock's trainer reads folders with all that is below them; its
    ``repair.json`` lists what was done. ``dry_run`` only says what would be done.

    Raises:
        UsageError: The folder may still be written, has changed since it was read, or the backup
            folder exists or lies in it.
    """
    folder = Path(report.folder)
    _refuse_unsettled(folder, report, settled_s)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    target = Path(backup) if backup else folder.resolve().with_name(
        f"{folder.resolve().name}.before-repair-{stamp}"
    )
    if target.exists() or folder.resolve() in (target.resolve(), *target.resolve().parents):
        raise UsageError(
            f"The backup folder {target} exists or lies in {folder}: name a new one elsewhere."
        )
    aside = {
        name: fault
        for fault in report.faults
        if fault.remedy is Remedy.SET_ASIDE
        for name in fault.files
    }
    masks, lost_masks = _reordered(folder, report, frozenset(aside))
    actions = [Action("set aside", name, fault.message) for name, fault in aside.items()]
    actions += [
        Action("set aside", name, f"{name} has another sample's loss mask, and its own is nowhere.")
        for name in lost_masks
    ]
    actions += [
        Action("reorder", name, f"{name} gets its loss mask back from {source}.", lost)
        for name, (source, _, lost) in masks.items()
    ]
    left = tuple(
        fault
        for fault in report.faults
        if fault.remedy is Remedy.NONE and fault.certainty is not Certainty.NOTE
    )
    moved = {action.file for action in actions if action.action == "set aside"}
    result = Repair(
        folder=report.folder,
        backup=None if dry_run or not actions else str(target),
        actions=tuple(actions),
        left=left,
        resume=_resume(report, moved),
    )
    if not dry_run and actions:
        try:
            target.mkdir(parents=True)
            (target / "repair.json").write_text(render_repair(result, "json"))
            for name in sorted(moved):
                shutil.move(folder / name, target / name)
            for name, (_, mask, _) in masks.items():
                _replace_mask(folder, target, name, mask)
        except OSError as error:
            raise VllmCompatError(
                f"The repair of {folder} stopped half-way ({error}): move what is in {target} back"
                " and start again."
            ) from error
    return result


def _refuse_unsettled(folder: Path, report: Report, settled_s: float) -> None:
    now = time.time()
    for entry in report.entries:
        try:
            stat = (folder / entry.name).stat()
        except OSError:
            stat = None
        if stat is None or (stat.st_size, stat.st_mtime_ns) != (entry.size, entry.modified):
            raise UsageError(f"{entry.name} has changed since it was read: verify {folder} again.")
    age = now - max(entry.modified for entry in report.entries) / 1e9
    if age < settled_s:
        raise UsageError(
            f"{folder} changed {max(age, 0):.0f} s ago, and an extraction may still be writing:"
            f" repair it when it has been still for {settled_s:.0f} s."
        )


def _reordered(
    folder: Path, report: Report, aside: frozenset[str]
) -> tuple[dict[str, tuple[str, bytes, int]], list[str]]:
    """Return for each file to reorder (source, mask, tokens lost), and files without a mask."""
    names = {entry.index: entry.name for entry in report.entries}
    pairing = _pairing(Listing(folder, report.entries))
    masks: dict[str, tuple[str, bytes, int]] = {}
    nowhere: list[str] = []
    for batch in report.batches:
        if not batch.sure:
            continue
        pairs = {index: pairing(index) for index in batch.indices if index in names}
        for index in batch.sure:
            pair, source = pairs.get(index), batch.mask_of(index)
            if pair is None or names[index] in aside:
                continue
            found = pairs.get(source)
            if found is None:
                nowhere.append(names[index])
                continue
            lost = max(0, len(pair[0]) - len(found[1]))
            mask = bytes(value == 1 for value in found[1][: len(pair[0])]) + bytes(lost)
            masks[names[index]] = (names[source], mask, lost)
    return masks, nowhere


def _replace_mask(folder: Path, target: Path, name: str, mask: bytes) -> None:
    """Write a file anew with another loss mask, keep the original, and exchange them.

    The name is never without a whole file. The new file's own name does not end in "pt", because
    the trainer takes whatever does for a sample.
    """
    import torch

    fresh = folder / f".{name}.repairing"
    data = _load(folder / name)
    data["loss_mask"] = torch.tensor(list(mask), dtype=data["loss_mask"].dtype)
    torch.save(data, fresh)
    with fresh.open("rb+") as file:
        os.fsync(file.fileno())
    try:
        os.link(folder / name, target / name)
    except OSError:
        shutil.copy2(folder / name, target / name)
    os.replace(fresh, folder / name)


def _resume(report: Report, moved: set[str]) -> str:
    """Say what a new run of the extraction does about the files that were set aside."""
    if not moved:
        return "Nothing was set aside, so there is nothing to extract again."
    if report.server_flow:
        return (
            f"The {len(moved)} files that were set aside are extracted again when the script is run"
            " again: it makes every index that is missing."
        )
    stay = [entry.index for entry in report.entries if entry.name not in moved]
    at = max(stay, default=-1) + 1
    gone = [entry.index for entry in report.entries if entry.name in moved]
    again = [index for index in gone if index >= at]
    lost = [index for index in gone if index < at]
    words = f"Stock's script goes on at the highest index plus one, {at}"
    if again:
        words += f", and so extracts {_ranges(again)} again"
    if lost:
        words += (
            f"; {_ranges(lost)} stay missing, which the trainer does not mind (it takes the files"
            " that are there), and only a run into a new folder brings them back"
        )
    return words + "."


# What people and programs read


def render(report: Report, form: str = "text") -> str:
    """Return the report as ``text`` for people or as ``json`` for programs."""
    if form == "json":
        record: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "clean": report.clean}
        record.update(asdict(report))
        del record["entries"]
        record["megabytes_per_second"] = round(report.size / 1e6 / max(report.seconds, 1e-9), 1)
        return json.dumps(record, indent=2, default=str) + "\n"
    if form != "text":
        raise UsageError(f"There is no form {form!r} of the report: choose text or json.")
    rate = report.size / max(report.seconds, 1e-9) / 1e9
    lines = [
        f"{report.folder}: {report.files:,} files, {report.tokens:,} tokens, {report.layers} layers"
        f" of {report.hidden_size} in {report.dtype}; {report.size / 1e9:.2f} GB read in"
        f" {report.seconds:.1f} s ({rate:.2f} GB/s)"
    ]
    groups: dict[tuple[Certainty, Kind], list[Fault]] = defaultdict(list)
    for fault in report.faults:
        groups[fault.certainty, fault.kind].append(fault)
    for certainty in Certainty:
        for (level, kind), faults in groups.items():
            if level is certainty:
                lines += ["", f"{certainty.value}: {kind.value} ({len(faults)})"]
                lines += [f"  {fault.message}" for fault in faults[:5]]
                if len(faults) > 5:
                    lines.append(f"  … and {len(faults) - 5} more, all in the JSON report")
    lines += ["", *report.notes]
    counts = Counter(fault.certainty for fault in report.faults)
    remedies = sum(fault.remedy is not Remedy.NONE for fault in report.faults)
    lines.append(
        "No fault found."
        if report.clean
        else f"{counts[Certainty.CERTAIN]} certain and {counts[Certainty.SUSPECTED]} suspected"
        f" faults; --repair can do something about {remedies}."
    )
    return "\n".join(lines) + "\n"


def render_repair(result: Repair, form: str = "text") -> str:
    """Return what a repair did as ``text`` for people or as ``json`` for programs."""
    if form == "json":
        record = {"schema_version": SCHEMA_VERSION, **asdict(result)}
        return json.dumps(record, indent=2) + "\n"
    if form != "text":
        raise UsageError(f"There is no form {form!r} of the report: choose text or json.")
    would = "" if result.backup else "would "
    lines = []
    for kind in ("set aside", "reorder"):
        steps = [action for action in result.actions if action.action == kind]
        lines += [f"{would}{kind}: {step.why}" for step in steps[:5]]
        if len(steps) > 5:
            lines.append(f"{would}{kind}: … and {len(steps) - 5} more, all in the JSON report")
    lost = sum(action.lost for action in result.actions)
    if lost:
        lines.append(f"{lost} tokens whose loss mask the extraction had cut away are masked out.")
    if result.backup:
        lines.append(f"The originals are in {result.backup}, the list in its repair.json.")
    if result.left:
        lines.append(f"{len(result.left)} faults have no certain repair and are left as they are.")
    lines.append(result.resume if result.actions else "There is nothing to repair with certainty.")
    return "\n".join(lines) + "\n"


def _counted(count: int, one: str, more: str) -> str:
    return f"1 {one} is" if count == 1 else f"{count} {more} are"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _ranges(indices: Iterable[int]) -> str:
    """Return indices as text, runs of them as ranges."""
    runs: list[range] = []
    for index in sorted(indices):
        if runs and index == runs[-1].stop:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return _listed_runs(runs)


def _listed_runs(runs: Sequence[range]) -> str:
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs[:6]]
    return ", ".join(shown) + (", …" if len(runs) > 6 else "")
