"""Call the launcher: launch.py OPTIONS (-m MODULE | SCRIPT) [ARGS…], with OPTIONS as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm_compat.commands.run.launch import run
from vllm_compat.commands.run.options import LaunchOptions

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    for name in ("record", "log", "status_file"):
        if name in options:
            options[name] = Path(options[name])
    program = sys.argv[2:]
    module = program[:1] == ["-m"]
    sys.exit(run(program[module:], module=module, options=LaunchOptions(**options)))
