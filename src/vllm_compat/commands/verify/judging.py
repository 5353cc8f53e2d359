"""Judge samples: faults of a file, of a folder, of what the run noted about itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from vllm_compat.commands.verify.model import (
    STOCK_BATCHES,
    Batch,
    Broken,
    Certainty,
    Difference,
    Fault,
    Kind,
    Listing,
    Pairing,
    Remedy,
    Sample,
    look_up,
)
from vllm_compat.commands.verify.order import judge_masks, mask_faults
from vllm_compat.commands.verify.words import counted, listed, listed_runs

_JUDGED = frozenset({"input_ids", "token_ids", "hidden_states", "hidden_states_scales", "loss_mask"})
_COMPARISONS = 200  # pairs of files with equal tokens that are read again


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
    faults += _missing_members(samples)
    notes += _unjudged_members(samples)
    sizes = [batch_size] if batch_size else [*STOCK_BATCHES]
    if not batch_size and (listing.batch_size or 0) not in range(33):
        sizes.append(listing.batch_size or 0)
    batches, usual, order_note = judge_masks(samples, sizes, pairing)
    faults += mask_faults(samples, batches, usual)
    faults += _twins(samples, difference, notes)
    faults += _first_rows(samples, notes)
    faults += _surroundings(listing, samples)
    return faults, batches, [*notes, order_note]


def _own_faults(sample: Sample) -> Iterator[Fault]:
    """Judge one file on its own."""
    for kind, message in (*_form_faults(sample), *_row_faults(sample)):
        sentence = f"{sample.name} {message}"
        yield Fault(kind, Certainty.CERTAIN, (sample.name,), sentence, Remedy.SET_ASIDE)
    if sample.odd_mask:
        sentence = f"{sample.name} has a loss mask with values other than 0 and 1."
        yield Fault(Kind.MASK, Certainty.SUSPECTED, (sample.name,), sentence)


def _form_faults(sample: Sample) -> Iterator[tuple[Kind, str]]:
    """Yield what no right run gives: layers that are no matrices of one row a token."""
    if any(len(shape) != 2 for shape in sample.shapes):
        shapes = Counter(sample.shapes).most_common(2)
        seen = " and ".join(f"{count} tensors of shape {list(shape)}" for shape, count in shapes)
        yield (
            Kind.SHAPE,
            f"has {seen} for {sample.tokens} tokens; a layer is one matrix [tokens, hidden size]"
            " (one layer's rows were taken for layers: speculators 0.3.0 on vLLM 0.11.1 or later"
            " does that).",
        )
    elif not sample.well_formed:
        rows = sorted({shape[0] for shape in sample.shapes})
        yield (
            Kind.ROWS,
            f"has {' or '.join(map(str, rows))} rows for {sample.tokens} tokens; one row a token is"
            " needed (a prompt that was cut into chunks, preempted or found in the prefix cache).",
        )
    elif any("float" not in dtype for dtype in sample.dtypes):
        yield Kind.DTYPE, f"has states of {sample.dtypes[0]}, which is no floating type."


def _row_faults(sample: Sample) -> Iterator[tuple[Kind, str]]:
    """Yield rows that cannot be right, and layers of different widths."""
    for kind, found, words in (
        (Kind.NOT_FINITE, sample.not_finite, "not finite"),
        (Kind.ZERO, sample.zero, "all zero"),
    ):
        for layer, count, first in found[:1]:
            also = f" (and {len(found) - 1} more layers)" if len(found) > 1 else ""
            yield (
                kind,
                f"has {count} of {sample.shapes[layer][0]} rows {words} in layer number"
                f" {layer}{also}, the first is row {first}.",
            )
    if sample.repeated:
        count, row, earlier = sample.repeated
        yield (
            Kind.REPEATED,
            f"has {count} rows that repeat another token's row in every layer, the first is row"
            f" {row}, equal to row {earlier}.",
        )
    if len(set(sample.shapes)) > 1 and sample.well_formed:
        widths = sorted({shape[1] for shape in sample.shapes})
        yield Kind.HIDDEN_SIZE, f"has layers of different hidden sizes, {widths}."


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


def _missing_members(samples: Sequence[Sample]) -> Iterator[Fault]:
    """Find files that lack a member which most files have."""
    counts = Counter(member for sample in samples for member in sample.members)
    usual = [member for member, count in sorted(counts.items()) if count > len(samples) / 2]
    for sample in samples:
        for member in usual:
            if member not in sample.members:
                yield Fault(
                    Kind.STRUCTURE,
                    Certainty.CERTAIN,
                    (sample.name,),
                    f"{sample.name} has no {member}, which {counts[member]} of {len(samples)} files"
                    " have.",
                    Remedy.SET_ASIDE,
                )


def _unjudged_members(samples: Sequence[Sample]) -> Iterator[str]:
    """Say what files hold besides what is judged."""
    unknown = sorted({member for sample in samples for member in sample.members} - _JUDGED)
    if unknown:
        yield f"What files hold as {listed(unknown)} was not judged."


def _twins(samples: Sequence[Sample], difference: Difference, notes: list[str]) -> Iterator[Fault]:
    """Compare files with the same rows or the same tokens."""
    sound = [sample for sample in samples if sample.well_formed and not sample.zero]
    yield from _same_rows(sound)
    copies: list[tuple[Sample, Sample]] = []
    compared = 0
    for first, *others in _groups(sound, lambda sample: sample.token_key):
        for other in others:
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
    yield from _duplicates(copies)


def _same_rows(sound: Sequence[Sample]) -> Iterator[Fault]:
    """Find files with the same rows for different tokens."""
    for group in _groups(sound, lambda sample: sample.state_key):
        prompts = {sample.token_key: sample for sample in group}
        if len(prompts) > 1:
            names = tuple(sample.name for sample in prompts.values())
            yield Fault(
                Kind.FOREIGN,
                Certainty.CERTAIN,
                names,
                f"{listed(names)} hold the same rows for different tokens: all but one of them,"
                " at least, are wrong.",
            )


def _duplicates(copies: Sequence[tuple[Sample, Sample]]) -> Iterator[Fault]:
    """Judge files that repeat another: several at one distance are a stretch extracted twice."""
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
    expected = look_up(listing.config, "data", "num_samples")
    if isinstance(expected, int) and not listing.server_flow:
        indices.append(max(expected, indices[-1] + 1))
    indices = sorted({*indices, *listing.left_out})  # no file, on request
    missing = [range(before + 1, after) for before, after in pairwise(indices) if after > before + 1]
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
            f"{counted(sum(map(len, missing)), 'index', 'indices')} missing,"
            f" {listed_runs(missing)}: {filled}.",
        )
    if listing.strays and not listing.server_flow:
        yield Fault(
            Kind.STRAY,
            Certainty.CERTAIN,
            listing.strays,
            f"stock's trainer takes every file under the folder whose name ends in 'pt' for a"
            f" sample, {listed(listing.strays)} too: move what is none out of the folder.",
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
    """Hold the files against stock's own records of the folder, and against what its trainer needs."""
    yield from _recorded_lengths(listing.lengths, samples)
    yield from _layer_counts(listing, samples)
    untrained = [s.name for s in samples if s.mask is not None and not s.trained]
    if untrained:
        yield Fault(
            Kind.MASK,
            Certainty.NOTE,
            tuple(untrained),
            f"{len(untrained)} files have a loss mask without a one: nothing is learnt from them.",
        )


def _recorded_lengths(lengths: Mapping[str, Any], samples: Sequence[Sample]) -> Iterator[Fault]:
    """Compare ``sample_lengths.json`` with the files."""
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


def _layer_counts(listing: Listing, samples: Sequence[Sample]) -> Iterator[Fault]:
    """Compare the usual number of layers with ``data_config.json`` and with what EAGLE-3 takes."""
    layers = Counter(len(s.shapes) for s in samples if s.well_formed).most_common(1)
    asked = look_up(listing.config, "hidden_states", "layer_ids")
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
