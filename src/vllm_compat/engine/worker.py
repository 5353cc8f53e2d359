"""What vLLM adds to its workers for the second engine, and what the driver asks of it.

vLLM's front end and its engine core speak msgpack, which hands tensors in a plain dictionary back as
something else, and pickles nothing unless it is told to. So all that passes here is bytes, pickled by
the driver and by the workers that it has started itself.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_compat.analysis.environment import ALONE
from vllm_compat.errors import GuardError, VllmCompatError
from vllm_compat.runtime import run

logger = logging.getLogger(__name__)

_KEY = "_vllm_compat_capture"


class Extension:
    """What ``worker_extension_cls`` names: one method, which runs what the driver sends.

    vLLM refuses an extension whose names its worker has too.
    """

    def vllm_compat_call(self, packed: bytes) -> bytes:
        """Run a pickled ``(function or method's name, args, kwargs)``; return its pickled outcome.

        The outcome is ``(True, what it returned)`` or ``(False, the error)``.
        """
        try:
            call, args, kwargs = pickle.loads(packed)
            if isinstance(call, str):
                answer = getattr(self, call)(*args, **kwargs)
            else:
                answer = call(self, *args, **kwargs)
            return pickle.dumps((True, answer))
        except VllmCompatError as error:
            return pickle.dumps((False, error))
        except Exception as error:
            logger.exception("vllm_compat: a worker could not answer its driver.")
            return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))


@dataclass(frozen=True)
class ModelFacts:
    """What the checks ask of a model's configuration, in the words of vLLM's ``ModelConfig``.

    ``dtype`` is written as torch writes it, ``hf_text_config`` holds the counts of experts only.
    ``alone`` says that the workers need one prompt a step.
    """

    width: int
    vocabulary: int
    dtype: str
    max_model_len: int
    hf_text_config: dict[str, int] = field(default_factory=dict)
    alone: bool = False

    def get_hidden_size(self) -> int:
        """Return the width of a row."""
        return self.width

    def get_vocab_size(self) -> int:
        """Return how many ids the model's embedding has."""
        return self.vocabulary


@dataclass(frozen=True)
class Reply:
    """What one rank has to tell of a batch.

    ``prompts`` maps the requests as this vLLM names them to :func:`digest` of their prompts; ``states``
    their rows, None where this rank captures none or something is wrong: then ``fault`` says what.
    """

    prompts: dict[str, str]
    states: Any = None
    fault: str = ""


def digest(tokens: Sequence[int]) -> str:
    """Return what two prompts have in common only where all their tokens are the same."""
    return hashlib.sha256(array("q", tokens).tobytes()).hexdigest()


def setup(worker: Any, layer_ids: Sequence[int]) -> ModelFacts:
    """Begin to capture these layers in a worker; return what the driver must know of the model.

    Raises:
        VllmCompatError: The model's layers cannot be told, or would be misread.
    """
    from vllm_compat.capture import slabs
    from vllm_compat.capture.worker import Capture, tells_order
    from vllm_compat.checks import misread

    mine = run.current()
    if mine.plan is None or mine.transaction is None:
        raise GuardError("This worker has no plan in force, so nothing would be checked.")
    misread.refuse_configured(worker.vllm_config, mine.plan)
    transaction = mine.transaction.owned_by("engine.public")
    alone = mine.plan.engine == ALONE or not tells_order(worker.model_runner)
    capture = Capture(
        worker,
        layer_ids,
        capture=mine.plan.environment.capture,
        shared=mine.plan.environment.transfer != "rpc" and not slabs.refused(),
        prove="proofs" not in mine.plan.switched_off,
        alone=alone,
        transaction=transaction,
    )
    transaction.set_attribute(worker, _KEY, capture)
    model = worker.vllm_config.model_config
    text = vars(model.hf_text_config)
    return ModelFacts(
        int(model.get_hidden_size()),
        int(model.get_vocab_size()),
        str(model.dtype),
        int(model.max_model_len),
        {k: v for k, v in text.items() if k.endswith("experts") and isinstance(v, int)},
        alone,
    )


def reset(worker: Any) -> None:
    """Forget what a worker has captured; the next batch begins."""
    getattr(worker, _KEY).reset()


def states(worker: Any) -> Reply:
    """Return the rows of a batch, and which request had which prompt."""
    capture = getattr(worker, _KEY)
    prompts = {request_id: digest(tokens) for request_id, tokens in capture.prompts.items()}
    try:
        return Reply(prompts, capture.states())
    except GuardError as error:
        return Reply(prompts, fault=str(error))
