"""What a run of stock's offline script will be given, for those who look at it beforehand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunTerms:
    """The model and the options of the run, in stock's own terms.

    ``devices`` is the tensor parallel size; ``layer_ids`` None leaves the choice to stock; with
    ``remote_code`` off no code that the model brings is run.
    """

    model: str
    layer_ids: tuple[int, ...] | None = None
    devices: int = 1
    max_model_len: int = 2048
    batch_size: int = 8
    gpu_memory_utilization: float = 0.8
    remote_code: bool = True
