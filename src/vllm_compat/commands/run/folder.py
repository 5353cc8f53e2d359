"""The output folder of stock's offline script: which it is, and that no two runs write into it.

The script makes its folder only after it has prepared its data, so what is locked is a file beside the
folder (``.NAME.vllm-compat.lock``), which can be there before it. The lock is the system's (`flock`): it
belongs to the launcher and to the program, and ends with the last of them, however that ends. The file
is taken away by the run that ends last.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_compat.commands.run.processes import say
from vllm_compat.errors import UsageError

_ATTEMPTS = 100
_LONGEST = 2**20
_MARKS = (b"VllmHiddenStatesGenerator", b"--output-dir", b"data_")
"""What stands in the source of stock's offline script, and in what is made of it."""


def output_folder(argv: Sequence[str], *, module: bool = False) -> Path | None:
    """Return the folder that stock's offline script is told to write to (``--output-dir``).

    The script is known by what its source says: it may have another name, stand behind a launcher such
    as torchrun, or be a copy that somebody has changed.

    Args:
        argv: The program and its arguments.
        module: Whether the first of them names a module.

    Returns:
        The folder; None where none of the words is such a script, whatever options it has.
    """
    given = argument(argv[1:], "--output-dir")
    if not given:
        return None
    scripts = [_source_of(argv[0])] if module else [Path(argv[0]), Path(argv[0], "__main__.py")]
    scripts += [Path(word) for word in argv[1:] if word.endswith(".py")]
    return Path(given) if any(map(_is_stocks, scripts)) else None


def _source_of(module: str) -> Path:
    """Return where a module's source should be; no package is imported to find it out."""
    relative = Path(*module.split("."))
    for entry in ("", *sys.path):
        for found in (Path(entry, relative, "__main__.py"), Path(entry, f"{relative}.py")):
            if found.is_file():
                return found
    return Path(f"{relative}.py")


def _is_stocks(script: Path) -> bool:
    """Whether a script writes ``data_<i>.pt`` with the downstream's generator, as stock's own does."""
    try:
        with script.open("rb") as file:
            text = file.read(_LONGEST)
    except (OSError, ValueError):
        return False
    return all(word in text for word in _MARKS)


def start_index(arguments: Sequence[str]) -> int:
    """Return the number of the first sample, as stock's offline script is told (``--start-idx``)."""
    given = argument(arguments, "--start-idx") or "0"
    return int(given) if given.isdigit() else 0


def numbers_to_leave_out(given: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers that ``--leave-out`` names: ``17,42``, or a file that holds such numbers.

    Raises:
        UsageError: One of them is neither.
    """
    found: set[int] = set()
    for words in given:
        text = words
        if not _are_numbers(words):
            try:
                text = Path(words).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"--leave-out takes numbers, as 17,42, or a file of numbers; {words!r} is neither"
                    f" ({getattr(error, 'strerror', None) or error})."
                ) from None
            if not _are_numbers(text):
                raise UsageError(
                    f"The file {words} of --leave-out holds something else than numbers, separated by"
                    " commas, blanks or new lines."
                )
        found.update(map(int, re.findall("[0-9]+", text)))
    return tuple(sorted(found))


def _are_numbers(text: str) -> bool:
    return re.fullmatch(r"[\s,]*[0-9]{1,15}(?:[\s,]+[0-9]{1,15})*[\s,]*", text) is not None


def argument(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of an option among a program's arguments, or None."""
    for place, word in enumerate(arguments):
        if word == name and place + 1 < len(arguments):
            return arguments[place + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


@contextmanager
def own_folder(folder: Path | None, *, shared: bool = False) -> Iterator[None]:
    """Keep a second run out of an output folder, which need not be there yet.

    Args:
        folder: The folder; nothing is done where it is None.
        shared: Whether this run leaves the folder's files alone, so that others of that kind may write
            beside it.

    Raises:
        UsageError: Another run writes into the folder.
    """
    if folder is None:
        yield
        return
    folder = Path(os.path.realpath(folder))
    made = _missing_parents(folder)
    name = folder.parent / f".{folder.name}.vllm-compat.lock"
    descriptor = _lock(name, folder, shared)
    try:
        yield
    finally:
        if descriptor is not None:
            _unlock(descriptor, name)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()  # where the program has put nothing into it


def _missing_parents(folder: Path) -> list[Path]:
    """Return the folders above the output folder that are not there yet, the inner ones first."""
    missing = []
    parent = folder.parent
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    return missing


def _lock(name: Path, folder: Path, shared: bool) -> int | None:
    """Return the descriptor that holds the lock, or None where there can be none; that is said."""
    import fcntl

    for _ in range(_ATTEMPTS):
        try:
            descriptor = _open(name, folder)
        except FileNotFoundError:
            continue  # another run has taken the parent away again
        except OSError as error:
            _cannot(folder, error)
            return None
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(
                f"Another `vllm-compat run` writes into {folder}: wait for it, or name another folder."
            ) from None
        except OSError as error:  # a file system that has no locks
            os.close(descriptor)
            _remove(name)
            _cannot(folder, error)
            return None
        # The run that held it may have taken the file away in between: then this is no lock any more.
        if _is(descriptor, name) or _is(descriptor, folder):
            os.set_inheritable(descriptor, True)
            return descriptor
        os.close(descriptor)
    return None


def _open(name: Path, folder: Path) -> int:
    """Open the file that is locked; the folder itself where only others may write beside it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)  # as the script itself would
        return os.open(name, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        if folder.is_dir():
            return os.open(folder, os.O_RDONLY)
        raise


def _unlock(descriptor: int, name: Path) -> None:
    """Give the lock back, and take its file away where nobody shares it."""
    import fcntl

    try:
        if _is(descriptor, name):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(name)
    except OSError:
        pass  # another run shares it
    finally:
        os.close(descriptor)


def _is(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _remove(name: Path) -> None:
    with suppress(OSError):
        name.unlink()


def _cannot(folder: Path, error: OSError) -> None:
    say(
        f"Nothing keeps a second run out of {folder}: its file system gives no lock there"
        f" ({error.strerror}). Start no other run into it."
    )
