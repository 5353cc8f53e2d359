"""Find torn and missing samples before a run, so that the run makes them again, and only them.

Stock's offline script resumes behind the highest number in its output folder. Files that an earlier
run, or an accident, has left torn or missing in the middle are so never made again. The launcher looks
at the folder before the program starts: a torn file is set aside, and whole files behind the first gap
are kept under another name, so that the script resumes at the gap. When it comes to a prompt whose
whole file is kept, the generator's answer is read from that file instead of computed
(:class:`ResumeSamples`), if it holds the very tokens of the prompt.

Everything else here runs in the launcher and needs the standard library only.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.errors import UsageError
from vllm_compat.features.atomic_save import SAMPLE, kept_of, torn_of
from vllm_compat.features.base import Feature, generate_rest
from vllm_compat.runtime import identity, numbering, run_record

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction

_ASIDE = re.compile(r"\.(data_(\d+)\.pt)\.(?:([\w-]+)\.)?(kept|part|torn)")
_ZIP = b"PK\x03\x04"
FORGOTTEN = 3600.0
"""Seconds after which a half-written file of another machine is nobody's any more."""


@dataclass(frozen=True)
class Folder:
    """What stands in an output folder before a run.

    Attributes:
        path: The folder.
        next: The number at which stock's script goes on.
        torn: Numbers of files that were cut off or cannot be opened; set aside.
        missing: Numbers below the highest that have no file.
        kept: Numbers of whole files behind the first gap, kept for the run.
        foreign: Numbers of files that something else has written; they are left alone.
        left_out: Numbers that are left out on request and have no file.
    """

    path: Path
    next: int
    torn: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    foreign: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the sentences for people; nothing where there is nothing to say."""
        said = self._said()
        if self.foreign:
            said += (
                f"{' ' if said else ''}{self.path} also holds {len(self.foreign)} data_<i>.pt"
                f" ({_ranges(self.foreign)}) that torch.save has not written as the script does: they"
                " are left as they are, and the script takes them for samples."
            )
        if self.left_out:
            said += (
                f"{' ' if said else ''}Left out on request: {_ranges(self.left_out)} (the list is"
                f" {self.path / numbering.LIST}; without a number there and in --leave-out its sample is"
                " made again)."
            )
        return said

    def _said(self) -> str:
        if not self.torn and not self.missing:
            return (
                f"{self.path} holds {self.next} whole samples; the run goes on at {self.next}."
                if (self.next)
                else ""
            )
        parts = []
        if self.torn:
            parts.append(f"{len(self.torn)} torn ({_ranges(self.torn)})")
        if self.missing:
            parts.append(f"{len(self.missing)} missing ({_ranges(self.missing)})")
        again = f"{self.path}: {' and '.join(parts)}; the run goes on at {self.next}"
        if self.kept:
            again += (
                f" and takes the {len(self.kept)} whole sample{'s' if len(self.kept) > 1 else ''}"
                " behind it from their files"
                " (.data_<i>.pt.kept until then)"
            )
        return f"{again}."


def prepare(path: Path, *, start: int = 0, leave_out: Collection[int] = ()) -> Folder | None:
    """Make an output folder ready for a run that resumes behind its highest number.

    Args:
        path: The folder; it need not exist.
        start: The number of the first sample of the run.
        leave_out: Numbers that are left out on request, beside those that the folder's list names.

    Returns:
        What was found and done, or None where there is nothing and nothing is left out.

    Raises:
        UsageError: The folder cannot be read or changed.
    """
    try:
        asked = numbering.read_list(path) | frozenset(leave_out)
    except NotADirectoryError as error:
        raise UsageError(
            f"The output folder {path} cannot be there: a part of that name is no folder ({error})."
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path / numbering.LIST} cannot be read ({error}): mend it, or take it away and name its"
            " numbers with --leave-out."
        ) from error
    try:
        return _prepare(path, start, asked)
    except OSError as error:
        raise UsageError(
            f"The output folder {path} cannot be made ready for the run: {error}."
        ) from error


def _prepare(path: Path, start: int, asked: Collection[int]) -> Folder | None:
    own, kept = _scan(path) if path.is_dir() else ({}, {})
    if not own and not kept:
        return Folder(path, start, left_out=tuple(sorted(asked))) if asked else None
    foreign = tuple(index for index, name in sorted(own.items()) if is_foreign(path / name))
    torn = _set_torn_aside(path, own)
    for index, name in sorted(kept.items()):
        if index in own:
            os.unlink(path / name)
            del kept[index]
        elif not is_whole(path / name):
            os.replace(path / name, path / torn_of(f"data_{index}.pt"))
            torn = (*torn, index)
            del kept[index]
    highest = max((*own, *kept, *torn), default=start - 1)
    following = start
    while following in own or following in asked:
        following += 1
    # The script goes on behind its highest file: it comes to those that are left out behind it again.
    while following > start and following - 1 not in own:
        following -= 1
    for index, name in sorted(own.items()):
        if index >= following and index not in foreign:
            os.replace(path / name, path / kept_of(name))
            kept[index] = kept_of(name)
    there = {*own, *kept, *torn, *asked}
    missing = tuple(index for index in range(following, highest) if index not in there)
    left_out = tuple(sorted(number for number in asked if number not in own and number not in kept))
    return Folder(path, following, torn, missing, tuple(sorted(kept)), foreign, left_out)


def _scan(path: Path) -> tuple[dict[int, str], dict[int, str]]:
    """Return the names of samples and of kept ones by number; take half-written files away."""
    own: dict[int, str] = {}
    kept: dict[int, str] = {}
    for name in os.listdir(path):
        if match := SAMPLE.fullmatch(name):
            own[int(match[1])] = name
        elif (match := _ASIDE.fullmatch(name)) and match[4] == "kept":
            kept[int(match[2])] = name
        elif match and match[4] == "part" and _is_nobodys(path / name, match[3]):
            os.unlink(path / name)  # of a run that was killed
    return own, kept


def _is_nobodys(path: Path, owner: str | None) -> bool:
    """Whether the process that was writing a file has ended; an earlier release named none."""
    ended = identity.has_ended(owner) if owner else None
    if ended is None and owner:
        with suppress(OSError):
            return time.time() - path.stat().st_mtime > FORGOTTEN
    return ended is not False


def _set_torn_aside(path: Path, own: dict[int, str]) -> tuple[int, ...]:
    """Give torn samples another name and take them out of ``own``; return their numbers."""
    torn = []
    for index, name in sorted(own.items()):
        if not is_foreign(path / name) and not is_whole(path / name):
            os.replace(path / name, path / torn_of(name))
            torn.append(index)
            del own[index]
    return tuple(torn)


def count_whole(path: Path) -> int:
    """Return how many samples of a folder are whole, those that were kept aside among them."""
    with suppress(OSError):
        names = os.listdir(path)
        kept = {match[1] for name in names if (match := _ASIDE.fullmatch(name)) and match[3] == "kept"}
        own = {name for name in names if SAMPLE.fullmatch(name)}
        places = [path / name for name in own] + [path / kept_of(name) for name in kept - own]
        return sum(map(is_whole, places))
    return 0


def put_back(path: Path) -> tuple[int, ...]:
    """Give files that were set aside and not made again their names back; return their numbers.

    What the run has made again is there under its own name, and the old file goes.
    """
    done = []
    with suppress(OSError):
        for name in os.listdir(path):
            match = _ASIDE.fullmatch(name)
            if not match or match[4] == "part":
                continue
            with suppress(OSError):  # the others all the same
                if (path / match[1]).exists():
                    os.unlink(path / name)
                    continue
                os.replace(path / name, path / match[1])
                done.append(int(match[2]))
    return tuple(sorted(done))


def is_whole(path: Path) -> bool:
    """Whether a file that ``torch.save`` wrote is there from its first byte to its last.

    ``torch.save`` writes a zip archive, whose directory stands at the end and names the place of
    each member.
    """
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if not members:
                return False
            # Stored, never compressed: reading the local header of the last is enough.
            with archive.open(max(members, key=lambda member: member.header_offset)) as last:
                last.read(1)
    except Exception:  # bytes that are torn make `zipfile` raise whatever they will
        return False
    return True


def is_foreign(path: Path) -> bool:
    """Whether something else than ``torch.save``'s zip archive stands there: no torn sample then.

    A sample that was cut off is empty or begins as an archive does; after a loss of power it may hold
    zeros.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(4096)
    except OSError:
        return True  # a folder, or a file that only others may read
    return bool(begin.strip(b"\0")) and not (begin.startswith(_ZIP) or _ZIP.startswith(begin))


