"""The whole pipeline on the tiny Kimi: conversations, hidden states, vocabulary, a draft; judged.

Every step is a program of the shape of speculators' own script (`vllm_compat.trial.programs`), which has
never heard of vllm_compat, under ``vllm-compat run``. What comes out is held against other sources: ids
and loss masks against a fast tokenizer with the same vocabulary, hidden states against transformers in
float32, and the draft is tried on hidden states as vLLM would hand them over, by the ids that
``vllm-compat layers`` prints and by those that vLLM takes where the draft's configuration names none.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_compat.analysis.layer_ids import layers_of
from vllm_compat.errors import VllmCompatError

LAYERS = 8
RESIDUAL = 0.25
CONVERSATIONS = 80
HELD_OUT = 24
SAMPLES_COMPARED = 6
DRAFT_VOCABULARY = 256
SEQUENCE = 256
MEDIAN = 0.02
"""Largest median deviation of bfloat16 rows, relative; a row of another token is off by 1.4."""

PROGRAMS = Path(__file__).parent / "programs"

_TEXT = """the hidden states of the model are the input of the draft what the model says next depends on
tokens that it has seen an answer to your question is the sum of two numbers please write a function that
returns it and explain what it does the capital of France is Paris"""
_PHRASES = (
    "你好，世界！",
    "模型的隐藏状态是草稿模型的输入。",
    "请问法国的首都是哪里？",
    "🙂 👍🏽",
    "Größe, Straße, été",
    "```python\nfor index in range(10):\n    print(index, index * index)\n```",
    "def add(first, second):\n    return first + second",
    "1234567890 + 55 = ?",
)


class PipelineError(VllmCompatError):
    """A step of the pipeline has ended in failure."""


@dataclass
class Verdict:
    """What the pipeline gave: lines for people, figures, and the faults that were found."""

    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.faults


def conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Return conversations in several scripts, the same for the same arguments."""
    draw = random.Random(seed)

    def text(words: int) -> str:
        parts = draw.choices(_TEXT.split(), k=words)
        parts.insert(draw.randrange(words), draw.choice(_PHRASES))
        return " ".join(parts)

    chats = []
    for _ in range(count):
        turns = []
        for _turn in range(draw.choice((1, 1, 2))):
            turns += [
                {"role": "user", "content": f"{text(6)}?"},
                {"role": "assistant", "content": f"{text(16)} {draw.choice(_PHRASES)}."},
            ]
        chats.append(turns)
    return chats


def run_pipeline(folder: Path, *, workers: int = 8, without: Sequence[str] = ()) -> Verdict:
    """Run all four steps in this environment, which has vLLM and speculators, and judge them.

    ``folder`` receives the model, the conversations, the extracted data and the draft; ``workers`` is
    the number of processes of ``datasets.map``; ``without`` leaves adapters out. One line a step goes
    to standard output.

    Raises:
        PipelineError: A step ended in failure; its last lines are in the message.
    """
    import torch

    torch.set_num_threads(1)  # tiny matrices: more threads wait for one another
    folder = folder.resolve()
    steps = _Steps(folder, without)
    model, data = folder / "kimi", folder / "data"

    steps.begin("making", f"a tiny Kimi-K2.5 of {LAYERS} layers and {CONVERSATIONS} conversations")
    _make(folder)
    layers = layers_of(model)

    begin: list[str | Path] = ["--target-model-path", model, "--train-data-path", folder / "chats.jsonl"]
    begin += ["--output-dir", data, "--token-freq-path", folder / "token_freq.pt"]
    begin += ["--hf-cache-dir", folder / "cache", "--seq-length", str(SEQUENCE)]
    begin += ["--num-preprocessing-workers", str(workers)]
    steps.begin("step 1", "conversations to token ids and loss masks, stock's preprocessing")
    second = f"hidden states of layers {list(layers.asked)}, stock's generator on real vLLM"
    said = steps.run("extract.py", *begin, then={"prepared": ("step 2", second)})
    steps.begin("step 3", f"a vocabulary of {DRAFT_VOCABULARY} tokens for the draft, stock's mapping")
    said += steps.run(
        "map_vocabulary.py", "--token-freq-path", folder / "token_freq.pt",
        "--draft-vocab-size", str(DRAFT_VOCABULARY), "--target-vocab-size", str(_vocabulary(model)),
        "--output-path", folder,
    )  # fmt: skip
    steps.begin("served", "hidden states of other conversations as vLLM hands them to a draft")
    _write_served(folder, model, layers.draft_ids, layers.vllm_default_ids)
    steps.begin("step 4", "a draft by stock's trainer, then tried on what it would be served with")
    said += steps.run(
        "train.py", "--verifier-name-or-path", model, "--data-path", data, "--save-path",
        folder / "draft", "--d2t-path", folder / "d2t.npy", "--t2d-path", folder / "t2d.npy",
        "--total-seq-len", "512", "--epochs", "5", "--lr", "1e-3", "--ttt-steps", "1",
        "--metrics", folder / "metrics.jsonl", "--evaluate", folder / "right", folder / "shifted",
    )  # fmt: skip
    steps.begin("judging", "ids and masks against a fast tokenizer, rows against transformers")
    verdict = Verdict()
    verdict.figures["said"] = [line for line in said if line.split(" ")[0] in _TOLD]
    _judge_samples(verdict, folder, data)
    _judge_rows(verdict, model, data, layers.asked)
    _judge_draft(verdict, folder, said, layers.draft_ids, layers.vllm_default_ids)
    verdict.figures["seconds"] = round(time.monotonic() - steps.started)
    return verdict


