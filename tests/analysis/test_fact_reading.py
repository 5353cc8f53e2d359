"""Facts about the downstream and transformers are read from their source, nothing is imported."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from vllm_compat.analysis.environment import Environment
from vllm_compat.analysis.fact_reading import read_features
from vllm_compat.analysis.facts import (
    TORCH_FOR_TYPING,
    Preprocessing,
    Trainer,
    missing_names,
    preprocessing_of,
    trainer_of,
)


def packages(tmp_path: Path, configuration: str, **downstream: str) -> tuple[Path, Path]:
    """Write a downstream, and a transformers with that configuration_utils."""
    down, transformers = tmp_path / "down", tmp_path / "transformers"
    for folder in (down, transformers, transformers / "models"):
        folder.mkdir()
    (transformers / "configuration_utils.py").write_text(dedent(configuration))
    (transformers / "modeling_utils.py").touch()
    for name, source in downstream.items():
        (down / f"{name}.py").write_text(dedent(source))
    return down, transformers


@pytest.mark.parametrize(
    ("configuration", "trips"),
    [
        ("class C:\n    dtype: torch.dtype | None = None\n", True),
        ("class C:\n    dtype: 'torch.dtype' = None\n", True),
        ("class C:\n    dtype: Union[str, 'torch.dtype'] = None\n", True),
        ("if TYPE_CHECKING:\n    import torch\nclass C:\n    dtype: torch.dtype\n", True),
        ("import torch\nclass C:\n    dtype: torch.dtype\n", False),
        ("import torch.nn\nclass C:\n    dtype: torch.dtype\n", False),
        ("class C:\n    torch_dtype: str\n", False),
        ("x: torch.dtype\n", False),
    ],
)
def test_annotations_that_name_a_torch_which_is_not_there_are_seen(
    tmp_path: Path, configuration: str, trips: bool
) -> None:
    found = read_features(*packages(tmp_path, configuration))
    assert (TORCH_FOR_TYPING in found) is trips


def test_modules_that_transformers_lacks_are_seen_with_the_names_that_are_wanted(
    tmp_path: Path,
) -> None:
    down, transformers = packages(
        tmp_path,
        "",
        one="from transformers.gone import B, A as Alias\nfrom transformers import AutoModel\n",
        two="from transformers.gone import C\nfrom transformers.modeling_utils import D\n",
        three="from transformers.models import E\ndef f():\n    from transformers.late import F\n",
    )
    features = read_features(down, transformers)
    environment = Environment("3.11", (), "cpu", features=features)
    assert missing_names(environment) == {"transformers.gone": ("A", "B", "C")}


def test_a_transformers_of_another_make_is_no_failure(tmp_path: Path) -> None:
    down, transformers = packages(tmp_path, "", one="from transformers.gone import A\n")
    (transformers / "configuration_utils.py").unlink()
    assert read_features(down, transformers) == ("missing transformers.gone:A",)


def test_without_transformers_there_is_nothing_to_be_seen(tmp_path: Path) -> None:
    down, _ = packages(tmp_path, "", one="from transformers.gone import A\n")
    assert read_features(down, None) == ()


MAPS = """
from down.train import save_token_frequency_distribution as save
def encode(tokenizer, text):
    return tokenizer(text, return_offsets_mapping=True)
def build(dataset, tokenizer):
    return dataset.map(lambda rows: encode(tokenizer, rows))
def other(dataset, tokenizer):
    return dataset
"""
DRAFT = """
class Draft:
    def setup(self, path):
        self.config = AutoConfig.from_pretrained(path)
        load_model_layers(["model.embed_tokens.weight"], path)
"""


def test_where_conversations_become_samples_is_read_from_source(tmp_path: Path) -> None:
    down, _ = packages(tmp_path, "", prepare=MAPS)
    environment = Environment("3.11", (), "cpu", features=read_features(down, None))
    assert preprocessing_of(environment) == Preprocessing(
        "down/prepare.py:4", "down.prepare:build", "down.prepare:save"
    )


def test_where_a_draft_is_made_is_read_from_source_with_what_it_does_not_know(tmp_path: Path) -> None:
    down, _ = packages(tmp_path, "", core=DRAFT)
    environment = Environment("3.11", (), "cpu", features=read_features(down, None))
    assert trainer_of(environment) == Trainer(
        "down/core.py:4", "down.core:Draft", "setup", ("text_config", "prefix", "norm")
    )


def test_a_downstream_without_them_has_neither(tmp_path: Path) -> None:
    down, _ = packages(tmp_path, "", one="x = 1\n")
    environment = Environment("3.11", (), "cpu", features=read_features(down, None))
    assert preprocessing_of(environment) is trainer_of(environment) is None
