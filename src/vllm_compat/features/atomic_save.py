"""Samples are written whole or not at all, and appear in the order of their numbers.

Stock's offline script saves ``data_<i>.pt`` with ``torch.save`` in place, from four threads, and
resumes behind the highest number that it finds. A run that ends in between leaves a torn file, or a
whole one behind a missing one, and neither is ever made again. And a save that fails says so only
when the program asks for its result: after the last batch.

What is wrapped is bound to ``torch.save`` of a sample (a mapping with ``hidden_states``) to such a
name, in the downstream's driver, and to nothing else. The sample goes first into
``.data_<i>.pt.<process>.part``, a name that neither the script nor a trainer takes for a sample, and
gets its own name when it is whole and the one before it is there. So whatever ends the run, the folder
holds an unbroken row of whole files. After a save that failed nothing behind it is put in place until
that very sample is saved, and the next batch is refused: once, so that a notebook can go on when the
disk has room again.

Not done: syncing each file to the disk. A machine that loses power may lose whole files' contents;
:mod:`vllm_compat.features.resume_samples` finds them before the next run.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_compat.errors import GuardError
from vllm_compat.features.base import Feature
from vllm_compat.runtime import identity, numbering, run, run_record

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction

SAMPLE = re.compile(r"data_(\d+)\.pt")
"""The name that stock's script gives to a sample."""

PATIENCE = 1.0
"""Seconds that a sample waits for one that should stand before it, is not there and not on its way."""

STRANGERS = 3
"""How many samples may turn out to have none before them, until their order is given up."""


def part_of(name: str) -> str:
    """Return the name of a sample that this process is writing; no other process writes that file."""
    return f".{name}.{identity.own()}.part"


def torn_of(name: str) -> str:
    """Return the name under which a torn sample is set aside."""
    return f".{name}.torn"


def kept_of(name: str) -> str:
    """Return the name under which a whole sample behind a gap is kept."""
    return f".{name}.kept"


@dataclass
class _Folder:
    """What is under way in one folder."""

    writing: set[int] = field(default_factory=set)
    failed: int | None = None
    strangers: int = 0


class Saves:
    """All saves of one run."""

    def __init__(self) -> None:
        self.folders: dict[str, _Folder] = {}
        self.changed = threading.Condition()
        self.failure = ""


class AtomicSave(Feature):
    """Save samples whole or not at all, in the order of their numbers."""

    name = "atomic_save"
    does = (
        "Writes a sample to .data_<i>.pt.<process>.part and gives it its name when it is whole and the"
        " one before it is there. After a save that failed nothing behind it is put in place until it is"
        " saved after all, and the next batch is refused, once."
    )
    why = (
        "The offline script saves in place, from four threads, and resumes behind the highest number: a"
        " run that is killed leaves torn files and gaps that are never made again, and a save that fails"
        " is told after the last batch."
    )
    targets = ("torch.save", "VllmHiddenStatesGenerator.generate")

    def install(self, transaction: Transaction, plan: Plan, role: str) -> None:
        """Enlist the wrappers of ``torch.save`` and of the generator."""
        transaction.wrap("torch:save", _save)
        module, _, cls = plan.roles.generator.partition(":")
        transaction.wrap(f"{module}:{cls}.generate", _before_a_batch)


def _before_a_batch(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    refuse_after_failure()
    return wrapped(*args, **kwargs)


def refuse_after_failure() -> None:
    """Stop a run whose samples can no longer be saved; who calls again knows of it.

    Raises:
        GuardError: Says which sample could not be saved, and why.
    """
    saves = run.current().find(Saves)
    if saves is None or not run_record.is_ours():
        return
    with saves.changed:
        failure, saves.failure = saves.failure, ""
    if failure:
        raise GuardError(
            f"No further batch is extracted: {failure} Make room, then go on at that sample (run the"
            " same again, or call generate() again)."
        )


def _save(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sample = args[0] if args else kwargs.get("obj")
    target = args[1] if len(args) > 1 else kwargs.get("f")
    if not isinstance(target, str | os.PathLike) or not run_record.is_ours():
        return wrapped(*args, **kwargs)
    path = os.path.abspath(os.fsdecode(target))
    folder, name = os.path.split(path)
    match = SAMPLE.fullmatch(name)
    if match is None or not (isinstance(sample, Mapping) and "hidden_states" in sample):
        return wrapped(*args, **kwargs)
    index = int(match[1])
    part = os.path.join(folder, part_of(name))
    if len(args) > 1:
        args = (args[0], part, *args[2:])
    else:
        kwargs = {**kwargs, "f": part}
    saves = run.current().part(Saves)
    with saves.changed:
        state = saves.folders.setdefault(folder, _Folder())
        state.writing.add(index)
    try:
        result = wrapped(*args, **kwargs)
        _publish(saves, state, index, folder, part)
        run_record.saved(path)
        return result
    except BaseException as error:
        with suppress(OSError):
            os.unlink(part)
        raise _failed(saves, state, index, path, error) from error
    finally:
        with saves.changed:
            state.writing.discard(index)
            saves.changed.notify_all()


def _publish(saves: Saves, state: _Folder, index: int, folder: str, part: str) -> None:
    """Give a whole sample its name, once those before it have theirs."""
    name = f"data_{index}.pt"
    preceding = numbering.current().follows(index)  # one that is left out on request has no file
    before = os.path.join(folder, f"data_{preceding}.pt")
    deadline = time.monotonic() + PATIENCE
    with saves.changed:
        while True:
            if state.failed is not None and state.failed < index:
                raise GuardError(
                    f"data_{state.failed}.pt could not be saved, and a run goes on behind the"
                    " highest number that it finds, so nothing is saved behind it."
                )
            if any(other < index for other in state.writing):
                saves.changed.wait()
                continue
            if preceding < 0 or state.strangers >= STRANGERS or os.path.exists(before):
                break
            patience = deadline - time.monotonic()
            if patience <= 0:
                state.strangers += 1  # the first of a row that begins here, or no row at all
                break
            saves.changed.wait(patience)
        os.replace(part, os.path.join(folder, name))
        state.writing.discard(index)
        if state.failed == index:
            state.failed = None  # saved after all
            saves.failure = ""
            run_record.recover_saving()
        saves.changed.notify_all()
    for old in (torn_of(name), kept_of(name)):
        with suppress(OSError):
            os.unlink(os.path.join(folder, old))


def _failed(saves: Saves, state: _Folder, index: int, path: str, error: BaseException) -> BaseException:
    """Note a save that failed, and return what is to be raised."""
    with saves.changed:
        if state.failed is None or index < state.failed:
            state.failed = index
    if not isinstance(error, Exception):
        return error
    folder, name = os.path.split(path)
    cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('.')}"
    try:
        free = shutil.disk_usage(folder).free
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or free < 2**20
    except OSError:
        free, full = 0, False
    if full:
        cause = f"the disk is full ({free:,} bytes free; {cause})"
    sentence = (
        f"{name} could not be saved to {folder}: {cause}. The folder holds whole files up to the one"
        " before it."
    )
    with saves.changed:
        first = not saves.failure
        saves.failure = saves.failure or sentence
    if first:
        run_record.fail_saving(sentence)
    return GuardError(sentence)
