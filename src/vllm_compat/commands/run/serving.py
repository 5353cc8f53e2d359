"""Stock's launcher of a vLLM server under `run`: judged before anything loads, then started as it is.

The launcher is known by what it holds, not by its name. The command that it would run is read from its
own ``--dry-run``, or, where it has none, from its arguments. What the vLLM of this environment would
answer with an error, or with wrong data for sure, is refused; flags that it needs and that cost nothing
but speed are added, and named. The launcher then takes the place of this process, so that signals and
exit status are the server's own. Nothing is put in force in the server and none of its data is looked
at, and that is said.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import cast

from vllm_compat.analysis.environment import MAX_LOSS, distributions
from vllm_compat.analysis.layer_ids import number_of_layers, read_config
from vllm_compat.analysis.serving.asked import read_launcher
from vllm_compat.analysis.serving.launching import (
    Judgement,
    ServeCommand,
    Served,
    command_from_arguments,
    command_from_output,
    judge_command,
)
from vllm_compat.analysis.serving.model import Ask, AskKind
from vllm_compat.analysis.serving.models import is_hybrid, named_in, read_model
from vllm_compat.analysis.serving.modules import Modules
from vllm_compat.analysis.serving.offered import read_offered
from vllm_compat.analysis.surface.files import installed_package
from vllm_compat.commands.run.options import LaunchOptions
from vllm_compat.commands.run.processes import say
from vllm_compat.errors import UsageError

_MARKS = (b"extract_hidden_states", b'"serve"')
_LONGEST = 2**20
_DRY_RUN = "--dry-run"
_HELP = {"-h", "--help"}
_SECONDS = 300


def launcher_in(script: str) -> tuple[Ask, ...] | None:
    """Return what a launcher of a server for hidden states asks; None where a script is none."""
    try:
        with open(script, "rb") as file:
            text = file.read(_LONGEST)
    except (OSError, ValueError):
        return None
    if not all(mark in text for mark in _MARKS):
        return None
    try:
        asks = read_launcher(text, script)
    except UsageError:
        return None
    return asks if any(ask.kind is AskKind.METHOD for ask in asks) else None


def serve(argv: Sequence[str], asks: Sequence[Ask], options: LaunchOptions) -> int:
    """Judge what a launcher would start, and start it; return only where it is not started.

    Returns 0 after a dry run, 1 where the command is refused, and the launcher's own exit status where
    it does not come to a command.

    Raises:
        UsageError: An option does not fit a server, or there is no vLLM here.
    """
    _fit(options)
    if _HELP & set(argv):
        return _start(argv, options)
    command, ended = _command_of(argv)
    if command is None:
        return ended
    judged = judge_command(command, asks, _served(command))
    for note in judged.notes:
        say(note)
    if judged.refused:
        for reason in judged.refused:
            say(f"refused, nothing was started: {reason}")
        return 1
    for flag, why in judged.add.items():
        say(f"adds {flag}: {why}")
    say(
        "the server itself runs without vllm_compat, and none of its data is checked: `vllm-compat"
        " check` lists what else is known of this pair, `vllm-compat verify` looks at the files."
    )
    final = _with_flags(argv, judged)
    if options.dry_run:
        print(_printed(command, judged, final), flush=True)
        return 0
    return _start(final, options)


def _fit(options: LaunchOptions) -> None:
    plain, apply = LaunchOptions(), options.apply
    without = cast("Collection[str]", apply.get("without", ()))
    given = {
        "--record": options.record != plain.record,
        "--status-file": options.status_file != plain.status_file,
        "--leave-out": options.leave_out != plain.leave_out,
        "--leave-folder": options.leave_folder != plain.leave_folder,
        "--grace": options.grace_seconds != plain.grace_seconds,
        "--no-remote-code": "remote_code" in without,
        "--without": set(without) - {"remote_code"},
        "--no-canary": not apply.get("canary", True),
        "--max-loss": apply.get("max_loss", MAX_LOSS) != MAX_LOSS,
        **{f"--{name}": apply.get(name, "auto") != "auto" for name in ("capture", "transfer", "engine")},
    }
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"{name} goes with a program that extracts by itself, not with a server.")


def _command_of(argv: Sequence[str]) -> tuple[ServeCommand | None, int]:
    """Return the command that a launcher would run; or, where it has failed, its exit status."""
    script, *arguments = argv
    if _DRY_RUN.encode() not in Path(script).read_bytes():
        return command_from_arguments(arguments), 0
    own = [_DRY_RUN, *(word for word in arguments if word != _DRY_RUN)]
    try:
        done = subprocess.run(
            [sys.executable, script, *own],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        say(f"{script} {_DRY_RUN} gave no command within {_SECONDS} s; nothing was started.")
        return None, 1
    if done.returncode:
        sys.stderr.write(done.stderr)
        say(f"{script} ended with exit status {done.returncode} before it had a command.")
        return None, done.returncode if done.returncode > 0 else 128 - done.returncode
    return command_from_output(done.stdout) or command_from_arguments(arguments), 0


def _served(command: ServeCommand) -> Served:
    """Return what the vLLM of this environment offers, its model classes included."""
    files = installed_package("vllm")
    offered = read_offered(files)
    if not (offered.flags and offered.methods and offered.routes):
        raise UsageError(f"The vLLM in {files.origin} has no source of `vllm serve` that can be read.")
    client = distributions(["speculators"]).get("speculators")
    model = next((word for word in command.words if not word.startswith("-")), "")
    try:
        config = read_config(model)
        names, layers = named_in(config), number_of_layers(config, model)
    except UsageError as error:
        say(f"the model's class was not looked at: {error}")
        return Served(offered, files.version, client[1] if client else "")
    modules = Modules(files)
    return Served(
        offered,
        files.version,
        client[1] if client else "",
        tuple(read_model(modules, name) for name in names),
        next((name for name in names if is_hybrid(modules, name)), ""),
        layers,
    )


def _with_flags(argv: Sequence[str], judged: Judgement) -> list[str]:
    """Return the launcher's words with the flags that were added, behind its ``--``."""
    if not judged.add:
        return list(argv)
    return [*argv, *([] if "--" in argv else ["--"]), *judged.add]


def _printed(command: ServeCommand, judged: Judgement, final: Sequence[str]) -> str:
    """Return the command for people: the server's where the launcher has told it, else its own."""
    if any(word.startswith("{") for word in command.words):
        return shlex.join(["vllm", "serve", *command.words, *judged.add])
    return shlex.join([sys.executable, *final])


def _start(argv: Sequence[str], options: LaunchOptions) -> int:
    """Put the launcher in the place of this process."""
    if options.log is not None:
        try:
            log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise UsageError(f"The log cannot be written to {options.log}: {error.strerror}.") from None
        os.dup2(log, 1)
        os.dup2(log, 2)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *flags, *argv])
