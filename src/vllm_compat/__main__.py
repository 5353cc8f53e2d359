"""``python -m vllm_compat``."""

from __future__ import annotations

import sys

from vllm_compat.cli import main

if __name__ == "__main__":
    sys.exit(main())
