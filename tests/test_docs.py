"""The pages for newcomers: what they say is what is recorded, and the site has every page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml
from lab.matrix import known_releases
from lab.matrix_report import read_records, release_of

from vllm_compat.analysis.misread import TABLE
from vllm_compat.analysis.recipes import NEEDS
from vllm_compat.analysis.server_flow import HAZARDS, Harm, hazards_of

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


def test_the_page_counts_the_hazards_of_each_release() -> None:
    page = start_page.page(CELLS, RELEASES)
    newest = RELEASES[-1]
    for release, span in (("0.25.0", "0.25.0 to 0.25.1"), (newest, f"0.31.0 to {newest}")):
        harms = [hazard.harm for hazard in hazards_of("0.9.0", release)]
        counts = [str(harms.count(harm)) for harm in Harm]
        assert [span, *counts, str(len(harms))] in rows(page, span)
    least = min(start_page.counted(release)[0] for release in RELEASES if start_page.can_serve(release))
    (told,) = re.findall(r"Wrong data are fewest on (.*?) \((\d+) hazards\)", page)
    assert told[1] == str(least)
    assert "| 0.11.0 to 0.17.1 | – | – | – | no server comes up |" in page
    for release in told[0].replace(" and on ", " to ").split(" to "):
        assert start_page.counted(release)[0] == least


def test_the_readme_names_each_refused_layer_with_its_release() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for row in TABLE:
        name = row.models.partition(" (")[0].partition(", dense")[0]
        assert f"{name} (from {row.since}" in text, f"README: {name} is refused from {row.since} on"


def test_the_readme_installs_what_check_asks_for_and_from_where_it_is() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Install")[2].partition("\n## ")[0]
    for need in NEEDS:
        assert need in section
    assert "'transformers<5'" in section
    assert "pip install vllm-compat" not in section  # nothing is released
    assert "$ pip install .\n" in section


def test_the_readme_names_the_newest_release_that_has_been_run() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    newest = RUN.removesuffix(".0")
    assert f"on vLLM 0.11 to {newest}" in text
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
