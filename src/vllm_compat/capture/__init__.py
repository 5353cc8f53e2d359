"""Hidden-state capture inside the worker. Only code that runs in workers imports this package."""

from __future__ import annotations
