"""Bookkeeping never ends a run: whatever is only told cannot fail the work that it tells of."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.analysis.environment import Environment
from vllm_compat.analysis.plan import Plan, Roles
from vllm_compat.checks import dataset
from vllm_compat.commands.run.launch import Outcome, verdict
from vllm_compat.commands.run.records import completed
from vllm_compat.commands.run.watch import Process, Watch, read_processes
from vllm_compat.features import progress
from vllm_compat.runtime import heartbeat, run, run_record

PLAN = Plan("speculators", "0.4.0", "0.16.0", Roles("speculators"), Environment("3.11", (), "cpu"))


class Integer:
    """FAKE: a number as numpy's, which JSON does not know."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Array:
    """FAKE: a row of numbers as numpy's and torch's."""

    def tolist(self) -> list[int]:
        return [1, 2]


class Secretive(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "status"
    folder.mkdir()
    monkeypatch.setenv("VLLM_COMPAT_STATUS", str(folder))
    return folder


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{os.getpid()}.json").read_text())
    return found


def test_numbers_that_json_does_not_know_are_told_as_numbers(said: Path) -> None:
    heartbeat.phase("ready", layer_ids=[Integer(3), Integer(-1)])
    assert read(said)["layer_ids"] == [3, -1]
    heartbeat.note(layer_ids=Array(), shards=Integer(2), of={5}, model=Path("/model"))
    assert {k: read(said)[k] for k in ("layer_ids", "shards", "of", "model")} == {
        "layer_ids": [1, 2],
        "shards": 2,
        "of": [5],
        "model": "/model",
    }


def test_what_cannot_be_told_is_left_out_and_does_not_stay(
    said: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heartbeat.note(shards=1)
    endless: list[Any] = []
    endless.append(endless)
    heartbeat.note(of=endless)
    heartbeat.note(of=endless)
    heartbeat.note(shards=2)
    assert read(said)["shards"] == 2
    assert "of" not in read(said)
    assert capsys.readouterr().err.count("could not be told") == 1


@pytest.mark.parametrize("what", ["vanished", "read-only", "full"])
def test_a_folder_that_takes_nothing_is_said_once(
    said: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    monkeypatch.setenv("VLLM_COMPAT_RECORD", str(said / "record.json"))
    run_record.open_for(PLAN)
    heartbeat.note(shards=1)
    if what == "vanished":
        shutil.rmtree(said)
    else:
        number = {"read-only": 30, "full": 28}[what]

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(number, what)

        monkeypatch.setattr("builtins.open", refuse)
    for _ in range(3):
        heartbeat.note(shards=2)
        run_record.fail("an error")
        run_record.fail_saving("a sample could not be saved")
        run_record.write()
    run.end()
    err = capsys.readouterr().err
    assert err.count("(note:") == 1
    assert err.count("(write:") == 1


@pytest.mark.parametrize(("vllm", "word"), [("0.32.0+cpu", "known"), ("0.99.0", "inferred")])
def test_record_and_verdict_say_whether_the_pair_is_known(
    said: Path, monkeypatch: pytest.MonkeyPatch, vllm: str, word: str
) -> None:
    monkeypatch.setenv("VLLM_COMPAT_RECORD", str(said / "record.json"))
    run_record.open_for(replace(PLAN, downstream_version="0.3.0", vllm=vllm))
    record = json.loads((said / "record.json").read_text())
    run.end()
    assert record["knowledge"]["word"] == word
    assert bool(record["knowledge"]["runs"]) == (word == "known")
    said_last = verdict(Outcome(returncode=0, seconds=1, record=record))
    assert f"speculators 0.3.0 on vLLM {vllm} ({word}), 0 adapters." in said_last


def test_a_record_that_grew_old_is_told_by_the_other_way(said: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_COMPAT_RECORD", str(said.parent / "gone" / "record.json"))
    (said.parent / "gone").mkdir()
    run_record.open_for(PLAN)
    record = json.loads((said.parent / "gone" / "record.json").read_text())
    shutil.rmtree(said.parent / "gone")
    run_record.fail_saving("data_3.pt could not be saved")
    run_record.saved("x")
    whole = completed(record, read_processes(said))
    outcome = Outcome(returncode=0, seconds=1, record=whole)
    assert not outcome.right
    assert "The record could not be written (FileNotFoundError" in verdict(outcome)
    assert completed(record, []) == record


def test_threads_that_tell_at_once_leave_a_whole_file(
    said: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_COMPAT_RECORD", str(said / "record"))
    run_record.open_for(PLAN)
    begin = threading.Barrier(8)

    def tell(number: int) -> None:
        begin.wait()
        for count in range(100):
            heartbeat.note(**{f"field_{number}_{count % 7}": count})
            run_record.saved("x")
            run_record.write()

    threads = [threading.Thread(target=tell, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run_record.write()
    run.current().parts.pop(run_record.Account).end()
    assert capsys.readouterr().err == ""
    assert len([name for name in read(said) if name.startswith("field_")]) == 56
    assert json.loads((said / "record").read_text())["saved"] == 800


def test_a_log_call_inside_of_telling_neither_hangs_nor_fails(said: Path) -> None:
    record = logging.getLogger("x").makeRecord("x", 20, "f", 1, "Processing 3/9 samples", (), None)

    def make(*args: Any) -> Any:
        return record

    threads = [
        threading.Thread(target=progress._read_log, args=(make, None, (), {}), daemon=True)
        for _ in range(2)
    ]
    mine = run.current().part(heartbeat.Said)
    with mine.lock:
        progress._read_log(make, None, (), {})  # the same thread, as from a signal's handler
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert read(said)["samples_to_do"] == 3


def test_a_fork_while_another_thread_tells_can_tell_too(said: Path) -> None:
    mine = run.current().part(heartbeat.Said)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with mine.lock:
            held.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    pid = os.fork()
    if pid == 0:
        heartbeat.note(shards=7)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert json.loads((said / f"{pid}.json").read_text())["shards"] == 7


def test_an_error_without_a_text_is_told_by_its_type(said: Path) -> None:
    heartbeat.fail(Secretive(), "program")
    assert read(said)["error"] == "Secretive: (its text cannot be had)"


def test_a_state_that_makes_no_sense_does_not_end_the_launchers_watch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    strange = {"pid": 1, "role": "worker", "phase": "loading", "shards": "many", "changed": "never"}
    (tmp_path / "1.json").write_text(json.dumps(strange))
    (tmp_path / "2.json").write_text(json.dumps({"pid": 2, "role": "program", "phase": "building"}))
    watch = Watch(tmp_path, stream=sys.stderr, status_file=tmp_path / "no" / "status")
    for _ in range(3):
        watch.look(1)
    watch.end("finished", "done", 0)
    assert capsys.readouterr().err.count("its state cannot be shown") == 1
    assert Process(strange).pid == 1


def test_reasons_that_no_disk_takes_do_not_end_the_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("the.downstream")
    with dataset._reasons("the.downstream") as reasons:

        def refuse(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "write", refuse)
            log.warning("Failed to process")
        assert reasons() == []

    def none(*_: Any, **__: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", none)
    with dataset._reasons("the.downstream") as reasons:
        log.warning("Failed to process")
        assert "no temporary file can be written" in reasons()[0]
