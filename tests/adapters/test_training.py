"""The trainer reads a nested verifier, and no remote code runs."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat.adapters import by_name, registry
from vllm_compat.adapters.base import Case
from vllm_compat.adapters.training import Head, head_of, load_by_ending
from vllm_compat.analysis.plan import Plan
from vllm_compat.errors import IncompatibleError
from vllm_compat.runtime.context import building

MakeCase = Callable[..., Case]
Install = Callable[[str, Case], Plan]
FILE = "speculators/models/eagle3/core.py"
READ = "AutoConfig.from_pretrained(config.name_or_path)"
TEXT = {"hidden_size": 8, "vocab_size": 16}


@pytest.mark.parametrize(
    ("downstream", "needed"),
    [
        (
            "speculators_0_3",
            [
                "training.layer_ids",
                "training.verifier_config",
                "training.verifier_head",
                "training.verifier_norm",
                "training.verifier_prefix",
            ],
        ),
        (
            "speculators_0_4",
            ["training.layer_ids", "training.verifier_config", "training.verifier_head"],
        ),
    ],
)
def test_a_release_gets_what_its_source_lacks(
    make_case: MakeCase, downstream: str, needed: list[str]
) -> None:
    case = make_case(downstream)
    names = [adapter.name for adapter in registry() if adapter.name.startswith("training.")]
    needs = {name: by_name(name).need(case) for name in names}
    assert [name for name, need in needs.items() if need is not None] == needed
    assert f"{FILE}:" in needs[needed[0]].reason  # type: ignore[union-attr]


def test_a_trainer_that_asks_for_trust_needs_no_help(make_case: MakeCase) -> None:
    trusting = READ.replace(")", ", trust_remote_code=True)")
    case = make_case("speculators_0_4", (FILE, READ, trusting))
    assert by_name("training.verifier_config").need(case) is None


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    config = {
        "model_type": "kimi_k25",
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "text_config": TEXT,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def modules(fake_modules: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The FAKE transformers, whose configurations are plain."""
    fake_modules("transformers_4", "speculators_0_3")
    transformers = importlib.import_module("transformers")

    class PretrainedConfig(SimpleNamespace):
        @classmethod
        def from_dict(cls, values: dict[str, Any]) -> PretrainedConfig:
            return cls(**values)

    monkeypatch.setattr(transformers, "PretrainedConfig", PretrainedConfig, raising=False)
    return transformers


def test_the_text_configuration_is_read_without_running_code(
    modules: Any, make_case: MakeCase, install: Install, kimi: Path
) -> None:
    install("training.verifier_config", make_case())
    assert vars(modules.AutoConfig.from_pretrained(kimi)) == TEXT
    assert vars(modules.AutoConfig.from_pretrained(pretrained_model_name_or_path=str(kimi))) == TEXT


def test_other_calls_and_other_models_are_left_alone(
    modules: Any, make_case: MakeCase, install: Install, kimi: Path, tmp_path: Path
) -> None:
    install("training.verifier_config", make_case())
    stock = modules.AutoConfig
    assert isinstance(stock.from_pretrained(kimi, trust_remote_code=True), stock)
    assert isinstance(stock.from_pretrained(kimi, trust_remote_code=False), stock)
    assert isinstance(stock.from_pretrained("nobody/knows"), stock)
    with building(None, str(kimi)):
        assert isinstance(stock.from_pretrained(kimi), stock)
    known = importlib.import_module("transformers.models.auto.configuration_auto")
    known.CONFIG_MAPPING["kimi_k25"] = object
    assert isinstance(stock.from_pretrained(kimi), stock)


