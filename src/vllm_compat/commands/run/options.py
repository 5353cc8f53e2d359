"""How `run` treats the program that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

USAGE_STATUS = 2
"""Exit status where nothing was started, as Python's own for a script that is not there."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How `run` treats the program.

    Attributes:
        grace_seconds: How long processes that outlive the program may take to end by themselves.
        kill_seconds: How long they then have between SIGTERM and SIGKILL.
        record: Where the program's process leaves its record; a temporary file if None.
        log: Where the program's output goes, as it is; to where the launcher's goes if None.
        status_file: Where the state of the run is kept as JSON, if anywhere.
        every: Seconds between two plain lines on the state of the run.
        leave_folder: Whether the program's output folder is left as it is before the run.
        leave_out: The numbers of samples (of data_<i>.pt) that are not made.
        dry_run: Whether a server's launcher is only judged, and its command printed.
        apply: Keyword arguments for `vllm_compat.apply()`; must be fit for JSON.
    """

    grace_seconds: float = 10.0
    kill_seconds: float = 5.0
    record: Path | None = None
    log: Path | None = None
    status_file: Path | None = None
    every: float = 30.0
    leave_folder: bool = False
    leave_out: tuple[int, ...] = ()
    dry_run: bool = False
    apply: Mapping[str, object] = field(default_factory=dict)
