"""What importing vllm_compat costs: next to nothing, and nothing of anybody else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import vllm_compat

SOURCE = Path(vllm_compat.__file__).parents[1]


def modules_after(statement: str) -> set[str]:
    """Return the modules that a statement imports in a fresh interpreter."""
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r}); before = set(sys.modules)\n"
        f"{statement}\n"
        "print(*(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_else() -> None:
    assert modules_after("import vllm_compat") <= {"vllm_compat", "__future__"}


def test_the_dormant_plugin_imports_only_its_door() -> None:
    found = modules_after("from vllm_compat.plugin import load; load()")
    assert {name for name in found if name.startswith("vllm_compat")} == {
        "vllm_compat",
        "vllm_compat.runtime",
        "vllm_compat.runtime.env",
        "vllm_compat.plugin",
    }
    assert not {"wrapt", "packaging", "typing", "json", "contextlib", "dataclasses"} & found


@pytest.mark.parametrize(
    "module",
    [
        "entry.apply",
        "analysis.plan",
        "adapters",
        "checks.batch",
        "commands.register",
        "analysis.installed",
    ],
)
def test_the_drivers_side_imports_neither_vllm_nor_torch_nor_a_downstream(module: str) -> None:
    found = {name.partition(".")[0] for name in modules_after(f"import vllm_compat.{module}")}
    assert not {"vllm", "torch", "speculators", "transformers", "rich", "wrapt"} & found


def test_the_public_names_are_there() -> None:
    for name in vllm_compat.__all__:
        assert getattr(vllm_compat, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'vllm_compat' has no attribute 'nothing'"):
        _ = vllm_compat.nothing  # type: ignore[attr-defined]
