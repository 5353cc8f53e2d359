"""Call the launcher: launch.py OPTIONS (-m MODULE | SCRIPT) [ARGS…], with OPTIONS as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm_compat.launch import LaunchOptions, run

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    if "record" in options:
        options["record"] = Path(options["record"])
    program = sys.argv[2:]
    module = program[:1] == ["-m"]
    sys.exit(run(program[module:], module=module, options=LaunchOptions(**options)))
