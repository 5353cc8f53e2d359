"""The committed records of real runs: complete, as expected, and asserted where they say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.plan import loads

RECORDS = Path(__file__).parent.parent / "records"
SUITES = sorted((RECORDS / "gpu").glob("h200*-vllm-*.json"))


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def test_there_are_records_of_one_and_of_two_gpus() -> None:
    assert {read(path)["gpus"] for path in SUITES} == {1, 2}


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_a_gpu_suite_is_complete_and_every_cell_ended_as_expected(path: Path) -> None:
    record = read(path)
    assert record["kind"] == "gpu suite"
    assert all(record[key] for key in ("device", "driver", "compute_capability", "memory_mib"))
    for cell in record["cells"]:
        assert cell["as_expected"], cell["name"]
        plan = loads(json.dumps(cell["plan"]))
        assert plan.environment.device == "cuda"
        if cell["outcome"] != "right":
            assert plan.switched_off, cell["name"]
            continue
        assert set(cell["versions"]) == {"vllm", "speculators", "torch", "transformers"}
        assert len(cell["scenarios"]) >= 9
        for key, text in cell["cell"].get("workers", {}).items():
            assert all(text in str(worker[key]) for worker in cell["workers"]), cell["name"]


@pytest.mark.parametrize("release", ["0.3.0", "0.4.0.1"])
def test_both_runners_both_start_methods_and_int4_were_seen(release: str) -> None:
    seen = set()
    for path in SUITES:
        for cell in read(path)["cells"]:
            if cell["outcome"] == "right" and cell["versions"]["speculators"] == release:
                for worker in cell["workers"]:
                    seen.add("V2" if ".gpu.model_runner" in worker["runner"] else "V1")
                    seen.add(worker["start_method"])
                    seen.update(worker["attention"])
                    if "CompressedTensorsWNA16MarlinMoEMethod" in str(worker["quant_methods"]):
                        seen.add("INT4")
    assert seen >= {"V1", "V2", "fork", "spawn", "TRITON_MLA", "FLASH_ATTN", "INT4"}


def test_a_killed_worker_left_nothing() -> None:
    (record,) = (read(p) for p in (RECORDS / "gpu").glob("*killed-worker.json"))
    assert record["processes_left"] == record["shared_memory_left"] == []
    assert set(record["gpu_memory_left"]) == {"0 MiB"}
    assert "rank 1" in record["verdict"]
