"""The table of models that people train drafts for: complete, and nothing in it is silent."""

from __future__ import annotations

from pathlib import Path

from lab import drafted, layers_page
from vllm_compat.trial.families import DRAFTED_NAMES, FAMILY_NAMES
from vllm_compat.trial.models import MODEL_NAMES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "families.md").read_text(encoding="utf-8")


def test_it_has_every_model_of_the_table_of_layers() -> None:
    assert set(drafted.TINY) == set(layers_page.FAMILIES)


def test_every_one_has_tiny_models_or_a_reason() -> None:
    named = {tiny for found in drafted.TINY.values() if not isinstance(found, str) for tiny in found}
    assert named <= {*DRAFTED_NAMES, *FAMILY_NAMES, *MODEL_NAMES}
    assert set(DRAFTED_NAMES) <= named
    assert all(drafted.TINY.values())


def test_every_one_has_been_run_or_the_page_says_why_not() -> None:
    rows = [row.split(" | ") for row in section() if row.startswith("| ")]
    assert {row[0].removeprefix("| ") for row in rows[1:]} == set(drafted.TINY)
    assert {row[1] for row in rows if row[2].startswith("not run yet")} == drafted.NOT_RUN_YET


def test_no_run_failed_but_those_that_are_known_to() -> None:
    rows = [row.split(" | ") for row in section() if row.startswith("| ")]
    assert {row[1] for row in rows if row[2].startswith("failed:")} == drafted.OPEN


def section() -> list[str]:
    return PAGE.partition(drafted.as_markdown([])[0])[2].partition("\n## ")[0].splitlines()
