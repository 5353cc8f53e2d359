"""Version, changelog and tag of a release agree."""

from __future__ import annotations

import datetime
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from vllm_compat import __version__

ROOT = Path(__file__).parent.parent
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def check_tag() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_tag", ROOT / "scripts" / "check_tag.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_newest_dated_section_is_of_this_version(check_tag: ModuleType) -> None:
    sections = check_tag.dated(CHANGELOG)
    assert sections[0][0] == check_tag.version() == __version__
    dates = [datetime.date.fromisoformat(date) for _, date in sections]
    assert dates == sorted(dates, reverse=True)


def test_what_comes_next_has_its_section_on_top() -> None:
    headings = re.findall(r"^## (.+)$", CHANGELOG, flags=re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert len(headings) == len(set(headings))


GOOD = "## [Unreleased]\n\n## [1.2.0] - 2027-01-01\n\n- A\n"


@pytest.mark.parametrize(
    ("tag", "version", "changelog", "said"),
    [
        ("v1.2.0", "1.2.0", GOOD, ""),
        ("v1.2.1", "1.2.0", GOOD, "the tag v1.2.1 is not v1.2.0"),
        ("1.2.0", "1.2.0", GOOD, "the tag 1.2.0 is not v1.2.0"),
        ("v1.3.0", "1.3.0", GOOD, "the newest section of CHANGELOG.md is 1.2.0"),
        ("v1.2.0", "1.2.0", "## [Unreleased]\n", "no section with a version"),
        ("v1.2.0", "1.2.0", GOOD.replace("ed]\n", "ed]\n\n- B\n", 1), "lines under Unreleased"),
    ],
)
def test_a_tag_that_does_not_agree_is_refused(
    check_tag: ModuleType, tag: str, version: str, changelog: str, said: str
) -> None:
    found = check_tag.disagreement(tag, version, changelog)
    assert bool(found) == bool(said)
    assert said in found


def test_the_status_tells_the_workflow(
    check_tag: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_tag.main(["v0.0.0"]) == 1
    assert f"is not v{__version__}" in capsys.readouterr().err
