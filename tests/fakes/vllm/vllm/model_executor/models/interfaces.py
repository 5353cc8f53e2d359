"""FAKE model interfaces."""

from __future__ import annotations

from typing import Any


def supports_eagle3(model: Any) -> bool:
    return bool(getattr(model, "supports_eagle3", False))
