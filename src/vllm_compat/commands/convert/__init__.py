"""Turn data of one speculators flow into data of the other, bit for bit.

speculators 0.3 and 0.4 extract in process: ``data_<i>.pt`` with token ids, loss mask and one tensor a
layer, whose ids count the residual stream *after* a layer. 0.5 to 0.9 take states from a vLLM server:
``hs_<i>.safetensors``, one tensor of shape [tokens, layers, hidden size], whose ids are vLLM's and count
the stream *before* a layer, one higher; token ids and loss masks stand in a data set beside them::

    report = convert(Options(Path("data"), Path("converted"), model="model"))
    print(render(report))

So what 0.4.0.1 has extracted on an old vLLM trains under 0.9, and the other way round.
"""

from __future__ import annotations

from vllm_compat.commands.convert.model import (
    ConversionError,
    Flow,
    Head,
    Layers,
    Origin,
    Report,
    UnknownError,
)
from vllm_compat.commands.convert.text import render
from vllm_compat.commands.convert.work import Options, convert

__all__ = [
    "ConversionError",
    "Flow",
    "Head",
    "Layers",
    "Options",
    "Origin",
    "Report",
    "UnknownError",
    "convert",
    "render",
]
