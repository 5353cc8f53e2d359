#!/usr/bin/env python3
"""What would have been: with the knowledge of each release, how many later releases still run?

usage: history.py DOWNSTREAM [DOWNSTREAM …]     (names, folders or wheels of speculators releases)

For each recorded release R only those adapters count whose drift R or an older release shows, and
the derived ones, which follow from any surface. A later release gets through if its plan needs no
other adapter and leaves nothing unmet. Prints Markdown.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))


def main(downstreams: list[str]) -> int:
    """Print one table for all downstreams."""
    from packaging.version import Version

    from vllm_compat.adapters import by_name, registry
    from vllm_compat.contract import read_contract
    from vllm_compat.environment import Environment
    from vllm_compat.plan import make_plan
    from vllm_compat.surface.recorded import RecordedSurface, recorded_versions

    environment = Environment("3.11.0", (), "cuda")
    versions = sorted((v for v in recorded_versions() if Version(v) >= Version("0.11.0")), key=Version)
    contracts = [read_contract(target) for target in downstreams]
    derived = {adapter.name for adapter in registry() if adapter.derived}
    print("| known up to | " + " | ".join(f"speculators {c.version}" for c in contracts) + " |")
    print("|---|" + "---|" * len(contracts))
    plans = {
        (contract.version, version): make_plan(contract, RecordedSurface(version), environment)
        for contract in contracts
        for version in versions
    }
    for index, known in enumerate(versions[:-1]):
        cells = []
        for contract in contracts:
            have = set(derived)
            for version in versions[: index + 1]:
                have.update(plans[contract.version, version].adapters)
            through: list[str] = []
            new: set[str] = set()
            for version in versions[index + 1 :]:
                plan = plans[contract.version, version]
                lacking = set(plan.adapters) - have
                if plan.unmet or lacking:
                    new |= lacking
                    break
                through.append(version)
            later = len(versions) - index - 1
            stop = "" if len(through) == later else f", then {', '.join(sorted(new)) or 'unmet'}"
            cells.append(f"{len(through)} of {later}{stop}")
        print(f"| {known} | " + " | ".join(cells) + " |")
    print()
    print("Derived: " + ", ".join(sorted(by_name(name).name for name in derived)) + ".")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
