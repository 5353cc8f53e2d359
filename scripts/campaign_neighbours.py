"""Run beside hostile neighbours, and keep a record of what came of it.

    python3 scripts/campaign_neighbours.py [--again] [--only TEXT] [--minutes M]

Launchers, tracers, debuggers, notebooks, somebody's `sitecustomize`, wrappers over the same methods: one
at a time is put beside a program that builds the FAKE downstream's generator with two workers, under
the launcher, as a child of a launched program, and with `apply()`; with forked and with spawned workers
(``tests/entry/neighbours.py`` holds the judge). Tools that are tried are installed beside this
interpreter (wrapt packaging pytest opentelemetry-distro ddtrace coverage debugpy ipython ipykernel
nbclient uv); one that is missing is counted as not tried.

The record (``records/reliability/neighbours.json``) grows by one entry a case; started again, the script
goes on where it was. ``--again`` repeats what did not come out right.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import campaign_record  # noqa: E402
from tests.conftest import made_site  # noqa: E402
from tests.entry.neighbour_cases import STDLIB  # noqa: E402
from tests.entry.neighbour_tools import TOOLS  # noqa: E402
from tests.entry.neighbours import METHODS, Neighbour, tried, undisturbed  # noqa: E402

TOOL_NAMES = (
    "wrapt", "opentelemetry-instrumentation", "ddtrace", "coverage", "debugpy", "pytest", "ipython",
    "ipykernel", "nbclient", "uv",
)  # fmt: skip
RECORD = ROOT / "records" / "reliability" / "neighbours.json"


class Campaign:
    """One campaign and its record."""

    def __init__(self, path: Path, work: Path) -> None:
        self.path, self.work, self.number = path, work, 0
        self.record = campaign_record.opened(path, "neighbours", entries={}, not_tried=[])
        self.wanted: dict[tuple[str, str], list[set[str]]] = {}

    def site(self) -> Any:
        """Return a fresh folder of fakes."""
        self.number += 1
        folder = self.work / str(self.number)
        folder.mkdir()
        return made_site(folder)

    def one(self, neighbour: Neighbour, program: str, method: str) -> dict[str, Any]:
        """Try one case; keep and return what came of it."""
        if (program, method) not in self.wanted:
            self.wanted[program, method] = undisturbed(self.site(), program, method)
        outcome = tried(self.site(), neighbour, program, method, self.wanted[program, method])
        entry = {"kind": neighbour.kind, "outcome": outcome.outcome}
        if outcome.why:
            entry["why"] = outcome.why.replace(str(self.work), "")
        self.record["entries"][key_of(neighbour, program, method)] = entry
        self.write()
        return entry

    def write(self) -> None:
        campaign_record.put(self.path, self.record)


def key_of(neighbour: Neighbour, program: str, method: str) -> str:
    """Return the name of a case in the record."""
    return f"{neighbour.kind}: {neighbour.name}; {program}, {method}"


def cases_of(neighbour: Neighbour) -> list[tuple[str, str]]:
    """Return with which programs, and which ways to start workers, a neighbour is tried."""
    return [
        (program, method)
        for program in neighbour.programs
        for method in (neighbour.methods if program != "child" else METHODS[1:])
    ]


def versions() -> dict[str, str]:
    """Return the versions of the tools that are here."""
    found = {}
    for name in TOOL_NAMES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> int:
    """Try what has not been tried; return 1 where something is wrong or lost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", action="store_true", help="repeat what did not come out right")
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as work:
        campaign = Campaign(options.record, Path(work))
        missing = set()
        for neighbour in [*STDLIB, *TOOLS]:
            if neighbour.tool and importlib.util.find_spec(neighbour.tool) is None:
                missing.add(neighbour.name)
                continue
            for program, method in cases_of(neighbour):
                key = key_of(neighbour, program, method)
                old = campaign.record["entries"].get(key)
                wanted = old is None or (options.again and old["outcome"] in ("wrong", "lost"))
                if wanted and options.only in key and time.monotonic() < until:
                    print(key, campaign.one(neighbour, program, method), flush=True)
        campaign.record["not_tried"] = sorted(missing)
        campaign.record["tools"] = versions()
        campaign.record["planned"] = sum(len(cases_of(each)) for each in (*STDLIB, *TOOLS))
        campaign.write()
    bad = [e for e in campaign.record["entries"].values() if e["outcome"] in ("wrong", "lost")]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
