"""A short part of the campaign beside hostile neighbours, and what it has found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import MakeSite, Site

FORKS = """
import os, signal, sys, threading, time
import vllm_compat
from vllm_compat import plugin

PROGRESS = threading.Event()

def churn():
    while True:
        vllm_compat.apply()
        PROGRESS.set()
        vllm_compat.revert()

def in_child():
    signal.alarm(20)  # a child that waits for a lock of its parent's waits for ever
    vllm_compat.status()
    vllm_compat.revert()
    vllm_compat.apply()
    assert vllm_compat.status().in_force
    assert not vllm_compat.revert().left
    os._exit(0)

if __name__ == "__main__":
    threading.Thread(target=churn, daemon=True).start()
    PROGRESS.wait(30)
    ended = []
    for number in range(5):
        time.sleep(0.013 * number)
        pid = os.fork()
        if not pid:
            try:
                in_child()
            except BaseException:
                import traceback
                traceback.print_exc()
            os._exit(1)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(ended, flush=True)
    os._exit(0)
"""


def test_a_fork_while_another_thread_applies_leaves_a_child_that_can(site: Site) -> None:
    (site.folder / "program.py").write_text(FORKS)
    done = site.run("program.py")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0] * 5, done.stderr
