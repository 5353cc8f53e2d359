"""What a run of the server flow will meet: layers, the model's class, memory for states, the disk.

All is read from files: nothing is started, and vLLM is not imported.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from vllm_compat.analysis.layer_ids import read_config
from vllm_compat.analysis.serving.layers import ServerLayers, server_layers_of
from vllm_compat.analysis.serving.models import named_in, read_model
from vllm_compat.analysis.serving.modules import Modules
from vllm_compat.analysis.surface.files import installed_package
from vllm_compat.commands.preflight.judge import Item, Options, Report, size_words
from vllm_compat.errors import UsageError

_LESS = (
    "speculators 0.9's `--hidden-states-backend fp8` (vLLM 0.22 or later) about halves it, generating on"
    " line while training keeps next to nothing, or take fewer samples"
)


def preflight_server(options: Options) -> Report:
    """Return what a run of the server flow will meet.

    ``options.layer_ids`` are in the server's numbering; ``options.tokens`` or ``options.samples`` say
    how much will be kept.

    Raises:
        UsageError: The model has no configuration that can be read, or an id is not there.
    """
    begin = time.perf_counter()
    if options.capability is not None or options.read_speed is not None:
        raise UsageError(
            "--server asks neither for a device nor how fast weights load: leave --device-capability and"
            " --read-speed out."
        )
    layers = server_layers_of(options.model, options.layer_ids)
    items = [
        Item(
            "layers",
            "note",
            f"server's ids {', '.join(map(str, layers.ids))}: give launcher and trainer the same"
            " (`vllm-compat layers --server` shows what they mean)",
        ),
        *_classes(options),
        *_cache(options, layers),
        *_disk(options, layers),
    ]
    seconds = {"own": round(time.perf_counter() - begin, 2), "vllm": 0.0}
    return Report(options, tuple(items), seconds=seconds)


def _classes(options: Options) -> Iterator[Item]:
    """Say what the model's class in the installed vLLM offers."""
    try:
        modules = Modules(installed_package("vllm"))
    except UsageError as error:
        yield Item("model's class", "unknown", f"{error} `vllm-compat check --model` asks any vLLM.")
        return
    for name in named_in(read_config(options.model)):
        offer = read_model(modules, name)
        known = offer.ids is not None
        yield Item(
            "model's class", "fail" if offer.lacks else "ok" if known else "unknown", offer.sentence
        )


def _cache(options: Options, layers: ServerLayers) -> Iterator[Item]:
    """Say what the hidden states of one longest prompt take of each rank's KV cache."""
    if layers.bytes_per_token is None:
        return
    needed = layers.bytes_per_token * (options.max_model_len + 1)
    words = (
        f"at least {size_words(needed)} of each rank's KV cache for one prompt of"
        f" {options.max_model_len} tokens ({layers.bytes_per_token:,} bytes a token, not divided by"
        " tensor parallelism); the KV cache cannot be fp8; models that mix Mamba with MLA have been"
        " charged many times that (vllm#56774)"
    )
    if options.device_memory is None:
        yield Item("states in memory", "note", words)
        return
    share = int(options.device_memory * options.gpu_memory_utilization)
    words += f"; {size_words(share)} a rank are vLLM's, weights included"
    yield Item("states in memory", "ok" if needed < share else "fail", words)


def _disk(options: Options, layers: ServerLayers) -> Iterator[Item]:
    """Say what the files will take, and what to do where that is too much."""
    each = layers.bytes_per_token
    if each is None:
        return
    tokens = options.tokens or (options.samples or 0) * options.max_model_len
    if not tokens:
        words = f"{each:,} bytes a token; give --tokens or --samples to compare with what is free"
        yield Item("disk", "note", words)
        return
    folder = (options.output_dir or Path(".")).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    upto = "" if options.tokens else "up to "
    words = (
        f"{upto}{size_words(tokens * each)} for {upto}{tokens:,} tokens ({each:,} bytes a token);"
        f" {size_words(free)} free at {folder}"
    )
    enough = tokens * each < free
    yield Item("disk", "ok" if enough else "fail", words if enough else f"{words}: {_LESS}")
