"""A FAKE vllm_compat: it patches nothing and only writes down when it was called.

Put on PYTHONPATH in front of the real one, it takes the place of `apply()` and of the plugin;
every other module (doors, launch, errors) is the real one.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

__path__.append(str(Path(__file__).parents[4] / "src" / "vllm_compat"))


def note(event: str) -> None:
    """Append `EVENT PID` to the log that the test reads."""
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(f"{event} {os.getpid()}\n")


def apply(*, fail: str = "", record: dict[str, object] | None = None, progress: bool = False) -> None:
    """Write down the call, and where, and publish a plan that nobody reads."""
    from vllm_compat import errors
    from vllm_compat.runtime import env

    note("apply")
    note(f"path0={sys.path[0]}")
    if fail == "refuse":
        raise errors.IncompatibleError("This pair does not work.")
    if fail == "bug":
        raise ZeroDivisionError("a bug")
    if fail == "interrupt":
        signal.raise_signal(signal.SIGINT)
    env.publish_plan("fake plan")
    if progress:  # the real feature, which tells the launcher what ends the program
        from vllm_compat.features.progress import Progress
        from vllm_compat.runtime.patching import Transaction

        Progress().install(Transaction(), None, "driver")
    if record is not None:
        env.write_record(record)
