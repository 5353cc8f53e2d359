"""The launcher's view of a run: one line for people, the same as JSON, and who stands still.

The processes of the run say what they are doing (:mod:`vllm_compat.runtime.heartbeat`); this module
puts it together. Everything here is the standard library's and runs in the launcher.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from vllm_compat.errors import UsageError
from vllm_compat.runtime import identity
from vllm_compat.runtime.heartbeat import DUMP

SCHEMA_VERSION = 1

STALL_TIMES = 10.0
"""How many times the usual shard or batch may take, until a run is said to stand still."""

STALL_LEAST = 60.0
"""Seconds below which nothing is called a stall."""

STALL_UNKNOWN = 600.0
"""Seconds without any change after which a phase whose usual time nobody knows is called a stall:
imports, building a model before its first shard, repacking weights, planning the KV cache."""

_STACK_SECONDS = 1.0
_WORDS = {
    "starting": "starting",
    "building": "starting vLLM's workers",
    "loading": "loading weights",
    "loaded": "weights are loaded, preparing them",
    "ready": "setting up the KV cache",
    "idle": "ready, between batches",
    "extracting": "extracting",
}


@dataclass(frozen=True)
class Process:
    """What one process of the run has said last, with the seconds since."""

    said: Mapping[str, Any]

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self.said["pid"])

    @property
    def name(self) -> str:
        """How people call it."""
        rank = self.said.get("rank")
        if self.said.get("role") == "worker":
            return "worker" if rank is None else f"rank {rank}"
        return str(self.said.get("role", "process"))


@dataclass(frozen=True)
class Stall:
    """No progress for ``seconds``, where ``usual`` are the usual ones (None: nobody knows)."""

    seconds: float
    usual: float | None
    processes: tuple[Mapping[str, Any], ...] = ()

    def __str__(self) -> str:
        """Return the sentences for people."""
        usual = f" (usually {_seconds(self.usual)})" if self.usual else ""
        doing = "; ".join(_doing(process) for process in self.processes)
        return f"no progress for {_seconds(self.seconds)}{usual}. {doing}."


@dataclass(frozen=True)
class View:
    """A run at one moment."""

    phase: str
    line: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    waited: float = 0.0
    usual: float | None = None
    processes: tuple[Process, ...] = ()

    @property
    def allowance(self) -> float:
        """Seconds without progress after which this is called a stall."""
        if self.usual is None:
            return STALL_UNKNOWN
        return max(STALL_LEAST, STALL_TIMES * self.usual)


def read_processes(folder: Path) -> tuple[Process, ...]:
    """Return what the processes of a run have said, in the order in which they entered."""
    found = []
    for path in folder.glob("*.json"):
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(said, dict) and type(said.get("pid")) is int:
            for name in ("entered", "error_at"):  # what they are put in order by
                if type(said.get(name, 0.0)) not in (int, float):
                    del said[name]
            found.append(Process(said))
    return tuple(sorted(found, key=lambda process: process.said.get("entered", 0.0)))


def view(processes: Sequence[Process], now: float) -> View:
    """Put together what the processes say; ``now`` is ``time.monotonic()``."""
    driver = next((p for p in reversed(processes) if p.said.get("role") == "program"), None)
    workers = [p.said for p in processes if p.said.get("role") == "worker"]
    if driver is None:
        return View("starting", "starting", processes=tuple(processes))
    said = driver.said
    changed = max([p.said.get("changed", 0.0) for p in processes])
    waited = max(0.0, now - changed)
    phase = str(said.get("phase", "starting"))
    if phase == "extracting":
        return _extracting(said, waited, tuple(processes))
    if phase == "ready":
        phase = "idle"
    if phase == "building" and workers:
        loading = [said for said in workers if said.get("phase") == "loading"]
        if loading:
            return _loading(loading, now, tuple(processes))
        phase = _building({said.get("phase") for said in workers})
    line = _WORDS.get(phase, phase)
    # Between batches the program does as it likes; that is no stall.
    return View(phase, line, {}, 0.0 if phase == "idle" else waited, None, tuple(processes))


def _building(workers: set[object]) -> str:
    """Return the phase of a run whose workers are in these phases, and load no weights."""
    if workers == {"ready"}:
        return "ready"
    return "loaded" if workers <= {"loaded", "ready"} else "building"


def _loading(workers: Sequence[Mapping[str, Any]], now: float, processes: tuple[Process, ...]) -> View:
    slowest = min(workers, key=lambda said: said.get("shards", 0))
    done, total = int(slowest.get("shards", 0)), slowest.get("of")
    seconds = slowest.get("loading_seconds", 0.0) / done if done else None
    # Each rank has its own pace: that the others go on does not help one that stands still.
    waited = max(0.0, now - slowest.get("changed", now))
    facts: dict[str, Any] = {
        "shards": done,
        "of": total,
        "seconds_per_shard": None if seconds is None else round(seconds, 3),
        "seconds_left": None,
        "ranks": [{k: said.get(k) for k in ("rank", "shards", "of")} for said in workers],
    }
    line = f"loading shard {min(done + 1, total) if total else done + 1}/{total or '?'}"
    if total:
        line += f", {100 * done // total} %"
    if seconds is not None:
        line += f", {_seconds(seconds)} a shard"
        if total:
            left = max(0.0, (total - done) * seconds - waited)
            facts["seconds_left"] = round(left, 1)
            line += f", about {_seconds(left)} left"
    return View("loading", line, facts, waited, seconds, processes)


def _extracting(said: Mapping[str, Any], waited: float, processes: tuple[Process, ...]) -> View:
    samples = int(said.get("samples", 0))
    total = said.get("samples_to_do")
    rate = said.get("tokens_per_second") or 0.0
    seconds, calls = said.get("extracting_seconds", 0.0), int(said.get("calls", 0))
    facts: dict[str, Any] = {
        "samples": samples,
        "of": total,
        "tokens": said.get("tokens", 0),
        "tokens_per_second": round(rate, 1),
        "seconds_left": None,
    }
    line = f"{samples:,} of {total:,} samples" if total else f"{samples:,} samples"
    if total:
        line += f", {100 * samples // total} %"
    if rate:
        line += f", {rate:,.0f} tokens/s"
    if total and calls > 1 and seconds and samples:
        # The first call only starts the clock.
        left = max(0.0, (total - samples) * seconds / (samples * (calls - 1) / calls) - waited)
        facts["seconds_left"] = round(left, 1)
        line += f", about {_seconds(left)} left"
    if said.get("waiting"):
        line += f", {said['waiting']}"
    usual = seconds / (calls - 1) if calls > 1 else None
    if "call_since" not in said:
        waited = 0.0  # the program is between two batches
    return View("extracting", line, facts, waited, usual, processes)


class Watch:
    """Looks at a run from time to time, and tells people and programs.

    Args:
        folder: Where the processes of the run say what they are doing.
        status_file: Where the same is kept as JSON, if anywhere.
        stream: Where the line goes; on a terminal it is written over and over.
        in_place: Whether the stream is a terminal that nobody else writes to.
        every: Seconds between two plain lines.
        command: What is run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        status_file: Path | None = None,
        stream: TextIO | None = None,
        in_place: bool = False,
        every: float = 30.0,
        command: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.status_file = status_file
        self.stream = stream
        self.in_place = in_place
        self.every = every
        self.stall: Stall | None = None
        self._facts: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "kind": "status",
            "pid": os.getpid(),
            "command": list(command),
            "started": time.time(),
        }
        self._said = time.monotonic()
        self._written = 0.0
        self._shown = ""
        self._blind = False

    def look(self, pid: int) -> None:
        """Look once; ``pid`` is the program's. Nothing that is seen, or cannot be, ends the run."""
        try:
            self._look(pid)
        except Exception as error:
            self._cannot(error)

    def _look(self, pid: int) -> None:
        now = time.monotonic()
        seen = view(read_processes(self.folder), now)
        if seen.waited <= seen.allowance:
            self.stall = None
        elif self.stall is None:
            self.stall = Stall(seen.waited, seen.usual, ask(self.folder, seen.processes))
            self._tell(f"{seen.line}: {self.stall}", now, plain=True)
        line = seen.line + (f"; NO PROGRESS for {_seconds(seen.waited)}" if self.stall else "")
        if self.in_place:
            self._show(line)
        elif now - self._said >= self.every:
            self._tell(line, now)
        if self.status_file is not None and now - self._written >= 1.0:
            self._written = now
            self._write("running", seen, line, {"program_pid": pid})

    def end(self, state: str, verdict: str, exit_status: int) -> None:
        """Say for the last time what there is to say."""
        try:
            self._end(state, verdict, exit_status)
        except Exception as error:
            self._cannot(error)

    def _cannot(self, error: Exception) -> None:
        if not self._blind:
            self._blind = True
            self._tell(
                f"The run goes on, but its state cannot be shown ({type(error).__name__}: {error}).",
                time.monotonic(),
                plain=True,
            )

    def _end(self, state: str, verdict: str, exit_status: int) -> None:
        if self.in_place and self._shown:
            self._show("")
        if self.status_file is not None:
            seen = view(read_processes(self.folder), time.monotonic())
            self.stall = None
            self._write(state, seen, verdict, {"verdict": verdict, "exit_status": exit_status})

    def _write(self, state: str, seen: View, line: str, more: Mapping[str, Any]) -> None:
        assert self.status_file is not None
        driver = next((p.said for p in seen.processes if "model" in p.said), {})
        stall = self.stall
        record = {
            **self._facts,
            "updated": time.time(),
            "state": state,
            "phase": seen.phase,
            "line": line,
            "model": driver.get("model"),
            "layer_ids": driver.get("layer_ids"),
            seen.phase if seen.facts else "progress": dict(seen.facts),
            "stall": stall
            and {
                "seconds": round(seen.waited, 1),
                "usual_seconds": stall.usual,
                "processes": list(stall.processes),
            },
            **more,
        }
        new = self.status_file.with_name(f"{self.status_file.name}.new")
        try:
            new.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            os.replace(new, self.status_file)
        except OSError as error:
            self._cannot(error)

    def _tell(self, line: str, now: float, *, plain: bool = False) -> None:
        self._said = now
        if self.in_place and plain and self._shown:
            self._show("")
        if self.stream is not None:
            try:
                print(f"vllm-compat: {line}", file=self.stream, flush=True)
            except (OSError, ValueError):
                self.stream = None

    def _show(self, line: str) -> None:
        if self.stream is None or line == self._shown:
            return
        self._shown = line
        try:
            width = os.get_terminal_size(self.stream.fileno()).columns
            self.stream.write(f"\r\x1b[K{line[: max(10, width - 1)]}")
            self.stream.flush()
        except (OSError, ValueError):
            self.stream = None


