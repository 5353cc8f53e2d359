"""Tests of the environment variables' meaning, and of what each process does at its start."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_compat.errors import PatchError
from vllm_compat.runtime import env

if TYPE_CHECKING:
    from conftest import Site

BOOTSTRAP = env.bootstrap_directory()
SITECUSTOMIZE = Path(BOOTSTRAP, "sitecustomize.py")


def test_the_bootstrap_folder_holds_nothing_but_the_sitecustomize() -> None:
    names = {name for name in os.listdir(BOOTSTRAP) if name != "__pycache__"}
    assert names == {"sitecustomize.py"}


def test_the_bootstrap_stands_in_front_of_what_was_on_the_path() -> None:
    child = env.child_environment({"PYTHONPATH": f"/a{os.pathsep}/b", "HOME": "/h"})
    assert child["PYTHONPATH"].split(os.pathsep) == [BOOTSTRAP, "/a", "/b"]
    assert child["HOME"] == "/h"
    assert child["VLLM_COMPAT"] == "1"


@pytest.mark.parametrize("environ", [{}, {"PYTHONPATH": ""}])
def test_an_empty_path_gets_no_further_entry(environ: dict[str, str]) -> None:
    assert env.child_environment(environ)["PYTHONPATH"] == BOOTSTRAP


def test_empty_entries_of_the_path_stay_because_they_mean_the_working_directory() -> None:
    path = f"/a{os.pathsep}"
    assert env.child_environment({"PYTHONPATH": path})["PYTHONPATH"] == (
        f"{BOOTSTRAP}{os.pathsep}/a{os.pathsep}"
    )


def test_a_launcher_inside_a_launched_run_starts_afresh() -> None:
    outer = env.child_environment({"PYTHONPATH": "/a"})
    outer.update(VLLM_COMPAT_PLAN="plan", VLLM_COMPAT_RECORD="/r", VLLM_COMPAT_MAIN="{}")
    inner = env.child_environment(outer)
    assert inner["PYTHONPATH"].split(os.pathsep) == [BOOTSTRAP, "/a"]
    assert not {"VLLM_COMPAT_PLAN", "VLLM_COMPAT_RECORD", "VLLM_COMPAT_MAIN"} & set(inner)


def test_a_published_plan_is_found_until_it_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPAT_PLAN", "")
    assert env.plan_from_environment(os.environ) is None
    env.publish_plan("{}")
    assert env.plan_from_environment(os.environ) == "{}"
    env.withdraw_plan()
    env.withdraw_plan()
    assert env.plan_from_environment(os.environ) is None


def test_the_longest_plan_still_reaches_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPAT_PLAN", "")
    env.publish_plan("x" * env.LONGEST_PLAN)
    subprocess.run([sys.executable, "-I", "-c", ""], check=True)


def test_a_plan_that_no_child_could_get_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPAT_PLAN", "")
    with pytest.raises(PatchError, match="nothing was patched"):
        env.publish_plan("é" * (env.LONGEST_PLAN // 2 + 1))
    assert env.plan_from_environment(os.environ) is None


@pytest.mark.parametrize(
    ("allowed", "cause", "cure"),
    [
        ("", "is set but empty", '"vllm_compat"'),
        ("a,b", "does not name vllm_compat", '"a,b,vllm_compat"'),
        ("a, vllm_compat", "has blanks around vllm_compat", '"a,vllm_compat"'),
        ("vllm-compat", "does not name vllm_compat", '"vllm-compat,vllm_compat"'),
    ],
)
def test_an_allow_list_that_shuts_us_out_is_named_with_its_cure(
    allowed: str, cause: str, cure: str
) -> None:
    sentence = env.allow_list_shuts_us_out({"VLLM_PLUGINS": allowed})
    assert sentence is not None
    assert sentence.startswith(f'VLLM_PLUGINS="{allowed}" {cause}')
    assert f"set VLLM_PLUGINS={cure}, or unset it" in sentence


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"VLLM_PLUGINS": "vllm_compat"},
        {"VLLM_PLUGINS": "a,vllm_compat"},
        env.child_environment({"VLLM_PLUGINS": ""}),
    ],
    ids=["unset", "alone", "among others", "launched"],
)
def test_no_complaint_where_a_door_is_open(environ: dict[str, str]) -> None:
    assert env.allow_list_shuts_us_out(environ) is None


def test_no_record_without_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_COMPAT_RECORD", raising=False)
    assert not env.write_record({"a": 1})


def test_a_record_replaces_the_one_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    monkeypatch.setenv("VLLM_COMPAT_RECORD", str(path))
    assert env.write_record({"a": 1})
    assert env.write_record({"a": 2})
    assert path.read_text() == '{"a": 2}'
    assert list(tmp_path.iterdir()) == [path]


def test_importing_the_doors_imports_next_to_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); "
        "from importlib.machinery import SourceFileLoader as Loader; "
        f"Loader('doors', {env.__file__!r}).load_module(); "
        "print(sorted(set(sys.modules) - before - {'doors', 'importlib', 'importlib.machinery',"
        " 'importlib._bootstrap', 'importlib._bootstrap_external', 'warnings', '__future__',"
        " '_warnings'}))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_the_bootstrap_spells_the_variables_as_the_doors_do() -> None:
    source = SITECUSTOMIZE.read_text()
    assert f'"{env.VLLM_COMPAT_MAIN}" in os.environ' in source
    assert f'"{env.VLLM_COMPAT_PLAN}" not in os.environ' in source


def test_the_bootstrap_can_be_read_by_interpreters_older_than_ours() -> None:
    tree = ast.parse(SITECUSTOMIZE.read_text(), feature_version=(3, 6))
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "__future__" not in imported


def test_an_interpreter_without_vllm_compat_notices_nothing(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    environ = env.child_environment({"PATH": os.environ["PATH"]})
    environ["VLLM_COMPAT_PLAN"] = "a plan"
    done = subprocess.run(
        [python, "-c", "import sys; print('vllm_compat' in sys.modules)"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_plan_that_the_real_plugin_cannot_read_disturbs_no_process() -> None:
    environ = env.child_environment(
        {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(env.__file__).parents[1])}
    )
    environ["VLLM_COMPAT_PLAN"] = "no plan"
    code = (
        "import sys; print('vllm_compat.plugin' in sys.modules); "
        "import vllm_compat; print(vllm_compat.status().in_force)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("True\nFalse\n", "")


def test_a_program_that_cannot_import_vllm_compat_does_not_start(tmp_path: Path, site: Site) -> None:
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    environ = env.child_environment({"PATH": os.environ["PATH"]})
    environ["VLLM_COMPAT_MAIN"] = "{}"
    done = subprocess.run(
        [python, "-c", "print('started')"], env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot use vllm_compat (ModuleNotFoundError" in done.stderr
    assert "or add to PYTHONPATH the folders that hold it, wrapt and packaging." in done.stderr
    assert done.stderr.count("\n") == 1
    folders = [str(Path(env.__file__).parents[2])]
    for name in ("wrapt", "packaging"):
        found = importlib.util.find_spec(name)
        assert found is not None
        folders.append(str(Path(str(found.origin)).parents[1]))
    environ["PYTHONPATH"] = os.pathsep.join([environ["PYTHONPATH"], str(site.folder), *folders])
    done = subprocess.run(
        [python, "-c", "print('started')"], env=environ, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("started\n", ""), done.stderr
