#!/usr/bin/env python3
"""Write the suite of cells for one vLLM release on one GPU (part 1: runners, start methods, MLA).

usage: make_suite.py VLLM_VERSION OUT.json [--only TEXT]
       make_suite.py VLLM_VERSION OUT.json --two-gpus
       make_suite.py VLLM_VERSION OUT.json --transfers RANKS
       make_suite.py VLLM_VERSION OUT.json --families
       make_suite.py VLLM_VERSION OUT.json --drafted
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COMMON = ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.3"]


def cell(name: str, speculators: str, model: str, *arguments: str, **more: Any) -> dict[str, Any]:
    """Return one cell."""
    return {
        "name": f"{name}: speculators {speculators}, {model}",
        "speculators": speculators,
        "model": model,
        "arguments": [*COMMON, *arguments],
        **more,
    }


def suite(vllm: str) -> list[dict[str, Any]]:
    """Return the cells of a release; only 0.22 and later have model runner V2 by default."""
    v2 = tuple(map(int, vllm.split(".")[:2])) >= (0, 22)
    fork = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    spawn = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    started = {"fork": {"start_method": "fork"}, "spawn": {"start_method": "spawn"}}
    cells = []
    for speculators in ("0.3.0", "0.4.0.1"):
        for model in ("llama", "deepseek_v3", "kimi_k25"):
            for name, environ in (("fork", fork), ("spawn", spawn)):
                workers = started[name]
                cells.append(cell(name, speculators, model, environ=environ, workers=workers))
        cells.append(
            cell(
                "TRITON_MLA",
                speculators,
                "kimi_k25",
                "--backend",
                "TRITON_MLA",
                environ=fork,
                workers={"attention": "TRITON_MLA"},
            )
        )
        if v2:
            runners = {"0": "vllm.v1.worker.gpu_model_runner", "1": "vllm.v1.worker.gpu.model_runner"}
            for model, use in (("llama", "0"), ("deepseek_v3", "1")):
                cells.append(
                    cell(
                        f"model runner V{int(use) + 1}",
                        speculators,
                        model,
                        environ={**fork, "VLLM_USE_V2_MODEL_RUNNER": use},
                        workers={"runner": runners[use]},
                    )
                )
    for speculators in ("0.3.0", "0.4.0.1"):
        cells.append(
            cell(
                "launcher and stock's loop",
                speculators,
                "kimi_k25",
                "--capture",
                "stock",
                "--already",
                launcher=["--capture", "stock"],
                environ=fork,
                workers={"capture": "stock"},
            )
        )
    cells += ablation(v2, fork)
    return cells


def ablation(v2: bool, fork: dict[str, str]) -> list[dict[str, Any]]:
    """Return cells with one adapter off, with the words in which they must fail."""
    off = [
        ("0.4.0.1", "device.fork", "Cannot re-initialize CUDA in forked subprocess"),
        ("0.4.0.1", "transformers.torch_annotation", "name 'torch' is not defined"),
        ("0.4.0.1", "request.eos_token_id", "unexpected keyword argument 'eos_token_id'"),
        ("0.3.0", "executor.two_phase_step", "" if v2 else "sample_tokens() must be called"),
        ("0.3.0", "worker.capture", ""),
    ]
    if v2:
        off.append(("0.4.0.1", "worker.capture", "has no attribute 'input_batch'"))
    return [
        cell(f"without {adapter}", release, "llama", "--without", adapter, environ=fork, expect=words)
        for release, adapter, words in off
    ]


def int4(fork: dict[str, str]) -> list[dict[str, Any]]:
    """Return the cells with INT4 experts, as the published Kimi-K2.5 has them."""
    marlin = "CompressedTensorsWNA16MarlinMoEMethod"
    cells = []
    for speculators in ("0.3.0", "0.4.0.1"):
        for name, arguments, attention in (
            ("TRITON_MLA, INT4", ["--backend", "TRITON_MLA"], "TRITON_MLA"),
            ("vLLM's own choice, INT4", [], "MLA"),
        ):
            workers = {"attention": attention, "quant_methods": marlin}
            cells.append(
                cell(name, speculators, "kimi_k25_int4", *arguments, environ=fork, workers=workers)
            )
    return cells


def two_gpus(fork: dict[str, str], spawn: dict[str, str]) -> list[dict[str, Any]]:
    """Return the cells with tensor parallelism 2, one worker a GPU."""
    two = ("--tensor-parallel-size", "2")
    cells = []
    for speculators in ("0.4.0.1", "0.3.0"):
        for model in ("llama", "deepseek_v3", "kimi_k25_int4"):
            workers = {"start_method": "fork"}
            cells.append(cell("TP 2, fork", speculators, model, *two, environ=fork, workers=workers))
        workers = {"start_method": "spawn"}
        cells.append(cell("TP 2, spawn", speculators, "kimi_k25", *two, environ=spawn, workers=workers))
    for speculators, model, use in (("0.3.0", "llama", "0"), ("0.4.0.1", "deepseek_v3", "1")):
        environ = {**fork, "VLLM_USE_V2_MODEL_RUNNER": use}
        name = f"TP 2, model runner V{int(use) + 1}"
        cells.append(cell(name, speculators, model, *two, environ=environ))
    return cells


def families(fork: dict[str, str]) -> list[dict[str, Any]]:
    """Return a cell for every tiny family, and cells with the models' own auxiliary hidden states.

    The canary is on in all of them. What no CPU build runs (hybrids, Llama-4's router, GPT-OSS in its
    own dtype) is shown here.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))
    from vllm_compat.trial.families import FAMILY_NAMES

    more = ["--canary", "--layer-ids", "0,1,2,3"]  # the last layer included
    cells = [cell("family", "0.4.0.1", name, *more, environ=fork) for name in FAMILY_NAMES]
    for model in ("llama", "deepseek_v3", "kimi_k25", "qwen3", "gpt_oss"):
        workers = {"capture": "auxiliary"}
        arguments = ["--capture", "auxiliary", *more]
        cells.append(cell("auxiliary", "0.4.0.1", model, *arguments, environ=fork, workers=workers))
    return cells


