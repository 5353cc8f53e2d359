"""What the tiny models' folders hold, as far as it can be seen without torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_compat.errors import UsageError
from vllm_compat.trial import byte_pairs, models

REMOTE_CODE = Path(models.__file__).parent / "remote_code"


def test_special_tokens_stand_where_the_real_ones_do() -> None:
    # Published ids of Kimi-K2.5, whose 256 special tokens begin at 163584.
    published = {
        "[BOS]": 163584,
        "[EOS]": 163585,
        "<|im_end|>": 163586,
        "<|media_pad|>": 163605,
        "<think>": 163606,
        "</think>": 163607,
        "[PAD]": 163839,
    }
    for name, index in published.items():
        assert models.special_token_id(name) - models.BYTE_PAIR_TOKENS == index - 163584
    assert models.VOCABULARY == models.BYTE_PAIR_TOKENS + 256


def test_an_unknown_special_token_is_refused() -> None:
    with pytest.raises(UsageError, match="no special token '<nope>'"):
        models.special_token_id("<nope>")


@pytest.mark.parametrize(("name", "dtype"), [("mamba", "float32"), ("llama", "int4")])
def test_what_cannot_be_made_is_refused_before_torch_is_needed(
    name: str, dtype: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"mamba|int4"):
        models.make_model(name, tmp_path / "model", dtype=dtype)
    assert not (tmp_path / "model").exists()


def test_the_slow_tokenizer_has_no_fast_form(tmp_path: Path) -> None:
    models.write_slow_tokenizer(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "tiktoken.model",
        "tokenization_kimi.py",
        "tokenizer_config.json",
    ]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["auto_map"] == {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    assert config["added_tokens_decoder"]["534"]["content"] == "<think>"
    ranks = byte_pairs.load((tmp_path / "tiktoken.model").read_text())
    assert ranks == models.ranks()


def test_the_fast_tokenizer_has_the_same_ids(tmp_path: Path) -> None:
    models.write_fast_tokenizer(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(models.VOCABULARY))
    for token, rank in models.ranks().items():
        assert vocabulary[byte_pairs.token_name(token)] == rank
    for offset, name in models.SPECIAL_TOKENS.items():
        assert vocabulary[name] == models.BYTE_PAIR_TOKENS + offset
    assert [entry["id"] for entry in tokenizer["added_tokens"]] == [
        models.BYTE_PAIR_TOKENS + offset for offset in models.SPECIAL_TOKENS
    ]


def test_the_remote_tokenizer_splits_as_the_ranks_were_learnt() -> None:
    # It is copied into model folders and cannot import the pattern.
    tree = ast.parse((REMOTE_CODE / "tokenization_kimi.py").read_text())
    found = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PATTERN"
    )
    assert eval(compile(ast.Expression(found), "pattern", "eval")) == byte_pairs.PATTERN


def test_remote_code_imports_nothing_of_this_project() -> None:
    for path in REMOTE_CODE.glob("*.py"):
        assert "vllm_compat" not in path.read_text(), path.name


def test_importing_the_lab_imports_no_heavy_package() -> None:
    program = (
        "import sys\n"
        "import vllm_compat.trial.models, vllm_compat.trial.reference, lab.environments\n"
        "import vllm_compat.trial.families\n"
        "print({'torch', 'transformers', 'vllm', 'wrapt', 'packaging'} & set(sys.modules))"
    )
    source = str(Path(models.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "set()"
