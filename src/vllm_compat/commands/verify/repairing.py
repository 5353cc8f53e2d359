"""Do what is certain to be right, with every original kept."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path

from vllm_compat.commands.verify.model import Action, Certainty, Listing, Remedy, Repair, Report
from vllm_compat.commands.verify.reading import load_sample, pairing_of
from vllm_compat.commands.verify.text import render_repair
from vllm_compat.commands.verify.words import runs_of
from vllm_compat.errors import UsageError, VllmCompatError

SETTLED_S = 60.0
"""A folder that changed less than this many seconds ago may still be written: no repair then."""


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
    target = _backup_folder(folder, backup)
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
    if result.backup:
        _carry_out(result, folder, target, moved, masks)
    return result


def _backup_folder(folder: Path, given: str | Path | None) -> Path:
    """Return where the originals go: a new folder, and none that lies in the repaired one."""
    whole = folder.resolve()
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    target = Path(given) if given else whole.with_name(f"{whole.name}.before-repair-{stamp}")
    if target.exists() or whole in (target.resolve(), *target.resolve().parents):
        raise UsageError(
            f"The backup folder {target} exists or lies in {folder}: name a new one elsewhere."
        )
    return target


def _carry_out(
    result: Repair,
    folder: Path,
    target: Path,
    moved: Iterable[str],
    masks: Mapping[str, tuple[str, bytes, int]],
) -> None:
    """Move what is set aside to the backup folder, and put reordered masks into their files.

    Raises:
        VllmCompatError: A disk is full, read-only or gone; what was done has been taken back.
    """
    made = [path for path in (target, *target.parents) if not path.exists()]
    done: set[str] = set()
    try:
        target.mkdir(parents=True)
        (target / "repair.json").write_text(render_repair(result, "json"))
        for name in sorted(moved):
            shutil.move(folder / name, target / name)
            done.add(name)
        for name, (_, mask, _) in masks.items():
            _replace_mask(folder, target, name, mask)
            done.add(name)
    except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of a full disk
        said = str(error).strip().partition("\n")[0].rstrip(".")
        if _take_back(folder, target, [*moved, *masks], done, made):
            raise VllmCompatError(
                f"The repair of {folder} failed ({said}), and everything is as it was: see to it that"
                f" the folder and {target} can be written to, and start again."
            ) from error
        raise VllmCompatError(
            f"The repair of {folder} stopped half-way ({said}): move the samples in {target}"
            " back, remove that folder and start again."
        ) from error


def _take_back(
    folder: Path, target: Path, names: Iterable[str], done: Collection[str], made: Iterable[Path]
) -> bool:
    """Put the originals back that were exchanged or moved; return whether that went well.

    ``names`` are all that were to be changed, ``done`` those that were, ``made`` the backup folder and
    those above it that were not there before, the inner ones first.
    """
    try:
        for name in names if target.is_dir() else ():
            if name in done:
                _put_back(target / name, folder / name)
            elif (folder / name).exists():  # what else has the name is a copy, or a part of one
                (target / name).unlink(missing_ok=True)
            fresh = folder / f".{name}.repairing"
            if fresh.exists():  # a disk that is read-only refuses even to remove what is not there
                fresh.unlink()
        if target.is_dir():
            (target / "repair.json").unlink(missing_ok=True)
        for path in made:
            if path.exists():
                path.rmdir()
    except OSError:
        return False
    return True


def _put_back(original: Path, place: Path) -> None:
    """Give an original its place again, which is never without a whole file."""
    try:
        os.replace(original, place)
    except OSError:  # the backup lies on another disk
        fresh = place.with_name(f".{place.name}.repairing")
        shutil.copy2(original, fresh)
        os.replace(fresh, place)
        original.unlink()


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
    pairing = pairing_of(Listing(folder, report.entries))
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
    data = load_sample(folder / name)
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
        words += f", and so extracts {runs_of(again)} again"
    if lost:
        words += (
            f"; {runs_of(lost)} stay missing, which the trainer does not mind (it takes the files"
            " that are there), and only a run into a new folder brings them back"
        )
    return words + "."
