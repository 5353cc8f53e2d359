"""Hold the static surface against the live one, symbol by symbol.

Run it with an interpreter that has vLLM, and ``src`` on its path::

    PYTHONPATH=src ENV/bin/python tests/surface/compare_live.py [--contract PATH]... [--write]

It compares all that the given downstreams use, and every top-level name of the parts of vLLM below
with its methods. Differences that are known and understood stand in ``live_limits.json``, one line
a case; the exit status is 1 if there are others, or if a known one is gone. ``--write`` writes what
was found into that file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from vllm_compat.contract import read_contract
from vllm_compat.surface.live import LiveSurface
from vllm_compat.surface.model import Signature, Surface, Symbol, SymbolKind

LIMITS = Path(__file__).with_name("live_limits.json")
PARTS = (
    "vllm.config",
    "vllm.distributed",
    "vllm.engine",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.interfaces",
    "vllm.outputs",
    "vllm.platforms",
    "vllm.pooling_params",
    "vllm.sampling_params",
    "vllm.sequence",
    "vllm.utils",
    "vllm.v1",
)


def shape(signature: Signature | None) -> list[str] | None:
    """Return what binding a call depends on: names, kinds and which are required."""
    if signature is None:
        return None
    return [f"{p.kind.value} {p.name}{'' if p.required else '?'}" for p in signature.parameters]


def internal(name: str) -> bool:
    """Whether a member is Python's own matter: dunders, and what Enum, ABC and Protocol leave."""
    sunder = name.startswith("_") and name.endswith("_")
    return sunder or name.startswith(("_abc_", "_is_protocol", "_is_runtime_protocol"))


def differences(path: str, static: Symbol | None, live: Symbol | None) -> Iterator[str]:
    """Iterate over what the two surfaces say differently of one name."""
    if (static is None) != (live is None):
        yield f"{path}: {'only live' if static is None else 'only static'}"
        return
    if static is None or live is None:
        return
    if static.kind is not live.kind:
        yield f"{path}: static {static.kind.value}, live {live.kind.value}"
        return
    if static.signature is not None and shape(static.signature) != shape(live.signature):
        yield f"{path}: static {shape(static.signature)}, live {shape(live.signature)}"
    if static.kind is SymbolKind.CLASS and not static.open_ended:
        # Dunders are Python's own matter.
        one = {n for n in static.members if not internal(n)}
        other = {n for n in live.members if not internal(n)}
        for name in sorted(one ^ other):
            yield f"{path}.{name}: {'only static' if name in one else 'only live'}"


def paths(static: Surface, live: LiveSurface, contracts: list[str]) -> Iterator[str]:
    """Iterate over the names to compare."""
    for target in contracts:
        for site in read_contract(Path(target)).sites:
            yield site.symbol
    for module in sorted(static.modules()):
        if not any(module == part or module.startswith(part + ".") for part in PARTS):
            continue
        try:
            loaded = importlib.import_module(module)
        except Exception as error:  # a platform's module may refuse to load here
            print(f"  {module} does not load here: {type(error).__name__}")
            continue
        for name, value in sorted(vars(loaded).items()):
            if name.startswith("__"):
                continue
            yield f"{module}.{name}"
            if isinstance(value, type) and value.__module__ == module:
                yield from (
                    f"{module}.{name}.{member}" for member in sorted(vars(value)) if not internal(member)
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--contract", action="append", default=[], metavar="PATH")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    start = time.perf_counter()
    live = LiveSurface()
    imported = time.perf_counter() - start
    static = live.source
    found: dict[str, str] = {}
    count = 0
    for path in dict.fromkeys(paths(static, live, options.contract)):
        count += 1
        for line in differences(path, static.resolve(path), live.resolve(path)):
            name, _, what = line.partition(": ")
            found[name] = what
    known: dict[str, dict[str, str]] = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    version = live.version.partition("+")[0]
    limits = known.get(version, {})
    new = {name: what for name, what in found.items() if name not in limits}
    gone = sorted(set(limits) - set(found))
    for name, what in sorted(new.items()):
        print(f"{name}: {what}")
    for name in gone:
        print(f"{name}: listed as a known limit, and no longer differs")
    print(
        f"vLLM {live.version}: {count} names compared, {len(found)} differ, {len(new)} of them new;"
        f" importing vLLM took {imported:.1f} s"
    )
    if options.write:
        known[version] = dict(sorted(found.items()))
        LIMITS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return 1 if new or gone else 0


if __name__ == "__main__":
    sys.exit(main())
