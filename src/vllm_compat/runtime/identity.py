"""Which process a process id means: an id is given again after its process has ended.

Only the standard library, and little of it: the launcher and every process of a run use it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path


def start_of(pid: int) -> int | None:
    """Return when a running process was started, in clock ticks since the machine's start (Linux).

    None where there is no such process, where it has ended, or where the system does not tell.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command's name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended (Linux)."""
    return start_of(pid) is not None


def machine() -> str:
    """Return eight digits for this start of this machine: elsewhere process ids mean other processes."""
    from hashlib import sha256

    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    try:
        # Containers of one machine have one boot id, and process ids of their own.
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return sha256(f"{socket.gethostname()} {boot} {namespace}".encode()).hexdigest()[:8]


def own() -> str:
    """Return this process's name, which no other process of any machine has, fit for a file's name."""
    pid = os.getpid()
    return f"{machine()}-{pid}-{start_of(pid) or 0}"


def has_ended(name: str) -> bool | None:
    """Whether the process with a name of :func:`own`'s has ended; None where that can't be known."""
    where, _, rest = name.partition("-")
    pid, _, start = rest.partition("-")
    if where != machine() or not pid.isdigit() or not start.isdigit() or not Path("/proc/self").exists():
        return None
    return start_of(int(pid)) != int(start)
