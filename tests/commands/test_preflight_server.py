"""`layers --server` and `preflight --server`: the server's numbering, memory for states, the disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.analysis.serving.test_models import BEFORE, WITHIN, modules_of

from vllm_compat import cli
from vllm_compat.analysis.serving.layers import Column, server_layers_of
from vllm_compat.analysis.surface.files import package_at
from vllm_compat.commands.preflight.judge import Item, Options, preflight
from vllm_compat.commands.preflight.server import preflight_server
from vllm_compat.errors import UsageError

TB = 1000**4


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model as wide as Kimi-K2, of 61 layers."""
    config = {"architectures": ["TinyForCausalLM"], "num_hidden_layers": 61, "hidden_size": 7168}
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    return tmp_path


def item(options: Options, question: str) -> Item:
    (found,) = (each for each in preflight_server(options).items if each.question == question)
    return found


def test_ids_are_the_servers_and_the_last_one_is_added(model: Path) -> None:
    found = server_layers_of(model)
    assert found.ids == (2, 30, 58, 61)
    assert found.columns[0] == Column(2, 1, "auxiliary")
    assert found.columns[-1] == Column(61, 60, "verifier's last")
    assert found.bytes_per_token == 4 * 7168 * 2
    given = server_layers_of(model, [5, 0, 5, 61])
    assert given.ids == (0, 5, 61)
    assert given.columns[0].in_process is None


@pytest.mark.parametrize("wrong", [-1, 62])
def test_an_id_that_is_not_there_is_a_sentence(model: Path, wrong: int) -> None:
    with pytest.raises(UsageError, match=rf"Layer id {wrong} is not in 0 to 61: .*\.$"):
        server_layers_of(model, [2, wrong])


def test_layers_prints_both_numberings(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["layers", str(model), "--server", "--layer-ids", "6", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[4:7]] == [
        ["0", "2", "1"],
        ["1", "6", "5"],
        ["2", "61", "60"],
    ]
    assert "--target-layer-ids 2 6" in " ".join(lines)
    assert cli.main(["layers", str(model), "--server", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["columns"][3]["server_id"] == 61


def test_three_hundred_million_tokens_are_seventeen_terabytes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * TB))
    full = item(Options(model=str(model), tokens=300_000_000), "disk")
    assert full.state == "fail"
    assert full.answer.startswith("15.6 TiB for 300,000,000 tokens (57,344 bytes a token); 1.8 TiB free")
    assert "fp8" in full.answer
    assert "on line" in full.answer
    fits = item(Options(model=str(model), samples=1000, max_model_len=2048), "disk")
    assert fits.state == "ok"
    assert fits.answer.startswith("up to 109.4 GiB for up to 2,048,000 tokens")
    assert item(Options(model=str(model)), "disk").state == "note"


def test_states_of_a_prompt_are_held_against_the_device(model: Path) -> None:
    options = Options(model=str(model), max_model_len=131_072)
    assert item(options, "states in memory").state == "note"
    for memory, state in ((141 * 2**30, "ok"), (8 * 2**30, "fail")):
        given = Options(model=str(model), max_model_len=131_072, device_memory=memory)
        found = item(given, "states in memory")
        assert found.state == state
        assert found.answer.startswith("at least 7.0 GiB of each rank's KV cache")


@pytest.mark.parametrize(("loop", "state"), [(WITHIN, "ok"), (BEFORE, "fail")])
def test_the_models_class_is_looked_at(
    model: Path, loop: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules_of(model, loop)
    there = "vllm_compat.commands.preflight.server.installed_package"
    monkeypatch.setattr(there, lambda name: package_at(model, name))
    assert item(Options(model=str(model)), "model's class").state == state


def test_without_vllm_the_class_is_unknown(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise UsageError("vllm is not installed.")

    monkeypatch.setattr("vllm_compat.commands.preflight.server.installed_package", absent)
    assert preflight_server(Options(model=str(model))).exit_status == 3


def test_options_of_the_other_flow_are_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["preflight", str(model), "--server", "--device-capability", "9.0"]) == 2
    assert "leave --device-capability and --read-speed out" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--tokens goes with --server"):
        preflight(Options(model=str(model), tokens=5), ask=False)
