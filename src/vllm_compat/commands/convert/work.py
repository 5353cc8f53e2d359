"""Look at everything first, then write file by file.

The first pass opens each old file without reading its states: what cannot be right is refused before
anything is written. The second writes the samples, a few at a time, and at the end what belongs to the
folder as a whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from packaging.version import InvalidVersion, Version

from vllm_compat.commands.convert import dataset, files
from vllm_compat.commands.convert.layers import map_layers
from vllm_compat.commands.convert.model import (
    RECORD,
    SCHEMA_VERSION,
    ConversionError,
    Flow,
    Head,
    Layers,
    Report,
)
from vllm_compat.commands.verify.model import Entry, Listing
from vllm_compat.commands.verify.reading import list_folder
from vllm_compat.commands.verify.words import runs_of
from vllm_compat.errors import UsageError

STATES = "hidden_states"
"""Where stock's trainer looks for the states in a data set's folder."""
LOCK = ".vllm_compat_convert.lock"
NEWEST = {Flow.IN_PROCESS: "0.4.0.1", Flow.SERVER: "0.9.0"}
RELEASES = {
    Flow.IN_PROCESS: ((0, 3), (0, 4)),
    Flow.SERVER: ((0, 5), (0, 6), (0, 7), (0, 8), (0, 9)),
}
SPARE = 16 << 20
"""Bytes that are kept free beside what is written."""

Progress = Callable[[int, int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Options:
    """What the caller asks for; see the command's help."""

    source: Path
    target: Path
    to: Flow | None = None
    speculators: str | None = None
    layers: tuple[int, ...] | None = None
    model: str | None = None
    num_layers: int | None = None
    dataset: Path | None = None
    renumber: bool = False
    jobs: int | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class _Source:
    """An old folder: its samples in order, and where their masks are."""

    flow: Flow
    listing: Listing
    rows: dataset.Rows | None
    config: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return self.listing.folder


def convert(options: Options, progress: Progress | None = None) -> Report:
    """Convert a folder, or say what would be done (``dry_run``).

    ``progress`` is called with samples written, samples in all and bytes written.

    Raises:
        UsageError: What was asked for makes no sense, or a library is not installed.
        ConversionError: The data cannot be converted, or not to this folder; files that were written
            before stay, and the same call goes on behind them.
        UnknownError: Layer ids or the model's number of layers are not to be found out.
    """
    flow, release = _direction(options)
    files.need_libraries("torch", "safetensors.torch", "datasets")
    source = _open(options, flow)
    _refuse_overlap(options.source, options.target)
    jobs = options.jobs or min(4, os.cpu_count() or 1)
    entries = source.listing.entries
    _refuse_gaps(source, options.renumber)
    heads, trained = _look(source, jobs)
    layers = map_layers(
        flow,
        heads,
        source.config,
        given=options.layers,
        model=options.model,
        num_layers=options.num_layers,
    )
    _refuse_mixed(heads, layers)
    numbers = range(len(entries)) if options.renumber else [entry.index for entry in entries]
    place = options.target / STATES if flow is Flow.IN_PROCESS else options.target
    targets = [place / flow.other.file_name(number) for number in numbers]
    around = _surroundings(options, source, heads, layers, numbers)
    done = _there_already(place, targets, heads, layers)
    _refuse_strangers(options.target, place, targets, around, flow)
    counts = dict(sorted(trained.items()))
    _refuse_other_counts(_token_freq_path(options.target, flow), counts)
    todo = [index for index in range(len(entries)) if index not in done]
    needed = sum(heads[i].states_bytes + 16 * heads[i].tokens + 8192 for i in todo)
    free = _refuse_full(options.target, needed)
    report = Report(
        source=str(options.source),
        target=str(options.target),
        flow=flow,
        layers=layers,
        samples=len(heads),
        written=len(todo),
        kept=len(done),
        tokens=sum(head.tokens for head in heads),
        hidden_size=heads[0].hidden_size,
        dtypes=tuple(sorted({head.states_dtype for head in heads})),
        bytes_needed=needed,
        bytes_free=free,
        token_freq=str(_token_freq_path(options.target, flow)),
        dry_run=options.dry_run,
        speculators=release,
        notes=source.notes + _notes(heads, layers, source, options.renumber),
    )
    if options.dry_run:
        return report
    with _locked(options.target, place):
        _write(source, heads, layers, targets, todo, jobs, progress)
        _finish(options.target, source, heads, counts, around)
    return report


