"""The demo: one tiny model through stock speculators and vllm_compat, compared, in a few lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_compat.errors import UsageError


def run_demo(model: str = "kimi_k25", folder: str | None = None) -> int:
    """Make a tiny model, extract, compare with transformers, print a verdict; return 0 if right.

    Runs in an environment that has vLLM and speculators. ``folder`` keeps what was made.

    Raises:
        UsageError: vLLM or speculators is not installed here.
    """
    _need("vllm", "speculators", "torch")
    _suit_this_machine()
    with _folder(folder) as place:
        return _demo(model, place)


def run_pipeline_demo(folder: str | None = None, without: Sequence[str] = ()) -> int:
    """Run the whole pipeline on the tiny Kimi, print a verdict; return 0 if right.

    Runs in an environment that has vLLM and speculators. ``folder``, which must be new or empty, keeps
    what was made; ``without`` leaves adapters out.

    Raises:
        UsageError: Something is not installed here or too new, or the folder holds something.
        PipelineError: A step ended in failure.
    """
    from vllm_compat.trial.pipeline import render, run_pipeline

    _need("vllm", "speculators", "torch", "datasets", "transformers")
    transformers = metadata.version("transformers")
    if int(transformers.partition(".")[0]) > 4:
        raise UsageError(
            f"transformers {transformers} is installed, on which stock's trainer cannot make a draft (no"
            " attribute '__pydantic_fields_set__'): use an environment with transformers 4, such as one"
            " with vLLM 0.16."
        )
    if folder is not None and Path(folder).exists() and any(Path(folder).iterdir()):
        raise UsageError(f"{folder} is not empty, and stock resumes what it finds: name a new folder.")
    _suit_this_machine()
    with _folder(folder) as place:
        verdict = run_pipeline(place, without=without)
    print(render(verdict))
    return 0 if verdict.right else 1


def _need(*packages: str) -> None:
    from importlib.util import find_spec

    for package in packages:
        if find_spec(package) is None:
            raise UsageError(
                f"The demo needs {package}, which is not installed in this environment; from a"
                " checkout, `python3 scripts/demo.py` makes one."
            )


def _suit_this_machine() -> None:
    """Set the variable that vLLM's CPU builds need for the tiny models, where the caller has not.

    Their attention for DeepSeek and Kimi (MLA) is not there before 0.30, and never in float32, in which
    the demo compares; the models' other form of attention computes the same.
    """
    from vllm_compat.analysis.environment import read_environment
    from vllm_compat.analysis.surface import open_surface

    vllm = open_surface(None)
    if read_environment(vllm.version, vllm.distribution).device == "cpu":
        os.environ.setdefault("VLLM_MLA_DISABLE", "1")


@contextmanager
def _folder(named: str | None) -> Iterator[Path]:
    if named is not None:
        yield Path(named)
        return
    with tempfile.TemporaryDirectory(prefix="vllm-compat-demo-") as temporary:
        yield Path(temporary)


def _demo(model: str, folder: Path) -> int:
    from vllm_compat.trial.models import make_model

    folder.mkdir(parents=True, exist_ok=True)
    print(f"1/3  writing a tiny {model} with random weights", flush=True)
    path = make_model(model, folder / model)
    print("2/3  extracting with stock speculators on real vLLM, with vllm_compat", flush=True)
    record_file, log = folder / "record.json", folder / "log.txt"
    command = [sys.executable, "-m", "vllm_compat.trial.cell", str(path), "--out", str(record_file)]
    with log.open("wb") as stream:
        status = subprocess.call([*command, "--repeat", "5"], stdout=stream, stderr=subprocess.STDOUT)
    if not record_file.exists():
        sys.stdout.write(log.read_text(encoding="utf-8", errors="replace")[-3000:])
        print(f"\nFAILED: the extraction ended with status {status} and left no record.")
        return 1
    record = json.loads(record_file.read_text(encoding="utf-8"))
    print("3/3  comparing every row with transformers in float32\n", flush=True)
    if record["outcome"] != "right":
        sys.stdout.write("\n".join(log.read_text(errors="replace").splitlines()[-25:]) + "\n\n")
    print(verdict(record))
    return 0 if record["outcome"] == "right" else 1


def verdict(record: dict[str, Any]) -> str:
    """Return a cell's record as a few lines for people."""
    scenarios = record.get("scenarios", {})
    versions = record.get("versions", {})
    plan = record.get("plan", {})
    lines = [
        f"vLLM {versions.get('vllm')}, speculators {versions.get('speculators')}, torch"
        f" {versions.get('torch')}, transformers {versions.get('transformers')}",
        "adapters in force, and why:",
    ]
    for step in plan.get("steps", []):
        lines += textwrap.wrap(
            step["reason"],
            100,
            initial_indent=f"  {step['adapter']:28} ",
            subsequent_indent=" " * 31,
        )
    lines.append("scenarios:")
    for name, entry in scenarios.items():
        worst = f"{entry['worst']:.1e}" if "worst" in entry else entry.get("wrong")
        lines.append(
            f"  {name:28} {entry['prompts']:3} prompts, {entry['tokens']:4} tokens, worst {worst}"
        )
    samples = sum(entry["prompts"] for entry in scenarios.values())
    shape = next((entry["shape"] for entry in scenarios.values()), None)
    dtype = next((entry["dtype"] for entry in scenarios.values()), "")
    speed = record.get("throughput")
    lines.append("")
    if record["outcome"] == "right":
        assert shape
        lines.append(
            f"RIGHT: {samples} samples, {shape[0]} layers of [tokens, {shape[2]}] in {dtype}, worst"
            f" relative deviation {record['worst']:.1e}"
            + (f", {speed['tokens'] / speed['median_seconds']:.0f} tokens/s" if speed else "")
        )
    else:
        lines.append(f"FAILED: {record.get('error')}")
    return "\n".join(lines)
