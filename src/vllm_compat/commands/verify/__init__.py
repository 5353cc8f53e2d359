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

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_compat.commands.verify.judging import judge
from vllm_compat.commands.verify.model import (
    STOCK_BATCHES,
    Batch,
    Broken,
    Certainty,
    Entry,
    Fault,
    Kind,
    Listing,
    Remedy,
    Repair,
    Report,
    Sample,
    stock_order,
)
from vllm_compat.commands.verify.order import Masks, explained, judge_masks
from vllm_compat.commands.verify.provenance import known_of
from vllm_compat.commands.verify.reading import difference_of, list_folder, pairing_of, read_sample
from vllm_compat.commands.verify.repairing import repair
from vllm_compat.commands.verify.text import Progress, render, render_repair
from vllm_compat.errors import UsageError

__all__ = [
    "STOCK_BATCHES",
    "Batch",
    "Broken",
    "Certainty",
    "Entry",
    "Fault",
    "Kind",
    "Listing",
    "Masks",
    "Progress",
    "Remedy",
    "Repair",
    "Report",
    "Sample",
    "explained",
    "judge",
    "judge_masks",
    "list_folder",
    "render",
    "render_repair",
    "repair",
    "stock_order",
    "verify_directory",
]


def verify_directory(
    folder: str | Path,
    *,
    batch_size: int | None = None,
    jobs: int | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Report:
    """Read every sample of a folder of extracted hidden states, in parallel, and judge it.

    Nothing is changed. Needs torch, and safetensors for a folder of speculators 0.5 and later.

    Args:
        folder: The folder that holds ``data_<i>.pt`` or ``hs_<i>.safetensors``.
        batch_size: The ``--batch-size`` that all runs of the extraction had; without it, every size
            that stock can do is tried.
        jobs: Reading threads; by default two a core, 16 at most.
        progress: Called with files read, files in all and bytes read, at least once.

    Returns:
        ``clean``, whether nothing is certain or suspected to be wrong; ``faults``, each with
        ``kind``, ``certainty``, ``files`` and the sentence ``message``; ``files``, ``size`` in bytes,
        ``tokens``, and ``layers``, ``hidden_size`` and ``dtype`` of most files; ``exit_status``, 0
        clean, 1 not.

    Raises:
        UsageError: There is no such folder, it holds no samples, or torch is not installed.

    Example:
        >>> report = vllm_compat.verify("output", batch_size=8)
        >>> for fault in report.faults:
        ...     print(fault.certainty.value, fault.kind.value, fault.message)
    """
    for name, number in (("batch size", batch_size), ("number of jobs", jobs)):
        if number is not None and number < 1:
            raise UsageError(f"A {name} of {number} makes no sense: give a positive number.")
    listing = list_folder(Path(folder))
    _need_torch(listing)
    begin = time.perf_counter()
    readings = _read_folder(listing, jobs or min(16, 2 * (os.cpu_count() or 1)), progress)
    seconds = time.perf_counter() - begin
    faults, batches, notes = judge(
        listing,
        readings,
        batch_size=batch_size,
        pairing=pairing_of(listing),
        difference=difference_of(listing.folder),
    )
    samples = [reading for reading in readings if isinstance(reading, Sample)]
    usual = [sample for sample in samples if sample.well_formed] or samples
    return Report(
        folder=str(listing.folder),
        files=len(readings),
        size=sum(reading.entry.size for reading in readings),
        seconds=seconds,
        tokens=sum(sample.tokens for sample in samples),
        trained=None if listing.server_flow else sum(sample.trained for sample in samples),
        layers=_most_common([len(sample.shapes) for sample in usual], 0),
        hidden_size=_most_common([sample.shapes[0][-1] for sample in usual if sample.shapes[0]], 0),
        dtype=_most_common([sample.dtypes[0] for sample in usual], "unknown"),
        faults=tuple(faults),
        batches=tuple(batches),
        notes=(*notes, *filter(None, [known_of(listing.config)])),
        entries=listing.entries,
        server_flow=listing.server_flow,
    )


def _need_torch(listing: Listing) -> None:
    try:
        import torch  # noqa: F401

        if listing.server_flow:
            import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "Reading samples needs torch: run vllm-compat in the environment that trains on them."
        ) from error


def _read_folder(
    listing: Listing, jobs: int, progress: Callable[[int, int, int], None] | None
) -> list[Sample | Broken]:
    """Read all samples, and leave torch with as many threads as it had."""
    import torch

    threads = torch.get_num_threads()
    readings: list[Sample | Broken] = []
    size = 0
    try:
        for reading in _read_all(listing, jobs):
            readings.append(reading)
            size += reading.entry.size
            if progress is not None:
                progress(len(readings), len(listing.entries), size)
    finally:
        torch.set_num_threads(threads)
    return readings


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
