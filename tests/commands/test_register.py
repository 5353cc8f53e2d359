"""The adapters' own headers, and the register that is made of them."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from vllm_compat import adapters
from vllm_compat.adapters import by_name, registry
from vllm_compat.adapters.base import Adapter
from vllm_compat.commands.register import (
    FIELDS,
    as_markdown,
    as_records,
    as_text,
    features_as_records,
)
from vllm_compat.errors import UsageError

TESTS = Path(__file__).parents[1] / "adapters"
AREAS = sorted(
    i.name for i in pkgutil.iter_modules(adapters.__path__) if i.name != "base" and i.name[0] != "_"
)

each = pytest.mark.parametrize("adapter", registry(), ids=lambda adapter: adapter.name)


@each
def test_a_header_is_complete(adapter: Adapter) -> None:
    for field, title in FIELDS:
        text = getattr(adapter, field)
        assert text.strip(), f"{adapter.name}: {title} is empty"
        assert "TODO" not in text
    assert type(adapter).__doc__
    assert adapter.processes <= {"driver", "worker"}
    assert adapter.processes


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


def test_one_adapter_a_target() -> None:
    assert max(Counter(adapter.target for adapter in registry()).values()) == 1


@pytest.mark.parametrize("area", AREAS)
def test_an_area_has_an_adapter_and_a_test_file_of_its_name(area: str) -> None:
    assert any(adapter.name.startswith(f"{area}.") for adapter in registry())
    assert (TESTS / f"test_{area}.py").is_file()


def test_an_unknown_adapter_is_told_in_words() -> None:
    with pytest.raises(UsageError, match=r"no adapter 'of\.tomorrow'.*the same vllm_compat"):
        by_name("of.tomorrow")


def test_records_hold_the_headers_as_written() -> None:
    records = as_records()
    assert [record["name"] for record in records] == [adapter.name for adapter in registry()]
    for record, adapter in zip(records, registry(), strict=True):
        assert set(record) == {"name", *(field for field, _ in FIELDS)}
        assert all(record[field] == getattr(adapter, field) for field, _ in FIELDS)


def test_the_text_fits_a_terminal_and_names_every_adapter() -> None:
    text = as_text()
    assert max(map(len, text.splitlines())) <= 100
    for adapter in registry():
        assert f"\n{adapter.name}\n" in f"\n{text}\n"


def test_the_page_has_one_table_an_adapter() -> None:
    page, headline, of_features = as_markdown().partition("\n# Features\n")
    assert headline
    for feature in features_as_records():
        assert f"\n## `{feature['name']}`\n" in of_features
    for adapter in registry():
        assert f"\n## `{adapter.name}`\n" in page
    tables = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(tables) == len(registry()) * (len(FIELDS) + 1)
    for line in tables:
        assert line.replace("\\|", "").count("|") == 3


def test_the_generated_pages_are_up_to_date() -> None:
    root = TESTS.parents[1]
    done = subprocess.run(
        [sys.executable, root / "scripts" / "render_records.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
