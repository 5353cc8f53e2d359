"""A short part of the campaign beside hostile neighbours, and what it has found."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.entry.neighbour_cases import STDLIB
from tests.entry.neighbours import REFUSED, RIGHT, Outcome, tried, undisturbed

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


SHORT = (
    ("that puts itself in front again", "child", "spawn"),
    ("that finds modules before others", "apply", "fork"),
    ("in front of ours, that hands on to nobody", "script", "spawn"),
    ("a zipapp", "script", "spawn"),
    ("a finder of an editable installation", "script", "spawn"),
    ("a .pth that empties PYTHONPATH", "child", "spawn"),
    ("a plain function, after ours", "script", "fork"),
    ("a function over a name that the downstream has bound, before ours", "apply", "spawn"),
    ("one that raises, zzz ours", "script", "spawn"),
)
"""What is tried each time; the whole campaign is scripts/campaign_neighbours.py."""

BY_NAME = {neighbour.name: neighbour for neighbour in STDLIB}


Alone = Callable[[str, str], list[set[str]]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, make_site: MakeSite) -> Alone:
    """Return what driver and workers hold without a neighbour, each looked at once."""

    @cache
    def look(program: str, method: str) -> list[set[str]]:
        return undisturbed(make_site(tmp_path_factory.mktemp("alone")), program, method)

    return look


@pytest.mark.parametrize(("name", "program", "method"), SHORT)
def test_beside_a_neighbour_each_process_holds_its_patches_or_it_is_refused_in_words(
    tmp_path: Path, make_site: MakeSite, alone: Alone, name: str, program: str, method: str
) -> None:
    neighbour = BY_NAME[name]
    outcome = tried(make_site(tmp_path), neighbour, program, method, alone(program, method))
    assert outcome == Outcome(REFUSED if neighbour.refused else RIGHT)
