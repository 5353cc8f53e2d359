"""Import, apply and revert in the orders that the arguments say; print what is found after each.

``V`` imports (the fake) vLLM, ``D`` the downstream's generator and worker, ``A`` applies, ``R``
reverts. One JSON line a letter: what is in force, and for each target of a patch whether it is
``wrapped``, ``original`` (the very object that the module was born with), ``other`` or ``absent``.
Each order runs in a process of its own, forked before any of these packages is imported.
"""

from __future__ import annotations

import asyncio  # noqa: F401 (this and the next are imported for all processes at once)
import importlib
import importlib.metadata
import importlib.resources
import inspect  # noqa: F401
import json
import os
import sys
import traceback
from collections.abc import Callable

MODULES = {
    "V": [
        "vllm.config",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.request",
    ],
    "D": [
        "speculators.data_generation.vllm_hidden_states_generator",
        "speculators.data_generation.custom_worker",
    ],
}
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
TARGETS = [
    "vllm.config:SchedulerConfig.__init__",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule",
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc",
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor.__init__",
    "transformers.models.auto.tokenization_auto:AutoTokenizer.from_pretrained",
    f"{GENERATOR}:get_kv_cache_config_from_groups",
    f"{GENERATOR}:VllmHiddenStatesGenerator.generate",
    "speculators.data_generation.custom_worker:HiddenStatesWorkerExtension._get_captured_states",
    "torch.cuda:mem_get_info",
]
born: dict[str, object] = {}


def found(target: str) -> object:
    """Return what stands at a target, unbound; None where its module is not imported."""
    module, _, path = target.partition(":")
    place: object = sys.modules.get(module)
    for part in path.split("."):
        if place is None:
            return None
        place = vars(place).get(part)
    return place


def innermost(value: object) -> object:
    while type(value).__name__ == "FunctionWrapper":
        value = value.__wrapped__  # type: ignore[attr-defined]
    return value


def state(target: str) -> str:
    value = found(target)
    if value is None:
        return "absent"
    raw = born.setdefault(target, innermost(value))
    if value is raw:
        return "original"
    return "wrapped" if innermost(value) is raw else "other"


def main(letters: str) -> None:
    """Run the letters."""
    import vllm_compat

    actions: dict[str, Callable[[], object]] = {
        "A": vllm_compat.apply,
        "R": vllm_compat.revert,
        "V": lambda: [importlib.import_module(name) for name in MODULES["V"]],
        "D": lambda: [importlib.import_module(name) for name in MODULES["D"]],
    }
    for letter in letters:
        result = actions[letter]()
        answer = {
            "order": letters,
            "letter": letter,
            "in_force": vllm_compat.status().in_force,
            "left": [patch.target for patch in getattr(result, "left", ())],
            "targets": {target: state(target) for target in TARGETS},
            "imported": sorted({n.partition(".")[0] for n in sys.modules} & {"vllm", "torch"}),
        }
        print(json.dumps(answer))


if __name__ == "__main__":
    for letters in sys.argv[1:]:
        if os.fork() == 0:
            try:
                main(letters)
            except BaseException:
                print(json.dumps({"order": letters, "error": traceback.format_exc()}))
            sys.stdout.flush()
            os._exit(0)
        os.wait()