def test_a_draft_that_knows_no_nesting_is_given_the_inner_configuration(
    modules: Any, make_case: MakeCase, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("training.verifier_config", make_case())
    core = importlib.import_module("speculators.models.eagle3.core")
    monkeypatch.setattr(modules.AutoConfig, "text_config", "inner", raising=False)
    assert core.Eagle3DraftModel(SimpleNamespace(name_or_path="known")).verifier == "inner"
    assert modules.AutoConfig.from_pretrained("known") != "inner"


def test_weights_are_found_by_the_end_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {
        "language_model.model.embed_tokens.weight",
        "language_model.lm_head.weight",
        "vision.a.norm.weight",
        "vision.b.norm.weight",
    }
    monkeypatch.setattr("vllm_compat.adapters.training._weight_names", lambda path: there)
    asked = []

    def load(names: list[str], path: str) -> dict[str, str]:
        asked.append(names)
        return {name: f"<{name}>" for name in names if name in there}

    found = load_by_ending(load, ["model.embed_tokens.weight", "lm_head.weight", "norm.weight"], "m")
    assert found == {
        "model.embed_tokens.weight": "<language_model.model.embed_tokens.weight>",
        "lm_head.weight": "<language_model.lm_head.weight>",
    }
    # Two names end in this one, so it is asked for as it is.
    assert asked[0][2] == "norm.weight"


def test_a_draft_names_the_layers_that_it_was_trained_on_while_it_is_saved(
    modules: Any, make_case: MakeCase, install: Install, tmp_path: Path
) -> None:
    write_layers(tmp_path, [2, 30, 58, 60])
    install("training.layer_ids", make_case())
    draft = draft_trained_on([tmp_path / "data_0.pt", tmp_path / "data_1.pt"])
    assert draft.save_pretrained(tmp_path) == [3, 31, 59]  # vLLM counts from the embedding
    assert draft.config.eagle_aux_hidden_state_layer_ids is None


def test_a_folder_is_as_good_as_a_list_of_its_files(
    modules: Any, make_case: MakeCase, install: Install, tmp_path: Path
) -> None:
    write_layers(tmp_path, [2, 30, 58, 60])
    install("training.layer_ids", make_case())
    assert draft_trained_on(folder=tmp_path).save_pretrained(tmp_path) == [3, 31, 59]


def test_layers_that_a_draft_names_itself_stay(
    modules: Any, make_case: MakeCase, install: Install, tmp_path: Path
) -> None:
    write_layers(tmp_path, [2, 30, 58, 60])
    install("training.layer_ids", make_case())
    draft = draft_trained_on(folder=tmp_path)
    draft.config.eagle_aux_hidden_state_layer_ids = [1, 2, 3]
    assert draft.save_pretrained(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({}, "No file that it was trained on is known."),
        ({"one": None}, "one/data_config.json, which would name the layers of the files there, cannot"),
        ({"one": "[2"}, "cannot be read"),
        ({"one": [2]}, "no list of two numbers or more: [2]"),
        ({"one": [2, "30"]}, "no list of two numbers or more"),
        ({"one": [58, 2, 30, 60]}, "by rising number where stock ran alone"),
        (
            {"one": [2, 30, 58, 60], "two": [2, 30, 57, 60]},
            "one/data_config.json says [2, 30, 58, 60] and",
        ),
    ],
)
def test_where_the_layers_cannot_be_told_the_draft_is_saved_and_it_is_said(
    modules: Any,
    make_case: MakeCase,
    install: Install,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    layers: dict[str, Any],
    words: str,
) -> None:
    install("training.layer_ids", make_case())
    for name, ids in layers.items():
        (tmp_path / name).mkdir()
        if ids is not None:
            write_layers(tmp_path / name, ids)
    draft = draft_trained_on([tmp_path / name / "data_0.pt" for name in layers])
    assert draft.save_pretrained(tmp_path) is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("The draft is saved without eagle_aux_hidden_state_layer_ids: ")
    assert words in said
    assert said.endswith("write into its config.json what `vllm-compat layers` prints.")


def write_layers(folder: Path, ids: Any) -> None:
    """Write what stock writes beside its files; text is written as it is."""
    text = ids if isinstance(ids, str) else json.dumps({"hidden_states": {"layer_ids": ids}})
    (folder / "data_config.json").write_text(text)


def draft_trained_on(files: Any = None, folder: Path | None = None) -> Any:
    """Return a FAKE draft of a FAKE trainer that has opened these files."""
    data = importlib.import_module("speculators.train.data")
    core = importlib.import_module("speculators.models.eagle3.core")
    data.Eagle3SampleFileDataset(8, folder and str(folder), files and [str(file) for file in files])
    config = SimpleNamespace(name_or_path="known", eagle_aux_hidden_state_layer_ids=None)
    return core.Eagle3DraftModel(config)


@pytest.mark.parametrize(
    ("config", "head"),
    [
        ({"model_type": "llama", "rms_norm_eps": 1e-6}, Head()),
        ({"model_type": "gemma3_text", "final_logit_softcapping": None}, Head(shifted=True)),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, Head(shifted=True, cap=30)),
        (SimpleNamespace(model_type="granite", logits_scaling=8), Head(scale=0.125)),
        ({"model_type": "cohere2", "logit_scale": 0.0625}, Head(scale=0.0625)),
    ],
)
def test_a_verifiers_configuration_tells_its_head(config: Any, head: Head) -> None:
    assert head_of(config) == head


def test_a_verifier_with_another_norm_is_refused_before_its_draft_is_made(
    modules: Any, make_case: MakeCase, install: Install, tmp_path: Path
) -> None:
    install("training.verifier_head", make_case())
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "layer_norm_eps": 1e-5}))
    core = importlib.import_module("speculators.models.eagle3.core")
    with pytest.raises(IncompatibleError, match="has no last norm of the kind rms_norm"):
        core.Eagle3DraftModel(SimpleNamespace(name_or_path=str(tmp_path)))


class Weight:
    """A FAKE tensor: what is added to it."""

    added = 0

    def __iadd__(self, more: int) -> Weight:
        self.added += more
        return self


def test_the_norm_is_shifted_and_the_head_scaled_once_they_are_loaded(
    modules: Any, make_case: MakeCase, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("training.verifier_head", make_case())
    core = importlib.import_module("speculators.models.eagle3.core")
    weight, hooks = Weight(), []
    head = SimpleNamespace(register_forward_hook=hooks.append)
    norm = SimpleNamespace(weight=SimpleNamespace(data=weight))
    monkeypatch.setattr(core.Eagle3DraftModel, "verifier_norm", norm, raising=False)
    monkeypatch.setattr(core.Eagle3DraftModel, "verifier_lm_head", head, raising=False)
    for config, added, count in (
        ({"model_type": "llama"}, 0, 0),
        ({"model_type": "gemma"}, 1, 0),
        ({"model_type": "granite", "logits_scaling": 4}, 1, 1),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        core.Eagle3DraftModel(SimpleNamespace(name_or_path=str(tmp_path)))
        assert (weight.added, len(hooks)) == (added, count)
    assert hooks[0](None, (), 8.0) == 2.0
