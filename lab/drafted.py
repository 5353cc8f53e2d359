"""Models that people train drafts for: what a tiny one of each came to, or why none was run.

``python3 -m lab matrix 0.32.0 --models drafted --speculators 0.4.0.1 --out records/drafted`` runs the
families of `vllm_compat.trial.families.DRAFTED`, one record a cell, resumed where it stopped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lab.matrix_report import Outcome, cause, read_records, release_of

RECORDS = Path(__file__).resolve().parent.parent / "records"

NOT_HERE = "not run here: "
SIMULATED = (
    "what they leave to the next layer's norm was simulated on two CPU ranks (*Faults put in on"
    " purpose*)"
)
TINY: dict[str, tuple[str, ...] | str] = {
    "Llama": ("llama",),
    "Llama 4": ("llama4_text", "llama4_dense"),
    "Qwen3": ("qwen3",),
    "Qwen3-MoE": ("qwen3_moe",),
    "Qwen3-Next": ("qwen3_next",),
    "Qwen3.5": ("qwen3_5",),
    "Qwen3.5-MoE": ("qwen3_5_moe",),
    "DeepSeek-V3": ("deepseek_v3",),
    "DeepSeek-V3.2": ("deepseek_v32",),
    "DeepSeek-V4": ("deepseek_v4",),
    "DeepSeek-V4.1": "its layers are there for CUDA and ROCm alone (0.33.0, 0.34.0); several streams a"
    " token, which is refused before loading",
    "GLM-4.5": ("glm4_moe",),
    "GLM-5": ("glm_moe_dsa",),
    "Kimi-K2.5, K2.6": ("kimi_k25",),
    "Kimi-K3": "its layers are there for CUDA and ROCm alone, from 0.27.0 on; refused before loading for"
    " its attention residuals",
    "Kimi-Linear": ("kimi_linear",),
    "MiniMax-M2": ("minimax_m2",),
    "MiniMax-M3": f"its layers are there for CUDA and ROCm alone; {SIMULATED}; in 0.34.0 the model calls"
    " parts of its layers and no forward of theirs, so that no hook fires and a run ends",
    "Mistral Large 3": "published in Mistral's own format, which the tiny models are not written in; its"
    " layers are DeepSeek-V3's (`deepseek_v2.py`)",
    "Mistral Large 4": f"its layers are there for CUDA and ROCm alone, from 0.34.0 on; {SIMULATED}",
    "Gemma-3n": ("gemma3n",),
    "Gemma 4": ("gemma4",),
    "gpt-oss": ("gpt_oss",),
    "Nemotron-H": ("nemotron_h", "nemotron_h_dense"),
    "Step-3": "transformers has no class that could write its weights and be compared with",
    "ERNIE 4.5": ("ernie4_5", "ernie4_5_moe"),
    "Hunyuan": ("hunyuan", "hunyuan_moe"),
}
"""The tiny models of each, or why there is none."""

NOT_RUN_YET: frozenset[str] = frozenset({"deepseek_v32", "glm_moe_dsa", "qwen3_5_moe"})
"""Tiny models without a run on a CPU build, which the command above runs."""

OPEN: frozenset[str] = frozenset()
"""Tiny models whose run failed where vLLM alone did not: not looked into."""

WHY = {
    "minimax_m2": "it chooses experts by sigmoid without groups, and CPU builds assert softmax",
    "nemotron_h": "its experts have no gate",
    "kimi_linear": "the class for CUDA is taken on a CPU too",
}
"""What was found where vLLM's own words say little."""

BESIDE = dict.fromkeys(
    ("qwen3_5", "qwen3_5_moe"),
    "with torchvision 0.28.0 beside it, without its compiled operators, for an import that the model's"
    " text path does not use",
)
"""What a run needed that its environment does not have."""


