"""GitHub's workflows: YAML that parses, and steps that are commands of this project."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.__main__ import parser_for

from vllm_compat import cli

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    content = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert content[True]  # `on`, which YAML 1.1 reads as a truth value
    for job in content["jobs"].values():
        yield from job["steps"]


def commands() -> Iterator[list[str]]:
    for workflow in WORKFLOWS:
        for step in steps(workflow):
            assert ("run" in step) is not ("uses" in step)
            for line in step.get("run", "").splitlines():
                text = re.sub(r"\$\{\{[^}]*\}\}", "0.16.0", line)
                if inner := re.search(r"\$\(([^)]*)\)", text):
                    text = inner[1]
                yield shlex.split(text.partition(" >> ")[0])


def test_the_workflows_are_there() -> None:
    assert {path.stem for path in WORKFLOWS} >= {"ci", "docs", "matrix", "nightly", "release"}


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_each_step_is_a_command_that_runs_on_a_laptop(words: list[str]) -> None:
    if words[0] == "vllm-compat":
        # Exits with status 2 where an option is unknown.
        options = cli._parser(words[1]).parse_args(words[1:])
        assert callable(options.command)
    elif words[:3] == ["python3", "-m", "lab"]:
        options = parser_for(words[3:]).parse_args(words[3:])
        assert callable(options.command)
    elif words[0] == "bash" or (words[0] == "python3" and words[1] != "-m"):
        assert (ROOT / words[1]).is_file()
    elif words[0] == "python3":
        assert words[2] in ("pip", "build")
    else:
        assert words[0] in ("actionlint", "sudo")


@pytest.mark.parametrize("job", ["fast", "with-torch"])
def test_every_python_that_the_metadata_claims_is_tried(job: str) -> None:
    content = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', metadata)
    assert content["jobs"][job]["strategy"]["matrix"]["python"] == claimed


def test_what_a_push_leaves_out_runs_every_week() -> None:
    content = yaml.safe_load((ROOT / ".github/workflows/matrix.yml").read_text(encoding="utf-8"))
    assert "schedule" in content[True]
    lines = [step.get("run") for step in content["jobs"]["beyond"]["steps"]]
    assert "python3 scripts/test.py --all" in lines


def test_only_the_job_that_publishes_may_ask_for_an_identity() -> None:
    content = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    assert list(content[True]) == ["push"], "nobody releases by hand"
    assert list(content[True]["push"]) == ["tags"]
    assert content["permissions"] == {"contents": "read"}
    may = {name for name, job in content["jobs"].items() if "id-token" in job.get("permissions", {})}
    assert may == {"publish"}
    publish = content["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert not any("run" in step for step in publish["steps"]), "no code of ours holds the identity"
    uses = [step["uses"].partition("@")[0] for step in publish["steps"]]
    assert uses[-2:] == ["actions/attest-build-provenance", "pypa/gh-action-pypi-publish"]


def test_a_release_is_checked_against_its_tag_before_anything_is_built() -> None:
    content = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    lines = [step["run"] for step in content["jobs"]["build"]["steps"] if "run" in step]
    assert lines[0] == 'python3 scripts/check_tag.py "$GITHUB_REF_NAME"'
    assert any("scripts/test.py --fast" in line for line in lines), "nothing untested is released"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_the_lab_runs_on_the_checkout_that_it_is_in(workflow: Path) -> None:
    """The lab is in no wheel: it is found in the checkout, and so must the library be."""
    content = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    for name, job in content["jobs"].items():
        lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
        first = next((at for at, line in enumerate(lines) if "python3 -m lab" in line), None)
        if first is not None:
            assert "python3 -m pip install --editable ." in lines[:first], name
