"""Records say by which vllm_compat they were made, and which are older than the code they speak for."""

from __future__ import annotations

import json
import subprocess
import warnings
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from vllm_compat._version import __version__
from vllm_compat.trial import stamp

ROOT = Path(__file__).parent.parent
RECORDS = sorted((ROOT / "records").rglob("*.json"))
SPOKEN_FOR = tuple(
    f"src/vllm_compat/{room}"
    for room in ("adapters", "capture", "checks", "entry", "features", "runtime")
)
"""The code that takes part in a run: what a record shows of it holds until it changes."""
STAMPED_SINCE = "2026-12-05"
"""Records of runs that were committed before that day have no stamp of their own."""
DERIVED = {"history", "decoder layers", "dates"}
"""Kinds that are made from other recorded data alone, and are made anew in other tests."""


def git(*words: str, at: Path = ROOT) -> str:
    done = subprocess.run(
        ["git", "-C", str(at), *words], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def has_history(at: Path = ROOT) -> bool:
    """Whether git knows here when a file was last changed: no export, and no shallow clone."""
    return (at / ".git").exists() and git("rev-parse", "--is-shallow-repository", at=at) == "false"


def changed(paths: tuple[str, ...], at: Path = ROOT) -> str:
    """Return the day on which one of these paths was last changed by a commit."""
    return git("log", "-1", "--format=%cs", "--", *paths, at=at)


def day_of(path: Path, record: dict[str, Any], at: Path = ROOT) -> str:
    """Return the day on which a record was made, at the latest."""
    made = record.get("vllm_compat")
    return str(made["date"]) if made else changed((str(path.relative_to(at)),), at)


def older(at: Path = ROOT, code: tuple[str, ...] = SPOKEN_FOR) -> Counter[str]:
    """Return how many records of each folder are older than the last change of the code."""
    last, found = changed(code, at), Counter[str]()
    for path in sorted((at / "records").rglob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("kind") not in DERIVED and day_of(path, record, at) < last:
            found[str(path.parent.relative_to(at))] += 1
    return found


def test_a_new_record_says_by_which_vllm_compat_it_was_made() -> None:
    assert RECORDS
    for path in RECORDS:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("kind") in DERIVED:
            continue
        if "vllm_compat" in record:
            assert record["vllm_compat"].keys() == {"version", "commit", "date"}, path
        elif has_history():
            assert changed((str(path.relative_to(ROOT)),)) <= STAMPED_SINCE, f"{path} has no stamp"


def test_records_that_are_older_than_the_code_they_speak_for_are_told() -> None:
    if not has_history():
        warnings.warn("Without git's history no record's age can be told.", stacklevel=1)
    elif found := older():
        words = ", ".join(f"{count} in {folder}" for folder, count in sorted(found.items()))
        warnings.warn(
            f"Records older than the last change of {', '.join(SPOKEN_FOR)}: {words}.", stacklevel=1
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in ("records/gpu", "code"):
        (tmp_path / folder).mkdir(parents=True)
    git("init", "-q", at=tmp_path)
    return tmp_path


def commit(at: Path, day: str) -> None:
    git("add", "-A", at=at)
    names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(
        ["git", "-C", str(at), *names, "commit", "-qm", day],
        check=True,
        env={"GIT_COMMITTER_DATE": f"{day}T12:00:00Z", "PATH": "/usr/bin:/bin:/usr/local/bin"},
    )


def test_the_stamp_counts_and_where_there_is_none_the_commit(checkout: Path) -> None:
    (checkout / "records/gpu/early.json").write_text("{}")
    stamped = {"vllm_compat": {"version": "1", "commit": None, "date": "2026-01-03"}}
    (checkout / "records/gpu/stamped.json").write_text(json.dumps(stamped))
    (checkout / "code/a.py").write_text("a")
    commit(checkout, "2026-01-01")
    assert has_history(checkout)
    assert older(checkout, ("code",)) == {}
    (checkout / "code/a.py").write_text("b")
    (checkout / "records/gpu/derived.json").write_text('{"kind": "history"}')
    commit(checkout, "2026-01-02")
    assert older(checkout, ("code",)) == {"records/gpu": 1}
    (checkout / "code/a.py").write_text("c")
    commit(checkout, "2026-01-04")
    assert older(checkout, ("code",)) == {"records/gpu": 2}


def test_a_stamp_names_version_commit_and_day(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = stamp.made_by()
    assert made["version"] == __version__
    head = git("rev-parse", "--short=12", "HEAD") if (ROOT / ".git").exists() else None
    assert made["commit"] in (head, f"{head}+")
    assert date.fromisoformat(made["date"]) <= date.today()
    assert stamp._commit(tmp_path) is None
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stamp._commit(tmp_path) is None