def drafted(fork: dict[str, str]) -> list[dict[str, Any]]:
    """Return a cell for the tiny model of each kind that people train drafts for, with the canary on."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))
    from vllm_compat.trial.families import DRAFTED

    more = ["--canary", "--layer-ids", "0,1,2,3"]  # the last layer included
    return [cell("drafted", "0.4.0.1", name, *more, environ=fork) for name in DRAFTED]


def transfers(fork: dict[str, str], ranks: str) -> list[dict[str, Any]]:
    """Return pairs of cells that differ in how rows leave the worker; their digests must be equal."""
    cells = []
    for speculators in ("0.3.0", "0.4.0.1"):
        for use, runner in (("0", "vllm.v1.worker.gpu_model_runner"), ("1", "gpu.model_runner")):
            environ = {**fork, "VLLM_USE_V2_MODEL_RUNNER": use}
            for transfer in ("auto", "rpc"):
                more = ["--transfer", transfer, "--tensor-parallel-size", ranks]
                if transfer == "auto":
                    more += ["--requests", "10000"]
                name = f"transfer {transfer}, TP {ranks}, V{int(use) + 1}"
                workers = {"runner": runner}
                cells.append(cell(name, speculators, "llama", *more, environ=environ, workers=workers))
    return cells


def main(version: str, out: str, *options: str) -> None:
    """Write the suite; ``--only TEXT`` keeps the cells whose names hold the text."""
    fork = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    spawn = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if "--two-gpus" in options:
        cells = [*int4(fork), *two_gpus(fork, spawn)]
    elif "--transfers" in options:
        cells = transfers(fork, options[options.index("--transfers") + 1])
    elif "--families" in options:
        cells = families(fork)
    elif "--drafted" in options:
        cells = drafted(fork)
    else:
        cells = suite(version)
    if "--only" in options:
        text = options[options.index("--only") + 1]
        cells = [c for c in cells if text in c["name"]]
    Path(out).write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
