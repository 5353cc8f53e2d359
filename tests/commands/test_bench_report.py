"""What `vllm-compat bench --report` writes for an issue, and how it is taken into the records."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from vllm_compat.cli import main
from vllm_compat.commands import bench_report

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
import performance  # noqa: E402
import take_report  # noqa: E402

SECRET = "/home/alice/secret-model"
FAKE: dict[str, Any] = {
    "schema_version": 1,
    "kind": "bench",
    "vllm_compat": {"version": "0.9.0", "commit": "0123456789ab+", "date": "2026-11-30"},
    "model": SECRET,
    "architecture": "LlamaForCausalLM",
    "tensor_parallel_size": 1,
    "calls": 5,
    "vllm": "0.26.0",
    "speculators": "0.4.0.1",
    "torch": "2.11.0+cu130",
    "python": "3.12.3",
    "cores": 16,
    "device": "FAKE Card 5000",
    "driver": "580.159.04",
    "compute_capability": "12.0",
    "memory_mib": 98304,
    "gpus": 2,
    "modes": {
        "plain": {"batches": {"8x512": {"tokens_per_second": 1000.0, "seconds": [4.1]}}},
        "stock": {"batches": {"8x512": {"failed": f"prompt 'Dear Alice' of {SECRET}"}}},
        "rpc": {"failed": f"exit status 1, see {SECRET}"},
        "auto": {
            "batches": {"8x512": {"tokens_per_second": 930.0, "seconds": [4.4]}},
            "plan": {
                "adapters": ["engine.kv_cache", "worker.capture"],
                "features": ["proofs"],
                "switched_off": [SECRET],
                "engine": "stock",
            },
            "runner": "V1",
            "worker": {
                "attention": ["TRITON_MLA"],
                "quant_methods": ["Linear: UnquantizedLinearMethod", f"Own: {SECRET}"],
            },
            "worker_peak_bytes": [{"host": 10, "device": 70 * 2**30}],
            "saving": [
                {"folder": SECRET, "filesystem": "nfs on alice-host", "batch": "8x512",
                 "tokens_per_second": 800.0,
                 "gb_per_second": {"extraction and saving": 0.5, "saving alone": 2.0, "cp": 1.0}},
            ],
        },
    },
}  # fmt: skip
"""A FAKE record of a bench: no such card has been measured."""

FAKE_PREFLIGHT: dict[str, Any] = {
    "schema_version": 1,
    "kind": "preflight",
    "options": {"model": SECRET, "devices": 1, "output_dir": SECRET},
    "items": [{"question": "disk", "state": "ok", "answer": SECRET}],
    "memory": {"weights": 60, "kv_cache": 10, "activations": 5, "context": 1, "device": 96, "total": 76},
    "asked": {"attention": {"TRITON_MLA": 12}, "methods": ["Linear: UnquantizedLinearMethod"]},
    "exit_status": 0,
}


def report() -> dict[str, Any]:
    return bench_report.report_of(copy.deepcopy(FAKE), FAKE_PREFLIGHT)


def written(tmp_path: Path, content: object, name: str = "report.json") -> Path:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    return path


def test_a_report_holds_no_path_no_prompt_and_no_name_of_a_host_or_user() -> None:
    text = json.dumps(report()).lower()
    for secret in ("alice", "secret", "home", "nfs", "/"):
        assert secret not in text.replace("the user's own", ""), secret


def test_a_report_has_what_a_maintainer_asks_for() -> None:
    found = report()
    Draft202012Validator.check_schema(bench_report.schema())
    Draft202012Validator(bench_report.schema()).validate(found)
    assert take_report.fault_of(found) == ""
    assert found["machine"]["compute_capability"] == "12.0"
    assert found["machine"]["driver"] == "580.159.04"
    assert found["model"] == {"weights": "the user's own", "architecture": "LlamaForCausalLM"}
    assert found["plan"]["adapters"] == ["engine.kv_cache", "worker.capture"]
    assert found["failed"] == ["rpc"]
    (batch,) = found["batches"]
    assert batch["modes"]["auto"] == {"tokens_per_second": 930.0, "of_plain": 0.93, "guards": "passed"}
    assert batch["modes"]["plain"]["guards"] == "not in force"
    assert found["predicted"]["attention"] == found["measured"]["attention"] == ["TRITON_MLA"]
    assert found["predicted"]["memory"]["total"] == 76
    assert found["measured"]["peak_bytes"] == [70 * 2**30]


def test_a_batch_that_a_guard_refused_says_so() -> None:
    record = copy.deepcopy(FAKE)
    record["modes"]["auto"]["batches"]["8x512"] = {"failed": "Result 2 belongs to another prompt."}
    found = bench_report.report_of(record)
    assert found["batches"][0]["modes"]["auto"] == {
        "tokens_per_second": None, "of_plain": None, "guards": "refused",
    }  # fmt: skip
    assert take_report.fault_of(found) == ""


def test_the_command_writes_it_beside_what_preflight_said(tmp_path: Path) -> None:
    source, said = written(tmp_path, FAKE, "a.json"), written(tmp_path, FAKE_PREFLIGHT, "b.json")
    out = tmp_path / "report.json"
    arguments = ["bench", "--from", str(source), "--report", str(out), "--preflight", str(said)]
    assert main(arguments) == 1, "a mode of it has failed"
    assert json.loads(out.read_text()) == report()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "run"}, "was not written by `vllm-compat preflight --json`"),
        ({"options": {"devices": 8}}, "was asked about 8 ranks, and the bench has 1"),
        ({"memory": {"weights": 1}}, "a field is missing"),
    ],
)
def test_another_preflight_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
) -> None:
    source = written(tmp_path, FAKE, "a.json")
    said = written(tmp_path, {**FAKE_PREFLIGHT, **change}, "b.json")
    out = tmp_path / "report.json"
    arguments = ["bench", "--from", str(source), "--report", str(out), "--preflight", str(said)]
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_options_that_lead_nowhere_are_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--preflight", "x.json"]) == 2
    assert "--preflight goes with --report" in capsys.readouterr().err
    assert main(["bench", "--report", str(tmp_path / "no" / "r.json")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["bench", "--report", str(tmp_path / "r.json"), "--preflight", "no.json"]) == 2
    assert "No such file" in capsys.readouterr().err


def put(report: dict[str, Any], where: str, value: object) -> None:
    *way, last = where.split(".")
    part: Any = report
    for key in way:
        part = part[int(key)] if isinstance(part, list) else part[key]
    part[last] = value


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ("machine.device", "/home/alice/card", "looks like a path"),
        ("machine.device", "C:\\Users\\alice", "looks like a path"),
        ("machine.device", "alice@host", "looks like a path or an address"),
        ("plan.adapters", ["engine.kv_cache", "../alice"], "plan.adapters.1 holds"),
        ("machine./etc/passwd", 1, "a name in machine holds '/etc/passwd'"),
        ("predicted.attention", ["TRITON_MLA at /opt/x"], "looks like a path"),
        ("machine.hostname", "alices-box", "Additional properties are not allowed"),
        ("prompts", ["Dear Alice"], "Additional properties are not allowed"),
        ("model.weights", "alice's secret model", "at model.weights"),
        ("measured.attention", ["Dear Alice, how are you?"], "at measured.attention.0"),
        ("kind", "bench", "at kind"),
        ("batches.0.modes.auto.tokens_per_second", 1e12, "at batches.0.modes.auto.tokens_per_second"),
        ("batches.0.modes.auto.tokens_per_second", -1, "at batches.0.modes.auto.tokens_per_second"),
        ("batches.0.modes.auto.tokens_per_second", True, "at batches.0.modes.auto.tokens_per_second"),
        ("batches.0.modes.auto.of_plain", 3.0, "3.0 of plain is not 930.0 tokens/s through 1000.0"),
        ("batches.0.modes.auto.of_plain", float("nan"), "NaN is no number"),
        ("batches.0.modes.auto.of_plain", None, "speeds without their ratio"),
        ("batches.0.modes.auto.guards", "refused", "a batch that a guard has refused has a speed"),
        ("machine.compute_capability", "sm_120", "at machine.compute_capability"),
        ("machine.gpus", 1, ""),
        ("tensor_parallel_size", 4, "4 ranks cannot run on 2 GPUs"),
        ("machine.device", "cpu", "do not go together"),
        ("measured.peak_bytes", [200 * 2**30], "on a card of"),
        ("predicted.memory.total", 500, "are not the sum of their parts"),
        ("vllm_compat.date", "2999-01-01", "at vllm_compat.date"),
        ("vllm_compat.date", "2098-01-01", "still to come"),
        ("vllm_compat.date", "2026-02-31", "there is no day"),
    ],
)
def test_what_no_bench_has_written_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, value: object, words: str
) -> None:
    changed = report()
    put(changed, where, value)
    path, records = written(tmp_path, changed), tmp_path / "records"
    status = take_report.main([str(path), "--records", str(records)])
    said = capsys.readouterr().err
    if not words:
        assert status == 0, said
        return
    assert status == 1
    assert words in said
    assert len(said.splitlines()) == 1
    assert not records.exists(), "nothing of it was taken"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "is no JSON file"),
        ("[]", "at the report"),
        ('{"kind": "bench report", "kind": "x"}', "stands twice"),
        ("[" * 100_000, "is no JSON file"),
        (" " * 2_000_000, "larger than"),
    ],
    ids=["text", "list", "twice", "deep", "large"],
)
def test_a_file_that_is_no_report_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    assert take_report.main([str(path), "--records", str(tmp_path / "records")]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1
    assert take_report.main([str(tmp_path / "none.json")]) == 1


def test_a_good_report_is_taken_once_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, records = written(tmp_path, report()), tmp_path / "records"
    assert take_report.main([str(path), "--records", str(records), "--check"]) == 0
    assert not records.exists()
    assert take_report.main([str(path), "--records", str(records)]) == 0
    (taken,) = (records / "reports").iterdir()
    assert taken.name.startswith("fake-card-5000-x1-vllm-0.26.0-")
    assert json.loads(taken.read_text()) == report()
    assert take_report.main([str(path), "--records", str(records)]) == 1
    assert "it was taken before" in capsys.readouterr().err

    def recorded(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if kind == report()["kind"]:
            yield f"records/reports/{taken.name}", json.loads(taken.read_text())

    table = performance.page(recorded)
    assert "1 × FAKE Card 5000 (12.0, driver 580.159.04)" in table
    assert "| vllm_compat | **0.93** | passed | TRITON_MLA / TRITON_MLA | 0.0 / 70.0 |" in table
    assert "| vllm_compat, pickled replies | failed |" in table


def test_every_report_in_the_records_could_be_taken_today() -> None:
    for path in sorted((ROOT / "records" / "reports").glob("*.json")):
        found, fault = take_report.read(path)
        assert not fault, f"{path.name}: {fault}"
        assert path.name == take_report.name_of(found, path.read_text(encoding="utf-8"))
