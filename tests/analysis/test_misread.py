"""Models whose residual stream would be read wrongly are refused, and no others."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat import checks
from vllm_compat.adapters import make_plan
from vllm_compat.adapters.base import Case
from vllm_compat.analysis import misread
from vllm_compat.analysis.misread import TABLE, architectures_of, before_loading, of_layer
from vllm_compat.errors import IncompatibleError
from vllm_compat.runtime.patching import Transaction

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
EXTENSION = "speculators.data_generation.custom_worker.HiddenStatesWorkerExtension"


def refused(architecture: str, ranks: int, vllm: str, device: str = "cuda", **more: Any) -> bool:
    return before_loading([architecture], ranks, vllm, device, **more) is not None


@pytest.mark.parametrize(
    ("architecture", "since", "before"),
    [
        ("DeepseekV32ForCausalLM", "0.29.0", "0.28.0"),
        ("GlmMoeDsaForCausalLM", "0.33.0", "0.25.1"),
        ("Dots3NoteForCausalLM", "0.28.0", "0.27.1"),
        ("MiniMaxM3SparseForCausalLM", "0.24.0", "0.23.0"),
        ("MiniMaxM3SparseForConditionalGeneration", "0.33.0", "0.23.0"),
        ("Qwen3_5ForCausalLM", "0.34.0", "0.33.0"),
        ("Qwen3_5MoeForCausalLM", "0.34.0+cu129", "0.33.0+cu129"),
        ("Qwen3_5ForConditionalGeneration", "0.34.0", "0.33.0"),
        ("Qwen3_5MoeForConditionalGeneration", "0.35.1", "0.33.0"),
    ],
)
def test_a_sum_left_to_the_next_layer_is_refused_with_several_ranks_on_cuda(
    architecture: str, since: str, before: str
) -> None:
    assert refused(architecture, 2, since)
    assert not refused(architecture, 1, since), "one rank has the whole"
    assert not refused(architecture, 2, before), "that release has another layer"
    for device in ("cpu", "rocm", "unknown"):
        assert not refused(architecture, 8, since, device), "the worker decides by the file"


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_kimi_linear_is_refused_with_any_number_of_ranks(ranks: int) -> None:
    assert refused("KimiLinearForCausalLM", ranks, "0.27.0")
    assert refused("KimiLinearForCausalLM", ranks, "0.34.0")
    assert not refused("KimiLinearForCausalLM", ranks, "0.26.0")
    assert not refused("KimiLinearForCausalLM", ranks, "0.33.0", "cpu")


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "Qwen3NextForCausalLM",
        "CohereForCausalLM",
    ],
)
def test_other_models_are_not_refused(architecture: str) -> None:
    assert not refused(architecture, 8, "0.34.0")


def test_what_hangs_on_an_option_is_refused_once_the_configuration_tells() -> None:
    def configured(value: bool) -> Any:
        passes = SimpleNamespace(fuse_allreduce_rms=value)
        return SimpleNamespace(compilation_config=SimpleNamespace(pass_config=passes))

    name = "MistralLarge4ForCausalLM"
    assert not refused(name, 2, "0.34.0")
    assert refused(name, 2, "0.34.0", configured=configured(True))
    assert not refused(name, 2, "0.34.0", configured=configured(False))
    assert not refused(name, 1, "0.34.0", configured=configured(True))
    assert not refused(name, 2, "0.34.0", configured=SimpleNamespace())


def test_a_version_alone_refuses_nothing(tmp_path: Path) -> None:
    """A nightly that no longer has the layer goes on to the worker, which looks at what is there."""
    name = "Qwen3_5ForCausalLM"
    assert not refused(name, 2, "0.36.0.dev7", source=tmp_path)
    file = tmp_path / "models/qwen3_5/nvidia/model.py"
    file.parent.mkdir(parents=True)
    file.write_text("class Qwen3_5DecoderLayerOfAnotherKind(Base):\n    pass\n")
    assert not refused(name, 2, "0.36.0.dev7", source=tmp_path)
    file.write_text("class Qwen3_5DecoderLayer(Base):\n    pass\n")
    assert refused(name, 2, "0.36.0.dev7", source=tmp_path)
    assert not refused(name, 2, "dev", source=tmp_path), "no version to go by"


def test_the_sentence_names_class_and_file_and_why_and_what_to_do() -> None:
    assert before_loading(["GlmMoeDsaForCausalLM"], 4, "0.33.0", "cuda") == (
        "Decoder layer DeepseekV32DecoderLayer (vllm/models/deepseek_v32/nvidia/model.py of vLLM 0.33.0)"
        " with 4 tensor-parallel ranks leaves the sum over the ranks to the next layer's norm, so that"
        " the captured rows would be one rank's part of the residual stream: refused; use"
        " tensor_parallel_size=1, or use a vLLM before 0.29.0, or wait for a vllm_compat that reads this"
        " layer."
    )
    kimi = before_loading(["KimiLinearForCausalLM"], 1, "0.33.0", "cuda") or ""
    assert "KimiDecoderLayer (vllm/models/kimi_k3/nvidia/model.py of vLLM 0.33.0) hands back" in kimi
    assert "tensor_parallel_size" not in kimi, "one rank does not help"
    assert kimi.endswith("use a vLLM before 0.27.0, or wait for a vllm_compat that reads this layer.")
    minimax = before_loading(["MiniMaxM3SparseForCausalLM"], 2, "0.33.0", "cuda") or ""
    assert "before 0.24.0" not in minimax, "no older release has the model"


def layer(name: str, module: str, base: type = object, **attributes: Any) -> Any:
    """Make an instance of a class of that name, as if from that module."""
    return type(name, (base,), {"__module__": module, **attributes})()


V32 = layer("DeepseekV32DecoderLayer", "vllm.models.deepseek_v32.nvidia.model")


@pytest.mark.parametrize(
    ("live", "ranks"),
    [
        (V32, 2),
        (layer("DeepseekV32DecoderLayer", "vllm.models.deepseek_v32.amd.model"), 2),
        (layer("Dots3NoteDecoderLayer", "vllm.models.dots3_note.nvidia.model", type(V32)), 2),
        (layer("Renamed", "somebody.elses.model", type(V32)), 8),
        (layer("MiniMaxM3DecoderLayer", "vllm.models.minimax_m3.nvidia.model"), 2),
        (
            layer(
                "MiniMaxM3DecoderLayer",
                "vllm.models.minimax_m3.nvidia.model",
                ffn_all_reduce_deferred=property(lambda self: True),
            ),
            2,
        ),
        (
            layer("Qwen3_5DecoderLayer", "vllm.models.qwen3_5.nvidia.model", mlp_output_is_partial=True),
            2,
        ),
        (
            layer(
                "MistralLarge4DecoderLayer",
                "vllm.models.mistral.mistral_large4.amd.model",
                defer_allreduce=True,
            ),
            2,
        ),
        (layer("KimiDecoderLayer", "vllm.models.kimi_k3.nvidia.model", use_attn_res=False), 1),
        (layer("KimiDecoderLayer", "vllm.models.kimi_k3.nvidia.model", use_attn_res=False), 2),
    ],
)
def test_a_live_layer_is_refused_by_what_it_is(live: Any, ranks: int) -> None:
    sentence = of_layer(live, ranks)
    assert sentence is not None
    assert type(live).__name__ in sentence


@pytest.mark.parametrize(
    ("live", "ranks"),
    [
        (V32, 1),
        (layer("DeepseekV2DecoderLayer", "vllm.model_executor.models.deepseek_v2"), 8),
        (layer("DeepseekV32DecoderLayer", "vllm.models.deepseek_v32_other.model"), 8),
        (layer("Qwen3_5DecoderLayer", "vllm.model_executor.models.qwen3_5"), 8),
        (
            layer(
                "Qwen3_5DecoderLayer", "vllm.models.qwen3_5.nvidia.model", mlp_output_is_partial=False
            ),
            8,
        ),
        (
            layer(
                "MiniMaxM3DecoderLayer",
                "vllm.models.minimax_m3.nvidia.model",
                ffn_all_reduce_deferred=False,
            ),
            8,
        ),
        (layer("MiniMaxM3DecoderLayer", "vllm.models.minimax_m3.amd.model"), 8),
        (
            layer(
                "MistralLarge4DecoderLayer",
                "vllm.models.mistral.mistral_large4.nvidia.model",
                defer_allreduce=False,
            ),
            8,
        ),
        (layer("KimiDecoderLayer", "vllm.models.kimi_k3.nvidia.model", use_attn_res=True), 8),
        (layer("KimiDecoderLayer", "vllm.models.kimi_k3.amd.linear"), 8),
        (layer("KimiDecoderLayer", "vllm.model_executor.models.kimi_linear"), 8),
        (object(), 8),
    ],
)
def test_layers_that_are_complete_are_not_refused(live: Any, ranks: int) -> None:
    assert of_layer(live, ranks) is None


def test_the_table_holds_together() -> None:
    named = [name for row in TABLE for name in row.architectures]
    assert len(named) == len(set(named))
    for row in TABLE:
        assert f"{row.file}.".startswith(f"{row.folder}.")
        assert row.covers(row.since)


@pytest.mark.parametrize("config", [{}, {"architectures": None}, {"architectures": "Llama"}])
def test_a_configuration_may_name_no_architecture(config: dict[str, Any]) -> None:
    assert architectures_of(config) == ()


MakeGenerator = Callable[..., Any]


@pytest.fixture
def make_generator(
    fake_modules: Callable[..., None],
    make_case: Callable[..., Case],
    transaction: Transaction,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> MakeGenerator:
    """Construct stock's FAKE generator, which stops where it would ask for its tokenizer."""

    def make(config: Any, *args: Any, device: str = "cuda", vllm: str = "0.33.0", **kwargs: Any) -> Any:
        fake_modules("vllm", "speculators_0_4", "transformers_4", "torch")
        case = make_case("speculators_0_4", device=device)
        plan = make_plan(case.contract, case.surface, case.environment)
        object.__setattr__(plan, "vllm", vllm)
        monkeypatch.setattr("vllm_compat.checks.misread._vllm", lambda: None)
        checks.install(transaction, plan, lambda worker: {})
        module = importlib.import_module(GENERATOR)
        monkeypatch.setattr(module.AutoTokenizer, "from_pretrained", lambda path: 1 / 0)
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        return module.VllmHiddenStatesGenerator(str(tmp_path), [0], *args, **kwargs)

    return make


