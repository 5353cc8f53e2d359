"""What a small model keeps of a large one; the rehearsals themselves are in tests/e2e."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.commands.rehearse import rehearse as r
from vllm_compat.errors import UsageError

MODELS = Path(__file__).parents[1] / "models"
KEPT = (
    "architectures", "model_type", "head_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "rope_theta", "rope_scaling", "hidden_act", "n_group", "topk_group", "topk_method",
    "scoring_func", "norm_topk_prob", "routed_scaling_factor", "quantization_config", "sliding_window",
    "attention_bias", "max_position_embeddings", "torch_dtype", "n_shared_experts",
    "tie_word_embeddings",
)  # fmt: skip


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MODELS / name / "config.json").read_text())
    return found


@pytest.mark.parametrize("name", sorted(path.name for path in MODELS.iterdir()))
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_kind_stays_and_the_sizes_shrink(name: str, ranks: int) -> None:
    own = config(name)
    small = r.shrink(own, None, ranks=ranks, vocabulary=768)
    before, after = own.get("text_config", own), small.config.get("text_config", small.config)
    assert set(after) == set(before)
    for key in KEPT:
        assert after.get(key) == before.get(key), key
        assert small.config.get(key) == own.get(key) or key in before, key
    assert after["num_hidden_layers"] == 4
    assert len(after.get("layer_types", range(4))) == 4
    assert after["num_attention_heads"] % ranks == after["num_key_value_heads"] % ranks == 0
    if "layer_types" in before:
        assert set(after["layer_types"]) == set(before["layer_types"])
    experts = after.get("n_routed_experts") or after.get("num_local_experts") or 0
    assert experts % max(after.get("n_group", 1), 1) == 0
    size = after["hidden_size"] * (
        after["vocab_size"] * 2 + 4 * 3 * after["intermediate_size"] * max(experts, 1)
    )
    assert size < 40_000_000 * ranks


def test_a_model_whose_head_size_is_a_quotient_keeps_it() -> None:
    own = config("llama-3.1-8b")
    del own["head_dim"]
    small = r.shrink(own, [0], vocabulary=768).config
    assert small["hidden_size"] // small["num_attention_heads"] == 4096 // 32


def test_the_tokenizers_own_vocabulary_stays() -> None:
    assert r.shrink(config("qwen3-8b"), None).config["vocab_size"] == 151936


@pytest.mark.parametrize(
    ("ids", "small"),
    [
        ((2, 30, 58, 60), (0, 1, 2, 3)),
        ((60, 2), (3, 0)),
        ((0, 1, 2, 3), (0, 1, 2, 3)),
        ((57, 58, 59, 60), (0, 1, 2, 3)),
        ((5, 5), (0, 0)),
        ((2, 61), (0, 4)),
        ((2, 75), (0, 18)),
        ((-1, 60), (-1, 3)),
    ],
)
def test_layer_ids_keep_their_order_and_what_does_not_exist_does_not(
    ids: tuple[int, ...], small: tuple[int, ...]
) -> None:
    assert r.map_layer_ids(ids, 61, 4) == small


def test_as_many_layers_as_are_asked_for() -> None:
    small = r.shrink(config("deepseek-v3"), list(range(10, 20)))
    assert small.config["num_hidden_layers"] == 10
    assert small.layer_ids == tuple(range(10))


def test_a_configuration_without_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="number of layers"):
        r.shrink({"architectures": ["X"]}, None)


def test_weights_stay_behind(tmp_path: Path) -> None:
    for name in (
        "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json",
        "tokenization_kimi.py", "tiktoken.model", "pytorch_model.bin",
    ):  # fmt: skip
        (tmp_path / name).write_text("{}")
    names = [path.name for path in r.own_files(str(tmp_path))]
    assert names == ["tiktoken.model", "tokenization_kimi.py", "tokenizer.json"]
    assert r.has_tokenizer(r.own_files(str(tmp_path)))
    assert not r.has_tokenizer([tmp_path / "tokenizer_config.json"])


def test_only_right_data_is_success() -> None:
    states = {"right": 0, "wrong": 1, "unknown": 3}
    for outcome, status in states.items():
        assert r.Report(outcome, (), 1.0).exit_status == status
    assert "THE REHEARSAL FAILED" in r.render(r.Report("wrong", ("x",), 1.0))


def rehearsed(
    monkeypatch: pytest.MonkeyPatch, folder: Path, found: dict[str, Any], keep: Path | None = None
) -> r.Report:
    """Rehearse with a program that only writes an output and what it found."""
    monkeypatch.setattr(r.tempfile, "tempdir", str(folder))

    def program(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        Path(command[-1]).write_text(json.dumps(found))
        Path(command[command.index("--log") + 1]).write_text("a line of the program\n")
        return subprocess.CompletedProcess(command, 1, stderr="vllm-compat: FAILED")

    monkeypatch.setattr(r.subprocess, "run", program)
    return r.rehearse(r.Options(model=str(MODELS / "llama-3.1-8b"), keep=keep))


def test_what_a_failed_rehearsal_leaves_is_kept_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = rehearsed(monkeypatch, tmp_path, {"outcome": "failed", "error": "no kernels"})
    (kept,) = tmp_path.iterdir()
    assert report.folder == kept
    assert (kept / "output.txt").read_text() == "a line of the program\n"
    text = r.render(report)
    assert text.endswith(f"its output, records and small model are in {kept}.")
    assert "--keep" not in text
    assert json.loads(r.render(report, "json"))["folder"] == str(kept)


def test_what_a_rehearsal_that_is_right_leaves_is_taken_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = rehearsed(monkeypatch, tmp_path, {"outcome": "right"})
    assert (list(tmp_path.iterdir()), report.folder) == ([], None)
    assert json.loads(r.render(report, "json"))["folder"] is None


@pytest.mark.parametrize("outcome", ["right", "failed"])
def test_a_folder_that_was_given_is_kept_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: str
) -> None:
    given = tmp_path / "given"
    report = rehearsed(monkeypatch, tmp_path, {"outcome": outcome}, keep=given)
    assert (given / "model" / "config.json").is_file()
    text = r.render(report)
    assert str(given) in text.splitlines()[-1]
    assert "--keep" not in text


def test_a_model_that_cannot_be_shrunk_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(r.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(r.shutil, "copyfile", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        r.rehearse(r.Options(model=str(MODELS / "kimi-k2.5")))
    assert list(tmp_path.iterdir()) == []
