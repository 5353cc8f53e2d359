"""What preflight reads, reckons and prints; what it asks of vLLM is shown in tests/e2e."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.commands.preflight import judge as p
from vllm_compat.errors import UsageError

MODELS = Path(__file__).parents[1] / "models"
GIB = 2**30
ANSWER: dict[str, Any] = {
    # What vLLM 0.16.0 answers for Kimi-K2.5 on 12.0, shortened.
    "stage": "done",
    "vllm": "0.16.0",
    "standing_in": True,
    "platform": "CUDA, stand-in device",
    "assumed": ["vllm._flashmla_C", "cutlass_scaled_mm_supports_fp8(120) is True"],
    "rejected": {"FLASHINFER_MLA": ["ImportError"], "FLASHMLA": ["compute capability not supported"]},
    "weight_bytes": 77_807_282_028,
    "methods": {
        "SharedFusedMoE: CompressedTensorsWNA16MarlinMoEMethod": 60,
        "RowParallelLinear: UnquantizedLinearMethod": 176,
    },
    "moe_methods": ["CompressedTensorsWNA16MarlinMoEMethod"],
    "quantization": "compressed-tensors",
    "use_mla": True,
    "attention": {"TRITON_MLA": 61},
    "kv_bytes_per_token": 70272.0,
    "block_size": 16,
    "timeouts": {"VLLM_ENGINE_READY_TIMEOUT_S": 600},
}
KIMI = p.Options(
    model=str(MODELS / "kimi-k2.5"),
    layer_ids=(2, 30, 58, 60),
    devices=8,
    capability=(12, 0),
    device_memory=96 * GIB,
)


class Asking:
    """A FAKE of the process that asks vLLM: it knows its answer."""

    answer_with: dict[str, Any] = ANSWER

    def __init__(self, options: p.Options) -> None:
        pass

    def answer(self) -> dict[str, Any]:
        return self.answer_with

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p, "_Asking", Asking)


def answers(report: p.Report, question: str) -> list[tuple[str, str]]:
    return [(i.state, i.answer) for i in report.items if i.question == question]


def test_kimi_on_eight_devices_of_96_gib() -> None:
    report = p.preflight(KIMI)
    ((state, said),) = answers(report, "memory")
    assert state == "ok"
    assert said.startswith("one rank: weights 72.5 GiB + KV cache 3.5 GiB")
    assert answers(report, "layers")[0][1].startswith("2 (vLLM's 3), 30 (vLLM's 31), 58")
    assert "TRITON_MLA (61 layers)" in answers(report, "attention")[0][1]
    assert "FLASHINFER_MLA could not be asked" in answers(report, "attention")[1][1]
    assert answers(report, "experts") == [("ok", "CompressedTensorsWNA16MarlinMoEMethod")]
    assert "remote code (tokenization_kimi.TikTokenTokenizer)" in answers(report, "tokenizer")[0][1]
    sources = [said.rpartition(" (")[2] for _, said in answers(report, "hazard")]
    assert "vllm#40923, vllm#43730)" in sources
    assert "stand-in for the device" in answers(report, "how")[0][1]


def test_what_does_not_fit_fails() -> None:
    from dataclasses import replace

    for memory, word in ((40, "the weights alone do not fit"), (75, "they do not fit")):
        report = p.preflight(replace(KIMI, device_memory=memory * GIB))
        ((state, said),) = answers(report, "memory")
        assert (state, word in said) == ("fail", True), said
        assert report.exit_status == 1


def test_layer_ids_out_of_range_fail() -> None:
    from dataclasses import replace

    report = p.preflight(replace(KIMI, layer_ids=(2, 61)))
    assert answers(report, "layers") == [
        ("fail", "Layer id 61 is not in 0 to 60: the model has 61 layers, and ids count from the first.")
    ]
    assert report.exit_status == 1


@pytest.mark.parametrize(
    ("devices", "vllm", "items"), [(2, "0.33.0", 1), (1, "0.33.0", 0), (2, "0.28.0", 0)]
)
def test_a_residual_stream_that_is_not_read_fails(
    tmp_path: Path, devices: int, vllm: str, items: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DeepseekV32ForCausalLM"]}))
    found = p._stream(p.Options(model=str(tmp_path), devices=devices), vllm)
    assert [(item.question, item.state) for item in found] == [("residual stream", "fail")] * items


def test_several_residual_streams_fail(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "hc_mult": 4}))
    (found,) = p._stream(p.Options(model=str(tmp_path)), "0.33.0")
    assert (found.question, found.state) == ("residual stream", "fail")
    assert "carries 4 residual streams a token (hc_mult of its configuration)" in found.answer


def test_the_disk_must_hold_the_samples(tmp_path: Path) -> None:
    from dataclasses import replace

    for samples, state in ((1, "ok"), (10**9, "fail")):
        options = replace(KIMI, samples=samples, output_dir=tmp_path / "not yet" / "there")
        ((found, said),) = answers(p.preflight(options), "disk")
        assert found == state, said
        assert "57,344 bytes a token" in said


def test_loading_takes_as_long_as_the_disk_needs(tmp_path: Path) -> None:
    from dataclasses import replace

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((MODELS / "kimi-k2.5" / "config.json").read_bytes())
    index = {"metadata": {"total_size": 547 * GIB}, "weight_map": {}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    ((_, said),) = answers(p.preflight(replace(KIMI, model=str(model))), "loading")
    assert "give --read-speed to know how long" in said
    options = replace(KIMI, model=str(model), read_speed=0.4 * GIB)
    ((state, said),) = answers(p.preflight(options), "loading")
    assert state == "note"
    assert "547.0 GiB at 409.6 MiB/s: about 23 min" in said
    assert "`vllm serve` for 10 min (VLLM_ENGINE_READY_TIMEOUT_S)" in said


def test_sizes_come_from_headers_where_there_is_no_index(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"x" * 8)
    assert p.weight_bytes_on_disk(tmp_path) == 8
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert p.weight_bytes_on_disk(tmp_path) == 5
    assert p.weight_bytes_on_disk(tmp_path / "nowhere") is None


def test_the_speed_of_the_disk_is_measured(tmp_path: Path) -> None:
    assert p.measured_speed(tmp_path) is None
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.truncate(65 * 2**20)
    speed = p.measured_speed(tmp_path)
    assert speed is not None
    assert speed > 0


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ({"stage": "importing vLLM", "error": "ModuleNotFoundError: No module named 'vllm'"}, "unknown"),
        (
            {
                "stage": "reading the model's configuration",
                "standing_in": True,
                "error": "ValidationError: Model architectures ['XForCausalLM'] are not supported",
            },
            "fail",
        ),
        (
            {
                "stage": "building the model's modules",
                "standing_in": True,
                "error": "RuntimeError: Found no NVIDIA driver",
            },
            "unknown",
        ),
    ],
)
def test_a_refusal_is_told_from_an_answer_that_could_not_be_had(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], state: str
) -> None:
    monkeypatch.setattr(Asking, "answer_with", answer)
    report = p.preflight(KIMI)
    assert report.items[0].question == "architecture"
    assert report.items[0].state == state
    assert answer["error"] in report.items[0].answer


@pytest.mark.parametrize("name", sorted(path.name for path in MODELS.iterdir()))
def test_every_shape_is_read_without_vllm(name: str) -> None:
    report = p.preflight(p.Options(model=str(MODELS / name)), ask=False)
    assert answers(report, "layers")[0][0] == "ok"
    assert report.memory is None
    assert "bytes a token" in p.render(report)
    assert json.loads(p.render(report, "json"))["kind"] == "preflight"


@pytest.mark.parametrize(
    ("text", "size"), [("96GiB", 96 * GIB), ("80 G", 80 * GIB), ("1.5t", 1536 * GIB), ("1000", 1000)]
)
def test_sizes(text: str, size: int) -> None:
    assert p.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "96 apples", "-1", "0"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="no size"):
        p.parse_size(text)


def test_capabilities() -> None:
    assert p.parse_capability("12.0") == (12, 0)
    for text in ("12", "sm_120", "12.0.1"):
        with pytest.raises(UsageError, match="no compute capability"):
            p.parse_capability(text)


@pytest.mark.parametrize(
    ("error", "raised_in", "state"),
    [
        (
            "ValueError: output_size 192 is not divisible by block_n = 128.",
            "vllm.model_executor",
            "fail",
        ),
        ("NotImplementedError: no such scheme", "vllm.config", "fail"),
        ("ValueError: not enough values to unpack", "torch.cuda", "unknown"),
        ("AssertionError: Torch not compiled with CUDA enabled", "torch.cuda", "unknown"),
        ("AssertionError: sizes", "vllm.model_executor", "unknown"),
        ("RuntimeError: capability 12.0 is not supported", "", "fail"),
        ("ValueError: Found no NVIDIA driver on your system", "vllm.platforms", "unknown"),
    ],
)
def test_what_vllm_itself_refuses_fails_and_what_the_stand_in_lacks_is_unknown(
    error: str, raised_in: str, state: str
) -> None:
    asked = {
        "stage": "building the model's modules",
        "standing_in": True,
        "error": error,
        "raised_in": raised_in,
    }
    (item,) = p._architecture({"architectures": ["A"]}, asked)
    assert item.state == state


@pytest.mark.parametrize(
    ("state", "said", "next_step"),
    [
        ("ok", "nothing speaks against it", "Next: `vllm-compat rehearse m` with the same options"),
        ("fail", "the run will fail", "Next: change what the lines with FAIL name"),
        ("unknown", "not everything could be told", "Next: read the lines with ??"),
    ],
)
def test_the_last_sentence_says_what_to_do_next(state: str, said: str, next_step: str) -> None:
    items = (p.Item("layers", "ok", "2 of 4"), p.Item("memory", state, "x"))
    report = p.Report(p.Options(model="m"), items, seconds={"own": 1, "vllm": 0})
    summary, last = p.render(report).splitlines()[-2:]
    assert said in summary
    assert last.startswith(next_step)


def test_where_there_is_no_vllm_the_next_step_is_another_environment() -> None:
    items = (p.Item("adapters", "unknown", "vllm is not installed in /here: nothing is adapted"),)
    report = p.Report(p.Options(model="m"), items, seconds={"own": 1, "vllm": 0})
    assert "the environment that has vLLM and speculators" in p.render(report).splitlines()[-1]


def test_blocks_that_do_not_divide_over_the_ranks_come_with_the_number_that_does() -> None:
    config = {
        "architectures": ["A"],
        "moe_intermediate_size": 1536,
        "intermediate_size": 12288,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    asked = {
        "stage": "building the model's modules",
        "standing_in": True,
        "error": "ValueError: output_size 192 is not divisible by block_n = 128.",
        "raised_in": "vllm.model_executor",
    }
    (item,) = p._architecture(config, asked, 8)
    assert item.state == "fail"
    assert item.answer.endswith(
        "128. By its widths, 4 tensor-parallel ranks would have whole blocks: take --devices 4"
    )
    assert p.ranks_of_whole_blocks(config, 4) == 2
    assert p.ranks_of_whole_blocks({**config, "moe_intermediate_size": 100}, 8) == 0
    assert p.ranks_of_whole_blocks({"text_config": config}, 8) == 4
    for odd in (
        {},
        {"weight_block_size": None},
        {"weight_block_size": ["a"]},
        {"weight_block_size": [0]},
    ):
        assert p.ranks_of_whole_blocks({**config, "quantization_config": odd}, 8) == 0
    (item,) = p._architecture({"architectures": ["A"]}, asked, 8)
    assert "take --devices" not in item.answer


def test_an_operator_that_this_build_lacks_has_its_overload_and_cannot_be_called() -> None:
    """Passes of vllm.compilation, imported while a vision model is built, hold on to `op.default`."""
    from vllm_compat.commands.preflight.stand_in import _uncallable

    operator = _uncallable("silu_and_mul")
    for held in (operator, operator.default):
        with pytest.raises(RuntimeError, match="silu_and_mul is compiled code"):
            held()
