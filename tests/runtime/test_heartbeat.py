"""What a process says of itself, through the places that are watched."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.features import progress
from vllm_compat.runtime import heartbeat, run
from vllm_compat.runtime.patching import Transaction


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that reads what this process has said."""
    monkeypatch.setenv("VLLM_COMPAT_STATUS", str(tmp_path))

    def read() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / f"{os.getpid()}.json").read_text())
        return found

    return read


class Bar:
    """A FAKE progress bar, as tqdm's."""

    def __init__(self, iterable: Any = None, total: int | None = None) -> None:
        self.iterable = iterable
        self.total = len(iterable) if iterable is not None else total
        self.updated = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    def update(self, by: int) -> None:
        self.updated += by


def test_shards_are_counted_as_they_are_loaded(said: Any) -> None:
    heartbeat.phase("starting", role="worker", rank=3)
    seen = []
    for shard in progress._shards(Bar, None, (["a", "b"],), {}):
        seen.append((shard, said()["shards"], said()["of"], said()["phase"]))
    assert seen == [("a", 0, 2, "loading"), ("b", 1, 2, "loading")]
    assert (said()["phase"], said()["shards"], said()["rank"]) == ("loaded", 2, 3)


def test_a_bar_that_is_moved_by_hand_is_left_alone(said: Any) -> None:
    bar = progress._shards(Bar, None, (), {"total": 100})
    bar.update(7)
    assert bar.updated == 7
    assert type(bar) is Bar
    counted = progress._shards(Bar, None, ([],), {})
    counted.update(7)
    assert counted.updated == 7


def record(text: str, *args: Any, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, None) if error else None
    return logging.LogRecord("any", logging.INFO, "file", 1, text, args, info)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "logged", [record("  %s", "Processing 80/100 samples"), record("Processing 80/100 samples")]
)
def test_the_number_of_samples_comes_from_the_scripts_own_log(
    said: Any, logged: logging.LogRecord
) -> None:
    assert progress._read_log(lambda: logged, None, (), {}) is logged
    assert (said()["samples_to_do"], said()["samples_in_all"]) == (80, 100)


def test_a_workers_first_error_is_kept_in_one_line(said: Any) -> None:
    heartbeat.phase("loading", role="worker", rank=1)
    for text, error in (
        ("Something else", KeyError("no")),
        ("WorkerProc hit an exception.", RuntimeError("out of\n  memory " + "x" * 2000)),
        ("WorkerProc failed.", ValueError("later")),
    ):
        progress._read_log(lambda t=text, e=error: record(t, error=e), None, (), {})
    kept = said()
    assert kept["error"].startswith("RuntimeError: out of memory xxx")
    assert len(kept["error"]) < 700
    assert kept["error_where"] == "worker"


def test_a_forked_child_speaks_for_itself(said: Any, tmp_path: Path) -> None:
    heartbeat.phase("building", role="program", model="m")
    child = os.fork()
    if child == 0:
        heartbeat.phase("starting", role="worker", rank=0)
        os._exit(0)
    os.waitpid(child, 0)
    its = json.loads((tmp_path / f"{child}.json").read_text())
    assert (its["pid"], its["role"], "model" in its) == (child, "worker", False)
    assert said()["role"] == "program"


def test_without_the_launcher_nothing_is_watched_and_nothing_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VLLM_COMPAT_STATUS", raising=False)
    assert not progress.Progress().applies(None)  # type: ignore[arg-type]
    heartbeat.phase("anything")
    assert heartbeat.said() == {}


def test_a_folder_that_is_gone_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPAT_STATUS", "/nowhere/at/all")
    heartbeat.phase("anything")
    heartbeat.listen()()


def test_an_optional_place_that_is_not_there_is_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    transaction = Transaction()
    transaction.wrap(f"{__name__}:no_such", lambda *a: None, optional=True)
    transaction.wrap("json:JSONEncoder.no_such.method", lambda *a: None, optional=True)
    assert [patch.state for patch in transaction.patches][1:] == ["absent"]
    assert sys.modules.get("json")


def test_the_drivers_hook_does_nothing_in_a_forked_child(
    said: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *args: None)
    transaction = Transaction()
    progress.Progress().install(transaction, None, run.DRIVER)  # type: ignore[arg-type]
    try:
        child = os.fork()
        if child == 0:
            sys.excepthook(ValueError, ValueError("a child's own"), None)
            os._exit(0)
        os.waitpid(child, 0)
        assert not (tmp_path / f"{child}.json").exists()
        sys.excepthook(ValueError, ValueError("the program's"), None)
        assert said()["error"] == "ValueError: the program's"
    finally:
        transaction.revert()


def catches() -> bool:
    """Whether this process catches the launcher's signal, by the system's own account."""
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if "SigCgt" in each]
    return bool(int(line.split()[1], 16) >> (heartbeat.DUMP - 1) & 1)


def test_a_process_answers_with_its_stacks_until_a_revert_and_again_after_it(
    said: Any, tmp_path: Path
) -> None:
    stack = tmp_path / f"{os.getpid()}.stack"
    for _ in range(2):
        transaction = Transaction()
        progress.Progress().install(transaction, None, run.WORKER)  # type: ignore[arg-type]
        os.kill(os.getpid(), heartbeat.DUMP)
        assert "test_a_process_answers" in stack.read_text()
        transaction.revert()
        # The launcher signals only whose file is there; in any other process the signal is an end.
        assert (stack.exists(), catches()) == (False, False)


@pytest.mark.parametrize("listening", [True, False])
def test_a_forked_child_answers_if_its_parent_does(said: Any, tmp_path: Path, listening: bool) -> None:
    end = heartbeat.listen()
    if not listening:
        end()
    try:
        child = os.fork()
        if child == 0:
            stack = tmp_path / f"{os.getpid()}.stack"
            if catches() != listening or stack.exists() != listening:
                os._exit(1)
            if listening:
                os.kill(os.getpid(), heartbeat.DUMP)
                heartbeat.listen()()  # what ends it in the child ends what it has begun with
            os._exit(2 if stack.exists() or catches() else 0)
        assert os.waitpid(child, 0)[1] == 0
        assert catches() == listening, "a child ends its own listening only"
    finally:
        end()
