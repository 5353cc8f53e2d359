"""A check's findings in words: one module per format, all from the same records."""

from __future__ import annotations

import sys
from importlib import import_module

from vllm_compat.commands.report.model import Report


def render(report: Report, form: str) -> str:
    """Return a report as ``text``, ``json``, ``markdown``, ``junit`` or ``github`` annotations."""
    text: str = import_module(f"vllm_compat.commands.report.{form}").render(report)
    return text if text.endswith("\n") else text + "\n"


def show(report: Report) -> None:
    """Print a report: tables on a terminal where ``rich`` is installed, else plain text."""
    if sys.stdout.isatty():
        try:
            from vllm_compat.commands.report.terminal import show as show_tables
        except ImportError:
            pass
        else:
            show_tables(report)
            return
    sys.stdout.write(render(report, "text"))
