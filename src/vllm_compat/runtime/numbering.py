"""Which sample of the program a prompt of a ``generate()`` call is, and which are left out on request.

Stock's offline script numbers its samples from the first that its output folder lacks; the file of
sample ``i`` is ``data_<i>.pt``. The launcher tells the program's process where that numbering begins and
which samples are to be left out (``VLLM_COMPAT_RESUME``). A wrapper that hands only a part of a call's
prompts on says which (:func:`handing_on`), so that a check beneath it can name a prompt by its file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from vllm_compat.runtime import env, run, run_record

LIST = "left_out.json"
"""The file of an output folder that lists what was left out on request; stock reads no such name."""


@dataclass
class Numbering:
    """The numbers of this run's samples.

    Attributes:
        folder: Where they are saved; None without the launcher, or where the program is not stock's.
        next: The number of the first prompt; meaningless without a folder.
        kept: Whether samples were set aside for this run.
        left_out: The numbers that are left out on request.
        given: The numbers of the prompts that the call under way has handed on; None: all of them.
    """

    folder: Path | None = None
    next: int = 0
    kept: bool = False
    left_out: frozenset[int] = frozenset()
    given: tuple[int, ...] | None = None
    written: set[int] = field(default_factory=set)

    def follows(self, index: int) -> int:
        """Return the number of the last sample before ``index`` that is not left out; -1 for none."""
        before = index - 1
        while before in self.left_out:
            before -= 1
        return before


def told() -> Numbering:
    """Return what the launcher has told of the output folder; an empty one where it told nothing."""
    text = env.resume_notes()
    try:
        notes = json.loads(text) if text else None
        if isinstance(notes, dict):
            return Numbering(
                Path(notes["folder"]),
                int(notes["next"]),
                bool(notes.get("kept")),
                frozenset(map(int, notes.get("left_out", ()))),
            )
    except (ValueError, KeyError, TypeError):
        pass  # not what our launcher writes: somebody else has set the variable
    return Numbering()


def current() -> Numbering:
    """Return the numbering of this run, made from what the launcher has told."""
    mine = run.current()
    if mine.find(Numbering) is None:
        mine.hold(told())
    return mine.part(Numbering)


def numbers_of(count: int) -> tuple[int, ...]:
    """Return the numbers of the prompts of the call under way, ``count`` of them."""
    mine = current()
    if mine.given is not None and len(mine.given) == count:
        return mine.given
    first = mine.next + run_record.samples_so_far()
    return tuple(range(first, first + count))


@contextmanager
def handing_on(numbers: Sequence[int]) -> Iterator[None]:
    """Mark the block as one in which prompts of these numbers are computed."""
    mine = current()
    before, mine.given = mine.given, tuple(numbers)
    try:
        yield
    finally:
        mine.given = before


def read_list(folder: Path) -> frozenset[int]:
    """Return which samples the list in an output folder names; none where there is no such list.

    Raises:
        ValueError: The file holds something else.
        OSError: It cannot be read.
    """
    try:
        found = json.loads((folder / LIST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return frozenset()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    numbers = found.get("left_out") if isinstance(found, dict) else None
    if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError('it is no list of ours ({"left_out": [numbers]})')
    return frozenset(numbers)


def write_list(folder: Path, numbers: Collection[int]) -> None:
    """Write the list of an output folder, as a whole.

    Raises:
        OSError: It cannot be written.
    """
    new = folder / f".{LIST}.{os.getpid()}"
    new.write_text(json.dumps({"left_out": sorted(numbers)}) + "\n", encoding="utf-8")
    os.replace(new, folder / LIST)