_TOLD = ("prepared", "extracted", "mapped", "trained")


def render(verdict: Verdict) -> str:
    """Return the verdict as lines for people."""
    figures = verdict.figures
    lines = ["", *(f"  {line}" for line in figures["said"])]
    if "better" in figures:
        lines.append(
            f"  the draft on {figures['held_out']} other conversations: loss {figures['loss_right']:.4f}"
            f" and accuracy {figures['accuracy_right']:.1%} with vLLM's ids {figures['ids_right']},"
        )
        lines.append(
            f"    {figures['loss_shifted']:.4f} and {figures['accuracy_shifted']:.1%} with"
            f" {figures['ids_shifted']}, which vLLM takes where the draft's configuration names none;"
            f" better on {figures['better']} of {figures['held_out']}"
        )
    lines.append("")
    if verdict.right:
        lines.append(
            f"RIGHT: all four steps, {figures['samples']} samples; ids and loss masks are a fast"
            f" tokenizer's, rows transformers' (median deviation {figures['median']:.1e}); loss"
            f" {figures['loss_first']:.3f} to {figures['loss_last']:.3f} in {figures['steps']} steps;"
            f" {figures['seconds']} s"
        )
    lines += [f"FAILED: {fault}" for fault in verdict.faults]
    return "\n".join(lines)