def _direction(options: Options) -> tuple[Flow, str]:
    """Return the old folder's flow and the release that the new one is for."""
    for name, number in (("number of jobs", options.jobs),):
        if number is not None and number < 1:
            raise UsageError(f"A {name} of {number} makes no sense: give a positive number.")
    if not options.source.is_dir():
        raise UsageError(f"There is no folder {options.source}: name the one with the extracted data.")
    kinds = {
        name.partition("_")[0]
        for folder in (options.source, options.source / STATES)
        if folder.is_dir()
        for name in os.listdir(folder)
        if name.startswith(("data_", "hs_")) and name.endswith((".pt", ".safetensors"))
    }
    if kinds == {"data", "hs"}:
        raise UsageError(
            f"The folder {options.source} holds data_<i>.pt and hs_<i>.safetensors, results of two"
            " different flows: move one kind into a folder of its own."
        )
    if not kinds:
        raise UsageError(f"No data_<i>.pt or hs_<i>.safetensors stands in {options.source}.")
    flow = Flow.IN_PROCESS if kinds == {"data"} else Flow.SERVER
    if options.to is flow:
        raise UsageError(f"The data in {options.source} are of the {flow.value} flow already.")
    release = options.speculators or NEWEST[flow.other]
    try:
        version = Version(release)
    except InvalidVersion as error:
        raise UsageError(f"{release} is no release of speculators: give one such as 0.9.0.") from error
    known = RELEASES[flow.other]
    if version.release[:2] not in known:
        first, last = (".".join(map(str, pair)) for pair in (known[0], known[-1]))
        raise UsageError(
            f"The {flow.other.value} flow's form is known of speculators {first} to {last}, not of"
            f" {release}: leave --speculators out, or convert the other way."
        )
    return flow, release


def _open(options: Options, flow: Flow) -> _Source:
    """Return the old folder's samples, and for the server flow the data set with the masks."""
    folder = options.source
    if flow is Flow.IN_PROCESS:
        if options.dataset is not None:
            raise UsageError("--dataset is for the server flow; data_<i>.pt have their own loss masks.")
        listing = list_folder(folder)
        return _Source(flow, listing, None, listing.config, _unfinished(listing))
    home = options.dataset
    if (folder / dataset.STATE).is_file():
        home, folder = home or folder, folder / STATES if (folder / STATES).is_dir() else folder
    elif home is None and (folder.resolve().parent / dataset.STATE).is_file():
        home = folder.resolve().parent
    if home is None:
        raise ConversionError(
            f"There is no data set in or above {folder}, and hs_<i>.safetensors have no loss masks: give"
            " the folder that stock's preparation wrote with --dataset."
        )
    listing = list_folder(folder)
    rows = dataset.Rows(home)
    record = _read_json(home / RECORD)
    config = record.get("data_config")
    notes = _unfinished(listing)
    if rows.others:
        notes += (f"The data set's columns {', '.join(rows.others)} are not taken over.",)
    return _Source(flow, listing, rows, config if isinstance(config, dict) else {}, notes)


def _unfinished(listing: Listing) -> tuple[str, ...]:
    count = len(listing.unfinished)
    return (f"{count} unfinished files in {listing.folder} are left out.",) if count else ()


def _refuse_overlap(source: Path, target: Path) -> None:
    one, other = source.resolve(), target.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise UsageError(f"{target} and {source} lie in one another: name a folder elsewhere.")
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is no folder: name another.")


def _refuse_gaps(source: _Source, renumber: bool) -> None:
    indices = [entry.index for entry in source.listing.entries]
    rows = source.rows
    if len(set(indices)) < len(indices):
        raise ConversionError(f"Two files in {source.folder} have the same number: keep one.")
    if rows is not None and indices[-1] >= len(rows):
        raise ConversionError(
            f"hs_{indices[-1]}.safetensors has no row in the data set {rows.folder}, which has"
            f" {len(rows)}: it is the data set of another run."
        )
    gone = set(range(indices[-1] + 1 if rows is None else len(rows))) - set(indices)
    if gone and not renumber:
        raise ConversionError(
            f"{len(gone)} samples are missing in {source.folder} ({runs_of(gone)}): extract them, or"
            " convert what is there with --renumber, which numbers it anew from 0."
        )


def _mask(source: _Source, entry: Entry) -> Any:
    """Return a sample's loss mask from the data set, None where the file has its own."""
    if source.rows is None:
        return None
    return source.rows.row(entry.index)[1]


