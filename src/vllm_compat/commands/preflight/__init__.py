"""`vllm-compat preflight`: what a run will meet, without weights or a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_compat.commands.preflight.judge import Report


def preflight(
    model: str | Path,
    *,
    layer_ids: Sequence[int] | None = None,
    tensor_parallel_size: int = 1,
    max_model_len: int = 2048,
    batch_size: int = 8,
    gpu_memory_utilization: float = 0.8,
    device_capability: str | tuple[int, int] | None = None,
    device_memory: str | int | None = None,
    samples: int | None = None,
    output_dir: str | Path | None = None,
    read_speed: str | float | None = None,
    static: bool = False,
    remote_code: bool = True,
) -> Report:
    """Say what a run of stock's extraction on a model will meet, before anything is loaded.

    Most answers are read from the model's files. What vLLM would choose is asked from the installed
    vLLM in a process of its own, without weights or a GPU; that takes one import of vLLM.

    Args:
        model: A model's folder, its ``config.json``, or the hub id of a model that is cached here.
        layer_ids: The layers to extract, in speculators' in-process numbering: *k* is the residual
            stream after layer *k*. By default stock's own choice.
        tensor_parallel_size: How many devices one copy of the model is spread over.
        max_model_len: Tokens of the longest sample.
        batch_size: Samples in one call of ``generate()``.
        gpu_memory_utilization: The share of a device's memory that vLLM may use, above 0 to 1.
        device_capability: Compute capability of the GPU to judge for, ``"12.0"`` or ``(12, 0)``; it
            need not be in this machine. By default this machine's own.
        device_memory: Memory of that GPU, ``"96GiB"`` or a number of bytes.
        samples: How many samples will be saved; with it the answer on disk space is complete.
        output_dir: The folder that they will be saved in.
        read_speed: How fast weights are read, ``"3GiB"`` or a number of bytes, per second. By
            default measured for a moment, if the weights are here.
        static: Leave out what has to be asked from vLLM.
        remote_code: Let vLLM run the code that this model brings, if it does, to answer.

    Returns:
        The answers: ``items``, each with ``question``, ``state`` (``ok``, ``note``, ``fail`` or
        ``unknown``) and ``answer``; ``memory``, the bytes of one device by use, or None where they
        are not known; ``exit_status``, 0 where nothing speaks against the run, 1 where something
        does, 3 where not everything could be told.

    Raises:
        UsageError: The model has no configuration that can be read, or an argument makes no sense.

    Example:
        >>> report = vllm_compat.preflight("models/Kimi-K2.5", device_capability="12.0")
        >>> [item.answer for item in report.items if item.state == "fail"]
    """
    from vllm_compat.commands.preflight import judge

    capability, memory, speed = device_capability, device_memory, read_speed
    options = judge.Options(
        model=str(model),
        layer_ids=None if layer_ids is None else tuple(layer_ids),
        devices=tensor_parallel_size,
        max_model_len=max_model_len,
        batch_size=batch_size,
        gpu_memory_utilization=gpu_memory_utilization,
        capability=judge.parse_capability(capability) if isinstance(capability, str) else capability,
        device_memory=judge.parse_size(memory) if isinstance(memory, str) else memory,
        samples=samples,
        output_dir=None if output_dir is None else Path(output_dir),
        remote_code=remote_code,
        read_speed=judge.parse_size(speed) if isinstance(speed, str) else speed,
    )
    return judge.preflight(options, ask=not static)