class ResumeSamples(Feature):
    """Make torn and missing samples again, and only them."""

    name = "resume_samples"
    does = (
        "Before the program starts, sets torn samples of its output folder aside and whole ones behind"
        " the first gap too, so that the script resumes at the gap; answers generate() from such a file"
        " when it holds the very tokens of the prompt."
    )
    why = (
        "The offline script resumes behind the highest number, so that what an earlier run has left torn"
        " or missing is never made again."
    )
    targets = ("the output folder of the offline script", "VllmHiddenStatesGenerator.generate")
    needs_launcher = True

    def applies(self, plan: Plan) -> bool:
        """Whether the launcher has set samples aside."""
        return bool(plan.roles.generator) and numbering.told().kept

    def install(self, transaction: Transaction, plan: Plan, role: str) -> None:
        """Enlist the answers that kept files give.

        In force outside of every other change of ``generate``: what is left of a batch goes through all
        of them.
        """
        given = numbering.told()
        assert given.folder is not None  # :meth:`applies`
        answers = _Kept(given.folder, given.next)
        module, _, cls = plan.roles.generator.partition(":")
        transaction.wrap(f"{module}:{cls}.generate", answers.generate)


def tell(folder: Folder) -> str:
    """Return, as text, what the driver must know of a folder."""
    notes = {
        "folder": str(folder.path.absolute()),
        "next": folder.next,
        "kept": bool(folder.kept),
        "left_out": folder.left_out,
    }
    return json.dumps(notes)


