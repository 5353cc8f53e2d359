"""Tests of the launcher with real processes, and a FAKE vllm_compat that only writes a log.

The fake (tests/programs/fake_vllm_compat) stands for `apply()` and the plugin; launcher, doors and
bootstrap are the real ones.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import IO, Any

import pytest

from vllm_compat.commands.run.launch import Outcome, verdict

PROGRAMS = Path(__file__).parents[1] / "programs"
FAKE = PROGRAMS / "fake_vllm_compat"
LAUNCH = PROGRAMS / "launch.py"
PATIENCE = 60.0
"""Seconds to wait for what is sure to come: on a machine that others use too, ten are not enough."""
BOOTSTRAP = Path(__file__).parents[2] / "src" / "vllm_compat" / "entry" / "bootstrap"

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="process tests are written for Linux"
)


class Launcher:
    """Runs programs that it writes into its folder, with and without the launcher."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_file = folder / "fake.log"
        self.started: list[subprocess.Popen[str]] = []
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHON"))},
            "PYTHONPATH": str(FAKE),
            "PYTHONDONTWRITEBYTECODE": "1",
            "FAKE_LOG": str(self.log_file),
        }

    def write(self, source: str, name: str = "program.py") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))
        return path

    def command(self, *program: object, **options: object) -> list[str]:
        return [sys.executable, str(LAUNCH), json.dumps(options), *map(str, program)]

    def run(
        self, *program: object, stdin: str = "", cwd: Path | None = None, **options: object
    ) -> subprocess.CompletedProcess[str]:
        return self.finish(self.command(*program, **options), stdin=stdin, cwd=cwd)

    def run_bare(self, *program: object, **keywords: Any) -> subprocess.CompletedProcess[str]:
        return self.finish([sys.executable, *map(str, program)], **keywords)

    def finish(
        self, command: list[str], *, stdin: str = "", cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            input=stdin,
            cwd=cwd,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=30,
        )

    def start(self, *program: object, **options: object) -> subprocess.Popen[str]:
        """Start the launcher in a session of its own, so that tests can signal its group."""
        return self.start_command(self.command(*program, **options))

    def start_command(self, command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        """End what a failed test has left behind."""
        for process in self.started:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def log(self) -> list[str]:
        return self.log_file.read_text().splitlines() if self.log_file.exists() else []


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def line_from(stream: IO[str] | None) -> str:
    assert stream is not None
    assert select.select([stream], [], [], PATIENCE)[0], "no line came"
    return stream.readline().rstrip("\n")


SHOW = """\
    import json, os, sys
    print(json.dumps([__name__, sys.argv, sys.path[0], os.getcwd(), sys.flags.optimize,
                      sys.stdout.write_through]))
    sys.exit(3)
"""


# What the program sees


def test_a_script_sees_what_it_would_see_without_the_launcher(launcher: Launcher) -> None:
    program = launcher.write(SHOW, "somewhere/program.py")
    elsewhere = launcher.folder / "elsewhere"
    elsewhere.mkdir()
    arguments = ("../somewhere/program.py", "--flag", "", "a b", "-m", "--", "é")
    launched = launcher.run(*arguments, cwd=elsewhere)
    bare = launcher.run_bare(*arguments, cwd=elsewhere)
    assert (launched.returncode, launched.stdout) == (bare.returncode, bare.stdout)
    assert json.loads(launched.stdout)[2] == str(program.parent)
    assert launched.stderr.startswith("vllm-compat: run failed with exit status 3 after")


def test_a_script_behind_a_symbolic_link_finds_its_neighbours(launcher: Launcher) -> None:
    launcher.write("name = 'neighbour'", "real/neighbour.py")
    launcher.write("import neighbour; print(neighbour.name)", "real/program.py")
    link = launcher.folder / "link.py"
    link.symlink_to("real/program.py")
    assert launcher.run(link).stdout == "neighbour\n"
    assert f"path0={launcher.folder / 'real'}" in launcher.log()[1]


def test_a_module_sees_what_it_would_see_without_the_launcher(launcher: Launcher) -> None:
    launcher.write(SHOW, "package/__main__.py")
    arguments = ("-m", "package", "-x", "y")
    launched = launcher.run(*arguments, cwd=launcher.folder)
    bare = launcher.run_bare(*arguments, cwd=launcher.folder)
    assert (launched.returncode, launched.stdout) == (bare.returncode, bare.stdout)
    assert json.loads(launched.stdout)[2] == str(launcher.folder)
    assert f"path0={launcher.folder}" in launcher.log()[1]


def test_a_folder_with_a_main_file_runs(launcher: Launcher) -> None:
    launcher.write("print('main file')", "folder/__main__.py")
    assert launcher.run(launcher.folder / "folder").stdout == "main file\n"
    assert f"path0={launcher.folder / 'folder'}" in launcher.log()[1]


def test_options_of_the_interpreter_go_to_the_program(launcher: Launcher) -> None:
    program = launcher.write(SHOW)
    command = launcher.command(program)
    launched = launcher.finish([command[0], "-O", "-u", *command[1:]])
    assert json.loads(launched.stdout)[-2:] == [1, True]


def test_standard_input_reaches_the_program(launcher: Launcher) -> None:
    program = launcher.write("import sys; print(sys.stdin.read().upper(), end='')")
    assert launcher.run(program, stdin="one\ntwo\n").stdout == "ONE\nTWO\n"


def test_a_program_is_read_from_standard_input(launcher: Launcher) -> None:
    assert launcher.run("-", "a", stdin="import sys; print(sys.argv)").stdout == "['-', 'a']\n"


def test_further_open_descriptors_reach_the_program(launcher: Launcher) -> None:
    program = launcher.write("import sys; print(open(sys.argv[1]).read())")
    reader, writer = os.pipe()
    os.write(writer, b"through a pipe")
    os.close(writer)
    done = subprocess.run(
        launcher.command(program, f"/dev/fd/{reader}"),
        env=launcher.environ,
        capture_output=True,
        text=True,
        pass_fds=[reader],
        timeout=30,
    )
    os.close(reader)
    assert done.stdout == "through a pipe\n"


def test_the_program_inherits_no_blocked_signals(launcher: Launcher) -> None:
    program = launcher.write("import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))")
    assert launcher.run(program).stdout == launcher.run_bare(program).stdout == "set()\n"


# What goes wrong before the start


def test_a_missing_script_is_one_sentence_and_starts_nothing(launcher: Launcher) -> None:
    done = launcher.run("no/such.py", cwd=launcher.folder)
    assert done.returncode == 2
    assert done.stderr == (
        f"vllm-compat: The script no/such.py does not exist (looked in {launcher.folder}); "
        "nothing was started.\n"
    )
    assert launcher.log() == []


def test_what_is_no_python_program_is_one_sentence_and_starts_nothing(launcher: Launcher) -> None:
    """It ended in a SyntaxError of Python's, told as the first cause."""
    shell = launcher.write("#!/bin/bash\npython program.py\n", "start.sh")
    for program, what in (
        (os.path.realpath(sys.executable), "machine code"),
        (shell, "run by /bin/bash"),
    ):
        done = launcher.run(program)
        assert done.returncode == 2
        assert done.stderr == (
            f"vllm-compat: {program} is no Python program (it is {what}): let it start the launcher,"
            f" as in `{Path(program).name} … python -m vllm_compat run SCRIPT`; nothing was started.\n"
        )
        assert launcher.log() == []
    for first in ("#!/usr/bin/env python3", "#!/usr/bin/pypy3", "", "# -*- coding: utf-8 -*-"):
        assert launcher.run(launcher.write(f"{first}\nprint(1)\n")).stdout == "1\n"


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ([], "No script was given to run."),
        (["-m"], "No module was given to run."),
        (["-c", "pass"], "-c is an option, not a script: name a script, or -m and a module."),
    ],
)
def test_a_wrong_call_is_one_sentence(launcher: Launcher, program: list[str], sentence: str) -> None:
    done = launcher.run(*program)
    assert (done.returncode, done.stderr) == (2, f"vllm-compat: {sentence}\n")


