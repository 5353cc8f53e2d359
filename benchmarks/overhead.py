#!/usr/bin/env python3
"""What vllm_compat costs where it does nothing: import, dormant plugin, one wrapped call. Ratios first.

usage: overhead.py [--runs 15]
Needs no vLLM; wrapt and packaging must be installed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import timeit


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    programs = {
        "bare interpreter": "pass",
        "import wrapt": "import wrapt",
        "import vllm_compat": "import vllm_compat",
        "dormant plugin": "from vllm_compat.plugin import load; load()",
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(runs):  # in turn, so that a slow moment of the machine meets all of them
        for name, program in programs.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            times[name].append(time.perf_counter() - begin)
    bare = statistics.median(times["bare interpreter"])
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"{name:22} {median * 1e3:7.1f} ms  {median / bare:5.2f} of bare,"
              f" {(median - bare) * 1e3:+6.1f} ms")  # fmt: skip
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, vllm_compat; print(*sorted(set(sys.modules) &"
         " {'wrapt', 'torch', 'vllm', 'rich', 'packaging'}))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    print(f"loaded by import vllm_compat, of wrapt, torch, vllm, rich, packaging: {loaded or 'none'}")
    _calls()
    return 0


def _calls() -> None:
    import types

    from vllm_compat.runtime.patching import Transaction

    module = types.ModuleType("vllm_compat_benchmark")
    sys.modules[module.__name__] = module

    class Target:
        def method(self, value: int) -> int:
            return value

    module.Target = Target  # type: ignore[attr-defined]
    target = Target()
    bare = min(timeit.repeat(lambda: target.method(1), number=100_000, repeat=5)) / 100_000
    transaction = Transaction()
    transaction.wrap(
        f"{module.__name__}:Target.method",
        lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs),
    )
    wrapped = min(timeit.repeat(lambda: target.method(1), number=100_000, repeat=5)) / 100_000
    transaction.revert()
    print(f"one wrapped call       {wrapped * 1e9:7.0f} ns  {wrapped / bare:5.1f} of the bare call,"
          f" {(wrapped - bare) * 1e9:+.0f} ns")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
