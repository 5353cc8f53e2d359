"""The campaigns' own eyes: whatever they cannot see they would count as nothing left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))
import campaign_kills  # noqa: E402

TOKEN = "5a5a5a5a5a5a5a5a"
FAMILY = """
import subprocess, sys, time
from multiprocessing import resource_tracker
# FAKES: as vLLM's worker looks when setproctitle has written over its arguments and environment.
subprocess.Popen(["VLLM::Worker_TP0", "60"], executable="/bin/sleep", env={})
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # spawn_main"])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "extract.py"])
resource_tracker.ensure_running()
subprocess.Popen(["sleep", "60"])
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["campaign_kills", "reliability"])
def test_a_campaign_can_be_started(name: str) -> None:
    """Seen: a module had moved, and no test imported the scripts."""
    assert __import__(name)


@pytest.fixture
def launcher() -> Iterator[int]:
    """The process id of a FAKE launcher with children, in a session of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", FAMILY], env={**os.environ, campaign_kills.TOKEN: TOKEN},
        start_new_session=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.5)  # until each has its own command line
    yield process.pid
    os.killpg(process.pid, 9)
    process.wait(10)


def test_a_worker_whose_title_hides_its_environment_is_seen_as_one(launcher: int) -> None:
    """Seen: 12 rounds found no worker, since /proc/<pid>/environ of one holds a part of its title."""
    members = campaign_kills.members(TOKEN, launcher)
    roles = sorted(campaign_kills.role_of(pid, launcher) for pid in members)
    assert roles == ["launcher", "other", "program", "tracker", "worker", "worker"]


def test_a_forked_worker_has_its_drivers_command_line(launcher: int) -> None:
    members = campaign_kills.members(TOKEN, launcher)
    (program,) = [pid for pid in members if campaign_kills.role_of(pid, launcher) == "program"]
    assert campaign_kills.role_of(program, launcher=1) == "worker", "its parent is not the launcher"
