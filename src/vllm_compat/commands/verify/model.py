"""What is found in a folder: files, samples, faults, batches, the report, a repair."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
STOCK_BATCHES = range(11, 33)
"""Batch sizes that stock 0.4 puts out of order: up to ten, text order is number order; above 32
(its ``max_num_seqs``) its ``generate()`` fails."""

_BATCH_SIZE = re.compile(r"--batch-size[ =](\d+)")


@cache
def stock_order(size: int) -> tuple[int, ...]:
    """Return the prompts of a batch in the order in which speculators 0.4 returns their results.

    Request ids are sorted as text, so that prompt 10 comes before prompt 2.
    """
    return tuple(sorted(range(size), key=str))


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
    trained on (-1 where the span opens the sample), ``members`` are the names of all that the file
    holds.
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
    members: tuple[str, ...] = ()

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
    ``lengths`` is ``sample_lengths.json``, ``config`` is ``data_config.json`` (empty where absent),
    ``left_out`` what ``left_out.json`` names (empty where it is absent or no list of ours).
    """

    folder: Path
    entries: tuple[Entry, ...]
    strays: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    lengths: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    left_out: frozenset[int] = frozenset()
    server_flow: bool = False

    @property
    def batch_size(self) -> int | None:
        """The batch size in the command that ``data_config.json`` records, or None."""
        command = str(look_up(self.config, "reproducibility", "command") or "")
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


def look_up(record: Any, *keys: str) -> Any:
    """Return the value under nested keys, or None where the way there ends."""
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


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
