"""Counts and lists in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(count: int, one: str, more: str) -> str:
    return f"1 {one} is" if count == 1 else f"{count} {more} are"


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def runs_of(indices: Iterable[int]) -> str:
    """Return indices as text, runs of them as ranges."""
    runs: list[range] = []
    for index in sorted(indices):
        if runs and index == runs[-1].stop:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return listed_runs(runs)


def listed_runs(runs: Sequence[range]) -> str:
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs[:6]]
    return ", ".join(shown) + (", …" if len(runs) > 6 else "")