def _look(source: _Source, jobs: int) -> tuple[list[Head], Counter[int]]:
    """Look at every file, and count the tokens that are trained on."""

    def look(entry: Entry) -> tuple[Head, list[int], list[int]]:
        mask = None
        data = files.load(source.folder, entry, again=True)
        tokens = files.tokens_of(entry.name, data)
        if source.rows is not None:
            row, mask = source.rows.row(entry.index)
            if row.tolist() != tokens.tolist():
                raise ConversionError(
                    f"{entry.name} holds other tokens than row {entry.index} of the data set"
                    f" {source.rows.folder}: it is the data set of another run."
                )
        head = files.head_of(source.folder, entry, data, mask)
        return head, *files.trained_tokens(tokens, data["loss_mask"] if mask is None else mask)

    heads: list[Head] = []
    counter: Counter[int] = Counter()
    for head, ids, counts in _in_order(look, source.listing.entries, jobs):
        heads.append(head)
        counter.update(dict(zip(ids, counts, strict=True)))
    return heads, counter


def _refuse_mixed(heads: Sequence[Head], layers: Layers) -> None:
    """Refuse a folder whose files are of different extractions."""
    first = heads[0]
    for head in heads:
        for what, mine, other in (
            ("layers", first.layers, head.layers),
            ("values a state", first.hidden_size, head.hidden_size),
            (
                "layer ids",
                first.origin and first.origin.layer_ids,
                head.origin and head.origin.layer_ids,
            ),
            ("loss mask type", first.target_mask_dtype, head.target_mask_dtype),
        ):
            if mine != other:
                raise ConversionError(
                    f"{first.name} and {head.name} differ in their {what} ({mine or 'none stated'},"
                    f" {other or 'none stated'}): they are of two extractions; convert each on its own."
                )


def _there_already(
    place: Path, targets: Sequence[Path], heads: Sequence[Head], layers: Layers
) -> set[int]:
    """Return the places of samples that an earlier call has converted.

    Raises:
        ConversionError: A file has the name of a new one and is not the same sample's.
    """
    done = set()
    for index, (target, head) in enumerate(zip(targets, heads, strict=True)):
        if not target.exists():
            continue
        if files.origin_of_file(target) != head.origin_of_target(layers):
            raise ConversionError(
                f"{target} is there and was not made from {head.name} as it is now: nothing is"
                " overwritten; name another folder, or remove the file."
            )
        done.add(index)
    return done


def _surroundings(
    options: Options,
    source: _Source,
    heads: Sequence[Head],
    layers: Layers,
    numbers: Sequence[int],
) -> dict[str, str]:
    """Return the texts that stand beside the samples, by name."""
    target_numbering = source.flow.other.numbering
    if source.flow is Flow.IN_PROCESS:
        record = {
            "schema_version": SCHEMA_VERSION,
            "source": str(options.source.resolve()),
            "samples": len(heads),
            "num_layers": layers.num_layers,
            "layer_ids": list(layers.target_ids),
            "layer_numbering": target_numbering,
            "source_layer_ids": list(layers.source_ids),
            "source_numbering": source.flow.numbering,
            "data_config": dict(source.config),
        }
        return {RECORD: _json(record)}
    config = dict(source.config)
    if config.get("hidden_states", {}).get("layer_ids") != list(layers.target_ids):
        config = {
            "generated_by": f"vllm-compat convert, from {options.source.resolve()}",
            "model": {"target_model_path": options.model, "hidden_size": heads[0].hidden_size},
            "data": {"num_samples": len(heads)},
            "hidden_states": {"layer_ids": list(layers.target_ids), "description": target_numbering},
        }
    lengths = {str(number): head.tokens for number, head in zip(numbers, heads, strict=True)}
    return {"data_config.json": _json(config), "sample_lengths.json": _json(lengths)}


def _refuse_strangers(
    target: Path, place: Path, targets: Sequence[Path], around: Mapping[str, str], flow: Flow
) -> None:
    """Refuse a folder with what a trainer would take for part of the new data."""
    for name, text in around.items():
        path = target / name
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise ConversionError(
                f"{path} is of another run: nothing is overwritten; name another folder."
            )
    ours = set(targets)
    if flow is Flow.IN_PROCESS:
        if (target / dataset.STATE).exists() and not (target / RECORD).exists():
            raise ConversionError(f"{target} holds another data set: name another folder.")
        strangers = [path for path in place.glob("hs_*.safetensors") if path not in ours]
    else:
        # Stock's trainer takes every file that ends in "pt", at any depth.
        found = (Path(at) / name for at, _, names in os.walk(target) for name in names)
        strangers = [path for path in found if path.name.endswith("pt") and path not in ours]
    if strangers:
        raise ConversionError(
            f"{strangers[0]} is not of these data, and the trainer would take it for a sample: name"
            " another folder."
        )