def test_an_interpreter_that_ignores_the_environment_is_refused(launcher: Launcher) -> None:
    program = launcher.write("")
    code = (
        f"import sys; sys.path.insert(0, {str(FAKE)!r}); from vllm_compat.commands.run import launch; "
    )
    code += f"sys.exit(launch.run([{str(program)!r}], module=False))"
    done = launcher.run_bare("-I", "-c", code)
    assert done.returncode == 2
    assert done.stderr.startswith("vllm-compat: Python's options -I, -E and -S keep")


def test_a_record_that_cannot_be_written_is_one_sentence(launcher: Launcher) -> None:
    done = launcher.run(launcher.write(""), record="/no/such/folder/record.json")
    assert done.returncode == 2
    assert done.stderr == (
        "vllm-compat: The record cannot be written to /no/such/folder/record.json: No such file "
        "or directory.\n"
    )


def test_the_program_does_not_start_when_apply_refuses(launcher: Launcher) -> None:
    program = launcher.write("print('started')")
    done = launcher.run(program, apply={"fail": "refuse"})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "vllm-compat: run refused before the program started, exit status 1. This pair does not work.\n"
    )


def test_an_internal_error_of_apply_shows_its_traceback_and_starts_nothing(
    launcher: Launcher,
) -> None:
    done = launcher.run(launcher.write("print('started')"), apply={"fail": "bug"})
    assert (done.returncode, done.stdout) == (1, "")
    assert "ZeroDivisionError: a bug" in done.stderr
    assert "Fatal Python error" not in done.stderr
    assert "exit status 1. An internal error (ZeroDivisionError, see the lines above)" in done.stderr


def test_an_interrupt_during_apply_ends_like_any_interrupt(launcher: Launcher) -> None:
    done = launcher.run(launcher.write("print('started')"), apply={"fail": "interrupt"})
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")
    assert "Fatal Python error" not in done.stderr


# How it ends


def test_success_is_said(launcher: Launcher) -> None:
    done = launcher.run(launcher.write("print('out')"))
    assert (done.returncode, done.stdout) == (0, "out\n")
    assert re.fullmatch(r"vllm-compat: run finished, exit status 0, after \d+\.\d s\.\n", done.stderr)


