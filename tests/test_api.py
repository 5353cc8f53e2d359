"""The public names: what is exported is what is typed, documented and there, whoever imported what."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_compat

ROOT = Path(__file__).parent.parent
SOURCE = Path(vllm_compat.__file__)
sys.path.append(str(ROOT / "scripts"))
import render_api  # noqa: E402

FUNCTIONS = sorted(render_api.RETURNED)


def for_type_checkers() -> dict[str, str]:
    """Return name → home of the imports that only type checkers see."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    (guarded,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    homes = {}
    for node in guarded.body:
        if isinstance(node, ast.ImportFrom) and node.module != "typing":
            homes.update({a.asname or a.name: f"{node.module}:{a.name}" for a in node.names})
        elif isinstance(node, ast.Import):
            homes.update({a.asname or a.name: f"{a.name}:" for a in node.names})
    return homes


def test_type_checkers_see_what_is_handed_out() -> None:
    assert for_type_checkers() == vllm_compat._HOMES


def test_what_is_exported_is_what_is_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^###? (\w+)$", page, flags=re.MULTILINE)) - {"Results"}
    assert headings | {"__version__"} == set(vllm_compat.__all__)
    assert set(vllm_compat._HOMES) == set(vllm_compat.__all__)
    assert list(vllm_compat.__all__) == sorted(vllm_compat.__all__)
    assert set(vllm_compat.__all__) <= set(dir(vllm_compat))


def test_the_page_is_that_of_the_docstrings() -> None:
    assert render_api.main(["--check"]) == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_all_of_what_it_takes_gives_and_raises(name: str) -> None:
    function = getattr(vllm_compat, name)
    parts = render_api.sections(function)
    assert set(render_api.entries(parts.get("Args", ""))) == set(inspect.signature(function).parameters)
    assert len(parts[""]) > 20
    assert all(parts[title] for title in ("Returns", "Example"))
    known = set(vars(vllm_compat.errors))
    assert set(render_api.entries(parts.get("Raises", ""))) <= known
    assert "Raises" in parts or "raises nothing" in parts[""] or "raise nothing" in parts[""]
    hint = function.__annotations__["return"]
    assert hint == getattr(vllm_compat, render_api.RETURNED[name]).__name__


@pytest.mark.parametrize("name", [*FUNCTIONS, "errors"])
def test_an_example_is_code_that_uses_public_names(name: str) -> None:
    code = "\n".join(render_api.example(render_api.sections(getattr(vllm_compat, name)))[1:-1])
    used = {
        node.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "vllm_compat"
    }
    assert {name} <= used <= set(vllm_compat.__all__)


def test_no_module_can_take_the_place_of_a_public_name() -> None:
    """Importing a submodule sets it on its package, over a function of that name."""
    modules = {info.name for info in pkgutil.iter_modules(vllm_compat.__path__)}
    assert modules & set(vllm_compat.__all__) == {"errors"}


ORDERS = f"""
import importlib, itertools, sys
sys.path.insert(0, {str(SOURCE.parents[1])!r})
MODULES = ("commands.check", "commands.verify", "commands.preflight", "entry.apply")
tried = 0
for order in itertools.permutations(MODULES):
    for first in (False, True):  # the names are asked for before the submodules are imported, or not
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_compat"]:
            del sys.modules[name]
        package = importlib.import_module("vllm_compat")
        before = dict.fromkeys(package.__all__) if not first else {{n: getattr(package, n) for n in package.__all__}}
        for module in order:
            importlib.import_module("vllm_compat." + module)
        for name in {FUNCTIONS!r}:
            found = getattr(package, name)
            assert type(found).__name__ == "function", (order, name, found)
            assert not first or found is before[name], (order, name)
        tried += 1
print(tried)
"""  # noqa: E501


def test_public_functions_stay_functions_whatever_order_submodules_are_imported_in() -> None:
    done = subprocess.run([sys.executable, "-I", "-c", ORDERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["48"]


def test_a_single_name_is_one_downstream_and_not_its_letters() -> None:
    with pytest.raises(vllm_compat.errors.UsageError, match="no-such-library is not installed"):
        vllm_compat.check("no-such-library", "0.33.0")
    with pytest.raises(vllm_compat.errors.UsageError, match="no-such-library is not installed"):
        vllm_compat.diff("0.16.0", "0.33.0", "no-such-library")


def test_an_unknown_device_is_refused_in_words() -> None:
    with pytest.raises(vllm_compat.errors.UsageError, match=r"'gpu'; it must be one of cpu, cuda, rocm"):
        vllm_compat.check(device="gpu")


def test_preflight_takes_the_words_of_the_command_line() -> None:
    model = ROOT / "tests" / "models" / "kimi-k2.5"
    report = vllm_compat.preflight(
        model,
        layer_ids=[2, 30],
        tensor_parallel_size=8,
        device_capability="12.0",
        device_memory="96GiB",
        samples=10,
        output_dir=ROOT,
        read_speed=2.5e9,
        static=True,
    )
    asked = report.options
    assert (asked.layer_ids, asked.devices) == ((2, 30), 8)
    assert (asked.capability, asked.device_memory) == ((12, 0), 96 * 2**30)
    assert (asked.read_speed, asked.output_dir) == (2.5e9, ROOT)
    assert "disk" in {item.question for item in report.items}
    with pytest.raises(vllm_compat.errors.UsageError, match="no compute capability"):
        vllm_compat.preflight(model, device_capability="new")


def test_verify_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(vllm_compat.errors.UsageError, match="nowhere"):
        vllm_compat.verify(tmp_path / "nowhere")
