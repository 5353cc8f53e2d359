"""Note every attribute of every module and class before apply(); say which are others later.

    same.py (driver|ranks)

Modules named in the environment variable ``MODULES`` are imported first, in this process and, as this
file is the program, in each spawned worker too. ``driver`` prints one JSON line a round of apply() and
revert(): the targets that are patched, which attributes differ then, and which differ after the revert.
``ranks`` does the same for the workers of a generator, each asked by one message.
"""

from __future__ import annotations

import asyncio  # noqa: F401 (what apply() imports of the standard library, so that it is here before)
import concurrent.futures.thread  # noqa: F401
import importlib
import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

for name in os.environ["MODULES"].split(","):
    importlib.import_module(name)

import vllm_compat  # noqa: E402
from vllm_compat.runtime import patching  # noqa: E402,F401

FAKES = ("vllm", "speculators", "torch", "transformers")
STANDARD = ("sys", "logging", "concurrent.futures.thread", "os", "atexit", "builtins")
OF_PYTHON = ("sys:stdin",)
"""What a child of multiprocessing sets itself."""
NONE = object()


def attributes() -> dict[str, Any]:
    """Return what stands at each ``module:name`` and ``module:Class.name``, unbound."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType):
            continue
        if name.partition(".")[0] not in FAKES and name not in STANDARD:
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}:{key}"] = value
            if isinstance(value, type):
                found |= {f"{name}:{key}.{inner}": held for inner, held in list(vars(value).items())}
    return found


def modules() -> set[str]:
    return {name for name in sys.modules if name.partition(".")[0] in FAKES}


def caught() -> int:
    """Return how many signals this process catches, by the system's account."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("SigCgt")]
    return int(line.split()[1], 16).bit_count()


# Held, so that no address is used twice.
BORN = attributes()
MODULES = modules()
ENVIRONMENT = dict(os.environ)
HOOK = sys.excepthook
CAUGHT = caught()


def others() -> list[str]:
    """Return the places at which something else stands than when this process began."""
    now = attributes()
    places = [p for p in BORN.keys() | now.keys() if now.get(p, NONE) is not BORN.get(p, NONE)]
    return sorted(
        place
        for place in places
        if place.partition(":")[0] in {*MODULES, *STANDARD}
        and place not in OF_PYTHON
        and not place.endswith(".__slotnames__")  # what pickling remembers of a class
        # An import binds a submodule to its package, whoever imports it.
        and now.get(place) is not sys.modules.get(place.replace(":", "."), NONE)
    )


def traces() -> dict[str, Any]:
    """Return what else a process could keep of a run."""
    theirs = {"VLLM_COMPAT_PLAN", *os.environ} - {*ENVIRONMENT}
    return {
        "others": others(),
        "environment": sorted(name for name in theirs if name in os.environ),
        "finders": [f.name for f in sys.meta_path if type(f).__module__.startswith("vllm_compat")],
        "handlers": len(logging.getLogger().handlers),
        "signals": caught() - CAUGHT,
    }


def look(worker: Any) -> dict[str, Any]:
    """Return the same of this worker; runs in it."""
    status = vllm_compat.status()
    patched = [patch.target for patch in status.patches if patch.state == "in force"]
    own = [name for name in vars(worker) if name.startswith("_vllm_compat")]
    return {
        "in_force": status.in_force,
        "role": status.role,
        "patched": patched,
        "own": own,
        "own_hook": sys.excepthook is not HOOK,
        **traces(),
    }


def driver() -> None:
    for _ in range(2):
        status = vllm_compat.apply()
        patched = [(p.owner, p.target) for p in status.patches if p.state == "in force"]
        during = traces()
        left = [patch.target for patch in vllm_compat.revert().left]
        print(json.dumps({"patched": patched, "during": during, "left": left, "after": traces()}))


def ranks() -> None:
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    for _ in range(2):
        vllm_compat.apply()
        generator = VllmHiddenStatesGenerator("model", [0], tensor_parallel_size=2)
        during = generator.executor.collective_rpc(look)
        states = [rank.state for rank in vllm_compat.revert().ranks]
        after = generator.executor.collective_rpc(look)
        generator.executor.shutdown()
        print(json.dumps({"states": states, "during": during, "after": after, "driver": traces()}))


if __name__ == "__main__":
    {"driver": driver, "ranks": ranks}[sys.argv[1]]()
