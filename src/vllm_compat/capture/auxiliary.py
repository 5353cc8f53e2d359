"""The model's own auxiliary hidden states, as vLLM takes them for EAGLE-3 drafts.

They see the residual stream where hooks on layers cannot, in the models that have them (vLLM's
``SupportsEagle3``). The model's forward then returns a pair; the states are taken out of it, so that the
model runner gets what it is used to. Some releases never hand over the state after the last layer (vLLM
0.18 to 0.24 for DeepSeek and Kimi): its absence is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_compat.errors import GuardError
from vllm_compat.runtime.patching import Transaction


def supported(model: Any) -> bool:
    """Whether the model hands over auxiliary hidden states."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    return bool(supports_eagle3(model))


def bind(
    model: Any,
    layer_ids: Sequence[int],
    receive: Callable[[list[Any]], None],
    transaction: Transaction,
) -> None:
    """Ask the model for the states after the layers, and call ``receive`` with those of each forward.

    ``layer_ids`` ascend, without duplicates; in-process id *k* is vLLM's *k + 1* (the input of layer
    *k + 1*). ``receive`` gets one tensor ``[tokens, hidden]`` for each, in that order.

    Raises:
        GuardError: The model has no such support; in a forward: the states are not those asked for.
    """
    if not supported(model):
        raise GuardError(
            f"{type(model).__name__} hands over no auxiliary hidden states in this vLLM (it is no"
            " SupportsEagle3); leave capture='auxiliary' out."
        )
    model.set_aux_hidden_state_layers(tuple(layer_id + 1 for layer_id in layer_ids))

    def ask_for_none() -> str:
        model.set_aux_hidden_state_layers(())
        return "reverted"

    transaction.did(f"auxiliary hidden states of one {type(model).__name__}", ask_for_none)
    forward = model.forward

    def take(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if not transaction.active:  # somebody has wrapped over us, and nothing is asked for any more
            return output
        states = output[1] if isinstance(output, tuple) and len(output) == 2 else []
        if len(states) != len(layer_ids):
            raise GuardError(
                f"{type(model).__name__} was asked for its states after the layers {list(layer_ids)} and"
                f" handed over {len(states)}; some releases leave out the last layer: use"
                " capture='hooks'."
            )
        receive(list(states))
        return output[0]

    transaction.set_attribute(model, "forward", take)