@pytest.mark.parametrize(("args", "kwargs"), [((2,), {}), ((), {"tensor_parallel_size": 2})])
def test_a_generator_is_refused_before_it_does_anything(
    make_generator: MakeGenerator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    config = {"architectures": ["DeepseekV32ForCausalLM"]}
    with pytest.raises(IncompatibleError, match=r"^Decoder layer DeepseekV32DecoderLayer \(vllm/"):
        make_generator(config, *args, **kwargs)


def test_kimi_linear_is_refused_on_one_rank_too(make_generator: MakeGenerator) -> None:
    with pytest.raises(IncompatibleError, match="KimiDecoderLayer"):
        make_generator({"architectures": ["KimiLinearForCausalLM"]})


def test_several_streams_are_refused_on_any_device(make_generator: MakeGenerator) -> None:
    with pytest.raises(IncompatibleError, match="carries 4 residual streams a token"):
        make_generator({"architectures": ["Gemma3nForCausalLM"], "altup_num_inputs": 4}, device="cpu")


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ({"architectures": ["DeepseekV32ForCausalLM"]}, {}),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, {"tensor_parallel_size": 2, "device": "cpu"}),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, {"tensor_parallel_size": 2, "vllm": "0.28.0"}),
        ({"architectures": ["LlamaForCausalLM"]}, {"tensor_parallel_size": 8}),
        ({}, {"tensor_parallel_size": 8}),
        (None, {"tensor_parallel_size": 8}),
    ],
    ids=["one rank", "CPU", "an older vLLM", "another model", "no name", "not here yet"],
)
def test_other_generators_are_constructed(
    make_generator: MakeGenerator, config: Any, more: dict[str, Any]
) -> None:
    with pytest.raises(ZeroDivisionError):
        make_generator(config, **more)


