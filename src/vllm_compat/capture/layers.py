"""Where a model keeps its decoder layers, and what one of them hands back."""

from __future__ import annotations

from typing import Any

from vllm_compat.errors import GuardError


def decoder(model: Any, count: int) -> tuple[str, Any]:
    """Return the dotted name and the module that holds the text model's decoder layers.

    Found by looking, not by the model's name: the module with a ``layers`` list of exactly
    ``count`` entries (the configuration's ``num_hidden_layers``), inside the language model where
    the model has one. vLLM 0.15 keeps Kimi-K2.5's layers at ``language_model.layers``, 0.16 and
    later at ``language_model.model.layers``; both are found.

    Raises:
        GuardError: There is no such module, or more than one.
    """
    from torch import nn

    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList)
        and len(module.layers) == count
    ]
    if len(found) > 1:
        inside = [(n, m) for n, m in found if "language_model" in n.split(".")]
        found = inside or [(n, m) for n, m in found if "vision" not in n]
    if len(found) != 1:
        names = [name for name, _ in found] or "none"
        raise GuardError(
            f"Cannot tell the decoder layers of {type(model).__name__}: looked for one module with"
            f" {count} layers, found {names}."
        )
    return found[0]


def residual_stream(output: Any, layer: str) -> Any:
    """Return the residual stream after a layer, ``[tokens, hidden]``, from what the layer returned.

    vLLM's layers return ``(hidden_states, residual)``, whose sum is the stream, or one tensor, which
    is the stream itself. The result is a new tensor that later layers do not write to.

    Raises:
        GuardError: It is neither.
    """
    import torch

    if isinstance(output, torch.Tensor):
        return output.clone()
    if isinstance(output, tuple) and len(output) == 2:
        hidden, residual = output
        if isinstance(hidden, torch.Tensor) and residual is None:
            return hidden.clone()
        if isinstance(hidden, torch.Tensor) and isinstance(residual, torch.Tensor):
            return hidden + residual
    shape = type(output).__name__
    raise GuardError(
        f"Decoder layer {layer} returned {shape}, which is neither one tensor nor a pair of hidden"
        " states and residual: its residual stream cannot be told."
    )