def test_the_summary_of_the_record_is_shown_and_the_record_kept(launcher: Launcher) -> None:
    path = launcher.folder / "record.json"
    path.write_text("an older run's")
    record = {"summary": "13 samples.", "more": [1, 2]}
    done = launcher.run(launcher.write(""), record=str(path), apply={"record": record})
    assert done.stderr.endswith(f" s. 13 samples. The record is in {path}.\n")
    assert json.loads(path.read_text()) == record


def test_no_temporary_record_stays_behind(launcher: Launcher) -> None:
    launcher.environ["TMPDIR"] = str(launcher.folder / "tmp")
    (launcher.folder / "tmp").mkdir()
    launcher.run(launcher.write("import os; print(os.environ['VLLM_COMPAT_RECORD'])"))
    assert list((launcher.folder / "tmp").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGINT])
def test_a_program_ended_by_a_signal_ends_the_launcher_by_it(
    launcher: Launcher, number: signal.Signals
) -> None:
    program = launcher.write(
        f"""\
        import os, resource, signal
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal({int(number)}, signal.SIG_DFL) if {int(number)} != 9 else None
        os.kill(os.getpid(), {int(number)})
        """
    )
    done = launcher.run(program)
    assert done.returncode == -number
    assert f"run killed by {number.name} (exit status {128 + number})" in done.stderr


def test_after_a_kill_the_whole_files_are_counted_and_not_what_the_record_last_said(
    launcher: Launcher,
) -> None:
    program = launcher.write(
        """\
        # VllmHiddenStatesGenerator, --output-dir, data_0.pt: known as stock's script by such words
        import os, sys, zipfile
        folder = sys.argv[2]
        os.makedirs(folder)
        for number in range(5):
            with zipfile.ZipFile(f"{folder}/data_{number}.pt", "w") as archive:
                archive.writestr("data", b"rows")
        with open(f"{folder}/data_5.pt", "wb") as torn:
            torn.write(b"PK")
        os.kill(os.getpid(), 9)
        """
        + STOCK
    )
    folder = launcher.folder / "states"
    record = {"summary": "1 samples (7 tokens)."}
    done = launcher.run(program, "--output-dir", folder, apply={"record": record})
    assert f"{folder} holds 5 whole samples. Its record, up to 10 s older, says: 1 " in done.stderr


def test_a_shell_sees_128_plus_the_signal(launcher: Launcher) -> None:
    program = launcher.write("import os; os.kill(os.getpid(), 9)")
    done = launcher.finish(["sh", "-c", '"$@"; echo $?', "sh", *launcher.command(program)])
    assert done.stdout == "137\n"


def test_a_program_that_never_came_through_the_bootstrap_is_no_success(launcher: Launcher) -> None:
    python = launcher.write(f'#!/bin/sh\nexec {sys.executable} -E "$@"\n', "python-E")
    python.chmod(0o755)
    program = launcher.write("print('ran')")
    code = f"import sys; sys.executable = {str(python)!r}; from vllm_compat.commands.run import launch; "
    code += f"sys.exit(launch.run([{str(program)!r}], module=False))"
    done = launcher.run_bare("-c", code)
    assert (done.returncode, done.stdout) == (1, "ran\n")
    assert "vllm_compat was never in force in it, so nothing that it wrote" in done.stderr


def test_a_record_whose_folder_vanishes_is_not_told_as_one_that_never_was(launcher: Launcher) -> None:
    """Seen: with TMPDIR gone, the verdict blamed the bootstrap of a run that it had been in force in."""
    program = launcher.write(
        """
        import os, shutil
        shutil.rmtree(os.path.dirname(os.environ["VLLM_COMPAT_RECORD"]))
        """
    )
    done = launcher.run(program)
    assert done.returncode == 1
    assert "the folder of its record (" in done.stderr
    assert "has vanished meanwhile" in done.stderr
    assert "never in force" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (
            Outcome(returncode=0, seconds=2.04, record={}),
            "run finished, exit status 0, after 2.0 s.",
        ),
        (
            Outcome(returncode=1, seconds=2, record={"summary": "Worker 3 died."}),
            "run failed with exit status 1 after 2.0 s. Worker 3 died.",
        ),
        (
            Outcome(returncode=-15, seconds=2, record=None),
            "run killed by SIGTERM (exit status 143) after 2.0 s.",
        ),
        (
            Outcome(returncode=-63, seconds=2, record={}, leftovers=("7 (w)",)),
            "run killed by signal 63 (exit status 191) after 2.0 s."
            " Ended 1 process that outlived the program: 7 (w).",
        ),
    ],
)
def test_verdicts(outcome: Outcome, text: str) -> None:
    assert verdict(outcome) == text


# Signals

NOTES_SIGNALS = """\
    import os, signal, sys
    def note(number, frame):
        os.write(1, signal.Signals(number).name.encode() + b"\\n")  # print isn't reentrant
    for number in (1, 2, 3, 10, 12, 15):
        signal.signal(number, note)
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(5))
    print(os.getpid(), flush=True)
    while True:
        signal.pause()
"""
HANDED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTERM")


