"""Two real launchers and one output folder, on FAKES of vLLM, speculators and torch."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_compat.commands.run.folder import own_folder
from vllm_compat.errors import UsageError
from vllm_compat.features import resume_samples
from vllm_compat.features.atomic_save import part_of

if TYPE_CHECKING:
    from conftest import Site

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="process tests are written for Linux"
)

SCRIPT = """
import argparse, pathlib, sys, time
import torch
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

parser = argparse.ArgumentParser()
parser.add_argument("--output-dir")
parser.add_argument("--name")
args = parser.parse_args()
out = pathlib.Path(args.output_dir)
pathlib.Path(args.name).write_text("prepares its data")
while not pathlib.Path("go").exists():
    time.sleep(0.02)
out.mkdir(parents=True, exist_ok=True)
first = max((int(p.stem[5:]) for p in out.glob("data_*.pt")), default=-1) + 1
for number in range(first, 6):
    torch.save({"hidden_states": [], "by": args.name * 1000}, out / f"data_{number}.pt")
"""
SAVE = """
    import time
    text = obj["by"]
    with open(f, "w") as file:
        for start in range(0, len(text), 500):
            file.write(text[start : start + 500])
            file.flush()
            time.sleep(0.01)
"""


@pytest.fixture
def start(site: Site) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `vllm-compat run` on a stand-in for stock's script, which waits for a file named `go`."""
    site.edit(
        "torch/__init__.py", '\n    raise NotImplementedError("the fake torch saves nothing")', SAVE
    )
    (site.folder / "script.py").write_text(SCRIPT)
    started = []

    def launch(name: str, out: Path, *options: str) -> subprocess.Popen[str]:
        source = str(Path(resume_samples.__file__).parents[2])
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm_compat", "run", "--no-canary", *options, "script.py"),
                *("--output-dir", str(out), "--name", name),
            ],
            cwd=site.folder,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHON"))},
                "PYTHONPATH": os.pathsep.join([str(site.folder), source]),
                "VLLM_COMPAT_CACHE": "off",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("place", ["out", "a/b/out"])
def test_two_runs_into_one_folder_that_is_not_there_yet(
    start: Callable[..., subprocess.Popen[str]], site: Site, place: str
) -> None:
    out = site.folder / place
    runs = {name: start(name, out) for name in ("one", "two")}
    wait_for(lambda: any(process.poll() is not None for process in runs.values()))
    (refused,) = [name for name, process in runs.items() if process.poll() is not None]
    (other,) = {"one", "two"} - {refused}
    assert runs[refused].wait() == 2
    assert f"Another `vllm-compat run` writes into {out}" in runs[refused].communicate()[1]
    (site.folder / "go").touch()
    said = runs[other].communicate(timeout=60)[1]
    assert runs[other].returncode == 0, said
    assert sorted(p.name for p in out.iterdir()) == [f"data_{i}.pt" for i in range(6)]
    assert {p.read_text() for p in out.iterdir()} == {other * 1000}
    assert not list(out.parent.glob(".*")), "no lock stays behind"


def test_two_runs_that_leave_the_folder_alone_never_write_one_file_together(
    start: Callable[..., subprocess.Popen[str]], site: Site
) -> None:
    out = site.folder / "out"
    runs = {name: start(name, out, "--leave-folder") for name in ("one", "two")}
    wait_for(lambda: all((site.folder / name).exists() for name in runs))
    third = start("three", out)  # one that would set files aside has to wait
    assert third.wait(30) == 2
    (site.folder / "go").touch()
    for process in runs.values():
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 0, said
    assert len(list(out.iterdir())) == 6
    assert {p.read_text() for p in out.iterdir()} <= {name * 1000 for name in runs}


def test_the_folder_belongs_to_the_program_when_its_launcher_was_killed(
    start: Callable[..., subprocess.Popen[str]], site: Site
) -> None:
    script = site.folder / "script.py"
    script.write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SCRIPT)
    out = site.folder / "out"
    first = start("one", out)
    wait_for((site.folder / "one").exists)
    first.kill()
    first.wait()
    assert start("two", out).wait(30) == 2
    (site.folder / "go").touch()
    wait_for((out / "data_5.pt").exists)

    def free() -> bool:
        try:
            with own_folder(out):
                return True
        except UsageError:
            return False

    wait_for(free)


def test_a_half_written_file_is_taken_away_only_when_its_process_has_ended(tmp_path: Path) -> None:
    mine = tmp_path / part_of("data_3.pt")
    ended = subprocess.run(
        [sys.executable, "-c", "from vllm_compat.runtime import identity; print(identity.own())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    elsewhere = "0badcafe-12-34"
    for name in (
        mine.name,
        f".data_4.pt.{ended}.part",
        ".data_5.pt.part",
        f".data_6.pt.{elsewhere}.part",
    ):
        (tmp_path / name).write_bytes(b"half")
    old = tmp_path / f".data_7.pt.{elsewhere}.part"
    old.write_bytes(b"half")
    os.utime(old, (0, 0))
    resume_samples.prepare(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {mine.name, f".data_6.pt.{elsewhere}.part"}


def test_where_there_are_no_locks_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with own_folder(tmp_path / "out"):
        pass
    assert "Nothing keeps a second run out of" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_in_a_parent_that_only_others_may_write_to_is_locked_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    original = os.open

    def refuse(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(".lock"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return original(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with own_folder(out), pytest.raises(UsageError, match="Another"), own_folder(out):
        pass
    with own_folder(out):
        pass


def test_a_folder_is_the_same_under_all_its_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    other = own_folder(tmp_path / "x" / ".." / "real")
    with own_folder(tmp_path / "link"), pytest.raises(UsageError), other:
        pass