def test_a_call_that_the_generator_does_not_understand_is_its_own_to_refuse(
    make_generator: MakeGenerator,
) -> None:
    with pytest.raises(TypeError, match="unheard_of"):
        make_generator({"architectures": ["LlamaForCausalLM"]}, unheard_of=1)


@pytest.mark.parametrize(("extension", "stops"), [(EXTENSION, True), ("another.Extension", False)])
def test_a_model_that_was_not_here_is_refused_before_its_workers_start(
    make_generator: MakeGenerator, extension: str, stops: bool
) -> None:
    with pytest.raises(ZeroDivisionError):
        make_generator(None)
    executor = importlib.import_module("vllm.v1.executor.multiproc_executor").MultiprocExecutor
    started: list[bool] = []
    cls = type("Executor", (executor,), {"_init_executor": lambda self: started.append(True)})
    named = SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"])
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_extension_cls=extension, tensor_parallel_size=2),
        model_config=SimpleNamespace(hf_config=named),
    )
    if stops:
        with pytest.raises(IncompatibleError, match="DeepseekV32DecoderLayer"):
            cls(config)
    else:
        cls(config)
    assert bool(started) is not stops


def test_every_kind_stands_in_the_documentation() -> None:
    page = "\n".join(misread.as_markdown())
    for row in TABLE:
        assert f"`{row.layer}`" in page
        assert all(name in page for name in row.architectures)
