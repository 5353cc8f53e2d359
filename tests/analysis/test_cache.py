"""What was read before: found again only where nothing has changed, and never in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.analysis.surface import packages
from tests.downstreams import VERSIONS, contract, wheel

import vllm_compat
from vllm_compat.adapters import make_plan
from vllm_compat.analysis import cache, codec
from vllm_compat.analysis.cache import Memory, cache_folder, stamp
from vllm_compat.analysis.environment import Environment
from vllm_compat.analysis.surface.recorded import RecordedSurface
from vllm_compat.commands.check import check
from vllm_compat.commands.report.json import as_record


class Counter:
    """Something to be remembered, and how often it was made."""

    def __init__(self, value: Any = "made") -> None:
        self.value = value
        self.made = 0

    def __call__(self) -> Any:
        self.made += 1
        return self.value


def recall(where: Memory, counter: Counter, *key: object) -> Any:
    return where.recall("kind", key, counter, pack=lambda v: v, unpack=lambda v: v)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_what_is_known_is_not_made_again(folder: Path) -> None:
    counter = Counter(["a", {"ü": 1}])
    assert recall(Memory(folder), counter, 1) == counter.value
    assert recall(Memory(folder), counter, 1) == counter.value
    assert counter.made == 1
    recall(Memory(folder), counter, 2)
    assert counter.made == 2


def test_without_a_folder_everything_is_made(tmp_path: Path) -> None:
    counter = Counter()
    for _ in range(2):
        assert recall(Memory(None), counter) == "made"
    assert counter.made == 2


@pytest.mark.parametrize("change", ["text", "times", "replaced", "gone"])
def test_a_stamp_tells_a_change(tmp_path: Path, change: str) -> None:
    path = tmp_path / "file.py"
    path.write_text("x = 1\n")
    before = stamp(path)
    if change == "text":
        path.write_text("x = 12\n")
    elif change == "times":
        os.utime(path, ns=(1, 1))
    elif change == "replaced":
        (tmp_path / "other.py").write_text("y = 1\n")
        os.replace(tmp_path / "other.py", path)
    else:
        path.unlink()
    assert stamp(path) != before


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-3],
        lambda text: text + " ",
        lambda text: text.replace("made", "fake"),
        lambda text: "\x00" * 10,
        lambda text: text.partition("\n")[2],
    ],
)
def test_a_damaged_record_is_made_again(folder: Path, damage: Any) -> None:
    counter = Counter()
    recall(Memory(folder), counter)
    (record,) = folder.iterdir()
    record.write_text(damage(record.read_text()))
    assert recall(Memory(folder), counter) == "made"
    assert counter.made == 2
    assert recall(Memory(folder), counter) == "made"
    assert counter.made == 2


def test_a_record_that_means_nothing_to_the_reader_is_made_again(folder: Path) -> None:
    counter = Counter({"a": 1})
    for _ in range(2):
        found = Memory(folder).recall(
            "kind", [], counter, pack=lambda value: value, unpack=lambda record: record["b"]
        )
        assert found == {"a": 1}
    assert counter.made == 2


def test_a_record_of_other_code_is_not_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter()
    recall(Memory(folder), counter)
    changed = Memory(folder)
    changed.__dict__["_code"] = "another version"
    recall(changed, counter)
    assert counter.made == 2


@pytest.mark.parametrize("package", ["analysis", "adapters", "commands/checking"])
def test_every_module_that_reads_source_or_judges_counts_as_our_code(folder: Path, package: str) -> None:
    code = Memory(folder)._code
    modules = list((Path(vllm_compat.__path__[0]) / package).rglob("*.py"))
    assert modules
    assert [str(path) for path in modules if repr(str(path)) not in code] == []


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    counter = Counter()
    for _ in range(2):
        assert recall(Memory(tmp_path / "file" / "cache"), counter) == "made"
    assert counter.made == 2


def test_a_folder_that_others_can_write_to_is_not_trusted(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    counter = Counter()
    for _ in range(2):
        recall(Memory(folder), counter)
    assert counter.made == 2
    assert not list(folder.iterdir())


def test_what_raises_leaves_nothing(folder: Path) -> None:
    def fail() -> str:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Memory(folder).recall("kind", [], fail, pack=str, unpack=str)
    assert not list(folder.iterdir())


def test_many_at_once(folder: Path) -> None:
    counter = Counter("x" * 200_000)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: recall(Memory(folder), counter, i % 3), range(60)))
    assert found == [counter.value] * 60
    assert len(list(folder.iterdir())) == 3


def test_old_records_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KEPT", 4)
    for number in range(9):
        recall(Memory(folder), Counter(), number)
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"VLLM_COMPAT_CACHE": "off"}, None),
        ({"VLLM_COMPAT_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/vllm_compat/check"),
        ({"HOME": "/h"}, "/h/.cache/vllm_compat/check"),
    ],
)
def test_where(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str | None) -> None:
    for name in ("VLLM_COMPAT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == (Path(expected) if expected else None)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_contract_survives(version: str) -> None:
    told = contract(version)
    assert codec.unpack_contract(json.loads(json.dumps(codec.pack_contract(told)))) == told


@pytest.mark.parametrize("release", ["0.11.0", "0.26.0"])
def test_findings_and_plan_survive(release: str) -> None:
    told, environment = contract("0.4.0"), Environment("3.11.0", (("torch", "2"),), "cuda")
    plan = make_plan(told, RecordedSurface(release), environment)
    text = json.dumps(codec.pack_planned((plan.findings, plan)))
    findings, same = codec.unpack_planned(json.loads(text))
    assert (findings, same) == (plan.findings, plan)
    assert same is not None
    assert same.findings == plan.findings
    assert [step.findings for step in same.steps] == [step.findings for step in plan.steps]
    assert same.digest == plan.digest


@pytest.mark.parametrize("release", ["0.11.0", "0.26.0", "0.33.0"])
def test_a_check_says_the_same_from_memory(folder: Path, release: str) -> None:
    def told(where: Path | bool) -> Any:
        return as_record(check([wheel("0.4.0")], [release], cache=where))

    expected = told(False)
    assert told(folder) == expected
    kept = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(kept) >= 3
    assert told(folder) == expected
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == kept


def test_an_edit_of_the_downstream_is_seen(tmp_path: Path, folder: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    source = package / "__init__.py"

    def sites() -> Iterator[str]:
        (pair,) = check([package], ["0.26.0"], cache=folder).pairs
        return (site.symbol for site in pair.contract.sites)

    source.write_text("from vllm import LLM\n")
    assert list(sites()) == ["vllm.LLM"]
    source.write_text("from vllm import ABC\n")
    assert list(sites()) == ["vllm.ABC"]
    (package / "more.py").write_text("from vllm.config import VllmConfig\n")
    assert list(sites()) == ["vllm.ABC", "vllm.config.VllmConfig"]


def test_an_edit_of_vllm_is_seen(tmp_path: Path, folder: Path) -> None:
    packages.write(tmp_path / "site", {"a.py": "def f(x): ...\n"})
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("from vllm.a import f\nf(1)\n")

    def found() -> list[str]:
        (pair,) = check([package], [tmp_path / "site"], cache=folder).pairs
        return [judged.finding.detail for judged in pair.findings]

    assert found() == found() == []
    (tmp_path / "site" / "vllm" / "a.py").write_text("def f(x, y): ...\n")
    assert found() == ["f requires y here, and the downstream does not give it."]
    (tmp_path / "site" / "vllm" / "a.py").unlink()
    (tmp_path / "site" / "vllm" / "b.py").write_text("def f(x): ...\n")
    assert found() == ["There is no module vllm.a here. f is in vllm.b here."]


def test_the_option_and_the_variable_turn_it_off(tmp_path: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "vllm_compat", "check", "--downstream", str(wheel("0.4.0"))]
    environ = {**os.environ, "VLLM_COMPAT_CACHE": str(folder)}

    def run(*more: str, **variables: str) -> str:
        return subprocess.run(
            [*command, "--vllm", "0.26.0", *more],
            env={**environ, **variables},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    expected = run("--no-cache")
    assert run(VLLM_COMPAT_CACHE="off") == expected
    assert not folder.exists()
    assert run() == expected
    assert list(folder.iterdir())
    assert run() == expected
