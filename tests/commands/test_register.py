"""The adapters' own headers, and the register that is made of them."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from vllm_compat import adapters
from vllm_compat.adapters import by_name, registry
from vllm_compat.adapters.base import Adapter
from vllm_compat.commands.register import (
    FIELDS,
    address,
    as_markdown,
    as_records,
    as_text,
    features_as_records,
)
from vllm_compat.errors import UsageError
from vllm_compat.trial import families, models

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "adapters"
AREAS = sorted(
    i.name for i in pkgutil.iter_modules(adapters.__path__) if i.name != "base" and i.name[0] != "_"
)

each = pytest.mark.parametrize("adapter", registry(), ids=lambda adapter: adapter.name)


WORDS = ("changed", "relies", "does", "until", "shown_by")
NAMES = frozenset(adapter.name for adapter in registry())
FACTS = {"transformers", "preprocessing", "trainer", "engine"}
MODELS = {*families.FAMILY_NAMES, *models.MODEL_NAMES}


@each
def test_a_header_is_complete(adapter: Adapter) -> None:
    for field in WORDS:
        text = getattr(adapter, field)
        assert text.strip(), f"{adapter.name}: {field} is empty"
        assert "TODO" not in text
    assert type(adapter).__doc__
    assert adapter.targets
    assert adapter.processes <= {"driver", "worker"}
    assert adapter.processes


@each
def test_what_it_refers_to_is_there(adapter: Adapter) -> None:
    assert set(adapter.excluded_by) <= NAMES - {adapter.name}
    assert set(adapter.decided_by) <= FACTS
    assert set(adapter.witnesses) <= MODELS
    assert {exception.device for exception in adapter.not_on} <= {"cpu", "cuda"}
    for path in adapter.shown_in:
        drift = adapter.name.partition(".")[2].replace("_", "-")  # a record is named after it
        assert adapter.name in (ROOT / path).read_text(encoding="utf-8") or drift in path


@each
def test_its_public_threads_are_those_that_its_words_name(adapter: Adapter) -> None:
    words = " ".join(getattr(adapter, field) for field in WORDS)
    assert sorted(adapter.pull_requests) == sorted(set(re.findall(r"[\w-]+#\d+", words)))
    for thread in adapter.pull_requests:
        assert re.fullmatch(r"https://github\.com/vllm-project/[\w-]+/issues/\d+", address(thread))


@each
def test_it_asks_no_other_adapter(adapter: Adapter) -> None:
    source = inspect.getsource(inspect.unwrap(type(adapter).need))
    assert ".need(" not in source
    assert "by_name" not in source


@each
def test_its_ranges_are_specifiers_that_include_a_served_pair(adapter: Adapter) -> None:
    vllm, downstream = SpecifierSet(adapter.vllm), SpecifierSet(adapter.downstream)
    assert any(vllm.contains(f"0.{minor}.0") for minor in range(11, 40))
    assert any(downstream.contains(version) for version in ("0.3.0", "0.4.0", "0.4.0.1"))
    assert not downstream.contains("0.5.0"), "from 0.5 on there is no in-process generator"


@each
def test_its_name_is_its_area_and_one_drift(adapter: Adapter) -> None:
    area, _, drift = adapter.name.partition(".")
    assert type(adapter).__module__ == f"vllm_compat.adapters.{area}"
    assert drift.isidentifier()
    assert by_name(adapter.name) is adapter


@each
def test_what_shows_it_names_a_model_and_both_releases(adapter: Adapter) -> None:
    assert "speculators 0." in adapter.shown_by
    assert "vLLM 0." in adapter.shown_by


def test_names_are_unique() -> None:
    assert max(Counter(adapter.name for adapter in registry()).values()) == 1


def test_places_in_a_plan_are_unique_and_in_order() -> None:
    places = [adapter.order for adapter in registry()]
    assert places == sorted(set(places))


def test_two_adapters_of_one_target_exclude_each_other() -> None:
    sharing = [(a, b) for a, b in combinations(registry(), 2) if set(a.targets) & set(b.targets)]
    assert sharing
    for one, other in sharing:
        assert other.name in one.excluded_by or one.name in other.excluded_by, (one.name, other.name)


@pytest.mark.parametrize("area", AREAS)
def test_an_area_has_an_adapter_and_a_test_file_of_its_name(area: str) -> None:
    assert any(adapter.name.startswith(f"{area}.") for adapter in registry())
    assert (TESTS / f"test_{area}.py").is_file()


def test_an_unknown_adapter_is_told_in_words() -> None:
    with pytest.raises(UsageError, match=r"no adapter 'of\.tomorrow'.*the same vllm_compat"):
        by_name("of.tomorrow")


def test_records_hold_the_headers_as_written() -> None:
    records = json.loads(json.dumps(as_records()))
    assert [record["name"] for record in records] == [adapter.name for adapter in registry()]
    for record, adapter in zip(records, registry(), strict=True):
        assert set(record) == {"name", *(field for field, _ in FIELDS)}
        for field, _ in FIELDS:
            value = getattr(adapter, field)
            if isinstance(value, (tuple, frozenset)):
                assert sorted(record[field]) == sorted(map(str, value))
            else:
                assert record[field] == value


def test_every_attribute_of_a_header_is_shown() -> None:
    attributes = {name for name in inspect.get_annotations(Adapter) if not name.startswith("_")}
    assert {"name", *(field for field, _ in FIELDS)} == attributes


def test_the_text_fits_a_terminal_and_names_every_adapter() -> None:
    text = as_text()
    assert max(map(len, text.splitlines())) <= 100
    for adapter in registry():
        assert f"\n{adapter.name}\n" in f"\n{text}\n"


def test_the_page_has_one_table_an_adapter_and_a_row_for_each_thing_that_its_header_says() -> None:
    page, headline, of_features = as_markdown().partition("\n# Features\n")
    assert headline
    for feature in features_as_records():
        assert f"\n## `{feature['name']}`\n" in of_features
    sections = dict(zip(re.findall(r"(?m)^## `(.+)`$", page), page.split("\n## `")[1:], strict=True))
    assert list(sections) == [adapter.name for adapter in registry()]
    for adapter in registry():
        rows = [line for line in sections[adapter.name].splitlines() if line.startswith("| ")]
        said = [title for field, title in FIELDS if getattr(adapter, field)]
        assert [row.split(" | ")[0].strip("| ") for row in rows[1:]] == said
        for row in rows:
            assert row.replace("\\|", "").count("|") == 3


def test_the_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "render_records.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
