"""The entry point that vLLM loads: it does nothing unless asked, and never raises."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Site

LOAD = """
import vllm_compat
from vllm_compat import plugin
plugin.load()
from vllm_compat.entry import apply as process
print(process.report(), vllm_compat.status().in_force)
"""


@pytest.mark.parametrize(
    ("plan", "cause"),
    [
        ("not JSON", "UsageError: VLLM_COMPAT_PLAN holds no readable plan"),
        ("{}", "UsageError: VLLM_COMPAT_PLAN holds no readable plan ('schema')"),
        ("[]", "UsageError: VLLM_COMPAT_PLAN holds no readable plan"),
        ('{"schema": 99}', "driver and worker must run the same vllm_compat"),
    ],
)
def test_a_plan_that_cannot_be_read_is_kept_for_the_driver_to_ask(
    site: Site, plan: str, cause: str
) -> None:
    done = site.run("-c", LOAD, VLLM_COMPAT_PLAN=plan)
    assert done.returncode == 0, done.stderr
    assert cause in done.stdout
    assert done.stdout.strip().endswith("False")
    assert "'digest': None" in done.stdout


def test_a_plan_with_an_adapter_that_is_not_known_here_is_told_in_words(site: Site) -> None:
    plan = site.run("-c", "import vllm_compat; print(vllm_compat.apply().plan.dumps())").stdout
    other = plan.strip().replace("scheduler.whole_prompts", "scheduler.of_tomorrow")
    done = site.run("-c", LOAD, VLLM_COMPAT_PLAN=other)
    assert done.returncode == 0, done.stderr
    assert "has no adapter 'scheduler.of_tomorrow'" in done.stdout
    assert "must run the same vllm_compat" in done.stdout


def test_without_a_plan_nothing_happens(site: Site) -> None:
    code = "import sys; from vllm_compat import plugin; plugin.load()\n"
    code += "print([n for n in sys.modules if n.startswith('vllm_compat.')])"
    done = site.run("-c", code)
    assert (
        done.stdout.strip() == "['vllm_compat.plugin', 'vllm_compat.runtime', 'vllm_compat.runtime.env']"
    )
    assert done.stderr == ""


@pytest.mark.parametrize("stderr", ["", "sys.stderr = None", "sys.stderr.close()"])
def test_a_broken_installation_ends_nobodys_vllm(site: Site, stderr: str) -> None:
    broken = "import sys; sys.modules['vllm_compat.entry.apply'] = None\n"
    broken += f"from vllm_compat import plugin\n{stderr}\nplugin.load(); print('alive')"
    done = site.run("-c", broken, VLLM_COMPAT_PLAN="{}")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "alive")
    if not stderr:
        assert done.stderr.startswith("vllm_compat: the plugin could not be loaded")


def test_loading_twice_is_loading_once(site: Site) -> None:
    plan = site.run("-c", "import vllm_compat; print(vllm_compat.apply().plan.dumps())").stdout
    code = """
from vllm_compat import plugin
from vllm_compat.entry import apply as process
plugin.load()
from speculators.data_generation.custom_worker import HiddenStatesWorkerExtension as Extension
first = vars(Extension)["_reset_capture"]
plugin.load()
print(vars(Extension)["_reset_capture"] is first, type(first.__wrapped__).__name__)
"""
    done = site.run("-c", code, VLLM_COMPAT_PLAN=plan.strip())
    assert done.stdout.split() == ["True", "function"], done.stderr


def test_the_entry_point_in_the_metadata_is_the_plugin() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib is in the standard library from Python 3.11 on")
    import tomllib

    path = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]["vllm.general_plugins"]
    assert points == {"vllm_compat": "vllm_compat.plugin:load"}
