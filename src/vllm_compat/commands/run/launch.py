"""Run an unmodified program under vllm_compat, in a child process watched until its end.

The child is the same interpreter with the program's own arguments; the only differences are the
bootstrap in front of `PYTHONPATH` and the variables of `vllm_compat.runtime.env`. It inherits standard
input, output and error and every other open descriptor, the working directory, the terminal and
the process group, so that a shell's job control, pipes, `nohup` and `timeout` treat launcher and
program as one.

What is left to do for the launcher:

*Signals.* A signal sent to the launcher alone (`kill PID`, a container's stop) is handed on. One
that goes to the whole process group (Ctrl-C in a terminal, `kill %1`, `timeout`, a batch system)
has reached the program already and must not arrive there twice, or it would interrupt the
program's own clean-up. The two look the same to the launcher, so it keeps a witness: a small
process in the same group that reports which signals it gets. When Ctrl-Z stops the program, the
launcher stops after it, so that the shell takes the terminal back when nobody else reads from it.

*Death.* If the launcher dies without a chance to act, the system sends SIGTERM to the program
(Linux: PR_SET_PDEATHSIG).

*Leftovers.* The launcher adopts orphaned descendants of the program (Linux:
PR_SET_CHILD_SUBREAPER). Those that stay in its session after the program has ended, such as
workers that hold GPU memory, get some time to leave, then SIGTERM, then SIGKILL, and are named.
Daemons with a session of their own are left alone.

*Progress.* The processes of the run say what they are doing (`vllm_compat.runtime.heartbeat`); the
launcher shows it and keeps it as JSON (`vllm_compat.commands.run.watch`).

*Servers.* Stock's launcher of a vLLM server is not supervised: its command is judged, and it takes the
place of this process (`vllm_compat.commands.run.serving`).

*Samples.* Before the program starts, torn and missing files in its output folder are found, so that
the run makes them again (`vllm_compat.features.resume_samples`). No second run gets the folder, from
before it is there until the last process that may write into it has ended
(`vllm_compat.commands.run.folder`).

*Verdict.* The last line on standard error says how the run ended, and why.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from vllm_compat.analysis.remote_code import remote_code_of, sentence
from vllm_compat.commands.run.folder import argument, output_folder, own_folder, start_index
from vllm_compat.commands.run.options import USAGE_STATUS, LaunchOptions
from vllm_compat.commands.run.processes import (
    Witness,
    adopt_orphans,
    end_leftovers,
    say,
    signals_held_back,
    spawn,
    wait,
)
from vllm_compat.commands.run.records import read_record
from vllm_compat.commands.run.serving import launcher_in, serve
from vllm_compat.commands.run.watch import (
    Watch,
    first_error,
    is_terminal,
    read_processes,
)
from vllm_compat.errors import UsageError
from vllm_compat.features import resume_samples
from vllm_compat.runtime import env


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a launched program ended.

    Attributes:
        returncode: Its exit status; -N where signal N ended it.
        seconds: From start to end.
        record: What its process wrote for us; None where the bootstrap never ran in it.
        leftovers: The processes that outlived it and were ended, each as `PID (command)`.
        cause: The first error that a process met, with the name of the process.
        of_worker: Whether that was a worker.
        built: Whether a process in which vllm_compat is in force has begun to build a generator.
        kept: Where the record and the log are, for people.
        resume: The command that goes on where this run has ended, if there is one.
        saved: What lies whole in the output folder, for people; told of a run that was killed, whose
            record is as old as its last writing.
        vanished: The folder of the record, where that is gone, and the record with it.
    """

    returncode: int
    seconds: float
    record: Mapping[str, object] | None
    leftovers: tuple[str, ...] = ()
    cause: str = ""
    of_worker: bool = False
    built: bool = True
    kept: str = ""
    resume: str = ""
    saved: str = ""
    vanished: str = ""

    @property
    def right(self) -> bool:
        """Whether the program has ended well, and with vllm_compat in force."""
        return self.returncode == 0 and self.record is not None and not self.record.get("failed")


