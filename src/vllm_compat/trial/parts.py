"""Where a worker's forward goes: the time of each part of its decoder layers, in one call.

Both functions run in a worker, through the executor's ``collective_rpc``.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from typing import Any

_KEPT = "_vllm_compat_parts"
WHOLE = "layers"


def watch(worker: Any) -> None:
    """Begin to measure the decoder layers of this worker and their direct parts."""
    from vllm_compat.capture.layers import decoder

    config = worker.vllm_config.model_config.hf_text_config
    _, layers = decoder(worker.model_runner.get_model(), config.num_hidden_layers)
    marks: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    handles = []
    for layer in layers:
        named = [(f"{name} ({type(part).__name__})", part) for name, part in layer.named_children()]
        for name, module in [(WHOLE, layer), *named]:
            begun: list[Any] = []
            handles.append(module.register_forward_pre_hook(functools.partial(_begin, begun)))
            handles.append(module.register_forward_hook(functools.partial(_end, marks[name], begun)))
    setattr(worker, _KEPT, (marks, handles))


def seconds(worker: Any) -> dict[str, float]:
    """Stop, and return the seconds of each part, named by its attribute and class; `WHOLE` is all."""
    marks, handles = getattr(worker, _KEPT)
    delattr(worker, _KEPT)
    for handle in handles:
        handle.remove()
    return {name: sum(_between(*pair) for pair in pairs) for name, pairs in marks.items() if pairs}


def shares(spent: dict[str, float]) -> dict[str, float]:
    """Return the share of the layers' time by part, largest first; what is in no part is ``rest``."""
    whole = spent[WHOLE]
    found = {name: took / whole for name, took in spent.items() if name != WHOLE}
    found["rest"] = max(0.0, 1 - sum(found.values()))
    return {name: round(found[name], 4) for name in sorted(found, key=lambda name: -found[name])}


def _mark() -> Any:
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end) - begin
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _begin(begun: list[Any], *_: Any) -> None:
    begun.append(_mark())


def _end(pairs: list[tuple[Any, Any]], begun: list[Any], *_: Any) -> None:
    pairs.append((begun.pop(), _mark()))
