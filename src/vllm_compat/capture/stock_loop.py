"""The downstream's own loop over the layers, made to find its model.

Used only where it is asked for (``capture="stock"``): it knows one family of models. What it looks
for under names that this vLLM has changed is supplied on the instances that it uses; no class is
touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from vllm_compat.capture.layers import decoder, leaves_the_sum
from vllm_compat.errors import GuardError
from vllm_compat.runtime.patching import Transaction


def bind(
    extension: Any,
    module: ModuleType,
    setup: Callable[[], Any],
    layers: int,
    transaction: Transaction,
) -> tuple[str, Callable[[Callable[[list[Any]], None]], None]]:
    """Let the downstream bind its loop; return where, and how to get what it captures.

    ``module`` is the downstream's worker module, ``setup`` its own set-up call, ``layers`` the
    number of decoder layers. The second value takes a function that is called with the captured
    tensors of each forward, in the order of ascending layer ids.

    Raises:
        GuardError: The model's layers are not of the kind that the loop adds up.
    """
    model = extension.model_runner.model
    path, found = decoder(model, layers)
    owner, _, name = path.rpartition(".")
    if name != "layers" or not all(map(leaves_the_sum, set(map(type, found)))):
        raise GuardError(
            f"The downstream's own loop adds up what the layers of {type(model).__name__} return, which"
            " is not how they work; leave capture='stock' out."
        )
    base = model.get_submodule(owner) if owner else model
    old, new = "get_input_embeddings", "embed_input_ids"  # renamed by vLLM 0.11.1
    for missing, present in ((old, new), (new, old)):
        if not hasattr(base, missing) and hasattr(base, present):
            transaction.set_attribute(base, missing, getattr(base, present))
    # The downstream puts its forward on the live model, and its notes on the extension: what it changes
    # is in the transaction, so that a revert gives the model's own forward back.
    with (
        _found(model, base, transaction),
        _supported(module, transaction),
        transaction.watched(extension),
        transaction.watched(base),
    ):
        setup()

    def deliver(receive: Callable[[list[Any]], None]) -> None:
        transaction.set_attribute(extension, "_store_captured_states", receive)

    return path, deliver


@contextmanager
def _found(model: Any, base: Any, transaction: Transaction) -> Iterator[None]:
    """Let ``model.model``, or ``model.get_language_model().model``, be ``base`` for a while."""
    owners = [model]
    if hasattr(model, "get_language_model"):
        owners.append(model.get_language_model())
    with ExitStack() as lent:
        for owner in owners:
            if owner is not base and getattr(owner, "model", None) is not base:
                lent.enter_context(transaction.lent(owner, "model", base))
        yield


@contextmanager
def _supported(module: ModuleType, transaction: Transaction) -> Iterator[None]:
    """Answer yes where the downstream asks for SupportsEagle3: its loop needs none of it."""
    if vars(module).get("supports_eagle3") is None:
        yield
        return
    with transaction.lent(module, "supports_eagle3", lambda model: True):
        yield