def run(argv: Sequence[str], *, module: bool, options: LaunchOptions | None = None) -> int:
    """Run SCRIPT [ARGS…], or MODULE [ARGS…] as `python -m` would, and return its exit status.

    Meant to be the last thing that a single-threaded process does: signals are held back and
    children are reaped while it runs. Where a signal ended the program, the same signal ends
    the calling process, so that a shell sees 128 + N; `run` then doesn't return. What is wrong
    with the call itself is said on standard error and returned as status 2, before anything is
    started.

    Args:
        argv: The script's path or the module's name, and the arguments of the program.
        module: Whether `argv[0]` names a module.
        options: What else was asked for.
    """
    options = options or LaunchOptions()
    launcher = None if module or not argv else launcher_in(argv[0])
    try:
        if launcher is not None:
            return serve(argv, launcher, options)
        if options.dry_run:
            raise UsageError("--dry-run goes with stock's launcher of a vLLM server, and this is none.")
        command = _command(argv, module=module)
        written = output_folder(argv, module=module)
        folder = None if options.leave_folder else written
        _may_leave_out(folder, options)
        with (
            _record_file(options.record) as record,
            tempfile.TemporaryDirectory(
                prefix="vllm-compat-status-", ignore_cleanup_errors=True
            ) as status,
            _log_file(options.log) as log,
            own_folder(written, shared=options.leave_folder),
        ):
            environ = _environment(options, record)
            environ[env.VLLM_COMPAT_STATUS] = status
            with _made_ready(folder, start_index(argv[1:]), environ, options.leave_out):
                _say_remote_code(argv, options)
                watch = _watch(options, Path(status), argv)
                outcome = _supervise(command, environ, record, options, watch=watch, log=log)
            outcome = replace(
                outcome,
                kept=_kept(options),
                resume=_resume(folder, outcome.record) if not outcome.right else "",
                saved=_saved(folder) if outcome.returncode < 0 else "",
            )
            said = verdict(outcome)
            watch.end(_state(outcome), said, _exit_status(outcome))
    except UsageError as error:
        say(str(error))
        return USAGE_STATUS
    say(said)
    if outcome.returncode < 0:
        _end_by_signal(-outcome.returncode)
    return _exit_status(outcome)


@contextmanager
def _made_ready(
    folder: Path | None, start: int, environ: dict[str, str], leave_out: Sequence[int] = ()
) -> Iterator[None]:
    """Set torn samples and those behind a gap aside for a run; put back what it had no use for.

    Raises:
        UsageError: The folder cannot be read or changed.
    """
    if folder is None:
        yield
        return
    found = resume_samples.prepare(folder, start=start, leave_out=leave_out)
    if found is not None and str(found):
        say(str(found))
    environ[env.VLLM_COMPAT_RESUME] = resume_samples.tell(
        found or resume_samples.Folder(folder, next=start)
    )
    try:
        yield
    finally:  # a run that has failed must not hide a file either
        resume_samples.put_back(folder)


def verdict(outcome: Outcome) -> str:
    """Return the sentences that say how the run ended; they can be read in one way only."""
    record = outcome.record
    parts = [_ending(outcome), *_why(outcome)]
    if record is not None and record.get("plan"):
        count = len(record.get("adapters") or ())  # type: ignore[arg-type]
        parts.append(
            f"Plan {record['plan']}: {record.get('downstream')} on vLLM"
            f" {record.get('vllm')}{_word(record)}, {count} adapter{'' if count == 1 else 's'}."
        )
    if outcome.kept:
        parts.append(outcome.kept)
    if outcome.leftovers:
        count = len(outcome.leftovers)
        processes = "1 process" if count == 1 else f"{count} processes"
        parts.append(f"Ended {processes} that outlived the program: {', '.join(outcome.leftovers)}.")
    if outcome.resume:
        parts.append(outcome.resume)
    return " ".join(parts)


