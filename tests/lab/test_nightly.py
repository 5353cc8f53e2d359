"""The nightly job on FAKE nightlies: what it says, what it remembers, when it opens an issue."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab import __main__ as cli
from lab import environments, matrix, matrix_report
from vllm_compat.errors import VllmCompatError

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


TRITON = "RuntimeError: vLLM on x86 CPUs requires Triton (triton-cpu)."


def cell(outcome: str, model: str = "llama", ranks: int = 1, **more: Any) -> dict[str, Any]:
    """Return a record of an overlay's cell, as the matrix makes it."""
    record = {
        "cell": f"vllm-0.40.0.dev1_speculators-0.3.0_{model}_tp{ranks}",
        "versions": {"vllm": "0.40.0.dev1", "speculators": "0.3.0"},
        "model": model, "ranks": ranks, "without": [], "overlay": True, "kernels": "0.32.0",
        "outcome": outcome, "worst": 1e-6,
    }  # fmt: skip
    if outcome == "vllm fails":
        record["error"] = "RuntimeError: of the downstream"
        record["plain"] = {"outcome": "failed", "error": TRITON, "log": []}
        record["log"] = ["the log"]
    return record | more


Run = Callable[..., int]


@pytest.fixture
def run(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return ``run(records, *words)``: a night with a FAKE matrix, which writes them."""

    def night(records: list[dict[str, Any]], *words: str) -> int:
        of = {"overlay_digest": matrix.digest_of(nights.source)}
        records = [of | record for record in records]

        class Stand(matrix.Matrix):
            def run(self) -> list[dict[str, Any]]:
                self.options.out.mkdir(parents=True, exist_ok=True)
                for record in records:
                    (self.options.out / f"{record['cell']}.json").write_text(json.dumps(record))
                return records

        monkeypatch.setattr(matrix, "Matrix", Stand)
        for path in (nights.summary, nights.issue):
            path.unlink(missing_ok=True)
        return cli.main(
            ["nightly", str(nights.source), "--state", str(nights.state), "--speculators", "0.3.0",
             "--summary", str(nights.summary), "--issue", str(nights.issue), *words]
        )  # fmt: skip

    return night


def test_a_night_on_which_nothing_ran_right_is_red_and_says_why(nights: Nights, run: Run) -> None:
    assert run([cell("vllm fails"), cell("vllm fails", "mistral"), cell("vllm fails", ranks=2)]) == 1
    assert "none of 3 cells has run right" in nights.summary.read_text()
    said = nights.issue.read_text()
    assert "vLLM 0.40.0.dev1 could not be run" in said
    assert f"3 × vLLM alone fails over the kernels of 0.32.0: {TRITON}" in said
    assert "the log" in said

    assert run([cell("vllm fails")]) == 1  # still red, but nothing new
    assert not nights.issue.exists()


def test_a_run_that_leaves_no_records_is_red_too(nights: Nights, run: Run) -> None:
    assert run([]) == 1
    assert "none of 0 cells has run right" in nights.issue.read_text()
    assert "the run left no record" in nights.issue.read_text()


def test_a_run_that_breaks_off_is_red_and_leaves_the_check(
    nights: Nights, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(self: Any) -> None:
        raise VllmCompatError("The tiny llama could not be made: no torch")

    assert run([cell("right")]) == 0
    monkeypatch.setattr(matrix.Matrix, "run", breaks)
    nights.issue.unlink(missing_ok=True)
    words = ["nightly", str(nights.source), "--state", str(nights.state), "--speculators", "0.3.0"]
    assert cli.main([*words, "--issue", str(nights.issue)]) == 1
    assert "the run broke off: The tiny llama could not be made" in nights.issue.read_text()
    assert "is missing: it has run right before" in nights.issue.read_text()


def test_what_vllm_alone_cannot_run_is_noted_where_others_ran(nights: Nights, run: Run) -> None:
    lacks = "AttributeError: '_OpNamespace' '_C' object has no attribute 'new_one'"
    kernels = cell("vllm fails", "mistral", plain={"outcome": "failed", "error": lacks})
    assert run([cell("vllm fails", "kimi_k25"), kernels, cell("right")]) == 0
    said = nights.summary.read_text()
    assert f"kimi_k25 × 1: vLLM alone fails over the kernels of 0.32.0: {TRITON}" in said
    assert "mistral × 1: the overlay's fault, whose kernels of 0.32.0 do not fit these sources" in said
    assert not nights.issue.exists()


def test_a_cell_that_has_run_right_and_does_not_tonight_is_a_trouble(nights: Nights, run: Run) -> None:
    assert run([cell("right", "kimi_k25")]) == 0
    assert run([cell("vllm fails", "kimi_k25"), cell("right")]) == 1
    said = nights.issue.read_text()
    assert "speculators 0.3.0: run: kimi_k25: it has run right before (0.40.0.dev1 or older)" in said
    assert TRITON in said

    assert run([cell("vllm fails", "kimi_k25"), cell("right")]) == 1  # still, but nothing new
    assert not nights.issue.exists()
    assert run([cell("right", "kimi_k25")]) == 0  # the model that stood in for it is not wanted
    assert run([]) == 1
    assert "run: kimi_k25 × 1 is missing: it has run right before" in nights.issue.read_text()


def test_a_night_without_a_run_keeps_what_ran(nights: Nights, run: Run) -> None:
    assert run([cell("right", "kimi_k25")]) == 0
    assert nights.look() == 0
    assert "Nothing. Its source was judged; it was not run." in nights.summary.read_text()
    assert run([cell("vllm fails", "kimi_k25"), cell("right")]) == 1


def test_the_deeper_cause_is_told_where_the_error_only_points_to_it() -> None:
    log = ["(EngineCore) ValueError: no such device", "RuntimeError: See root cause above."]
    plain = {"outcome": "failed", "error": "RuntimeError: failed. See root cause above.", "log": log}
    assert matrix_report.cause(cell("vllm fails", plain=plain)).endswith("ValueError: no such device")


def test_a_record_that_is_of_other_sources_is_red(nights: Nights, run: Run) -> None:
    assert run([cell("right", overlay_digest="of last night's sources"), cell("right", "mistral")]) == 1
    said = nights.issue.read_text()
    assert "speculators 0.3.0: run: llama × 1 is old: its record is of other sources" in said
    assert "mistral × 1 is old" not in said


def test_a_symbol_in_use_that_went_away_is_red_though_an_adapter_repairs_it(
    nights: Nights, run: Run
) -> None:
    assert run([cell("right")]) == 0
    nights.edit("v1/request.py", "FINISHED_ABORTED = 4", "FINISHED_CANCELLED = 4")
    assert run([cell("right")]) == 1
    said = nights.issue.read_text()
    assert (
        "gone: vllm.v1.request.RequestStatus.FINISHED_ABORTED: vLLM 0.40.0.dev1 has it no more" in said
    )
    assert "vllm_hidden_states_generator.py:" in said


SIMULATE = Path(__file__).parents[2] / "scripts" / "simulate_nightly.py"


@pytest.mark.parametrize(
    ("mutation", "status", "said"),
    [
        ("gone", 1, "RequestStatus has no FINISHED_ABORTED here"),
        ("broken", 0, "Nothing. Its source was judged; it was not run."),  # only a run shows these two
        ("lacking", 0, "Nothing. Its source was judged; it was not run."),
    ],
)
def test_a_simulated_night_says_what_its_source_shows(
    nights: Nights, tmp_path: Path, mutation: str, status: int, said: str
) -> None:
    out = tmp_path / "simulated"
    words = [sys.executable, str(SIMULATE), str(nights.source), str(out), mutation]
    subprocess.run(words, check=True, capture_output=True)
    assert nights.look() == 0
    nights.source = out
    assert nights.look() == status
    assert said in nights.summary.read_text()
    if mutation == "gone":
        assert "gone: vllm.v1.request.RequestStatus.FINISHED_ABORTED" in nights.issue.read_text()


LACKS = "AttributeError: '_OpNamespace' '_C' object has no attribute 'new_one'"
FULL = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("record", "whose"),
    [
        (cell("vllm fails", "mistral"), "vLLM's"),
        (cell("failed", "mistral", error="ValueError: rows differ", log=[]), "ours"),
        (cell("failed", "mistral", error="No module named 'vllm.v1.request'", log=[]), "ours"),
        (cell("refused", "mistral", error="IncompatibleError: no plan", log=[]), "ours"),
        (
            cell("vllm fails", "mistral", plain={"outcome": "failed", "error": LACKS}),
            "the environment's",
        ),
        (cell("failed", "mistral", error=FULL, log=[]), "the environment's"),
        (cell("failed", "mistral", error="No module named 'numba'", log=[]), "the environment's"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["outcome"],
)
def test_it_is_said_whose_fault_a_cell_is(
    nights: Nights, run: Run, record: dict[str, Any], whose: str
) -> None:
    status = run([record, cell("right")])
    assert status == (0 if record["outcome"] == "vllm fails" else 1)  # the other cell is right
    assert f"by whose fault it is: 1 {whose}." in nights.summary.read_text()
    assert run([record]) == 1  # nothing ran right: red, whoever's fault it is
    assert f"{whose})" in nights.issue.read_text()
    assert f"by whose fault it is: 1 {whose}." in nights.issue.read_text()


def test_a_dry_run_leaves_the_state_folder_as_it_is(nights: Nights, run: Run, tmp_path: Path) -> None:
    assert run([cell("right")], "--dry-run") == 0
    assert not nights.state.exists()
    out = tmp_path / "records"
    assert run([cell("right")], "--dry-run", "--out", str(out)) == 0
    assert not nights.state.exists()
    assert len(list(out.iterdir())) == 1
    assert run([cell("right")]) == 0
    assert len(list((nights.state / "records").iterdir())) == 1


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
