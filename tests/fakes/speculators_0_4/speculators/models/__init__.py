"""FAKE models; importing them needs what transformers 5 has removed."""

from transformers.modeling_attn_mask_utils import AttentionMaskConverter

__all__ = ["AttentionMaskConverter"]