def ask(folder: Path, processes: Sequence[Process]) -> tuple[Mapping[str, Any], ...]:
    """Ask each living process what it is doing; return name, state, CPU seconds and stack of each.

    The stack holds the functions of the main thread, innermost first, as ``function (file:line)``.
    """
    alive = [p for p in processes if _is_the_same(p)]
    asked = {}
    for process in alive:
        path = folder / f"{process.pid}.stack"
        if path.exists():  # only who listens: the signal would end any other
            asked[process.pid] = path.stat().st_size
            try:
                if not _is_the_same(process):
                    raise ProcessLookupError
                os.kill(process.pid, DUMP)
            except OSError:
                del asked[process.pid]
    if asked:
        time.sleep(_STACK_SECONDS)
    found = []
    for process in alive:
        state, cpu = _stat(process.pid) or ("gone", 0.0)
        stack = []
        if process.pid in asked:
            stack = _stack(folder / f"{process.pid}.stack", asked[process.pid])
        found.append(
            {
                "pid": process.pid,
                "name": process.name,
                "phase": process.said.get("phase"),
                "state": state,
                "cpu_seconds": cpu,
                "stack": stack,
            }
        )
    return tuple(found)


def _is_the_same(process: Process) -> bool:
    """Whether a process that has spoken still runs: its id may be another's by now.

    The signal that asks would end whoever does not know it.
    """
    return "started" in process.said and identity.start_of(process.pid) == process.said["started"]


