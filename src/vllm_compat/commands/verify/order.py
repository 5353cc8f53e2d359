"""Find batches whose loss masks stand in another order than their tokens (speculators#365)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import product

from vllm_compat.commands.verify.model import (
    STOCK_BATCHES,
    Batch,
    Certainty,
    Fault,
    Kind,
    Pairing,
    Remedy,
    Sample,
    stock_order,
)


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
    settled = [_settled(batch, masks, whole) for batch in batches]
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


def _settled(batch: Batch, masks: Masks, whole: Collection[int]) -> Batch:
    """Settle of which of a batch's files the right mask is certain."""
    moved = [index for index in batch.moved if index in masks.lengths]
    before = [masks.fitting.get((index, index)) for index in moved]
    after = [masks.fitting.get((index, batch.mask_of(index))) for index in moved]
    sure: tuple[int, ...] = ()
    if masks.usual and any(fit is not None for fit in after):
        batch = replace(batch, fit_before=_share(before), fit_after=_share(after))
        if batch.borne_out:
            sure = _sure_by_tokens(masks, moved, before, after)
    elif not masks.usual and _sure_by_lengths(batch, masks, whole):
        sure = tuple(moved)
    return replace(batch, sure=sure)


def _sure_by_tokens(
    masks: Masks, moved: Sequence[int], before: Sequence[bool | None], after: Sequence[bool | None]
) -> tuple[int, ...]:
    """Return the files whose new mask fits and whose old one does not, or says nothing."""
    return tuple(
        index
        for index, stored, new in zip(moved, before, after, strict=True)
        if (new and not stored) or (new is not False and masks.odd(index))
    )


def _sure_by_lengths(batch: Batch, masks: Masks, whole: Collection[int]) -> bool:
    """Whether lengths alone settle a batch; ``whole`` are the starts of whole batches."""
    outside = {min(masks.lengths), max(masks.lengths) + 1}
    begins_well = batch.start in outside or batch.start - batch.size in whole
    ends_well = batch.indices.stop in outside or batch.indices.stop in whole
    return (
        batch.evidence >= 3
        and batch.start in whole
        and begins_well
        and ends_well
        and not _read_elsewhere(batch, masks)
    )


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
    last = indices[min(511, len(indices) - 1)]
    tried = sizes if last < indices[0] + 1024 else ()
    readings = [stored, *(_before_reordered(pairs, range(indices[0], last + 1), n) for n in tried)]
    best: tuple[frozenset[int], float] = (frozenset(), 0.0)
    for counts in readings:
        usual = _usual(counts, everywhere)
        share = sum(counts[token] for token in usual) / max(1, counts.total())
        if share > best[1]:
            best = usual, share
    return best if best[1] >= 0.2 else (frozenset(), best[1])


def _before_reordered(
    pairs: Mapping[int, tuple[Sequence[int], Sequence[int]] | None], files: range, size: int
) -> Counter[int]:
    """Count the tokens before spans, of files in the order that a batch size gives."""
    found: Counter[int] = Counter()
    for start in files[::size]:
        batch = Batch(start, min(size, files.stop - start), size, 0)
        for index in range(start, start + batch.size):
            tokens, mask = pairs.get(index), pairs.get(batch.mask_of(index))
            if tokens and mask:
                found.update(_before(tokens[0], _starts(mask[1])))
    return found


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
    wanted = _wanted(samples, usual, reach)
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


def _wanted(samples: Sequence[Sample], usual: frozenset[int], reach: int) -> set[int]:
    """Return the indices around four odd masks that lie near one another."""
    if not usual:
        return set()
    odd = [
        sample.entry.index
        for sample in samples
        if sample.mask != sample.tokens or not usual.issuperset(dict(sample.before_spans))
    ]
    many = {i for i, j in zip(odd, odd[3:], strict=False) if j - i < 2 * reach}
    return {near for index in many for near in range(index - 2 * reach, index + 4 * reach)}


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


def mask_faults(
    samples: Sequence[Sample], batches: Sequence[Batch], usual: frozenset[int]
) -> Iterator[Fault]:
    """Yield what is wrong with loss masks: of batches out of order, then of single files."""
    names = {sample.entry.index: sample.name for sample in samples}
    suspects = {index for batch in batches for index in batch.moved}
    settled = {index for batch in batches for index in batch.sure}
    for batch in batches:
        yield from _batch_faults(batch, names, settled)
    for sample in samples:
        if sample.mask is not None and sample.entry.index not in settled:
            fault = _file_fault(sample, usual, sample.entry.index in suspects)
            if fault is not None:
                yield fault


def _batch_faults(batch: Batch, names: Mapping[int, str], settled: Collection[int]) -> Iterator[Fault]:
    """Yield the files of a batch that certainly have another's mask, and those that may."""
    why = f"that order explains {batch.evidence} oddities"
    if batch.fit_after is not None and batch.fit_before is not None:
        why += (
            f"; {batch.fit_before:.0%} of the masks begin their spans behind usual tokens as"
            f" stored, {batch.fit_after:.0%} reordered"
        )
    for certainty, indices, remedy in (
        (Certainty.CERTAIN, set(batch.sure), Remedy.REORDER),
        (Certainty.SUSPECTED, set(batch.moved).difference(settled), Remedy.NONE),
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


def _file_fault(sample: Sample, usual: frozenset[int], suspect: bool) -> Fault | None:
    """Judge one file's mask; ``suspect``: it lies in a batch that may be out of order."""
    if sample.mask != sample.tokens:
        return Fault(
            Kind.MASK,
            Certainty.CERTAIN,
            (sample.name,),
            f"{sample.name} has a loss mask of {sample.mask} for {sample.tokens} tokens: it"
            " does not belong to them.",
            Remedy.NONE if suspect else Remedy.SET_ASIDE,
        )
    spans = dict(sample.before_spans)
    if usual and spans and not suspect and usual.isdisjoint(spans):
        return Fault(
            Kind.MASK,
            Certainty.SUSPECTED,
            (sample.name,),
            f"{sample.name} has no trained span behind a token that spans begin behind"
            " elsewhere: its loss mask may be another sample's.",
        )
    return None