class _Steps:
    """Runs programs under the launcher, and says which step is under way."""

    def __init__(self, folder: Path, without: Sequence[str]) -> None:
        self.folder = folder
        self.started = time.monotonic()
        self._options = [part for name in without for part in ("--without", name)]

    def begin(self, name: str, what: str) -> None:
        seconds = time.monotonic() - self.started
        print(f"[{seconds:5.0f} s]  {name:8} {what}", flush=True)

    def run(
        self,
        program: str,
        *arguments: str | os.PathLike[str],
        then: Mapping[str, tuple[str, str]] | None = None,
    ) -> list[str]:
        """Run a program; return the lines of its standard output.

        ``then`` names the step that begins when the program has said a word.

        Raises:
            PipelineError: It did not end well.
        """
        command = [sys.executable, "-m", "vllm_compat", "run", *self._options, str(PROGRAMS / program)]
        log = self.folder / "log.txt"
        variables = {"TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if program != "extract.py":
            variables["OMP_NUM_THREADS"] = "1"
        said = []
        with (
            log.open("a", encoding="utf-8") as errors,
            subprocess.Popen(
                [*command, *map(str, arguments)],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            assert process.stdout
            for line in process.stdout:
                said.append(line.rstrip("\n"))
                if begins := (then or {}).get(line.partition(" ")[0]):
                    self.begin(*begins)
        if process.returncode:
            last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
            raise PipelineError(f"{last}\n{program} ended with exit status {process.returncode}.")
        return said


def _make(folder: Path) -> None:
    from vllm_compat.trial.models import make_model, write_fast_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    make_model("kimi_k25", folder / "kimi", layers=LAYERS, residual=RESIDUAL)
    (folder / "fast").mkdir(exist_ok=True)
    write_fast_tokenizer(folder / "fast")
    rows = (json.dumps({"conversations": chat}) for chat in conversations(CONVERSATIONS))
    (folder / "chats.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def _vocabulary(model: Path) -> int:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return int(config["text_config"]["vocab_size"])


def encode(fast: Any, chat: Sequence[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Return ids and loss mask of a conversation by a fast tokenizer and by its special tokens alone.

    What the assistant says stands between ``</think>`` and ``<|im_end|>``. Stock's generator leaves
    room for one more token and cuts at ``SEQUENCE - 1``.
    """
    text = fast.apply_chat_template(chat, tokenize=False)
    ids = fast(text, add_special_tokens=False)["input_ids"][: SEQUENCE - 1]
    opens, closes = fast.convert_tokens_to_ids(["</think>", "<|im_end|>"])
    mask, inside = [], 0
    for token in ids:
        inside = 0 if token == closes else inside
        mask.append(inside)
        inside = 1 if token == opens else inside
    return ids, mask


def _fast(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "fast")


def _write_served(folder: Path, model: Path, right: Sequence[int], shifted: Sequence[int]) -> None:
    """Write conversations that nothing was trained on with the states that vLLM gives for ids.

    vLLM's auxiliary id k is the input of layer k, so the residual stream after layer k - 1.
    """
    import torch

    from vllm_compat.trial.reference import reference_hidden_states

    fast = _fast(folder)
    samples = [encode(fast, chat) for chat in conversations(HELD_OUT, seed=1)]
    wanted = sorted({k - 1 for k in (*right, *shifted)} | {LAYERS - 1})
    rows = reference_hidden_states(model, [ids for ids, _ in samples], wanted)
    for name, vllm_ids in (("right", right), ("shifted", shifted)):
        (folder / name).mkdir(exist_ok=True)
        for place, ((ids, mask), states) in enumerate(zip(samples, rows, strict=True)):
            after = dict(zip(wanted, states, strict=True))
            auxiliary = [after[k - 1].to(torch.bfloat16) for k in vllm_ids]
            sample = {
                "input_ids": torch.tensor(ids),
                "hidden_states": [*auxiliary, after[LAYERS - 1].to(torch.bfloat16)],
                "loss_mask": torch.tensor(mask),
            }
            torch.save(sample, folder / name / f"data_{place}.pt")


def _samples(data: Path) -> list[dict[str, Any]]:
    import torch

    files = sorted(data.glob("data_*.pt"), key=lambda path: int(path.stem[5:]))
    return [torch.load(file, weights_only=True) for file in files]


def _judge_samples(verdict: Verdict, folder: Path, data: Path) -> None:
    """Hold ids and loss masks against the fast tokenizer's; stock has shuffled the conversations."""
    fast = _fast(folder)
    expected = sorted(encode(fast, chat) for chat in conversations(CONVERSATIONS))
    found = sorted((s["input_ids"].tolist(), s["loss_mask"].tolist()) for s in _samples(data))
    verdict.figures["samples"] = len(found)
    if len(found) != len(expected):
        verdict.faults.append(f"{len(expected)} conversations gave {len(found)} samples")
    pairs = list(zip(found, expected, strict=False))
    ids = sum(one[0] != other[0] for one, other in pairs)
    masks = sum(one[1] != other[1] for one, other in pairs)
    if ids or masks:
        verdict.faults.append(f"{ids} samples have other ids, {masks} another loss mask than is right")


def _judge_rows(verdict: Verdict, model: Path, data: Path, layer_ids: Sequence[int]) -> None:
    from vllm_compat.trial.reference import compare, reference_hidden_states

    samples = _samples(data)[:SAMPLES_COMPARED]
    reference = reference_hidden_states(model, [s["input_ids"].tolist() for s in samples], layer_ids)
    deviation = compare([s["hidden_states"] for s in samples], reference)
    verdict.figures["median"] = deviation.median
    if not deviation.median <= MEDIAN:
        verdict.faults.append(f"hidden states differ from transformers': {deviation}")


def _judge_draft(
    verdict: Verdict, folder: Path, said: Sequence[str], right: Sequence[int], shifted: Sequence[int]
) -> None:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [entry["train"]["loss"] for entry in entries if "train" in entry]
    first, last = statistics.mean(losses[:5]), statistics.mean(losses[-5:])
    verdict.figures |= {"steps": len(losses), "loss_first": first, "loss_last": last}
    if not last < 0.75 * first:
        verdict.faults.append(f"the loss went from {first:.3f} to {last:.3f}, which is no training")
    epochs = sorted((folder / "draft").glob("*/config.json"), key=lambda path: int(path.parent.name))
    written = json.loads(epochs[-1].read_text()).get("eagle_aux_hidden_state_layer_ids")
    if written != list(right):
        verdict.faults.append(f"the draft's eagle_aux_hidden_state_layer_ids are {written}")
    tried = [json.loads(line.partition(" ")[2]) for line in said if line.startswith("evaluated")]
    by_name = {Path(entry["folder"]).name: entry for entry in tried}
    one, other = by_name["right"], by_name["shifted"]
    better = sum(loss < other["loss"][name] for name, loss in one["loss"].items())
    verdict.figures |= {
        "held_out": len(one["loss"]),
        "better": better,
        "ids_right": list(right),
        "ids_shifted": list(shifted),
        "loss_right": statistics.mean(one["loss"].values()),
        "loss_shifted": statistics.mean(other["loss"].values()),
        "accuracy_right": statistics.mean(one["accuracy"].values()),
        "accuracy_shifted": statistics.mean(other["accuracy"].values()),
    }
    if not better > 0.75 * len(one["loss"]):
        verdict.faults.append(
            f"the draft is better with the ids {list(right)} on {better} of {len(one['loss'])} only"
        )
