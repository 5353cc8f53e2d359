"""FAKE configuration whose annotations name a torch that is imported for type checking only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class PreTrainedConfig:
    dtype: torch.dtype | None = None
