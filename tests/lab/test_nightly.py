"""The nightly job on FAKE nightlies: what it says, what it remembers, when it opens an issue."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_compat import cli
from vllm_compat.lab import environments, matrix

FAKES = Path(__file__).parent.parent / "fakes"
FILE_ISSUE = Path(__file__).parents[2] / "scripts" / "file_issue.py"


class Nights:
    """A folder of fake vLLM sources, the job's state, and what the job has written."""

    def __init__(self, home: Path) -> None:
        self.source = home / "source"
        self.state = home / "state"
        self.summary = home / "summary.md"
        self.issue = home / "issue.md"
        shutil.copytree(FAKES / "vllm", self.source)
        info = self.source / "vllm-0.40.0.dev1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.40.0.dev1\n")

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.source / "vllm" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def look(self, *more: str) -> int:
        for path in (self.summary, self.issue):
            path.unlink(missing_ok=True)
        return cli.main(
            ["nightly", str(self.source), "--state", str(self.state), "--speculators", "0.3.0",
             "--no-run", "--summary", str(self.summary), "--issue", str(self.issue), *more]
        )  # fmt: skip


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    fake = FAKES / "speculators_0_3"
    monkeypatch.setattr(environments, "speculators_folder", lambda *_args, **_more: fake)
    return Nights(tmp_path)


def test_a_new_finding_opens_an_issue_once(nights: Nights) -> None:
    assert nights.look() == 0
    assert "## What does not fit\n\nNothing." in nights.summary.read_text()
    assert not nights.issue.exists()

    nights.edit("v1/request.py", "request_id: str", "request_name: str")
    assert nights.look() == 1
    said = nights.issue.read_text()
    assert "parameter" in said
    assert "request_id" in said
    assert "request_name" in said  # the difference since the last nightly
    assert "**new**" in nights.summary.read_text()

    assert nights.look() == 1  # still wrong, but nothing new
    assert not nights.issue.exists()
    assert "**new**" not in nights.summary.read_text()


def test_a_dry_run_forgets(nights: Nights) -> None:
    nights.edit("v1/request.py", "request_id: str", "request_name: str")
    assert nights.look("--dry-run") == 1
    assert not nights.state.exists()
    assert nights.look() == 1
    assert nights.issue.exists()
    state = json.loads((nights.state / "state.json").read_text())
    assert state["version"] == "0.40.0.dev1"


def test_a_run_that_fails_is_a_finding_too(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {
        "cell": "vllm-0.40.0.dev1_speculators-0.3.0_llama_tp1",
        "versions": {"vllm": "0.40.0.dev1", "speculators": "0.3.0"},
        "model": "llama", "ranks": 1, "without": [], "overlay": True,
        "outcome": "failed", "error": "ValueError: rows", "log": ["the log"],
    }  # fmt: skip
    asked: list[matrix.Options] = []

    class Stand(matrix.Matrix):
        def run(self) -> list[dict[str, object]]:
            asked.append(self.options)
            return [record]

    monkeypatch.setattr(matrix, "Matrix", Stand)
    words = ["nightly", str(nights.source), "--state", str(nights.state), "--speculators", "0.3.0"]
    assert cli.main([*words, "--issue", str(nights.issue)]) == 1
    assert asked[0].source == nights.source
    assert asked[0].again
    said = nights.issue.read_text()
    assert "run: llama: failed: ValueError: rows" in said
    assert "the log" in said


def test_the_commands_for_github_are_shown_without_giving_them(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, FILE_ISSUE, *words], capture_output=True, text=True, check=True,
            env={"PATH": ""},
        )  # fmt: skip
        return done.stdout

    assert "no issue is needed" in run(str(tmp_path / "none.md"))
    text = tmp_path / "issue.md"
    text.write_text("what is new")
    said = run(str(text), "--dry-run")
    assert "gh issue create --title" in said
    assert "gh issue comment NUMBER" in said
    assert "what is new" in said