def _refuse_full(target: Path, needed: int) -> int:
    """Return the bytes that are free where the folder will be.

    Raises:
        ConversionError: They are too few.
    """
    existing = next(path for path in (target, *target.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed and needed + SPARE > free:
        raise ConversionError(
            f"The conversion takes {needed:,} bytes, and {existing} has {free:,} free: make room, or"
            " name a folder on another disk."
        )
    return free


def _token_freq_path(target: Path, flow: Flow) -> Path:
    """Return where the token frequencies go: never into a folder that the in-process trainer reads."""
    if flow is Flow.IN_PROCESS:
        return target / "token_freq.pt"
    whole = target.resolve()
    return whole.with_name(f"{whole.name}.token_freq.pt")


def _notes(heads: Sequence[Head], layers: Layers, source: _Source, renumber: bool) -> tuple[str, ...]:
    notes = []
    if layers.order != tuple(range(len(layers.order))):
        notes.append("The entries are put into the order that the other flow has.")
    if renumber and [entry.index for entry in source.listing.entries] != list(range(len(heads))):
        notes.append("The samples are numbered anew from 0; each file names the one it was made from.")
    if any(head.states_dtype.startswith("float8") for head in heads):
        notes.append("States in fp8 are decoded to bfloat16 with their scales, as stock's trainer does.")
    return tuple(notes)


@contextmanager
def _locked(target: Path, place: Path) -> Iterator[None]:
    """Make the folder, and keep a second conversion out of it."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        path = target / LOCK
        with path.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConversionError(f"Another conversion is writing to {target}.") from error
            try:
                yield
            finally:
                with suppress(OSError):
                    path.unlink()
    except OSError as error:
        raise ConversionError(f"{target} cannot be written to: {error}.") from error


def _write(
    source: _Source,
    heads: Sequence[Head],
    layers: Layers,
    targets: Sequence[Path],
    todo: Sequence[int],
    jobs: int,
    progress: Progress | None,
) -> None:
    """Write the samples that are not there yet."""
    entries = source.listing.entries

    def write(index: int) -> int:
        entry, head, target = entries[index], heads[index], targets[index]
        if source.flow is Flow.IN_PROCESS:
            files.write_server(target, source.folder, entry, head, layers)
        else:
            files.write_in_process(target, source.folder, entry, head, layers, _mask(source, entry))
        return head.states_bytes

    size = 0
    for count, written in enumerate(_in_order(write, todo, jobs), 1):
        size += written
        if progress is not None:
            progress(count, len(todo), size)


def _refuse_other_counts(path: Path, counts: Mapping[int, int]) -> None:
    if path.exists() and files.load_object(path) != counts:
        raise ConversionError(
            f"{path} counts other tokens than these samples have: nothing is overwritten; move it away."
        )


def _finish(
    target: Path,
    source: _Source,
    heads: Sequence[Head],
    counts: Mapping[int, int],
    around: Mapping[str, str],
) -> None:
    """Write what belongs to the folder as a whole."""
    frequencies = _token_freq_path(target, source.flow)
    if not frequencies.exists():
        files.put_object(frequencies, dict(counts))
    for name, text in around.items():
        if not (target / name).exists():
            files.put_text(target / name, text)
    if source.flow is Flow.SERVER or (target / dataset.STATE).exists():
        return
    entries = source.listing.entries

    def read(index: int) -> tuple[list[int], list[int]]:
        data = files.load(source.folder, entries[index], again=True)
        return data["input_ids"].tolist(), data["loss_mask"].tolist()

    dataset.write_rows(target, read, len(entries), heads[0].target_mask_dtype)


def _in_order(work: Callable[[Item], Result], items: Sequence[Item], jobs: int) -> Iterator[Result]:
    """Yield results in order, with a few items under way and no more."""
    import torch

    waiting: deque[Future[Result]] = deque()
    rest = iter(items)
    # OpenMP counts threads per calling thread: each worker has to be told to compute alone.
    with ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for item in islice(rest, jobs + 1):
                waiting.append(pool.submit(work, item))
            while waiting:
                result = waiting.popleft().result()
                for item in islice(rest, 1):
                    waiting.append(pool.submit(work, item))
                yield result
        finally:
            for future in waiting:
                future.cancel()


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
