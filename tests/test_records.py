"""The committed records of real runs: complete, as expected, and asserted where they say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.analysis.plan import loads

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


@pytest.mark.parametrize(("whom", "words"), [("worker", "rank 1"), ("driver", "killed by SIGKILL")])
def test_a_killed_process_left_nothing(whom: str, words: str) -> None:
    (record,) = (read(p) for p in (RECORDS / "gpu").glob(f"*killed-{whom}.json"))
    assert record["processes_with_slabs_before"] == 2
    assert record["processes_with_slabs_left"] == 0
    assert record["processes_left"] == record["shared_memory_left"] == []
    assert set(record["gpu_memory_left"]) == {"0 MiB"}
    assert words in record["verdict"]


GPU = RECORDS / "gpu"
BENCHES = sorted(GPU.glob("*-bench-*.json"))


def test_extraction_keeps_nine_tenths_of_plain_prefill_for_both_downstreams() -> None:
    from vllm_compat.commands.bench import speed

    seen = set()
    for path in BENCHES:
        record = read(path)
        assert record["device"] == "NVIDIA H200"
        assert record["driver"]
        plain, auto = (speed(record, mode, "8x2048") for mode in ("plain", "auto"))
        assert plain
        assert auto
        assert auto / plain > 0.9, path.name
        assert not record["modes"]["auto"]["handover"]["not_page_locked"]
        seen.add((record["speculators"], record["tensor_parallel_size"]))
    assert seen == {("0.3.0", 1), ("0.4.0.1", 1), ("0.4.0.1", 2)}


def test_the_readme_tells_what_was_measured() -> None:
    from vllm_compat.commands.bench import speed

    record = read(GPU / "h200-bench-0.26.0.json")
    plain, auto, stock = (speed(record, mode, "8x2048") or 0 for mode in ("plain", "auto", "stock"))
    text = " ".join((RECORDS.parent / "README.md").read_text(encoding="utf-8").split())
    assert f"runs at {auto / plain:.2f} of vLLM's plain prefill on an H200" in text
    assert f"stock's own way reaches {stock / plain:.2f}" in text
    kimi = read(GPU / "h200-bench-0.26.0-kimi-k2.5.json")
    plain, auto = (speed(kimi, mode, "8x2048") or 0 for mode in ("plain", "auto"))
    assert f"(12 of its 61 layers, INT4, one H200): {auto / plain:.2f}." in text


@pytest.mark.parametrize("path", sorted(GPU.glob("*-transfers-*.json")), ids=lambda p: p.stem)
def test_shared_memory_and_replies_gave_the_same_bits_and_nothing_grew(path: Path) -> None:
    cells = read(path)["cells"]
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for cell in cells:
        assert cell["outcome"] == "right"
        group = groups.setdefault((cell["speculators"], cell["runner"], cell["ranks"]), {})
        group[cell["transfer"]] = cell
    assert len(groups) == 4, "both downstreams, both runners"
    for group in groups.values():
        assert len(group["auto"]["digests"]) == 9
        assert group["auto"]["digests"] == group["rpc"]["digests"]
        run = group["auto"]["endurance"]
        assert run["requests"] >= 10_000
        assert run["different_results"] == 1, "the same batch gave the same bits every time"
        for early, late in zip(run["after_a_tenth"], run["at_the_end"], strict=True):
            assert late["shared"] == early["shared"]
            assert late["descriptors"] == early["descriptors"]
            assert late["resident"] < early["resident"] + 4096  # KiB


def test_what_waits_to_be_saved_was_bounded_and_grows_without_the_adapter() -> None:
    record = read(GPU / "h200-save-backlog.json")
    bounded, unbounded = record["bounded"], record["unbounded"]
    assert bounded["most_waiting"] <= bounded["bound"] + bounded["batch_bytes"]
    assert unbounded["most_waiting"] > 2 * bounded["most_waiting"]
    assert bounded["most_shared_memory"] < unbounded["most_shared_memory"] / 2


def test_preflight_was_right_on_a_gpu() -> None:
    (record,) = (read(p) for p in (RECORDS / "gpu").glob("h200-preflight-*.json"))
    run = {name: case for name, case in record["cases"].items() if "workers" in case["seen"]}
    assert set(run) == {"dense", "moe"}
    for case in run.values():
        worker, asked = case["seen"]["workers"][0], case["predicted"]["asked"]
        assert sorted(asked["attention"]) == worker["attention"]
        methods = {name.partition(": ")[2] for name in worker["quant_methods"]}
        assert {name.partition(": ")[2] for name in asked["methods"]} == methods
        used = case["seen"]["memory"][0]["used"]
        assert used > 0.5 * case["seen"]["memory"][0]["total"]
        assert abs(case["predicted"]["memory"]["total"] / used - 1) < 0.1
