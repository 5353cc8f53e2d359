"""The processes of a run: start the program, hand signals on to it, end what it leaves behind.

Nothing of vLLM is known here; `vllm_compat.commands.run.launch` says what each of it is for.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

HANDED_ON = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
"""The signals that the launcher hands on to the program."""

_HELD_BACK = HANDED_ON | {signal.SIGTSTP}
_JOB_CONTROL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36

_REPORT_SECONDS = 0.25  # how long the witness may take to report a signal, on a busy machine
_POLL_SECONDS = 0.1
_LOOK_SECONDS = 0.5  # between two looks at what the processes say

_WITNESS = """\
import os, signal, sys, time
def report(number, frame):
    os.write(1, b"%3d %27f\\n" % (number, time.monotonic()))  # 32 bytes
for number in map(int, sys.argv[1:]):
    signal.signal(number, report)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.read(0, 1)
"""


@contextmanager
def signals_held_back() -> Iterator[set[int]]:
    """Keep signals pending, to be taken one by one; give the mask that was there before.

    A handler would be simpler, but the child would then start with default dispositions where
    it should inherit ignored ones: SIGHUP under `nohup`, SIGINT in a script's background job.
    """
    mask = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())}
    child_handler = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_HELD_BACK, signal.SIGCHLD})
    try:
        yield mask
    finally:
        while pending := signal.sigpending() & _HELD_BACK:
            signal.sigwait(pending)  # came too late for the program
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGCHLD, child_handler)


class Witness:
    """A process in our own group that tells which signals went to the whole of it."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}  # signal → when it was last reported
        self._reports, reports = os.pipe()
        lifeline, self._lifeline = os.pipe()
        nowhere = os.open(os.devnull, os.O_RDWR)
        # Apart from a copy of ourselves it has another command line, so that a `pkill -f` that
        # means us alone misses it.
        numbers = [str(int(number)) for number in _HELD_BACK]
        self.pid = spawn(
            [sys.executable, "-I", "-S", "-c", _WITNESS, *numbers],
            os.environ,
            mask=_HELD_BACK,
            descriptors=(lifeline, reports, nowhere),
        )
        for descriptor in (reports, lifeline, nowhere):
            os.close(descriptor)

    def saw(self, number: int) -> bool:
        """Tell whether the witness got the signal that we have just got, and merge repetitions."""
        arrived = time.monotonic()
        deadline = arrived + _REPORT_SECONDS
        # An older report belongs to an earlier signal, handed on without waiting for it longer.
        while self._seen.get(number, 0.0) < arrived - _REPORT_SECONDS:
            patience = max(0.0, deadline - time.monotonic())
            if not select.select([self._reports], [], [], patience)[0]:
                return False
            lines = os.read(self._reports, 32 * 128).splitlines()
            if not lines:
                return False  # the witness is gone
            for line in lines:
                reported, moment = line.split()
                self._seen[int(reported)] = float(moment)
        del self._seen[number]
        if number in signal.sigpending():
            signal.sigwait({number})
        return True

    def dismiss(self) -> None:
        """End the witness."""
        os.close(self._lifeline)
        os.close(self._reports)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def spawn(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    mask: Collection[int],
    descriptors: Sequence[int] = (),
) -> int:
    """Start `command` as a child that does not outlive us, and return its process id.

    Not through `subprocess`, which closes the descriptors above 2 (a shell's `<(…)` is one).

    Args:
        command: The command line; its first item is the path of the executable.
        environ: The environment.
        mask: The signals that are blocked in the child.
        descriptors: What becomes its standard input, output and error; inherited if empty.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before it could be told
            os._exit(1)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execve(command[0], list(command), environ)
    except OSError as error:
        say(f"Cannot start {command[0]}: {error.strerror}.")
    finally:
        os._exit(127)


def wait(child: int, witness: Witness, look: Callable[[int], None]) -> int:
    """Hand signals on until the child has ended; return its exit status, or -N for signal N.

    ``look`` is called with the child's process id, again and again while nothing arrives.
    """
    while True:
        arrived = signal.sigtimedwait({*_HELD_BACK, signal.SIGCHLD}, _LOOK_SECONDS)
        if arrived is None:
            look(child)
            continue
        number = arrived.si_signo
        if number == signal.SIGCHLD:
            returncode = _reap(child)
            if returncode is not None:
                return returncode
        elif os.getpgid(child) != os.getpgrp() or not witness.saw(number):
            os.kill(child, number)


def _reap(child: int | None = None) -> int | None:
    """Take note of all descendants that have ended; return the child's return code if it has.

    If the terminal has stopped the child, stop too, until a shell lets both go on.
    """
    returncode = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return returncode
        if pid == 0:
            return returncode
        if pid != child:
            continue
        if not os.WIFSTOPPED(status):
            returncode = os.waitstatus_to_exitcode(status)
        elif os.WSTOPSIG(status) in _JOB_CONTROL:
            os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(child, signal.SIGCONT)


def end_leftovers(grace_seconds: float, kill_seconds: float, *, except_for: int) -> tuple[str, ...]:
    """End the descendants that are left in our session; return them as `PID (command)`.

    They first have some time to end by themselves; a signal to us cuts that short.
    """

    def wait_until_gone(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while _leftovers(except_for):
            if time.monotonic() >= deadline or signal.sigpending() & HANDED_ON:
                return False
            time.sleep(_POLL_SECONDS)
            _reap()
        return True

    if wait_until_gone(min(1.0, grace_seconds)):
        return ()
    if grace_seconds > 1.0:
        say(
            f"The program has ended; waiting up to {grace_seconds:g} s for "
            f"{', '.join(map(_describe, _leftovers(except_for)))}."
        )
        if wait_until_gone(grace_seconds - 1.0):
            return ()
    ended: dict[int, str] = {}
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _leftovers(except_for):
            ended.setdefault(pid, _describe(pid))
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue
        while pending := signal.sigpending() & HANDED_ON:
            signal.sigwait(pending)
        if wait_until_gone(kill_seconds):
            break
    return tuple(ended.values())


def _leftovers(except_for: int) -> list[int]:
    """Return the ids of our running descendants in our own session (Linux; else none)."""
    children: dict[int, list[int]] = {}
    running_here = set()
    session = os.getsid(0)
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            continue
        # PID (COMMAND) STATE PARENT GROUP SESSION …, where COMMAND may hold anything.
        state, parent, _, its_session = stat.rpartition(")")[2].split()[:4]
        children.setdefault(int(parent), []).append(pid)
        if state not in "ZX" and int(its_session) == session:
            running_here.add(pid)
    found = []
    to_visit = [os.getpid()]
    while to_visit:
        for pid in children.get(to_visit.pop(), ()):
            if pid != except_for:
                to_visit.append(pid)
                found.append(pid)
    return [pid for pid in found if pid in running_here]


def _describe(pid: int) -> str:
    """Return `PID (command line)`, shortened."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        line = ""
    return f"{pid} ({line[:60] or 'unknown'})"


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    """Call Linux's prctl(2); do nothing where there is none."""
    if not sys.platform.startswith("linux"):
        return
    try:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


def say(sentence: str) -> None:
    """Write a sentence to standard error, where there is one."""
    with suppress(OSError, ValueError):
        print(f"vllm-compat: {sentence}", file=sys.stderr, flush=True)
