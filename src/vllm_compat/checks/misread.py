"""Models whose residual stream would be read wrongly are refused before anything loads."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.analysis import misread
from vllm_compat.analysis.layer_ids import read_config
from vllm_compat.analysis.streams import refusal
from vllm_compat.errors import IncompatibleError, UsageError

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan

_HALVES = "a step is computed in parts, each by a forward of its own"
_NOT_SERVED = {
    "pipeline_parallel_size": (
        "Pipeline parallelism",
        1,
        "each stage has some of the layers and the downstream reads the answer of one rank",
    ),
    "prefill_context_parallel_size": (
        "Context parallelism of prompts",
        1,
        "each rank has some of the rows",
    ),
    "data_parallel_size": (
        "Data parallelism",
        1,
        "each engine computes prompts of its own and the downstream runs one engine",
    ),
    "enable_dbo": ("Ubatching", False, _HALVES),
    "ubatch_size": ("Ubatching", 1, _HALVES),
}
"""Options of vLLM's ``ParallelConfig`` (0.33.0) and their values where they are off."""


def refuse(model: str, ranks: int, plan: Plan) -> None:
    """Refuse, by its configuration file, a model whose residual stream would be read wrongly.

    A model whose file is not here yet is judged when vLLM's configuration is made
    (`refuse_configured`), and any model by its layers in the worker.

    Raises:
        IncompatibleError: Names the layer's class and file, why, and what to do.
    """
    try:
        config = read_config(model)
    except UsageError:
        return
    _refuse_streams(config, model)
    _refuse_named(misread.architectures_of(config), ranks, plan)


def refuse_configured(vllm_config: Any, plan: Plan) -> None:
    """Refuse the same, before workers start, by the configuration that vLLM has made.

    Raises:
        IncompatibleError: As `refuse`.
    """
    refuse_parallel(vllm_config)
    model = getattr(vllm_config, "model_config", None)
    config = getattr(model, "hf_config", None)
    _refuse_streams(config, str(getattr(model, "model", "This model")))
    ranks = getattr(vllm_config.parallel_config, "tensor_parallel_size", 1)
    named = getattr(config, "architectures", None) or ()
    _refuse_named(tuple(map(str, named)), ranks, plan, vllm_config)


def refuse_parallel(vllm_config: Any) -> None:
    """Refuse kinds of parallelism under which no rank has every scheduled row of every layer.

    So is a model that is compiled or replayed from CUDA graphs, within which no hook on a layer fires.
    The downstream asks for tensor parallelism and an eager model; who sets something else is told
    before loading. Experts that are spread over the tensor-parallel ranks (``enable_expert_parallel``)
    change no layer's output. Sequence parallelism comes with a compiled model, or with data parallelism.

    Raises:
        IncompatibleError: Names the kind, the option of vLLM's configuration, and what to do.
    """
    if not getattr(getattr(vllm_config, "model_config", None), "enforce_eager", True):
        raise IncompatibleError(
            "A compiled model (enforce_eager=False) is not served, since hooks on its layers do not fire"
            " within it: leave enforce_eager=True, as the downstream has it."
        )
    parallel = vllm_config.parallel_config
    for name, (kind, without_it, why) in _NOT_SERVED.items():
        value = getattr(parallel, name, without_it)
        if value > without_it:
            raise IncompatibleError(
                f"{kind} ({name}={value}) is not served, since {why}: use tensor_parallel_size alone."
            )


def _refuse_streams(config: Any, model: str) -> None:
    if sentence := refusal(config, model):
        raise IncompatibleError(sentence)


def _refuse_named(named: tuple[str, ...], ranks: int, plan: Plan, configured: Any = None) -> None:
    sentence = misread.before_loading(
        named, ranks, plan.vllm, plan.environment.device, source=_vllm(), configured=configured
    )
    if sentence:
        raise IncompatibleError(sentence)


def _vllm() -> Path | None:
    """Return the folder of the vLLM package, without importing it."""
    try:
        found = importlib.util.find_spec("vllm")
    except ValueError:  # something that calls itself vllm stands in sys.modules without a spec
        return None
    return Path(found.origin).parent if found is not None and found.origin else None
