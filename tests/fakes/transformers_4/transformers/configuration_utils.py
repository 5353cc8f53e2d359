"""FAKE configuration whose annotations need torch."""

from __future__ import annotations

import torch


class PreTrainedConfig:
    dtype: torch.dtype | None = None
