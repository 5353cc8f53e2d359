"""What `vllm-compat bench` asks for, prints and draws; measuring itself needs vLLM."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat.cli import main
from vllm_compat.commands import bench

RECORD: dict[str, Any] = {
    "kind": "bench",
    "model": "random weights, tiny Llama",
    "tensor_parallel_size": 1,
    "calls": 3,
    "vllm": "0.16.0",
    "speculators": "0.4.0.1",
    "device": "cpu",
    "modes": {
        "plain": {"batches": {"8x64": {"tokens_per_second": 1000.0, "seconds": [0.5, 0.5, 0.6]}}},
        "stock": {"failed": "exit status 1"},
        "auto": {
            "batches": {
                "8x64": {
                    "tokens_per_second": 900.0,
                    "seconds": [0.6, 0.5, 0.6],
                    "phases": {"forward": 0.5, "reply": 0.05, "rest": 0.05},
                    "parts": {"mlp (MLP)": 0.7, "self_attn (Attention)": 0.294, "rest": 0.006},
                }
            },
            "saving": [
                {"folder": "/data", "filesystem": "tmpfs", "batch": "8x64", "tokens_per_second": 800.0,
                 "gb_per_second": {"extraction and saving": 0.5, "saving alone": 2.0, "cp": 1.0}},
            ],
        },
    },
}  # fmt: skip


def test_ratios_come_first_and_a_cpu_run_says_so() -> None:
    text = bench.render(RECORD)
    assert "this is a CPU run" in text.splitlines()[0]
    assert "auto   0.90 of plain" in text
    assert "forward 83%, reply 8%, rest 8%" in text
    assert "layers: mlp (MLP) 70%, self_attn (Attention) 29%\n" in text
    assert "0.50 of cp" in text
    assert "Failed: stock: exit status 1" in text


def test_a_batch_that_a_mode_fails_at_is_told_beside_the_others() -> None:
    modes = {
        **RECORD["modes"],
        "stock": {"batches": {"8x64": {"failed": "Result 2 belongs to another prompt."}}},
    }
    assert "stock failed: Result 2 belongs" in bench.render({**RECORD, "modes": modes})
    assert bench.speed({**RECORD, "modes": modes}, "stock", "8x64") is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "8"], "--batch is '8'"),
        (["--batch", "0x8"], "--batch is '0x8'"),
        (["--modes", "plain,fast"], "--modes names 'fast'"),
        (["--calls", "0"], "--calls is 0"),
        (["--model", "x", "--shape", "8b"], "leave it out with --model"),
        (["--model", "x", "--layers", "2"], "leave it out with --model"),
        (["--save", "/no/such/folder"], "there is no such folder"),
        (["--from", "/no/such/record.json"], "No such file"),
    ],
)
def test_a_call_that_makes_no_sense_is_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_a_record_is_read_again_and_another_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(RECORD))
    assert main(["bench", "--from", str(path)]) == 1, "a mode of it has failed"
    assert "0.90 of plain" in capsys.readouterr().out
    for text in ("not json", '{"kind": "cell"}', "[]"):
        path.write_text(text)
        assert main(["bench", "--from", str(path)]) == 2


def test_a_plot_without_matplotlib_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(RECORD))
    assert main(["bench", "--from", str(path), "--plot", str(tmp_path / "plot.svg")]) == 2
    assert "pip install 'vllm-compat[bench]'" in capsys.readouterr().err


def test_prompts_have_the_shape_asked_for() -> None:
    tokens = bench._tokens("3x5")
    assert [len(ids) for ids in tokens] == [5, 5, 5]
    assert tokens != bench._tokens("3x5", 1)


class Executor:
    """A FAKE one whose steps are messages, as in some releases; each takes its time."""

    def collective_rpc(self, method: str, *, seconds: float = 0.05) -> str:
        time.sleep(seconds)
        return method

    def execute_model(self, output: Any) -> str:
        return self.collective_rpc("execute_model")

    def sample_tokens(self, output: Any) -> str:
        return self.collective_rpc("sample_tokens")


def test_phases_add_up_and_no_time_counts_twice() -> None:
    executor = Executor()
    scheduler = SimpleNamespace(schedule=lambda: time.sleep(0.05))
    phases: dict[str, float] = defaultdict(float)
    bench._watch(SimpleNamespace(executor=executor, scheduler=scheduler), phases)
    begin = time.perf_counter()
    assert executor.execute_model(None) == "execute_model"
    executor.sample_tokens(None)
    scheduler.schedule()
    executor.collective_rpc("_reset_capture")
    executor.collective_rpc("_get_captured_states")
    total = time.perf_counter() - begin
    assert set(phases) == {"forward", "reply", "messages", "scheduling"}
    assert phases["forward"] > phases["reply"]
    assert 0.9 * total < sum(phases.values()) <= total
