"""What a run says of itself: the line, the status file, a stall, from files that processes write."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.commands.run import watch
from vllm_compat.commands.run.watch import Process, Watch, first_error, read_processes, view
from vllm_compat.errors import UsageError
from vllm_compat.runtime import identity

NOW = 1000.0


def program(**said: Any) -> Process:
    return Process({"pid": 1, "role": "program", "entered": 0.0, "changed": NOW, **said})


def worker(rank: int, **said: Any) -> Process:
    return Process(
        {"pid": 10 + rank, "role": "worker", "rank": rank, "entered": 1.0, "changed": NOW, **said}
    )


def loading(rank: int, shards: int, seconds: float, **said: Any) -> Process:
    said = {"changed": NOW, **said}
    return worker(rank, phase="loading", shards=shards, of=64, loading_seconds=seconds, **said)


def test_loading_is_told_by_the_slowest_rank() -> None:
    seen = view([program(phase="building"), loading(0, 40, 800.0), loading(1, 39, 975.0)], NOW)
    assert seen.line == "loading shard 40/64, 60 %, 25 s a shard, about 10 min left"
    assert seen.facts["shards"] == 39
    assert [rank["shards"] for rank in seen.facts["ranks"]] == [40, 39]


def test_one_rank_that_stands_still_is_a_stall_though_the_others_go_on() -> None:
    seen = view(
        [program(phase="building"), loading(0, 64, 1600.0), loading(1, 9, 90.0, changed=NOW - 150)],
        NOW,
    )
    assert seen.waited == 150
    assert seen.usual == 10
    assert seen.allowance == 100


@pytest.mark.parametrize(
    ("phases", "line"),
    [
        ([], "starting vLLM's workers"),
        (["starting", "starting"], "starting vLLM's workers"),
        (["loaded", "loaded"], "weights are loaded, preparing them"),
        (["ready", "ready"], "setting up the KV cache"),
    ],
)
def test_the_phases_before_and_after_loading(phases: list[str], line: str) -> None:
    workers = [worker(rank, phase=phase) for rank, phase in enumerate(phases)]
    assert view([program(phase="building"), *workers], NOW).line == line


def test_extracting_has_a_rate_and_an_end() -> None:
    said = program(
        phase="extracting",
        call_since=NOW - 1,
        samples=1000,
        samples_to_do=5000,
        tokens=512_000,
        tokens_per_second=2280.0,
        calls=100,
        extracting_seconds=198.0,
    )
    seen = view([said], NOW)
    assert seen.line == "1,000 of 5,000 samples, 20 %, 2,280 tokens/s, about 13 min left"
    assert seen.usual == 2.0


def test_time_between_batches_is_no_stall() -> None:
    said = program(phase="extracting", samples=4, calls=2, extracting_seconds=1.0, changed=0.0)
    assert view([said], NOW).waited == 0.0
    assert view([program(phase="ready", changed=0.0)], NOW).waited == 0.0


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    code = (
        "import time\nfrom vllm_compat.runtime import heartbeat as progress\n"
        "progress.listen()\nprogress.phase('extracting', role='program', model='m',"
        " call_since=time.monotonic(), calls=3, samples=6, extracting_seconds=0.2)\n"
        "def waits_for_a_reply():\n    print('up', flush=True)\n    time.sleep(60)\n"
        "waits_for_a_reply()\n"
    )
    environ = {**os.environ, "VLLM_COMPAT_STATUS": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.communicate()


def test_a_stall_is_named_with_what_each_process_is_doing(
    hanging: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "STALL_LEAST", 0.2)
    monkeypatch.setattr(watch, "STALL_TIMES", 2.0)
    out, status = io.StringIO(), tmp_path / "status"
    looking = Watch(tmp_path, stream=out, status_file=status, command=["x.py"])
    looking.look(hanging.pid)
    assert out.getvalue() == ""
    time.sleep(0.5)
    looking._written = 0.0
    looking.look(hanging.pid)
    looking.look(hanging.pid)
    said = out.getvalue()
    assert said.count("no progress for") == 1
    assert f"program (pid {hanging.pid}): waiting, in waits_for_a_reply" in said
    assert "usually 0.1 s" in said
    assert hanging.poll() is None  # asking does not end it
    record = watch.read_status(status)
    assert record["stall"]["processes"][0]["stack"][0].startswith("waits_for_a_reply (")
    text, code = watch.render(record, time.time())
    assert code == 1
    assert "NO PROGRESS" in text


def test_a_process_that_does_not_listen_is_not_signalled(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = identity.start_of(process.pid)
        said = Process({"pid": process.pid, "started": started, "role": "worker", "rank": 0})
        (answer,) = watch.ask(tmp_path, [said])
        assert answer["stack"] == []
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_process_id_that_was_given_again_gets_no_signal(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (tmp_path / f"{process.pid}.stack").touch()  # of the process that had this id before
        started = identity.start_of(process.pid)
        assert started is not None
        for said in ({"started": started - 5}, {}):
            assert watch.ask(tmp_path, [Process({"pid": process.pid, **said})]) == ()
        time.sleep(0.2)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_files_that_are_no_states_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text("{")
    (tmp_path / "2.json").write_text("[]")
    (tmp_path / "3.json").write_text(json.dumps({"pid": 3}))
    assert [process.pid for process in read_processes(tmp_path)] == [3]


def test_the_first_error_counts_not_the_eighth() -> None:
    processes = [
        program(error="RuntimeError: see the trace above", error_at=9.0),
        worker(1, error="OutOfMemoryError: 20 MiB", error_at=5.0),
        worker(0, error="OutOfMemoryError: 20 MiB", error_at=6.0),
    ]
    first = first_error(processes)
    assert first is not None
    assert first.name == "rank 1"
    assert first_error([program()]) is None


def test_a_status_file_of_a_launcher_that_is_gone_is_unknown(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    record = {
        "kind": "status", "state": "running", "line": "starting", "command": ["x.py"],
        "updated": time.time() - 100, "started": time.time() - 200, "pid": process.pid,
    }  # fmt: skip
    text, code = watch.render(record, time.time())
    assert code == 3
    assert "is gone" in text


@pytest.mark.parametrize("content", [None, "", "[]", '{"kind": "run"}'])
def test_a_file_that_is_no_status_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "status"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match="status"):
        watch.read_status(path)
