"""The pages for newcomers: what they say is what is recorded, and the site has every page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml
from lab.matrix import known_releases
from lab.matrix_report import read_records, release_of

from vllm_compat.analysis.misread import TABLE
from vllm_compat.analysis.server_flow import HAZARDS, Harm

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))
import start_page  # noqa: E402

CELLS = read_records(ROOT / "records" / "matrix")
RELEASES = known_releases()
RUN = start_page.newest_run(CELLS, RELEASES)


def rows(text: str, first: str) -> list[list[str]]:
    """Return the cells of the table rows that begin with ``first``."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(f"| {first} |")
    ]


def test_the_page_says_yes_only_where_each_release_has_been_run() -> None:
    page = start_page.page(CELLS, RELEASES)
    assert next(row[1:3] for row in rows(page, "0.3.0")) == [f"0.11.0 to {RUN}", "**yes**"]
    less = [cell for cell in CELLS if release_of(cell) != "0.20.0"]
    told = [row[1:3] for row in rows(start_page.page(less, RELEASES), "0.4.0.1")]
    assert ["0.20.0", "**ask `check`**"] in told
    assert [f"0.20.1 to {RUN}", "**yes**"] in told
    later = start_page.page(CELLS, [*RELEASES, "9.0.0"])
    newest = [row[1:3] for row in rows(later, "0.4.0.1")][-1]
    assert newest[0].endswith("9.0.0")
    assert newest[1] == "**ask `check`**"


def test_the_page_has_each_hazard_and_each_misread_layer() -> None:
    page = start_page.page(CELLS, RELEASES)
    assert "<<" not in page
    for hazard in HAZARDS:
        assert (hazard.sentence in page) is (hazard.harm is not Harm.FAILURE)
    for row in TABLE:
        assert f"| {row.models} | {row.since} and later" in page


def test_the_readme_names_the_newest_release_that_has_been_run() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    newest = RUN.removesuffix(".0")
    assert f"on vLLM 0.12 to {newest} (0.3.0 also on 0.11)" in text
    assert text.index("docs/start.md") < text.index("\n## ")  # a person in a hurry finds it first


def test_the_readme_says_who_needs_it_before_how_to_install_it() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert headings[:3] == ["Do I need it?", "Install", "Three commands"]
    assert {"What it will not do", "What it changes in a process"} < set(headings)


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, which names a Python function."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *_: None)


def test_the_site_has_every_page_and_fetches_nothing() -> None:
    # Building it is a step of scripts/test.py.
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    listed = re.findall(r"[\w-]+\.md", str(site["nav"]))
    there = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert sorted(listed) == sorted([*there, "index.md", "changelog.md"])
    assert listed[:2] == ["index.md", "start.md"]
    assert (site["strict"], site["theme"]["font"]) == (True, False)
    steps = (ROOT / "scripts" / "test.py").read_text(encoding="utf-8")
    assert '"mkdocs", "build"' in steps