def _stack(path: Path, start: int) -> list[str]:
    """Return the main thread of a dump by ``faulthandler`` (the thread written last)."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    last = text.rpartition("hread 0x")[2]
    frames = []
    for line in last.splitlines()[1:]:
        parts = line.strip().removeprefix("File ").rsplit(", line ", 1)
        if len(parts) == 2:
            number, _, function = parts[1].partition(" in ")
            place = "/".join(parts[0].strip('"').split("/")[-2:])
            frames.append(f"{function} ({place}:{number})")
    return frames[:12]


_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a disk or a device",
    "T": "stopped",
    "t": "stopped by a debugger",
}


def _stat(pid: int) -> tuple[str, float] | None:
    """Return a process's state in words and its CPU seconds, or None where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return _STATES.get(fields[0], fields[0]), (int(fields[11]) + int(fields[12])) / ticks


def _doing(process: Mapping[str, Any]) -> str:
    stack = process["stack"]
    where = f", in {' < '.join(stack[:3])}" if stack else ", which does not answer"
    return f"{process['name']} (pid {process['pid']}): {process['state']}{where}"


def first_error(processes: Sequence[Process]) -> Process | None:
    """Return the process that met the first error of a run, or None."""
    failed = [p for p in processes if "error" in p.said]
    return min(failed, key=lambda p: p.said.get("error_at", 0.0), default=None)