class _Kept:
    """The kept files of one folder, answered from in the order of the run."""

    def __init__(self, folder: Path, following: int) -> None:
        self.folder = folder
        self.at = following

    def generate(
        self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = args[0] if args else kwargs.get("token_ids")
        given = [] if given is None else given
        limit = instance.vllm_config.model_config.max_model_len - 1
        kept = {}
        numbers = numbering.current().given or range(self.at, self.at + len(given))
        for place, prompt in enumerate(given):
            ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
            if result := self._read(numbers[place], ids[:limit], len(instance.layer_ids)):
                kept[place] = result
        self.at += len(given)
        left = [place for place in range(len(given)) if place not in kept]
        with numbering.handing_on([numbers[place] for place in left]):
            if not kept:
                return wrapped(*args, **kwargs)
            rest = [given[place] for place in left]
            made = iter(generate_rest(wrapped, rest, args, kwargs) if rest else ())
        run_record.add_from_files(len(kept))
        return [kept[place] if place in kept else next(made) for place in range(len(given))]

    def _read(self, index: int, ids: Sequence[int], layers: int) -> Mapping[str, Any] | None:
        """Return the kept sample of that number if it is the answer to these tokens."""
        path = self.folder / kept_of(f"data_{index}.pt")
        if not path.exists():
            return None
        import torch

        from vllm_compat.checks.batch import check_layers, look_at

        try:
            sample = torch.load(path, map_location="cpu", weights_only=True)
            if sample["input_ids"].tolist() != list(ids):
                return None
            check_layers(index, [look_at(t) for t in sample["hidden_states"]], len(ids), layers)
        except Exception:  # a torn file makes `torch.load` raise whatever its bytes will
            return None  # computed again, as if it had not been there
        return {
            "input_ids": sample["input_ids"],
            "hidden_states": list(sample["hidden_states"]),
            "loss_mask": None,
        }


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs]
    return ", ".join(words[:5]) + (f" and {len(words) - 5} more" if len(words) > 5 else "")
