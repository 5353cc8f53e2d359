"""A child with another vLLM than its parent's makes a plan of its own; all on FAKES."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_compat.runtime import origin

if TYPE_CHECKING:
    from conftest import MakeSite, Site

PROGRAM = """
import json, os, subprocess, sys
import vllm_compat

CHILD = '''
import json
import vllm_compat
from vllm_compat import plugin
from vllm_compat.runtime import run
if HOW == "plugin":
    plugin.load()
else:
    vllm_compat.apply()
status = vllm_compat.status()
print(json.dumps([status.plan and status.plan.vllm, status.role, run.current().error]))
'''

def child(path, how):
    code = CHILD.replace("HOW", repr(how))
    environ = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True)
    found = json.loads(done.stdout) if done.returncode == 0 else ["raised", None, None]
    print(json.dumps([*found, done.stderr]))

print(json.dumps(vllm_compat.apply().plan.vllm))
for path in sys.argv[1:]:
    for how in ("plugin", "apply"):
        child(path, how)
"""


def run(site: Site, *others: Path) -> list[Any]:
    source = str(Path(origin.__file__).parents[2])
    paths = [os.pathsep.join([str(other), source]) for other in others]
    done = site.run("-c", PROGRAM, *paths)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_child_with_another_vllm_plans_anew(site: Site, tmp_path: Path, make_site: MakeSite) -> None:
    (tmp_path / "other").mkdir()
    other = make_site(tmp_path / "other").folder
    (other / "vllm-0.16.0+cpu.dist-info").rename(other / "vllm-0.17.0+cpu.dist-info")
    metadata = other / "vllm-0.17.0+cpu.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.16.0", "0.17.0"))
    parent, same, same_apply, plugin, apply = run(site, site.folder, other)
    assert parent == "0.16.0+cpu"
    assert same[:3] == ["0.16.0+cpu", "worker", None]
    assert same_apply[:3] == ["0.16.0+cpu", "worker", None]
    assert plugin[:3] == ["0.17.0+cpu", "worker", None]
    assert apply[:3] == ["0.17.0+cpu", "driver", None]


def test_a_child_whose_vllm_cannot_be_served_is_told_and_gets_no_plan(
    site: Site, tmp_path: Path, make_site: MakeSite
) -> None:
    (tmp_path / "other").mkdir()
    other = make_site(tmp_path / "other").edit("vllm/v1/core/sched/scheduler.py", "Scheduler", "Gone")
    _, found, applied = run(site, other.folder)
    assert applied[0] == "raised"
    assert "cannot run on vLLM" in applied[3]
    assert found[0] is None
    assert "cannot run on vLLM" in found[2]
    assert "so that it is not used here" in found[3]


def test_packages_that_are_changed_or_elsewhere_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("a", "b"):
        (tmp_path / place / "some_package").mkdir(parents=True)
        (tmp_path / place / "some_package" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "a")
    text = origin.describe(["some_package", "not_there"])
    assert origin.difference(text) == ""
    monkeypatch.syspath_prepend(tmp_path / "b")
    assert origin.difference(text) == "", "the same environment: found elsewhere only so early"
    monkeypatch.setenv("PYTHONPATH", "other")
    assert "some_package is that of" in origin.difference(text)
    shutil.rmtree(tmp_path / "b")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path / "a")
    (tmp_path / "a" / "some_package" / "__init__.py").write_text("x = 1")
    assert "has changed since" in origin.difference(text)