@pytest.mark.parametrize("to", ["launcher", "group"])
def test_each_signal_arrives_once(launcher: Launcher, to: str) -> None:
    process = launcher.start(launcher.write(NOTES_SIGNALS))
    child = int(line_from(process.stdout))
    arrived = []
    for name in HANDED_ON:
        number = getattr(signal, name)
        os.kill(process.pid, number) if to == "launcher" else os.killpg(process.pid, number)
        arrived.append(line_from(process.stdout))
    time.sleep(0.5)  # for what must not come
    os.kill(child, signal.SIGALRM)
    rest, errors = process.communicate(timeout=PATIENCE)
    assert (tuple(arrived), rest) == (HANDED_ON, "")
    assert process.returncode == 5, errors


def test_a_repeated_signal_arrives_again(launcher: Launcher) -> None:
    process = launcher.start(launcher.write(NOTES_SIGNALS))
    child = int(line_from(process.stdout))
    for to in (os.killpg, os.kill, os.killpg):
        to(process.pid, signal.SIGTERM)
        assert line_from(process.stdout) == "SIGTERM"
        time.sleep(0.3)
    os.kill(child, signal.SIGALRM)
    assert process.communicate(timeout=PATIENCE)[0] == ""


def test_a_program_that_left_the_group_still_gets_the_groups_signals(launcher: Launcher) -> None:
    program = launcher.write("import os\nos.setpgid(0, 0)\n" + dedent(NOTES_SIGNALS))
    process = launcher.start(program)
    child = int(line_from(process.stdout))
    os.killpg(process.pid, signal.SIGTERM)
    assert line_from(process.stdout) == "SIGTERM"
    os.kill(child, signal.SIGALRM)
    process.communicate(timeout=PATIENCE)


def test_an_unhandled_termination_ends_both(launcher: Launcher) -> None:
    process = launcher.start(launcher.write("import time; print('up', flush=True); time.sleep(60)"))
    assert line_from(process.stdout) == "up"
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGTERM
    assert "run killed by SIGTERM (exit status 143)" in errors


def test_under_nohup_a_hangup_ends_nothing(launcher: Launcher) -> None:
    program = launcher.write(
        """\
        import signal
        signal.signal(signal.SIGALRM, lambda *_: None)
        print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, flush=True)
        signal.pause()
        print("survived")
        """
    )
    process = launcher.start_command(["nohup", *launcher.command(program)])
    assert line_from(process.stdout) == "True"
    os.killpg(process.pid, signal.SIGHUP)
    os.kill(process.pid, signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    os.kill(child_of(process.pid, "program.py"), signal.SIGALRM)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output) == (0, "survived\n")
    assert "run finished, exit status 0" in errors


