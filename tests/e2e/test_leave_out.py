"""A real run that one bad prompt ends names it, and its own advice does the rest (issue 18, no. 11)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.environments import EnvironmentPaths

pytestmark = pytest.mark.e2e
PROGRAM = Path(__file__).parent.parent / "programs" / "extract.py"

SPOIL = """
import json, sys
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
folder = Path(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(folder)
lines = [json.loads(line)["conversations"] for line in Path(sys.argv[2]).read_text().splitlines()]
ids = [set(tokenizer(tokenizer.apply_chat_template(c, tokenize=False))["input_ids"]) for c in lines]
only = ids[5] - set().union(*(each for n, each in enumerate(ids) if n != 5))
for path in folder.glob("*.safetensors"):
    weights = load_file(path)
    for name, weight in weights.items():
        if "embed_tokens" in name:
            weight[sorted(only)[0]] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
"""


def test_fault_11_the_printed_command_does_all_but_the_bad_sample(
    environment: Callable[[str, str], EnvironmentPaths],
    models: Callable[..., Path],
    tmp_path: Path,
) -> None:
    paths = environment("0.16.0", "0.3.0")
    model = tmp_path / "model"
    model.mkdir()
    for path in models("llama").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    chats = tmp_path / "chats.jsonl"
    asked = [f"{n} and {n}?" for n in range(12)]
    asked[5] = "§ ~ ^ {"
    turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": "yes"}] for a in asked]
    chats.write_text("\n".join(json.dumps({"conversations": each}) for each in turns))
    spoilt = paths.run(["-c", SPOIL, model, chats], timeout=200)
    assert spoilt.returncode == 0, spoilt.stderr
    out, record = tmp_path / "out", tmp_path / "record.json"
    command = [
        "-m", "vllm_compat", "run", "--record", str(record), str(PROGRAM),
        "--target-model-path", str(model), "--train-data-path", str(chats), "--output-dir", str(out),
        "--layer-ids", "0", "3", "--batch-size", "3", "--seq-length", "64",
    ]  # fmt: skip
    failed = paths.run(command, timeout=400)
    assert failed.returncode == 1, failed.stderr
    assert "which belongs to data_5.pt" in failed.stderr
    assert json.loads(record.read_text())["bad_sample"] == 5
    said = re.findall(r"without the sample that it cannot do \(data_5\.pt\): (.*)$", failed.stderr, re.M)
    advised = shlex.split(said[-1])
    assert "--leave-out=5" in advised
    assert Path(advised[0]) == Path(paths.python)

    done = paths.run(advised[1:], timeout=400)
    assert done.returncode == 0, done.stderr
    assert "1 left out on request (5)" in done.stderr
    assert json.loads(record.read_text())["left_out"] == [5]
    whole = sorted(int(path.stem[5:]) for path in out.glob("data_*.pt"))
    assert whole == [n for n in range(12) if n != 5]