def _word(record: Mapping[str, Any]) -> str:
    """Return whether the pair is known, inferred or unknown, in brackets; empty in an older record."""
    told = record.get("knowledge")
    word = told.get("word") if isinstance(told, dict) else None
    return f" ({word})" if isinstance(word, str) else ""


def _ending(outcome: Outcome) -> str:
    """Return the sentence that says how the program ended."""
    record = outcome.record
    after = f"after {outcome.seconds:.1f} s"
    if outcome.returncode < 0:
        number = -outcome.returncode
        ended = f"run killed by {_signal_name(number)} (exit status {128 + number}) {after}."
        if number == signal.SIGKILL:
            ended += " If nobody sent it, the system ran out of memory: the kernel's log (dmesg) tells."
        return ended
    if record is not None and not record.get("started", True):
        return f"run refused before the program started, exit status {outcome.returncode}."
    if record is None and outcome.vanished:
        return (
            f"run failed: the program ended with exit status {outcome.returncode} {after}, and the"
            f" folder of its record ({outcome.vanished}) has vanished meanwhile, so that nothing tells"
            " whether its checks have passed."
        )
    if record is None:
        return (
            f"run failed: the program ended with exit status {outcome.returncode} {after}, but "
            "vllm_compat was never in force in it, so nothing that it wrote can be trusted; "
            "something keeps Python from importing the sitecustomize in "
            f"{env.bootstrap_directory()}, or from writing its record (a full or read-only disk)."
        )
    if outcome.returncode == 0 and record.get("failed"):
        return (
            f"run failed {after}: the program ended with exit status 0, as if all were well, but it"
            " has lost data (exit status 1)."
        )
    if outcome.returncode == 0:
        return f"run finished, exit status 0, {after}."
    return f"run failed with exit status {outcome.returncode} {after}."


def _why(outcome: Outcome) -> list[str]:
    """Return what was extracted, and where it went wrong what went wrong first."""
    record = outcome.record or {}
    summary = str(record.get("summary") or "")
    if outcome.saved:  # the record is behind: nobody wrote it when the run was killed
        told = [f"Its record, up to 10 s older, says: {summary}"] if summary else []
        return [outcome.saved, *(told if not outcome.cause else [f"First cause: {outcome.cause}."])]
    if outcome.right or not outcome.cause:
        return [sentence for sentence in (summary, _past_us(outcome)) if sentence]
    failure = str(record.get("failure") or "")
    if failure and not outcome.of_worker:
        return [summary]  # the same error, where it came up first
    parts = [f"First cause: {outcome.cause}."]
    if failure:
        parts.append(f"The program then saw: {failure.rstrip('.')}.")
    if record.get("extracted"):
        parts.append(f"Before it: {record['extracted']}.")
    return parts


def _past_us(outcome: Outcome) -> str:
    """Return the sentence on a program that has failed where nobody saw it, or nothing."""
    record = outcome.record or {}
    if outcome.built or outcome.returncode <= 0 or record.get("samples") or not record.get("plan"):
        return ""
    return (
        "No process that vllm_compat is in force in has built a generator; where the program starts"
        " another one that does, that one has not imported the sitecustomize in"
        f" {env.bootstrap_directory()}: leave out Python's -I, -E and -S there, and let a launcher that"
        " puts a sitecustomize of its own in front (opentelemetry-instrument) start `python -m"
        " vllm_compat run`, not the other way round."
    )


def _exit_status(outcome: Outcome) -> int:
    """Return the status that the launcher ends with, as a shell would see it."""
    if outcome.returncode < 0:
        return 128 - outcome.returncode
    return outcome.returncode or (0 if outcome.right else 1)


def _state(outcome: Outcome) -> str:
    if outcome.returncode < 0:
        return "killed"
    if outcome.record is not None and not outcome.record.get("started", True):
        return "refused"
    return "finished" if outcome.right else "failed"


