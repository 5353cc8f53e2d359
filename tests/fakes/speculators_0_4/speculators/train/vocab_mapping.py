"""FAKE of the module that counts tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_token_frequency_distribution(dataset: Any, output_path: str = "./token_freq.pt") -> str:
    if not Path(output_path).exists():
        Path(output_path).write_text(str(len(dataset)))
    return output_path