def as_markdown(families: Iterable[dict[str, Any]]) -> list[str]:
    """Return the section of the page; ``families`` are the records of ``records/families``."""
    on_cpu: dict[str, str] = {}
    on_gpu: dict[str, str] = {}
    for record in read_records(RECORDS / "matrix"):  # oldest release first
        if record["outcome"] == Outcome.RIGHT and not record["without"]:
            on_cpu[record["model"]] = _entry(record)
    for record in families:
        for cell in record["families"]:
            column = on_gpu if "H200" in record["where"] else on_cpu
            if cell["outcome"] == "right":
                column[cell["model"]] = _right(cell, f"{cell['versions']['vllm']}, TP {cell['ranks']}")
    own: dict[str, list[dict[str, Any]]] = {}
    for record in read_records(RECORDS / "drafted"):
        own.setdefault(record["model"], []).append(record)
    for model, cells in own.items():
        right = [record for record in cells if record["outcome"] == Outcome.RIGHT]
        on_cpu[model] = "; ".join(map(_entry, right or cells[-1:]))
    parts = [
        "## Models that people train drafts for",
        "",
        "A tiny model of each through stock speculators 0.4.0.1, every row of every scenario compared"
        " with transformers in float32: right with the worst deviation of a row, refused, failed in vLLM"
        " alone as well, or not run here and why. Records: `records/drafted`, `records/families`,"
        " `records/matrix`.",
        "",
        "| model | tiny model | CPU, float32 where nothing else is said | 1 × NVIDIA H200, bfloat16 |",
        "|---|---|---|---|",
    ]
    for name, tiny in TINY.items():
        if isinstance(tiny, str):
            parts.append(f"| {name} | – | {NOT_HERE}{tiny} | {NOT_HERE.rstrip(': ')} |")
            continue
        for model in tiny:
            found = on_cpu.get(model, "not run yet")
            if model in WHY and "vLLM alone fails" in found:
                found += f": {WHY[model]}"
            if model in BESIDE and model in on_cpu:
                found += f" ({BESIDE[model]})"
            parts.append(f"| {name} | {model} | {found} | {on_gpu.get(model, 'not run')} |")
    return [*parts, *_proofs([record for cells in own.values() for record in cells])]


def _proofs(cells: list[dict[str, Any]]) -> list[str]:
    """Return what the cells say of their proofs: a cell that is right was not stopped by one."""
    proven = [cell for cell in cells if cell.get("proofs") and cell["outcome"] == Outcome.RIGHT]
    if not proven:
        return []
    steps = sum(cell["proofs"]["steps_watched"] for cell in proven)
    alone = sum(bool(cell["proofs"]["unproven_layers"]) for cell in proven)
    return [
        "",
        f"In {len(proven)} of these cells, which came out right, the proofs watched {steps} steps and"
        f" stopped none; a layer was believed by its source alone in {alone or 'none'} of them.",
    ]


def _right(found: dict[str, Any], where: str) -> str:
    worst = found["worst"]
    if worst > 0.08:  # a router chose otherwise in bfloat16
        return f"right, median {found['median']:.1e} (vLLM {where})"
    return f"right, worst {worst:.1e} (vLLM {where})"


def _entry(record: dict[str, Any]) -> str:
    where = f"{release_of(record)}, TP {record['ranks']}{', overlay' if record['overlay'] else ''}"
    if record["dtype"] != "float32":
        where += f", {record['dtype']}"
    if record["outcome"] == Outcome.RIGHT:
        medians = [scenario["median"] for scenario in record["scenarios"].values()]
        less = "".join(
            f", but for {name}: vLLM alone fails there"
            for name, alone in record.get("left_out", {}).items()
            if alone["outcome"] != Outcome.RIGHT
        )
        alone = (record.get("proofs") or {}).get("unproven_layers")
        less += f", layers {alone} by their source alone" if alone else ""
        return _right({**record, "median": max(medians, default=0.0)}, where) + less
    found = cause(record)
    if own := re.search(r"Worker failed with error '(.+?)', please check", str(record["error"])):
        found = f"vLLM alone fails too: {own[1]}" if record["outcome"] == Outcome.VLLM else found
    found = re.sub(r"\(\w+ pid=\d+\) ERROR [-\d: ]+\[[\w.]+:\d+\] ", "", found)
    found = re.sub(r"ROOT/models/(\w+)-\w+-\w+", r"\1", found)
    said = " ".join(found.split()).replace("|", "\\|").replace("<", "\\<")
    return f"{said} (vLLM {where})"
