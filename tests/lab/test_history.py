"""The page on releases that came later: its record is what the plans say now."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.downstreams import VERSIONS, wheel

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("history", ROOT / "scripts" / "history.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "records" / "history.json").read_text("utf-8"))
    return loaded


def test_the_record_is_up_to_date(script: ModuleType, record: dict[str, Any]) -> None:
    assert script.history([wheel(version) for version in VERSIONS]) == record, "run scripts/history.py"


def test_the_page_has_every_release(script: ModuleType, record: dict[str, Any]) -> None:
    page = script.page(record)
    assert all(f"| {row['known']} | " in page for row in record["rows"])
    assert "4 of 4" in page


def test_what_stops_is_named(record: dict[str, Any]) -> None:
    for row in record["rows"]:
        for cell in row["cells"]:
            assert (cell["stop"] is None) is (cell["through"] == cell["of"])
            if cell["stop"]:
                assert cell["stop"]["lacking"] or cell["stop"]["unmet"]


def test_each_way_gets_as_far_as_the_one_before(record: dict[str, Any]) -> None:
    for row in record["rows"]:
        for cell in row["cells"]:
            second, alone = cell["second"], cell["alone"]
            assert cell["through"] <= second["through"] <= alone["through"]
            assert second["stop"] is None or second["stop"]["worker"] or second["stop"]["lacking"]


def test_with_what_0_12_had_the_second_engine_gets_through_all_that_came(record: dict[str, Any]) -> None:
    (row,) = [row for row in record["rows"] if row["known"] == "0.12.0"]
    assert [cell["second"]["stop"] for cell in row["cells"]] == [None] * 3
    assert all(cell["stop"] for cell in row["cells"]), "adapters alone do not"