def child_of(pid: int, name: str) -> int:
    """Return the child of `pid` whose command line has `name` in it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (child,) = (c for c in children if name in Path(f"/proc/{c}/cmdline").read_text())
    return int(child)


def test_the_program_is_terminated_when_the_launcher_is_killed(launcher: Launcher) -> None:
    process = launcher.start(launcher.write(NOTES_SIGNALS))
    child = int(line_from(process.stdout))
    process.kill()
    assert line_from(process.stdout) == "SIGTERM"
    os.kill(child, signal.SIGALRM)
    process.communicate(timeout=PATIENCE)


# Terminals


class Terminal:
    """An interactive bash with a terminal and job control."""

    def __init__(self, launcher: Launcher) -> None:
        pid, self.descriptor = pty.fork()
        if pid == 0:
            environ = {**launcher.environ, "PS1": "", "TERM": "dumb"}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], environ)
        self.pid = pid
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def expect(self, pattern: str) -> str:
        """Wait until the screen shows `pattern`, and return all up to its end."""
        deadline = time.monotonic() + PATIENCE
        while not (match := re.search(pattern, self.seen, re.MULTILINE)):
            patience = max(0.0, deadline - time.monotonic())
            assert select.select([self.descriptor], [], [], patience)[0], self.seen
            self.seen += os.read(self.descriptor, 4096).decode(errors="replace")
        shown, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return shown

    def close(self) -> None:
        os.close(self.descriptor)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.fixture
def terminal(launcher: Launcher) -> Iterator[Terminal]:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    terminal = Terminal(launcher)
    yield terminal
    terminal.close()


def as_line(command: list[str]) -> str:
    return " ".join(f"'{word}'" for word in command) + "\n"


def test_ctrl_c_in_a_terminal_interrupts_the_program_once(
    launcher: Launcher, terminal: Terminal
) -> None:
    program = launcher.write(
        """\
        import time
        try:
            print("up", flush=True)
            time.sleep(30)
        except KeyboardInterrupt:
            time.sleep(1)  # a second interrupt would end this
            print("cleaned up", flush=True)
            raise
        """
    )
    terminal.type(as_line(launcher.command(program)))
    terminal.expect("^up")
    terminal.type("\x03")
    terminal.expect("cleaned up")
    terminal.expect(r"vllm-compat: run killed by SIGINT \(exit status 130\)")
    terminal.type("echo status $?\n")
    terminal.expect("^status 130")


def test_a_program_can_be_stopped_resumed_and_typed_to(launcher: Launcher, terminal: Terminal) -> None:
    program = launcher.write("print('up', flush=True); print('got ' + input())")
    terminal.type(as_line(launcher.command(program)))
    terminal.expect("^up")
    terminal.type("\x1a")
    terminal.expect("Stopped")
    terminal.type("echo in between\n")
    terminal.expect("^in between")
    terminal.type("fg\n")
    terminal.type("hello\n")
    terminal.expect("got hello")
    terminal.expect("vllm-compat: run finished, exit status 0")


def test_stopping_the_launcher_stops_the_program(launcher: Launcher, terminal: Terminal) -> None:
    program = launcher.write("import os; print(os.getpid(), flush=True); input()")
    terminal.type(as_line(launcher.command(program)))
    child = int(terminal.expect(r"^\d+\r?\n").splitlines()[-1])
    parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGTSTP)
    terminal.expect("Stopped")
    assert Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    terminal.type("fg\n")
    terminal.type("\n")
    terminal.expect("vllm-compat: run finished, exit status 0")


def test_killing_the_job_reaches_the_program_once(launcher: Launcher, terminal: Terminal) -> None:
    program = launcher.write(NOTES_SIGNALS)
    terminal.type(as_line(launcher.command(program)).rstrip() + " &\n")
    child = int(terminal.expect(r"^\d+\r?\n").splitlines()[-1])
    terminal.type(f"kill %1; sleep 0.6; kill -ALRM {child}; wait %1\n")
    shown = terminal.expect("vllm-compat: run failed with exit status 5")
    assert shown.count("SIGTERM") == 1


# What outlives the program


def test_leftover_processes_are_ended_and_named(launcher: Launcher) -> None:
    program = launcher.write(
        """\
        import subprocess, sys
        code = "import signal, sys; {}; print(1, flush=True); signal.pause()"
        stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
        for line in "pass", stubborn:
            command = [sys.executable, "-c", code.format(line), "worker"]
            child = subprocess.Popen(command, stdout=subprocess.PIPE)
            child.stdout.readline()
            print(child.pid)
        """
    )
    done = launcher.run(program, grace_seconds=0.3, kill_seconds=0.5)
    first, second = map(int, done.stdout.split())
    assert done.returncode == 0
    assert not is_running(first)
    assert not is_running(second)
    assert "Ended 2 processes that outlived the program: " in done.stderr
    assert f"{first} ({sys.executable[:30]}" in done.stderr
    assert f"{second} ({sys.executable[:30]}" in done.stderr


def test_processes_of_a_killed_program_are_ended(launcher: Launcher) -> None:
    program = launcher.write(
        """\
        import os, subprocess, sys
        print(subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL).pid, flush=True)
        os.kill(os.getpid(), 9)
        """
    )
    done = launcher.run(program, grace_seconds=0.1)
    assert done.returncode == -signal.SIGKILL
    assert not is_running(int(done.stdout))
    assert f"Ended 1 process that outlived the program: {int(done.stdout)} (sleep 60)" in done.stderr


def test_processes_that_end_by_themselves_are_not_mentioned(launcher: Launcher) -> None:
    program = launcher.write("import subprocess; subprocess.Popen(['sleep', '0.3'])")
    done = launcher.run(program)
    assert re.fullmatch(r"vllm-compat: run finished, .* s\.\n", done.stderr)


def test_the_wait_for_leftover_processes_can_be_cut_short(launcher: Launcher) -> None:
    program = launcher.write(
        """\
        import subprocess
        quiet = subprocess.DEVNULL
        subprocess.Popen(["sleep", "60"], stdout=quiet, stderr=quiet)
        """
    )
    process = launcher.start(program, grace_seconds=60)
    line = line_from(process.stderr)
    assert re.fullmatch(
        r"vllm-compat: The program has ended; waiting up to 60 s for \d+ \(sleep 60\)\.", line
    )
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "Ended 1 process that outlived the program" in errors


def test_a_daemon_in_a_session_of_its_own_is_left_alone(launcher: Launcher) -> None:
    program = launcher.write(
        """\
        import subprocess
        quiet = subprocess.DEVNULL
        print(subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=quiet,
                               stderr=quiet).pid)
        """
    )
    done = launcher.run(program, grace_seconds=0.1)
    daemon = int(done.stdout)
    assert is_running(daemon)
    os.kill(daemon, signal.SIGKILL)
    assert "outlived" not in done.stderr


# The bootstrap in each process


def test_apply_runs_once_in_the_programs_process_and_before_it(launcher: Launcher) -> None:
    program = launcher.write(
        """\
        import os, sys
        print(os.getpid(), "VLLM_COMPAT_MAIN" in os.environ, os.environ["VLLM_COMPAT_PLAN"])
        from vllm_compat import note
        note("main")
        """
    )
    done = launcher.run(program)
    pid, *rest = done.stdout.split(maxsplit=2)
    assert rest == ["False", "fake plan\n"]
    assert launcher.log() == [
        f"apply {pid}",
        f"path0={launcher.folder} {pid}",
        f"main {pid}",
    ]


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_children_of_multiprocessing_get_the_door_before_the_main_module(
    launcher: Launcher, method: str
) -> None:
    program = launcher.write(
        f"""\
        import multiprocessing, os
        from vllm_compat import note
        note(f"import {{__name__}}")
        def work():
            note("work")
            print(os.environ["VLLM_COMPAT_PLAN"])
        if __name__ == "__main__":
            process = multiprocessing.get_context("{method}").Process(target=work)
            process.start()
            process.join()
            note("end")
        """
    )
    done = launcher.run(program)
    assert (done.returncode, done.stdout) == (0, "fake plan\n"), done.stderr
    events = [line.split()[:-1] for line in launcher.log()]
    pids = [line.split()[-1] for line in launcher.log()]
    child = [["import", "__mp_main__"], ["work"]]
    expected = {
        "spawn": [["load"], *child],
        "forkserver": [["load"], *child],
        "fork": [["work"]],
    }[method]
    assert events == [
        ["apply"],
        [f"path0={launcher.folder}"],
        ["import", "__main__"],
        *expected,
        ["end"],
    ]
    if method == "spawn":
        assert pids[3] == pids[4] == pids[5] != pids[0]


def test_the_whole_tree_of_processes_gets_the_door(launcher: Launcher) -> None:
    leaf = "import os; print(os.environ['VLLM_COMPAT'], os.getppid())"
    program = launcher.write(
        f"""\
        import os, subprocess, sys
        subprocess.run(["sh", "-c", '"$0" -c "$1"; true', sys.executable, {leaf!r}], check=True)
        """
    )
    done = launcher.run(program)
    assert done.stdout.startswith("1 ")
    assert [line.split()[0] for line in launcher.log()][2:] == ["load"]


def test_helpers_and_interpreters_without_environment_are_left_alone(launcher: Launcher) -> None:
    worker = launcher.write("", "_inductor/compile_worker/__main__.py")
    program = launcher.write(
        f"""\
        import subprocess, sys
        from multiprocessing import resource_tracker
        resource_tracker.ensure_running()
        for arguments in (["-m", "pip", "--version"], ["-mpip", "--version"], ["-I", "-c", ""],
                          ["-S", "-c", ""], ["-E", "-c", ""], [{str(worker)!r}, "--workers=2"]):
            subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
        """
    )
    done = launcher.run(program)
    assert done.returncode == 0
    assert [line.split()[0] for line in launcher.log()][2:] == []


def test_arguments_that_look_like_a_helper_do_not_make_one(launcher: Launcher) -> None:
    program = launcher.write(
        """\
        import subprocess, sys
        if sys.argv[1:] != ["pip"]:
            subprocess.run([sys.executable, __file__, "pip"], check=True)
        """
    )
    launcher.run(program)
    assert [line.split()[0] for line in launcher.log()][2:] == ["load"]


def test_a_failing_plugin_does_not_disturb_a_process(launcher: Launcher) -> None:
    launcher.environ["FAKE_LOAD"] = "fail"
    program = launcher.write(
        """\
        import subprocess, sys
        subprocess.run([sys.executable, "-c", "print('undisturbed')"], check=True)
        """
    )
    done = launcher.run(program)
    assert done.stdout == "undisturbed\n"
    assert done.stderr.startswith("vllm-compat: run finished, exit status 0")
    assert [line.split()[0] for line in launcher.log()][2:] == ["load"]


def test_a_process_outside_the_run_is_untouched(launcher: Launcher) -> None:
    assert (BOOTSTRAP / "sitecustomize.py").is_file(), "or nothing is tried here"
    launcher.environ["PYTHONPATH"] = os.pathsep.join([str(BOOTSTRAP), str(FAKE)])
    done = launcher.run_bare("-c", "import sys; print('vllm_compat' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_launched_program_may_launch_another(launcher: Launcher) -> None:
    launcher.write("print('inner')", "inner.py")
    command = launcher.command(launcher.folder / "inner.py")
    program = launcher.write(f"import subprocess; subprocess.run({command!r}, check=True)")
    done = launcher.run(program)
    assert (done.returncode, done.stdout) == (0, "inner\n")
    assert [line.split()[0] for line in launcher.log() if "path0" not in line] == [
        "apply",
        "load",  # the inner launcher is a process of the outer run
        "apply",
    ]


# Somebody else's sitecustomize


def with_sitecustomize(launcher: Launcher, source: str) -> Path:
    path = launcher.write(source, "site/sitecustomize.py")
    launcher.environ["PYTHONPATH"] += os.pathsep + str(path.parent)
    return path


def test_an_existing_sitecustomize_runs_first_and_takes_our_place(launcher: Launcher) -> None:
    path = with_sitecustomize(launcher, "from vllm_compat import note; note('theirs'); mine = 7")
    program = launcher.write("import sitecustomize; print(sitecustomize.mine, sitecustomize.__file__)")
    done = launcher.run(program)
    assert done.stdout == f"7 {path}\n"
    # Once in the launcher itself, then in the program's process.
    assert [line.split()[0] for line in launcher.log() if "path0" not in line] == [
        "theirs",
        "theirs",
        "apply",
    ]


def test_two_others_are_handed_on_to_in_their_order(launcher: Launcher) -> None:
    with_sitecustomize(launcher, "print('first')")
    second = launcher.write("print('second')", "site2/sitecustomize.py")
    launcher.environ["PYTHONPATH"] += os.pathsep + str(second.parent)
    program = launcher.write("")
    # The first one does not hand on, so the second one never runs, as without us.
    assert launcher.run_bare(program).stdout == "first\n"
    assert launcher.run(program).stdout == "first\nfirst\n"  # launcher and program


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError('theirs')",
        "import no_such_module",
        "raise ImportError('theirs')",
        "raise ImportError('theirs', name='sitecustomize')",
        "def",
    ],
)
def test_errors_of_an_existing_sitecustomize_stay_what_they_are(launcher: Launcher, source: str) -> None:
    with_sitecustomize(launcher, source)
    program = launcher.write("import sys; print('sitecustomize' in sys.modules)")
    bare = launcher.run_bare(program)
    launched = launcher.run(program)
    assert (launched.returncode, launched.stdout) == (bare.returncode, bare.stdout)
    own_line = [line for line in launched.stderr.splitlines(True) if "vllm-compat" in line]
    assert len(own_line) == 1
    # Said by the launcher's own interpreter and by the program's.
    assert launched.stderr.removesuffix(own_line[0]) == bare.stderr * 2
    assert launcher.log()[0].startswith("apply")


def test_a_sitecustomize_that_exits_ends_the_program_as_ever(launcher: Launcher) -> None:
    with_sitecustomize(
        launcher,
        """\
        import os
        if "VLLM_COMPAT" in os.environ or "BARE" in os.environ:
            raise SystemExit(4)
        """,
    )
    program = launcher.write("print('started')")
    launched = launcher.run(program)
    launcher.environ["BARE"] = "1"
    bare = launcher.run_bare(program)
    assert launched.stdout == bare.stdout == ""
    assert launched.returncode == bare.returncode == 1


def test_a_sitecustomize_in_front_of_us_may_hand_on_to_us(launcher: Launcher) -> None:
    front = launcher.write(
        """\
        import os, sys
        print("front", flush=True)
        here = os.path.dirname(__file__)
        index = sys.path.index(here)
        del sys.path[index], sys.modules["sitecustomize"]
        import sitecustomize
        sys.path.insert(index, here)
        """,
        "front/sitecustomize.py",
    )
    program = launcher.write(
        f"""\
        import os, subprocess, sys
        path = os.pathsep.join([{str(front.parent)!r}, os.environ["PYTHONPATH"]])
        subprocess.run([sys.executable, "-c", "print('inner')"],
                       env=dict(os.environ, PYTHONPATH=path))
        """
    )
    done = launcher.run(program)
    assert done.stdout == "front\ninner\n"
    assert [line.split()[0] for line in launcher.log()][2:] == ["load"]


# What a run says of itself


def test_the_output_goes_untouched_into_the_log(launcher: Launcher) -> None:
    log = launcher.folder / "log.txt"
    log.write_text("before\n")
    program = launcher.write("import sys; print('out'); print('err', file=sys.stderr)")
    done = launcher.run(program, log=str(log))
    assert sorted(log.read_text().splitlines()) == ["before", "err", "out"]
    assert done.stdout == ""
    assert re.fullmatch(
        rf"vllm-compat: run finished, .* s\. The program's output is in {log}\.\n", done.stderr
    )


def test_the_state_is_told_in_plain_lines_and_kept_as_json(launcher: Launcher) -> None:
    status = launcher.folder / "status.json"
    program = launcher.write(
        """\
        import time
        from vllm_compat.runtime import heartbeat as progress
        progress.phase("extracting", call_since=time.monotonic(), samples=8, model="m")
        print("up", flush=True)
        time.sleep(4)
        """
    )
    process = launcher.start(program, status_file=str(status), every=0.1)
    assert line_from(process.stdout) == "up"
    wait_for(lambda: '"samples": 8' in status.read_text())
    record = json.loads(status.read_text())
    assert (record["state"], record["phase"], record["line"]) == ("running", "extracting", "8 samples")
    _, errors = process.communicate(timeout=PATIENCE)
    assert "vllm-compat: 8 samples\n" in errors
    record = json.loads(status.read_text())
    assert (record["state"], record["exit_status"]) == ("finished", 0)
    assert record["verdict"] == errors.splitlines()[-1].removeprefix("vllm-compat: ")


def test_on_a_terminal_the_line_is_written_over(launcher: Launcher, terminal: Terminal) -> None:
    program = launcher.write(
        """\
        import time
        from vllm_compat.runtime import heartbeat as progress
        for number in range(6):
            progress.phase("extracting", samples=number)
            time.sleep(0.6)
        """
    )
    command = launcher.command(program, log=str(launcher.folder / "log.txt"))
    terminal.type("export TERM=xterm\n" + as_line(command))
    terminal.expect(r"\r\x1b\[K2 samples")
    shown = terminal.expect(r"\r\x1b\[K\r?vllm-compat: run finished")
    assert "\n" not in shown.partition("3 samples")[2].partition("vllm-compat")[0]


# The verdict


def test_the_programs_own_error_is_the_first_cause(launcher: Launcher) -> None:
    program = launcher.write("raise ValueError('no such\\ncolumn')")
    done = launcher.run(program, apply={"progress": True})
    assert done.returncode == 1
    assert re.search(r"First cause: program \(pid \d+\): ValueError: no such column\.", done.stderr)
    assert "Traceback" in done.stderr  # it is still the program's to print


def test_the_workers_error_stands_before_the_programs() -> None:
    outcome = Outcome(
        returncode=1,
        seconds=3,
        record={"summary": "…", "failure": "RuntimeError: see above.", "extracted": "8 samples"},
        cause="rank 5 (pid 7): OutOfMemoryError: 20 MiB",
        of_worker=True,
        resume="To do the rest: x",
    )
    assert verdict(outcome) == (
        "run failed with exit status 1 after 3.0 s. First cause: rank 5 (pid 7): OutOfMemoryError:"
        " 20 MiB. The program then saw: RuntimeError: see above. Before it: 8 samples. To do the"
        " rest: x"
    )


def test_an_error_that_was_dealt_with_is_no_cause() -> None:
    record = {"summary": "8 samples."}
    outcome = Outcome(returncode=0, seconds=3, record=record, cause="x", of_worker=True)
    assert verdict(outcome) == "run finished, exit status 0, after 3.0 s. 8 samples."


def test_lost_data_is_no_success_whatever_the_program_says(launcher: Launcher) -> None:
    record = {"summary": "First cause: data_3.pt could not be saved.", "failed": True}
    done = launcher.run(launcher.write(""), apply={"record": record})
    assert done.returncode == 1
    assert "run failed after" in done.stderr
    assert "data_3.pt could not be saved" in done.stderr


# The output folder


STOCK = "# VllmHiddenStatesGenerator, --output-dir, data_0.pt: known as stock's script by such words\n"


def whole_sample(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", "x" * 100)


def test_gaps_are_found_before_and_the_way_to_go_on_is_said_after(launcher: Launcher) -> None:
    out = launcher.folder / "out put"
    out.mkdir()
    for number in (0, 1, 3):
        whole_sample(out / f"data_{number}.pt")
    program = launcher.write(
        """\
        import os, sys
        print(sorted(os.listdir(sys.argv[2])), os.environ.get("VLLM_COMPAT_RESUME"))
        sys.exit(3)
        """
        + STOCK
    )
    done = launcher.run(program, "--output-dir", out)
    assert "['.data_3.pt.kept', 'data_0.pt', 'data_1.pt']" in done.stdout
    assert '"next": 2' in done.stdout
    assert "1 missing (2); the run goes on at 2 and takes the 1 whole sample behind" in done.stderr
    assert f"run the same again: {sys.executable} {LAUNCH}" in done.stderr
    assert f"--output-dir '{out}'" in done.stderr
    # A run that has failed hides nothing, and the next one ends well.
    assert sorted(os.listdir(out)) == ["data_0.pt", "data_1.pt", "data_3.pt"]
    launcher.write(STOCK, "program.py")
    assert launcher.run(program, f"--output-dir={out}").returncode == 0
    assert sorted(os.listdir(out)) == ["data_0.pt", "data_1.pt", "data_3.pt"]


def test_the_output_folder_can_be_left_alone(launcher: Launcher) -> None:
    out = launcher.folder / "out"
    out.mkdir()
    (out / "data_0.pt").write_bytes(b"PK")  # torn
    program = launcher.write(f"import os, sys; print(os.listdir({str(out)!r}))\n{STOCK}")
    done = launcher.run(program, "--output-dir", out, leave_folder=True)
    assert done.stdout == "['data_0.pt']\n"
    assert launcher.run(program, "--output-dir", out).stdout == "['.data_0.pt.torn']\n"
    assert os.listdir(out) == ["data_0.pt"]


def test_the_output_folder_of_another_program_is_none_of_ours(launcher: Launcher) -> None:
    out = launcher.folder / "out"
    out.mkdir()
    for number in (0, 2):
        whole_sample(out / f"data_{number}.pt")
    (out / "data_3.pt").write_bytes(b"PK")
    program = launcher.write(f"import os; print(sorted(os.listdir({str(out)!r})))")
    done = launcher.run(program, "--output-dir", out)
    assert done.stdout == "['data_0.pt', 'data_2.pt', 'data_3.pt']\n"
    assert "goes on at" not in done.stderr


def test_a_second_run_into_the_same_folder_is_refused(launcher: Launcher) -> None:
    out = launcher.folder / "out"
    out.mkdir()
    program = launcher.write("import time; print('up', flush=True); time.sleep(30)\n" + STOCK)
    process = launcher.start(program, "--output-dir", out)
    assert line_from(process.stdout) == "up"
    done = launcher.run(program, "--output-dir", out)
    assert done.returncode == 2
    assert f"Another `vllm-compat run` writes into {out}" in done.stderr
