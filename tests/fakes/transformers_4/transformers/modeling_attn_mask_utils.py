"""FAKE of what transformers 5 has removed."""


class AttentionMaskConverter:
    pass
