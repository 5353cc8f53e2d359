"""Decoder layers of released vLLM whose residual stream capture would read wrongly, and is refused.

What a layer hands back looks the same from outside whether it is complete or not: a pair of tensors
whose sum is one rank's part of the stream has the right shape, the right dtype and finite values, is the
same for a prompt alone and in company, and so goes through every guard and the canary. Until capture
reads such a layer, this table says where it is met. It is asked twice: by the architecture's name before
anything loads (`before_loading`), and in the worker by the live layer's class and the file that it comes
from (`of_layer`), which decides, whatever the release or the architecture is called.

Read from the sources of vLLM 0.22.1 to 0.34.0. The folders below ``vllm/models/`` choose their file by
the platform; only layers of the files named here are misread. Where CUDA has a file of its own (Qwen3.5,
DeepSeek-V3.2), CPU builds keep the one below ``vllm/model_executor/models/``, whose layers are complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTIAL = (
    "leaves the sum over the ranks to the next layer's norm, so that the captured rows would be one"
    " rank's part of the residual stream"
)
THIRD = (
    "hands back (output, None, residual), whose first and third are the residual stream together, so"
    " that the captured rows would be the output of its MLP alone"
)


@dataclass(frozen=True, kw_only=True)
class Misread:
    """One kind of decoder layer, and when its stream is read wrongly.

    ``layer`` is the class, ``file`` the module that CUDA takes it from, ``folder`` the prefix of all
    modules whose class of that name (or a class made from it) is meant. ``architectures`` get this layer
    on CUDA from vLLM ``since`` on and before ``before`` (empty: still so); with ``fits_before`` releases
    before ``since`` give them another layer, which is read rightly. ``several_ranks``: only with more
    than one tensor-parallel rank. ``live`` is an attribute of the layer and the value with which it is
    misread (so is a layer without it); ``option`` one of vLLM's configuration without which it does not
    happen, so that the architecture's name alone does not tell.
    """

    models: str
    layer: str
    file: str
    folder: str
    architectures: tuple[str, ...]
    since: str
    before: str = ""
    fits_before: bool = False
    several_ranks: bool = True
    live: tuple[str, bool] | None = None
    option: str = ""
    reason: str = PARTIAL

    def covers(self, vllm: str) -> bool:
        """Whether this release gives the architectures this layer, as far as its version tells.

        A version that is none (a checkout) is not judged by it: the worker looks at the layer.
        """
        from packaging.version import InvalidVersion, Version

        try:
            found = Version(vllm)
        except InvalidVersion:
            return False
        return found >= Version(self.since) and not (self.before and found >= Version(self.before))

    def is_in(self, vllm: Path) -> bool:
        """Whether a vLLM package folder has this layer where it is looked for."""
        try:
            text = vllm.joinpath(*self.file.split(".")[1:]).with_suffix(".py").read_text("utf-8")
        except OSError:
            return False
        return f"class {self.layer}(" in text

    def sentence(self, module: str, vllm: str, ranks: int, name: str = "") -> str:
        """Say which layer of which file is refused, why, and what to do."""
        where = f"{module.replace('.', '/')}.py{f' of vLLM {vllm}' if vllm else ''}"
        with_ranks = f" with {ranks} tensor-parallel ranks" if self.several_ranks else ""
        return (
            f"Decoder layer {name or self.layer} ({where}){with_ranks} {self.reason}: refused;"
            f" {self.advice}."
        )

    @property
    def advice(self) -> str:
        """What to do instead."""
        ways = ["use tensor_parallel_size=1"] if self.several_ranks else []
        if self.fits_before:
            ways.append(f"use a vLLM before {self.since}")
        return ", or ".join([*ways, "wait for a vllm_compat that reads this layer"])


TABLE = (
    Misread(
        models="DeepSeek-V3.2, GLM-5",
        layer="DeepseekV32DecoderLayer",
        file="vllm.models.deepseek_v32.nvidia.model",
        folder="vllm.models.deepseek_v32",
        # The files are there from 0.25.0 on, chosen with model_class_overrides only.
        architectures=("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
        since="0.29.0",
        fits_before=True,
    ),
    Misread(
        models="dots3-note (its layers are made from DeepSeek-V3.2's)",
        layer="Dots3NoteDecoderLayer",
        file="vllm.models.dots3_note.nvidia.model",
        folder="vllm.models.dots3_note",
        architectures=("Dots3NoteForCausalLM",),
        since="0.28.0",
    ),
    Misread(
        models="MiniMax-M3",
        layer="MiniMaxM3DecoderLayer",
        file="vllm.models.minimax_m3.nvidia.model",
        folder="vllm.models.minimax_m3.nvidia",  # AMD's reduces in the layer
        architectures=("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
        since="0.24.0",
        live=("ffn_all_reduce_deferred", True),
    ),
    Misread(
        models="Qwen3.5, dense and with experts",
        layer="Qwen3_5DecoderLayer",
        file="vllm.models.qwen3_5.nvidia.model",
        folder="vllm.models.qwen3_5",
        architectures=(
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        since="0.34.0",
        fits_before=True,
        live=("mlp_output_is_partial", True),
    ),
    Misread(
        models="Mistral Large 4",
        layer="MistralLarge4DecoderLayer",
        file="vllm.models.mistral.mistral_large4.nvidia.model",
        folder="vllm.models.mistral.mistral_large4",
        architectures=("MistralLarge4ForCausalLM",),
        since="0.34.0",
        live=("defer_allreduce", True),
        option="compilation_config.pass_config.fuse_allreduce_rms",
    ),
    Misread(
        models="Kimi-Linear (Kimi-K3, with use_attn_res on, is refused for its attention residuals)",
        layer="KimiDecoderLayer",
        file="vllm.models.kimi_k3.nvidia.model",
        folder="vllm.models.kimi_k3.nvidia",  # AMD's returns a pair
        architectures=("KimiLinearForCausalLM",),
        since="0.27.0",
        fits_before=True,
        several_ranks=False,
        live=("use_attn_res", False),
        reason=THIRD,
    ),
)
"""Every kind that is known."""


def before_loading(
    architectures: Iterable[str],
    ranks: int,
    vllm: str,
    device: str,
    *,
    source: Path | None = None,
    configured: Any = None,
) -> str | None:
    """Return the sentence that refuses a model by its architecture's name, or None.

    ``vllm`` is the version and ``source`` the installed package's folder (a release that no longer has
    the layer there is not refused for its version), ``device`` an environment's. ``configured`` is
    vLLM's configuration where it has been made; without it, what hangs on an option is let through.
    """
    named = set(architectures)
    for row in TABLE:
        if device != "cuda" or named.isdisjoint(row.architectures) or not row.covers(vllm):
            continue
        if (row.several_ranks and ranks < 2) or (source is not None and not row.is_in(source)):
            continue
        if row.option and not _at(configured, row.option):
            continue
        return row.sentence(row.file, vllm, ranks)
    return None


def _at(configured: Any, path: str) -> Any:
    for name in path.split("."):
        configured = getattr(configured, name, None)
    return configured


def of_layer(layer: Any, ranks: int, vllm: str = "") -> str | None:
    """Return the sentence that refuses a live layer, by what it is, or None."""
    for cls in type(layer).__mro__:
        for row in TABLE:
            if cls.__name__ != row.layer or not f"{cls.__module__}.".startswith(f"{row.folder}."):
                continue
            if row.several_ranks and ranks < 2:
                continue
            if row.live is not None and bool(getattr(layer, *row.live)) is not row.live[1]:
                continue
            return row.sentence(cls.__module__, vllm, ranks, type(layer).__name__)
    return None


def architectures_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the architectures that a model's configuration file names."""
    named = config.get("architectures")
    return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()


def as_markdown() -> list[str]:
    """Return the lines of the documentation's section."""
    parts = [
        "## Layers that are refused",
        "",
        "What these layers hand back looks right and is not the residual stream, so no guard that looks"
        " at rows would notice. They are refused: before the model loads where the architecture's name"
        " tells (on CUDA), and in the worker by the layer's class and the file that it comes from. Other"
        " files' layers for the same models (Qwen3.5's and DeepSeek-V3.2's on the CPU) are not refused."
        " Found by reading vLLM 0.22.1 to 0.34.0, not by running it.",
        "",
        "| models | layer | on CUDA, vLLM | ranks | why | instead |",
        "|---|---|---|---|---|---|",
    ]
    for row in TABLE:
        releases = f">= {row.since}" + (f", < {row.before}" if row.before else "")
        names = ", ".join(f"`{name}`" for name in row.architectures)
        ranks = "two or more" if row.several_ranks else "any number"
        when = f", where `{row.live[0]}` is {row.live[1]}" if row.live else ""
        parts.append(
            f"| {row.models} ({names}) | `{row.layer}` in `{row.file.replace('.', '/')}.py`{when} |"
            f" {releases} | {ranks} | {row.reason} | {row.advice} |"
        )
    return parts