def _say_remote_code(argv: Sequence[str], options: LaunchOptions) -> None:
    """Say before the program starts that the model it names brings code, and that this is run."""
    model = argument(argv[1:], "--target-model-path")
    if model and "remote_code" not in _without(options):
        names = remote_code_of(model)
        if names:
            say(sentence(model, names))


def _without(options: LaunchOptions) -> Sequence[str]:
    """Return the names that `apply()` is told to leave out."""
    without = options.apply.get("without")
    return without if isinstance(without, list) else ()


def _may_leave_out(folder: Path | None, options: LaunchOptions) -> None:
    """Refuse to leave samples out where that cannot be done.

    Raises:
        UsageError: Says why not.
    """
    if not options.leave_out:
        return
    if options.leave_folder:
        raise UsageError("--leave-out and --leave-folder cannot both be given.")
    if folder is None:
        raise UsageError(
            "--leave-out takes numbers of the data_<i>.pt that stock's offline script writes to its"
            " --output-dir, and this program is no such script; leave conversations out of its data."
        )
    needed = {"leave_out", "atomic_save"}.intersection(_without(options))
    if needed:
        raise UsageError(f"--leave-out needs {sorted(needed)[0]}, which --without leaves out.")


def _resume(folder: Path | None, record: Mapping[str, object] | None) -> str:
    """Return the sentence that says how to go on; nothing where no folder is known."""
    if folder is None:
        return ""
    command, bad = list(sys.orig_argv), (record or {}).get("bad_sample")
    same = "run the same again"
    if bad is not None and "run" in command:
        command.insert(command.index("run") + 1, f"--leave-out={bad}")
        same += f", without the sample that it cannot do (data_{bad}.pt)"
    return f"What it has saved is whole. To do the rest, and no more, {same}: {shlex.join(command)}"


def _saved(folder: Path | None) -> str:
    """Return the sentence that counts the whole files of a folder; nothing where there is none."""
    if folder is None or not folder.is_dir():
        return ""
    count = resume_samples.count_whole(folder)
    return f"{folder} holds {count} whole sample{'' if count == 1 else 's'}."


def _kept(options: LaunchOptions) -> str:
    """Return the sentence that says where the record and the log are."""
    parts = []
    if options.record is not None:
        parts.append(f"the record is in {options.record}")
    if options.log is not None:
        parts.append(f"the program's output is in {options.log}")
    text = " and ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _watch(options: LaunchOptions, folder: Path, argv: Sequence[str]) -> Watch:
    """Return what looks at the run.

    Raises:
        UsageError: the status file cannot be written.
    """
    if options.status_file is not None:
        try:
            options.status_file.touch()
        except OSError as error:
            raise UsageError(
                f"The status file cannot be written to {options.status_file}: {error.strerror}."
            ) from None
    return Watch(
        folder,
        status_file=options.status_file,
        stream=sys.stderr,
        in_place=options.log is not None and is_terminal(sys.stderr),
        every=options.every,
        command=argv,
    )


@contextmanager
def _log_file(wanted: Path | None) -> Iterator[int | None]:
    """Give the descriptor of the log, opened to append, or None.

    Raises:
        UsageError: it can't be written.
    """
    if wanted is None:
        yield None
        return
    try:
        descriptor = os.open(wanted, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise UsageError(f"The log cannot be written to {wanted}: {error.strerror}.") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _command(argv: Sequence[str], *, module: bool) -> list[str]:
    """Return the command line of the child.

    Raises:
        UsageError: there is nothing to run, or this interpreter would not run the bootstrap.
    """
    if not argv or not argv[0]:
        raise UsageError(f"No {'module' if module else 'script'} was given to run.")
    program = argv[0]
    if not module and program != "-":
        if program.startswith("-"):
            raise UsageError(f"{program} is an option, not a script: name a script, or -m and a module.")
        if not os.path.exists(program):
            raise UsageError(
                f"The script {program} does not exist (looked in {os.getcwd()}); nothing was started."
            )
        if other := _no_python(program):
            raise UsageError(
                f"{program} is no Python program ({other}): let it start the launcher, as in"
                f" `{os.path.basename(program)} … python -m vllm_compat run SCRIPT`; nothing was"
                " started."
            )
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise UsageError(
            "Python's options -I, -E and -S keep vllm_compat out of the program's processes: "
            "start the launcher without them."
        )
    if not sys.executable:
        raise UsageError("This interpreter does not know its own path, so it can start no child.")
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.__stdout__, "write_through", False):
        flags.append("-u")  # leaves no trace in sys.flags
    return [sys.executable, *flags, *(["-m"] if module else []), *argv]


