# mypy: allow-subclassing-any, allow-untyped-calls
"""A stand-in image processor: enough for vLLM to load Kimi-K2.5 and to run text through it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor


class KimiK25VisionProcessor(BaseImageProcessor):
    """Turn every medium into the same grey square of 4 x 4 patches, which merge into 4 tokens."""

    model_type = "kimi_k25"

    def __init__(self, media_proc_cfg: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg or {}
        self.num_frames_per_chunk = self.media_proc_cfg.get("temporal_merge_kernel_size", 4)

    def media_tokens_calculator(self, media: Any) -> int:
        """Return the number of tokens that one medium takes in the prompt."""
        return 4

    def preprocess(self, medias: Any, return_tensors: str | None = None, **_: Any) -> BatchFeature:
        """Return ``pixel_values`` [patches, 3, side, side] and ``grid_thws`` [media, 3]."""
        side = self.media_proc_cfg.get("patch_size", 14)
        count = len(medias) if isinstance(medias, list) else 1
        return BatchFeature(
            {
                "pixel_values": torch.zeros(16 * count, 3, side, side),
                "grid_thws": torch.tensor([[1, 4, 4]] * count),
            }
        )

    def split_video_chunks(self, video: Any) -> list[Any]:
        """Return the whole video as its only chunk."""
        return [video]
