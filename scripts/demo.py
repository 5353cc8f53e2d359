#!/usr/bin/env python3
"""Everything for the demo: real vLLM 0.16.0 (CPU build), stock speculators 0.3.0, a tiny Kimi-K2.5.

usage: python3 scripts/demo.py [--vllm VERSION] [--speculators VERSION] [--model MODEL]
                       [--pipeline [--without ADAPTER]] [--folder DIR]
Needs Python 3.10 to 3.13, and PyPI on the first run (4 GB of downloads, 8 GB of disk).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]


def parser() -> argparse.ArgumentParser:
    """Return the parser: the options of `vllm-compat demo`, and which releases it runs with."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", default="0.16.0", metavar="VERSION")
    parser.add_argument("--speculators", default="0.3.0", metavar="VERSION")
    parser.add_argument("--model", default="kimi_k25", choices=["kimi_k25", "deepseek_v3", "llama"])
    parser.add_argument("--pipeline", action="store_true", help="all four steps, to a trained draft")
    parser.add_argument("--folder", metavar="DIR", help="keep what is made in this folder")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="ADAPTER",
        help="with --pipeline: leave this adapter out, and see what fails",
    )
    return parser


def main() -> int:
    """Make the environment or reuse it, run the demo in it, return its exit status."""
    options = parser().parse_args()

    from lab.environments import ensure

    from vllm_compat.errors import VllmCompatError

    try:
        paths = ensure(options.vllm, options.speculators, progress=lambda text: print(text, flush=True))
    except VllmCompatError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    return subprocess.call([str(paths.python), *command(options)], env=paths.variables())


def command(options: argparse.Namespace) -> list[str]:
    """Return what the environment's Python runs: `vllm-compat demo` with the options given here."""
    words = ["-m", "vllm_compat", "demo", "--model", options.model]
    words += ["--pipeline"] if options.pipeline else []
    words += ["--folder", options.folder] if options.folder else []
    return words + [word for name in options.without for word in ("--without", name)]


if __name__ == "__main__":
    sys.exit(main())
