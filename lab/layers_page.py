"""The page of decoder layers: every one of every recorded release, from `decoder_layers`' table."""

from __future__ import annotations

import re

from lab.decoder_layers import Row
from vllm_compat.analysis import misread

# What people train drafts for, and how the architectures' names begin.
FAMILIES = {
    "Llama": "LlamaForCausalLM",
    "Llama 4": "Llama4ForC",
    "Qwen3": "Qwen3ForCausalLM",
    "Qwen3-MoE": "Qwen3MoeForCausalLM",
    "Qwen3-Next": "Qwen3NextForCausalLM",
    "Qwen3.5": "Qwen3_5ForC",
    "Qwen3.5-MoE": "Qwen3_5MoeForC",
    "DeepSeek-V3": "DeepseekV3ForCausalLM",
    "DeepSeek-V3.2": "DeepseekV32ForCausalLM",
    "DeepSeek-V4": "DeepseekV4ForC",
    "DeepSeek-V4.1": "DeepseekV41",
    "GLM-4.5": "Glm4MoeForCausalLM",
    "GLM-5": "GlmMoeDsaForCausalLM",
    "Kimi-K2.5, K2.6": "KimiK25ForConditionalGeneration",
    "Kimi-K3": "KimiK3ForConditionalGeneration",
    "Kimi-Linear": "KimiLinearForCausalLM",
    "MiniMax-M2": "MiniMaxM2ForCausalLM",
    "MiniMax-M3": "MiniMaxM3Sparse",
    "Mistral Large 3": "MistralLarge3ForCausalLM",
    "Mistral Large 4": "MistralLarge4ForCausalLM",
    "Gemma-3n": "Gemma3nForC",
    "Gemma 4": "Gemma4ForC",
    "gpt-oss": "GptOssForCausalLM",
    "Nemotron-H": "NemotronHForCausalLM",
    "Step-3": "Step3TextForCausalLM",
    "ERNIE 4.5": "Ernie4_5",
    "Hunyuan": "HunYuan",
}


_KINDS = ("stream", "first", "sum", "other sum", "partial", "several", "unknown")


def differs(row: Row) -> list[Row]:
    """Return a row's cases where going by the order of use alone takes something else for the stream."""
    return [case for case in row["cases"] if case.get("today", "") not in ("", case.get("stream", ""))]


def as_markdown(table: Row) -> list[str]:
    """Return the section of the families' page: a row a class, and what is odd about some."""
    order = table["releases"]
    return [
        "## What decoder layers hand on",
        "",
        "Every decoder layer of every recorded release, read by `python3 -m lab layers` from the sources"
        f" of vLLM {order[0]} to {order[-1]} ([table](../records/decoder_layers/table.json)), not run:"
        " the model's loop over its layers is followed, and what the next layer's norm and the model's"
        " final norm read says what the returned values are (*1st*, *2nd*: of the values handed on)."
        " *Partial*: the norm reduces over the tensor-parallel ranks, so what is handed on is one rank's"
        " part. Files in a folder `nvidia`, `amd`, `cpu` or `xpu` are for that platform only; file names"
        " without a folder lie in `vllm/model_executor/models`.",
        "",
        "*Proven by* is what shows it: the lines of source that read the stream, and in every run the"
        " identity *stream* over the live layer ([what is proven](architecture.md#what-is-proven))."
        " Where the source alone does not tell, only that identity does (*the running model alone*)."
        " *Drafts*: models that people train drafts for whose classes can reach the layer in the last"
        " release of its range, so by more than use it.",
        "",
        "| layer | vLLM | the stream is | proven by | drafts |",
        "|---|---|---|---|---|",
        *layer_rows(table),
        "",
        *_counts(table),
        "",
        *_odd(table),
    ]


def layer_rows(table: Row) -> list[str]:
    """Return a row for every class, file and range of releases; models that share one share a row."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for row in table["rows"]:
        proof = "; ".join(dict.fromkeys(_proven(row, case) for case in row["cases"]))
        where = f"`{row['layer']}` in `{_short(row['file'])}`"
        names = rows.setdefault((where, _range(row), _said(row["cases"]), _short(proof)), [])
        names += [name for name in drafted(row) if name not in names]
    return ["| " + " | ".join([*key, ", ".join(names)]) + " |" for key, names in rows.items()]


def drafted(row: Row) -> list[str]:
    """Return the models that people train drafts for and that can have a row's layer."""
    return [
        name
        for name, start in FAMILIES.items()
        if any(architecture.startswith(start) for architecture in row["architectures"])
    ]


def _proven(row: Row, case: Row) -> str:
    """Return what shows the meaning of a case, or who refuses it, or that only the live model tells."""
    if case["kind"] == "several" and re.match(
        r"m?hc\b|m?hc_|altup_|HyperConnection", case.get("reason", "")
    ):
        return "refused before loading: several streams"
    if case["kind"] == "several" and re.match(r"attn_res|block_residual", case.get("reason", "")):
        return "refused before loading: attention residuals"
    if case["kind"] == "partial":
        module = row["file"].removesuffix(".py").replace("/", ".")
        listed = any(
            known.layer == row["layer"] and f"{module}.".startswith(f"{known.folder}.")
            for known in misread.TABLE
        )
        return f"refused with several ranks: {case['proof']}" if listed else "the identity *ranks*"
    if case["kind"] in ("unknown", "several"):
        return "the running model alone"
    return str(case.get("proof") or "the running model alone")


def _counts(table: Row) -> list[str]:
    parts = ["Classes a release, by what their source proves:", ""]
    parts += ["| vLLM | " + " | ".join(_KINDS) + " |", "|---" * (len(_KINDS) + 1) + "|"]
    for version in table["releases"]:
        counts = table["counts"][version]
        parts.append(f"| {version} | " + " | ".join(str(counts.get(kind, 0)) for kind in _KINDS) + " |")
    return parts


def _odd(table: Row) -> list[str]:
    parts = [
        "Where the order in which `forward` uses its parameters says something else than the norms do:",
        "",
        "| layer | vLLM | by order of use | by the norms |",
        "|---|---|---|---|",
    ]
    for row in table["rows"]:
        if odd := differs(row):
            orders = ", ".join(sorted({case["today"] for case in odd}))
            where = f"`{row['layer']}` in `{_short(row['file'])}`"
            parts.append(f"| {where} | {_range(row)} | {orders} | {_said(odd)} |")
    return parts


def _short(text: str) -> str:
    return text.replace("vllm/model_executor/models/", "").replace("vllm/models/", "models/")


def _range(row: Row) -> str:
    first, last = row["releases"]
    return first if first == last else f"{first} – {last}"


def _said(cases: list[Row]) -> str:
    words = []
    for case in cases:
        text = case["kind"] + (f": {case['stream']}" if case.get("stream") else "")
        if case["kind"] in ("unknown", "several") and case.get("reason"):
            text += f" ({_short(case['reason'])})"
        if len(cases) > 1 and case.get("when"):
            text += f", where `{case['when'][0][:60]}`"
        words.append(text.replace("|", "\\|"))
    return "; ".join(dict.fromkeys(words))
