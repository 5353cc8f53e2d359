"""The packages: few files at the top, no import cycles, and a page that draws what is there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # import-linter needs it there, too

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "vllm_compat"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
EVERYWHERE = {"errors", "_version"}
"""What every package may import, and no drawing shows."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("vllm_compat", "lab", exclude_type_checking_imports=True, cache_dir=None)


def imports(graph: grimp.ImportGraph) -> Iterator[tuple[str, str]]:
    for module in sorted(graph.modules):
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            yield module, imported


def package_of(module: str) -> str:
    first, *rest = module.split(".")
    return rest[0] if rest and first == "vllm_compat" else first


def drawn() -> set[tuple[str, str]]:
    section = PAGE.partition("## Packages")[2]
    (drawing,) = re.findall(r"```mermaid\n(.*?)```", section, flags=re.DOTALL)
    return set(re.findall(r"^ +(\w+) --> (\w+)$", drawing, flags=re.MULTILINE))


def test_the_drawing_shows_the_imports_between_packages(graph: grimp.ImportGraph) -> None:
    pairs = {(package_of(module), package_of(imported)) for module, imported in imports(graph)}
    real = {
        (above, below)
        for above, below in pairs
        if above != below and below not in EVERYWHERE and "vllm_compat" not in (above, below)
    }
    missing = "\n".join(f"    {above} --> {below}" for above, below in sorted(real - drawn()))
    gone = "\n".join(f"    {above} --> {below}" for above, below in sorted(drawn() - real))
    assert not missing + gone, f"docs/architecture.md: draw\n{missing}\nand take away\n{gone}"


def test_the_table_of_packages_is_the_order_that_the_linter_holds() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = next(c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    section = PAGE.partition("## Packages")[2].partition("```mermaid")[0]
    table = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert table == [layer.rpartition(".")[2] for layer in layers["layers"]]
    there = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    assert there - {"__init__"} == set(table) - {"lab"}


def cycles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other."""
    after: dict[str, set[str]] = {}
    for module, imported in edges:
        after.setdefault(module, set()).add(imported)

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for module in after.get(waiting.pop(), set()) - found:
                found.add(module)
                waiting.append(module)
        return found

    reach = {module: reached(module) for module in after}
    groups = {
        tuple(sorted(other for other in found if module in reach.get(other, ())))
        for module, found in reach.items()
        if module in found
    }
    return [list(group) for group in sorted(groups)]


def test_modules_import_each_other_in_no_circle(graph: grimp.ImportGraph) -> None:
    """Nor a package and its own modules, of which import-linter says nothing."""
    assert cycles(imports(graph)) == []


def test_a_circle_is_found() -> None:
    assert cycles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "a")]) == [["a", "b", "c"]]
    assert cycles([("a", "b"), ("b", "c")]) == []


def test_few_files_stand_at_the_top() -> None:
    files = sorted(path.name for path in PACKAGE.iterdir() if path.is_file())
    assert len(files) <= 8, files


def test_the_page_names_files_that_are_there() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/**/*.py")}
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert len(named) > 20
    assert {
        name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)
    } == set()