def _no_python(program: str) -> str:
    """Return what a file is that Python cannot run, or nothing; Python tells what it cannot read."""
    try:
        with open(program, "rb") as file:
            first = file.readline(200) if os.path.isfile(program) else b""
    except OSError:
        return ""
    if first.startswith(b"\x7fELF"):
        return "it is machine code"
    interpreter = first[2:].decode(errors="replace").strip()
    if first.startswith(b"#!") and "py" not in interpreter:
        return f"it is run by {interpreter}"
    return ""


def _environment(options: LaunchOptions, record: Path) -> dict[str, str]:
    """Return the child's environment.

    Raises:
        UsageError: the bootstrap can't be put on `PYTHONPATH`, or is not installed.
    """
    bootstrap = env.bootstrap_directory()
    if os.pathsep in bootstrap:
        raise UsageError(
            f'vllm_compat is installed in {bootstrap}, and PYTHONPATH cannot hold a "{os.pathsep}"'
            ": install it elsewhere."
        )
    if not os.path.isfile(os.path.join(bootstrap, "sitecustomize.py")):
        raise UsageError(
            f"The file sitecustomize.py is missing from {bootstrap}: install vllm_compat again."
        )
    environ = env.child_environment(os.environ)
    environ[env.VLLM_COMPAT_MAIN] = json.dumps(dict(options.apply))
    environ[env.VLLM_COMPAT_RECORD] = str(record)
    return environ


@contextmanager
def _record_file(wanted: Path | None) -> Iterator[Path]:
    """Give the path of the record, where no file exists yet; take a temporary one away again.

    Raises:
        UsageError: the wanted file can't be written.
    """
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="vllm-compat-", ignore_cleanup_errors=True) as directory:
            yield Path(directory, "record.json")
        return
    path = Path(os.path.abspath(wanted))
    try:
        path.unlink(missing_ok=True)
        path.touch()
        path.unlink()
    except OSError as error:
        raise UsageError(f"The record cannot be written to {wanted}: {error.strerror}.") from None
    yield path


def _supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    record: Path,
    options: LaunchOptions,
    *,
    watch: Watch,
    log: int | None,
) -> Outcome:
    """Start the child, hand signals on until it ends, and end what it leaves behind."""
    started = time.monotonic()
    adopt_orphans()
    with signals_held_back() as mask:
        witness = Witness()
        descriptors = () if log is None else (0, log, log)
        child = spawn(command, environ, mask=mask, descriptors=descriptors)
        returncode = wait(child, witness, watch.look)
        seconds = time.monotonic() - started
        leftovers = end_leftovers(options.grace_seconds, options.kill_seconds, except_for=witness.pid)
        witness.dismiss()
    processes = read_processes(watch.folder)
    failed = first_error(processes)
    return Outcome(
        returncode=returncode,
        seconds=seconds,
        record=read_record(record, watch.folder, processes),
        leftovers=leftovers,
        cause=f"{failed.name} (pid {failed.pid}): {failed.said['error']}" if failed else "",
        of_worker=failed is not None and failed.said.get("role") == "worker",
        vanished="" if record.parent.is_dir() else str(record.parent),
        built=any("model" in process.said for process in processes),
    )


def _end_by_signal(number: int) -> NoReturn:
    """End this process by the signal that ended the program."""
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left its core already
    except (ImportError, OSError, ValueError):
        pass
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _signal_name(number: int) -> str:
    """Return the signal's name, or its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
