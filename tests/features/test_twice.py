"""`apply → revert → apply` in one interpreter: a feature behaves as the first time; all on FAKES."""

from __future__ import annotations

import json
import pickle
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_compat.features import names

if TYPE_CHECKING:
    from conftest import MakeSite

PROGRAM = str(Path(__file__).parents[1] / "fakes" / "programs" / "twice.py")


def record(**more: Any) -> dict[str, Any]:
    return {"samples": 0, "calls": 0, "saved": 0, "from_files": 0, "failed": False, **more}


EXPECTED: dict[str, list[Any]] = {
    "clean_scheduler": [[["r0"]], [], [["r0"]]],
    "shut_down": [1, 0, 0, 1],
    "end_orphans": [1, 0, 0, 1],
    "atomic_save": [
        *("saved", ["computed"]),
        *("data_N.pt failed", "No further batch is extracted"),
        *("data_N+1.pt refused", record(saved=1, failed=True)),
        *(1, ["computed"]),
        *("saved", ["computed"], False),
    ],
    "save_backlog": [["computed"], True, 5000, 1000, 0, ["computed"], 900, 0.0],
    "resume_samples": [["computed", "file"], ["file", "computed"], 2, ["computed"]],
    "leave_out": [[0, "computed"], ["computed", 0], [2, 5], ["computed"]],
    "run_record": [
        record(),
        record(samples=4, calls=2, saved=1, failed=True),
        True,
        record(),
        "No hidden states were extracted.",
    ],
    "progress": [
        *(None, "ValueError: first of N", "ValueError: first of N", "worker"),
        *(2, "ready", 3),
        *(None, True, ["a"], 2),
        *("RuntimeError: end of N", "program"),
    ],
}


@pytest.fixture(scope="module", params=EXPECTED)
def rounds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, make_site: MakeSite
) -> tuple[str, list[Any]]:
    """Return a feature, and what a program saw of it in each round around a revert."""
    folder = tmp_path_factory.mktemp("twice")
    site = make_site(folder).add_loading()
    (folder / "status").mkdir()
    environ = {
        "VLLM_COMPAT_STATUS": str(folder / "status"),
        "VLLM_COMPAT_RECORD": str(folder / "record.json"),
    }
    if request.param == "resume_samples":
        environ["VLLM_COMPAT_RESUME"] = json.dumps({"folder": str(folder), "next": 2, "kept": True})
    if request.param == "leave_out":
        notes = {"folder": str(folder), "next": 2, "left_out": [2, 5]}
        environ["VLLM_COMPAT_RESUME"] = json.dumps(notes)
    for number in (3, 4):  # whole samples behind the gap at 2, as the program's own torch saves them
        kept = {"input_ids": array("i", [number, 1]), "hidden_states": [b"rows"]}
        (folder / f".data_{number}.pt.kept").write_bytes(b"begun" + pickle.dumps(kept))
    done = site.run(PROGRAM, str(folder), request.param, **environ)
    assert done.returncode == 0, done.stderr
    return request.param, [json.loads(line) for line in done.stdout.splitlines()]


def test_every_feature_is_used_twice() -> None:
    assert set(names()) <= set(EXPECTED)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_feature_behaves_after_a_revert_as_the_first_time(
    rounds: tuple[str, list[Any]], number: int
) -> None:
    feature, seen = rounds
    assert len(seen) == 3
    assert seen[number] == EXPECTED[feature]
