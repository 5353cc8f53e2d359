"""What a process of a launched run does at its start: the bootstrap calls `enter`, once."""

from __future__ import annotations

import os
import sys

from vllm_compat.runtime import env

TYPE_CHECKING = False  # `typing` would cost more than all the rest of this module
if TYPE_CHECKING:
    from typing import NoReturn


def enter() -> bool:
    """Do what this process has to do at its start, and return whether a plan is to be taken over.

    The program's own process applies vllm_compat. If that fails it tells the launcher why and exits
    with status 1, or 2 for what was asked for wrongly, and the program never starts. A process that
    the program starts, directly or through vLLM, has the patches of the published plan to install
    (`vllm_compat.plugin.load`). Any other process does nothing.
    """
    keywords = os.environ.pop(env.VLLM_COMPAT_MAIN, None)
    if keywords is not None:
        _say_starting()
        _enter_program(keywords)
        return False
    return env.plan_from_environment(os.environ) is not None


def _say_starting() -> None:
    """Tell the launcher that the program's process is there, before anything is planned."""
    if env.status_directory() is None:
        return
    from vllm_compat.runtime import heartbeat

    heartbeat.phase("starting", role="program")


def _enter_program(keywords: str) -> None:
    """Apply vllm_compat in the program's own process, or end it before the program starts."""
    import json

    import vllm_compat
    from vllm_compat.errors import UsageError, VllmCompatError

    directory = _program_directory()
    if directory is not None:
        sys.path.insert(0, directory)
    try:
        vllm_compat.apply(**json.loads(keywords))
        if not env.record_exists():
            _tell({"started": True})
    except UsageError as error:
        _refuse(str(error), 2)
    except VllmCompatError as error:
        _refuse(str(error))
    except Exception as error:
        import traceback

        traceback.print_exc()
        _refuse(
            f"An internal error ({type(error).__name__}, see the lines above) stopped vllm_compat "
            "before the program started; please report it."
        )
    except KeyboardInterrupt:
        # Raised out of `site` this would be a "Fatal Python error" with status 1.
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        if directory is not None and directory in sys.path:
            sys.path.remove(directory)


def _program_directory() -> str | None:
    """Return the folder that the interpreter will put in front of `sys.path`, or None.

    It does that after `site` has run, but a downstream or a vLLM that lies beside the program
    must be found by the plan as the program will find it.
    """
    if getattr(sys.flags, "safe_path", False):  # since Python 3.11
        return None
    program = sys.argv[0] if sys.argv else ""
    if program in ("", "-", "-c", "-m"):
        return os.getcwd()
    if os.path.isdir(program):
        return os.path.abspath(program)
    return os.path.dirname(os.path.realpath(program))


def _tell(record: dict[str, object]) -> bool:
    """Write the record, and return whether the launcher will read it.

    A disk that is full or read-only must not keep the program from running.
    """
    try:
        return env.write_record(record)
    except OSError as error:
        print(f"vllm-compat: The record cannot be written: {error}.", file=sys.stderr, flush=True)
        return False


def _refuse(sentence: str, status: int = 1) -> NoReturn:
    """Tell the launcher why the program does not start, and end the process with this status.

    It is said here only where the launcher will not say it.

    `os._exit`, because `SystemExit` raised out of `site` becomes a "Fatal Python error".
    """
    try:
        if not _tell({"started": False, "summary": sentence}):
            print(f"vllm-compat: {sentence}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)
