"""What is known of data by where they come from, which their tensors do not show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_compat.analysis.layer_ids import read_config
from vllm_compat.analysis.misread import architectures_of, before_loading
from vllm_compat.analysis.streams import refusal
from vllm_compat.commands.verify.model import look_up
from vllm_compat.errors import UsageError


def known_of(config: Mapping[str, Any]) -> str | None:
    """Return the note on a folder's ``data_config.json`` where its rows may be wrong throughout.

    The model's own configuration has to be at hand; where it is not, nothing is said.
    """
    vllm = look_up(config, "reproducibility", "package_versions", "vllm")
    model = look_up(config, "model", "target_model_path")
    ranks = look_up(config, "model", "tensor_parallel_size")
    on_cpu = str(look_up(config, "reproducibility", "gpu")).upper() in ("CPU ONLY", "NO ACCELERATOR")
    if not (isinstance(vllm, str) and isinstance(model, str) and isinstance(ranks, int)) or on_cpu:
        return None
    try:
        found = read_config(model)
    except UsageError:
        return None
    architectures = architectures_of(found)
    if (sentence := refusal(found, model)) is not None:
        return f"Rows may be wrong in every file, which this vllm_compat would not have made: {sentence}"
    if before_loading(architectures, ranks, vllm, "cuda") is None:
        return None
    where = f"vLLM {vllm} on {ranks} tensor-parallel rank{'' if ranks == 1 else 's'}"
    return (
        f"Rows may be wrong in every file: they are of {', '.join(architectures)}, made with {where},"
        " whose layers a vllm_compat from before 0.1.0 misread. Extract these again, unless a later one"
        " has made them."
    )
