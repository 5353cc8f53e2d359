"""Protection and counts follow the process that builds the generator; real processes on FAKES."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_compat.commands.run.records import summed

if TYPE_CHECKING:
    from conftest import Site

CHILD = """
import json, sys, torch
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
from vllm_compat.runtime import run_record

class Layer:
    shape = (3, 8)
    dtype = "float32"

def extract(folder, first):
    generator = VllmHiddenStatesGenerator("model", [0])
    # The FAKE generator has no rows to check, so what a checked batch adds is added here.
    run_record.add([{"input_ids": [1, 2, 3], "hidden_states": [Layer()]}] * 2)
    for number in (first, first + 1):
        torch.save({"hidden_states": []}, f"{folder}/data_{number}.pt")
    if "fail" in sys.argv:
        run_record.fail("ValueError: rows")
    generator.executor.shutdown()

if __name__ == "__main__":
    extract(sys.argv[1], int(sys.argv[2]))
"""
SAVE = """
    with open(f, "w") as file:
        file.write(f.rpartition("/")[2])
"""

AROUND = {
    "subprocess": """
import subprocess, sys
sys.exit(subprocess.call([sys.executable, "child.py", sys.argv[1], "0"]))
""",
    "a shell": """
import os, sys
status = os.system(f"{sys.executable} child.py {sys.argv[1]} 0 && true")
sys.exit(os.waitstatus_to_exitcode(status))
""",
    "exec": """
import os, sys
os.execv(sys.executable, [sys.executable, "child.py", sys.argv[1], "0"])
""",
    "spawn": """
import multiprocessing, sys
from child import extract
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=extract, args=(sys.argv[1], 0))
    process.start()
    process.join()
    sys.exit(process.exitcode)
""",
    "fork": """
import multiprocessing, sys
from child import extract
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=extract, args=(sys.argv[1], 0))
    process.start()
    process.join()
    sys.exit(process.exitcode)
""",
}


def launch(site: Site, script: str, *arguments: str) -> tuple[Any, dict[str, Any]]:
    site.edit(
        "torch/__init__.py", '\n    raise NotImplementedError("the fake torch saves nothing")', SAVE
    )
    (site.folder / "child.py").write_text(CHILD)
    (site.folder / "program.py").write_text(script)
    out = site.folder / "out"
    out.mkdir()
    done = site.run(
        *("-m", "vllm_compat", "run", "--no-canary", "--record", "record.json"),
        *("program.py", str(out), *arguments),
        VLLM_CPU_KVCACHE_SPACE="1",
    )
    return done, json.loads((site.folder / "record.json").read_text())


@pytest.mark.parametrize("around", AROUND)
def test_the_account_is_opened_where_the_generator_is_built(site: Site, around: str) -> None:
    done, record = launch(site, AROUND[around])
    assert done.returncode == 0, done.stderr
    assert "2 samples (6 tokens), 1 layers of [tokens, 8] in float32" in done.stderr
    assert "2 files saved" in done.stderr
    assert (record["samples"], record["saved"], record["calls"]) == (2, 2, 1)
    for number in (0, 1):  # written whole under a name of its own first
        written = (site.folder / "out" / f"data_{number}.pt").read_text()
        assert written.startswith(f".data_{number}.pt.")
        assert written.endswith(".part")


def test_the_launcher_sums_over_processes(site: Site) -> None:
    script = """
import subprocess, sys
both = [subprocess.Popen([sys.executable, "child.py", sys.argv[1], first]) for first in ("0", "2")]
sys.exit(max(process.wait() for process in both))
"""
    done, record = launch(site, script)
    assert done.returncode == 0, done.stderr
    assert "4 samples (12 tokens) in 2 processes: 2 samples" in done.stderr
    assert (record["samples"], record["tokens"], record["saved"]) == (4, 12, 4)
    assert [each["samples"] for each in record["processes"]] == [2, 2]


def test_a_childs_failure_is_the_runs_whatever_the_wrapper_says(site: Site) -> None:
    script = """
import subprocess, sys
subprocess.call([sys.executable, "child.py", sys.argv[1], "0", "fail"])
"""
    done, record = launch(site, script)
    assert done.returncode == 1
    assert "First cause: ValueError: rows. Before it: 2 samples" in done.stderr
    assert record["failed"]


def test_a_child_that_was_started_again_has_not_failed() -> None:
    main = {"samples": 0, "failed": False}
    first = {"opened": 1.0, "written": 5.0, "failed": True, "failure": "disk full", "samples": 2}
    again = {"opened": 6.0, "written": 9.0, "failed": False, "samples": 3, "extracted": "3 samples"}
    found = summed(main, [first, again])
    assert found is not None
    assert (found["failed"], found["failure"], found["samples"]) == (False, None, 5)
    beside = {**again, "opened": 4.0}
    found = summed(main, [first, beside])
    assert found is not None
    assert (found["failed"], found["failure"]) == (True, "disk full")


def test_without_children_the_record_is_the_programs(tmp_path: Path) -> None:
    assert summed(None, []) is None
    assert summed({"samples": 3}, []) == {"samples": 3}
