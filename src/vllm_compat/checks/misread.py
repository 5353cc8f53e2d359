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
    model = getattr(vllm_config, "model_config", None)
    config = getattr(model, "hf_config", None)
    _refuse_streams(config, str(getattr(model, "model", "This model")))
    ranks = getattr(vllm_config.parallel_config, "tensor_parallel_size", 1)
    named = getattr(config, "architectures", None) or ()
    _refuse_named(tuple(map(str, named)), ranks, plan, vllm_config)


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