def read_status(path: Path) -> Mapping[str, Any]:
    """Return what a run keeps in its ``--status-file``.

    Raises:
        UsageError: There is no such file, or it holds something else.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"The status file {path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or record.get("kind") != "status" or not _can_be_shown(record):
        raise UsageError(f"{path} is no status file: `vllm-compat run --status-file` writes one.")
    return record


def _can_be_shown(record: Mapping[str, Any]) -> bool:
    """Whether a status file holds what :func:`render` reads."""
    try:
        render(record, 0.0)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
        return False
    return True


def render(record: Mapping[str, Any], now: float) -> tuple[str, int]:
    """Return what a status file says, for people, and an exit status.

    The status is 0 for a run that goes on or has finished, 1 for one that has failed or stands still,
    3 for one whose launcher is gone without a verdict.
    """
    state = str(record["state"])
    age = now - float(record["updated"])
    what = record.get("model") or " ".join(record["command"][:1])
    lines = [f"{what}: {record['line']}"]
    status = 0 if state in ("running", "finished") else 1
    if state == "running":
        lines[0] += f" (running for {_seconds(now - float(record['started']))})"
        if record.get("stall"):
            status = 1
            lines += [f"  {_doing(process)}" for process in record["stall"]["processes"]]
        if age > 30 and _stat(int(record["pid"])) is None:
            status = 3
            lines.append(
                f"  The launcher (pid {record['pid']}) is gone, and has said nothing for"
                f" {_seconds(age)}: it was killed, or ran on another machine."
            )
    return "\n".join(lines), status


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal."""
    return stream is not None and stream.isatty() and "TERM" in os.environ


def _seconds(seconds: float | None) -> str:
    """Return a duration as people say it."""
    if seconds is None:
        return "?"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def follow(path: Path, every: float, stream: TextIO = sys.stdout) -> int:
    """Print a status file's line again and again until its run has ended; return the exit status."""
    while True:
        record = read_status(path)
        text, status = render(record, time.time())
        print(text, file=stream, flush=True)
        if record["state"] != "running" or status == 3:
            return status
        time.sleep(every)
