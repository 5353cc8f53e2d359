"""The formats of a report: the same findings, each in the shape that its readers parse."""

from __future__ import annotations

import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as xml

import pytest
from jsonschema import Draft202012Validator
from tests.downstreams import VERSIONS, wheel

import vllm_compat
from vllm_compat.adapters import by_name
from vllm_compat.analysis.contract import SiteKind
from vllm_compat.analysis.drift import Finding, FindingKind
from vllm_compat.analysis.server_flow import Harm
from vllm_compat.commands.check import check
from vllm_compat.commands.report import render, show, words
from vllm_compat.commands.report.model import Dating, Judged, Report, Standing, Verdict, spans

SERVER_FLOW = Path(__file__).parents[2] / "fakes" / "speculators_0_5" / "speculators"
SCHEMAS = Path(vllm_compat.__file__).parent / "schemas"


@cache
def report(name: str) -> Report:
    """Return a report that is repaired, one that is not, or the whole matrix."""
    if name == "repaired":
        return check([wheel("0.3.0")], ["0.26.0"])
    if name == "unmet":
        return check([wheel("0.4.0")], ["0.10.2"])
    if name == "guarded":
        return check([wheel("0.4.0.1")], ["0.32.0"], device="cpu")
    if name == "hazards":
        return check([SERVER_FLOW], ["0.22.1"])
    if name == "hazards of many":
        return check([SERVER_FLOW], ["0.16.0", "0.22.1", "0.32.0"])
    return check([wheel(version) for version in VERSIONS], all_releases=True)


NAMES = ("repaired", "unmet", "guarded", "matrix", "hazards", "hazards of many")
each = pytest.mark.parametrize("name", NAMES)


# JSON.


def schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))
    return loaded


@each
def test_json_is_as_the_published_schema_says(name: str) -> None:
    published = schema("report")
    Draft202012Validator.check_schema(published)
    record = json.loads(render(report(name), "json"))
    Draft202012Validator(published).validate(record)
    assert record["exit_status"] == report(name).exit_status
    assert len(record["pairs"]) == len(report(name).pairs)


def test_the_schema_refuses_what_it_does_not_name() -> None:
    record = json.loads(render(report("repaired"), "json"))
    validator = Draft202012Validator(schema("report"))
    for change in ({"schema_version": 2}, {"more": 1}, {"pairs": []}, {"verdict": "fine"}):
        assert not validator.is_valid({**record, **change})


def test_the_schema_has_every_kind_there_is() -> None:
    defs = schema("report")["$defs"]
    finding = defs["finding"]["properties"]
    assert finding["kind"]["enum"] == [kind.value for kind in FindingKind]
    assert finding["standing"]["enum"] == [standing.value for standing in Standing]
    site = finding["sites"]["items"]["properties"]
    assert site["kind"]["enum"] == [kind.value for kind in SiteKind]
    assert defs["hazard"]["properties"]["harm"]["enum"] == [harm.value for harm in Harm]
    assert defs["verdict"]["enum"] == [verdict.value for verdict in Verdict]


def test_json_gives_each_adapters_header_once() -> None:
    record = json.loads(render(report("matrix"), "json"))
    used = {s["adapter"] for pair in record["pairs"] for s in pair["plan"]["steps"]}
    assert set(record["adapters"]) == used
    assert record["adapters"]["request.eos_token_id"]["changed"].startswith("0.17.0")


FORMS = ("text", "json", "markdown", "junit", "github")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("pair", "device", "said"),
    [
        (("0.4.0.1", "0.32.0"), "cpu", ("known", "on CPU (x86_64, model runner V1)", "last on 20")),
        (("0.4.0.1", "0.26.0"), "cuda", ("known", "NVIDIA H200 (compute capability 9.0")),
        (("0.4.0.1", "0.32.0"), "cuda", ("inferred", "run on CPU only, never on CUDA")),
        (("0.4.0", "0.10.2"), "cpu", ("inferred", "has never been run")),
    ],
)
def test_every_format_says_what_is_known_and_what_is_inferred(
    form: str, pair: tuple[str, str], device: str, said: tuple[str, ...]
) -> None:
    text = " ".join(render(check([wheel(pair[0])], [pair[1]], device=device), form).split())
    for words_of_it in said:
        assert words_of_it in text, text[:3000]


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_of_which_nothing_can_be_told_is_unknown(form: str) -> None:
    text = " ".join(render(report("hazards"), form).split())
    assert "It has not been run, and its source alone does not tell." in text


def test_several_pairs_are_sorted_by_what_is_known() -> None:
    text = render(report("matrix"), "text")
    assert re.search(r"^0\.32\.0 .*adapters, known ", text, re.MULTILINE)
    known = text.partition(words.KNOWLEDGE_TITLE)[2].partition("Adapters, and")[0]
    assert "- known on CPU and compute capability 9.0: 0.20.2, 0.26.0" in known
    assert "- known on CPU: 0.11.0" in known
    assert "- inferred: 0.10.2" in known
    assert f"### {words.KNOWLEDGE_TITLE}" in render(report("matrix"), "markdown")


# Text.


@each
def test_text_keeps_to_its_width(name: str) -> None:
    for line in render(report(name), "text").splitlines():
        assert len(line) <= 100 or " " not in line.strip(), line
        assert line == line.rstrip()


@pytest.mark.parametrize("name", ["repaired", "unmet", "guarded"])
@pytest.mark.parametrize("form", ["text", "markdown", "junit"])
def test_a_pair_in_full_has_each_finding_with_place_date_and_repair(name: str, form: str) -> None:
    shown = " ".join(render(report(name), form).split())
    (pair,) = report(name).pairs
    for judged in pair.findings:
        assert judged.finding.sites[0].where in shown
        assert judged.finding.sites[0].file in shown
        for part in (*judged.adapters, words.dated(judged)):
            assert part in shown
        if not judged.adapters and not judged.finding.home:
            assert words.STANDINGS[judged.standing] in shown
    for name_ in pair.plan.adapters if pair.plan else ():
        assert name_ in shown


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_derived_repairs_are_labelled(form: str) -> None:
    shown = render(report("repaired"), form).replace("`", "")
    assert "request.eos_token_id (derived)" in shown
    assert "worker.capture (derived)" not in shown


def test_derived_repairs_are_told_in_json() -> None:
    (pair,) = json.loads(render(report("repaired"), "json"))["pairs"]
    derived = {step["adapter"] for step in pair["plan"]["steps"] if step["derived"]}
    named = {step["adapter"] for step in pair["plan"]["steps"]}
    assert derived == {name for name in named if by_name(name).derived}
    for finding in pair["findings"]:
        assert finding["derived"] is bool(derived & set(finding["adapters"]))


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_changed_defaults_stand_by_themselves(form: str) -> None:
    shown = " ".join(render(report("guarded"), form).split())
    assert "defaults that the downstream relies on have changed since 0.16.0" in shown
    assert "is True here and was False on 0.16.0. Since 0.18.0 (0.16.0 fits)." in shown


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_a_matrix_has_every_release_and_what_stands_in_the_way(form: str) -> None:
    shown = render(report("matrix"), form)
    for pair in report("matrix").pairs:
        assert pair.surface.version in shown
    assert "What stands in the way" in shown
    assert "older than 0.11.0" in shown
    assert "request.eos_token_id" in shown


def test_what_is_not_put_in_force_is_not_called_in_force() -> None:
    text = " ".join(render(report("repaired"), "text").split())
    assert "that `vllm-compat run` and `apply()` put in force, and why" in text
    assert "Next: put `vllm-compat run` in front of your extraction's command" in text
    assert "none is applied" in render(report("unmet"), "text")


@pytest.mark.parametrize("form", ["text", "json", "markdown", "junit", "github"])
def test_every_format_shows_each_hazard_with_its_harm_and_remedy(form: str) -> None:
    (pair,) = report("hazards").pairs
    shown = render(report("hazards"), form)
    if form == "junit":
        skipped = list(xml.fromstring(shown.encode()).iter("skipped"))
        shown = " ".join(f"{element.get('message')} {element.text}" for element in skipped)
    if form == "json":
        listed = json.loads(shown)["pairs"][0]["hazards"]
        assert [hazard["key"] for hazard in listed] == [hazard.key for hazard in pair.hazards]
        shown = " ".join(value for hazard in listed for value in hazard.values())
    shown = " ".join(shown.replace("&lt;", "<").split())
    assert len(pair.hazards) > 5
    for hazard in pair.hazards:
        for part in (hazard.harm.value, hazard.sentence, hazard.remedy):
            assert part in shown


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_a_matrix_says_each_hazard_once_and_on_which_releases(form: str) -> None:
    shown = " ".join(render(report("hazards of many"), form).replace("&lt;", "<").split())
    on = {h.key: h.sentence for pair in report("hazards of many").pairs for h in pair.hazards}
    assert all(shown.count(sentence) == 1 for sentence in on.values())
    assert f"22.1: wrong data: {on['prefix-caching.rows']}" in shown
    assert f"0.16.0: failure: {on['method.missing']}" in shown
    assert f"0.22.1 – 0.32.0: lost data: {on['writer.lock']}" in shown
    assert shown.index(on["prefix-caching.rows"]) < shown.index(on["method.missing"])
    assert "? not served: 2 failure" in shown
    assert "not served: 4 wrong data, 3 lost data, " in shown


# Markdown.


@each
def test_markdown_tables_have_as_many_cells_in_every_row(name: str) -> None:
    columns = 0
    for line in render(report(name), "markdown").splitlines():
        if not line.startswith("|"):
            columns = 0
            continue
        cells = len(re.findall(r"(?<!\\)\|", line))
        columns = columns or cells
        assert cells == columns, line


# JUnit.


@each
def test_junit_counts_what_it_holds(name: str) -> None:
    root = xml.fromstring(render(report(name), "junit").encode())
    assert root.tag == "testsuites"
    suites = root.findall("testsuite")
    assert len(suites) == len(report(name).pairs)
    for element in (root, *suites):
        assert int(element.get("tests", "")) == len(element.findall(".//testcase"))
        assert int(element.get("failures", "")) == len(element.findall(".//failure"))
        assert int(element.get("skipped", "")) == len(element.findall(".//skipped"))
    for suite, pair in zip(suites, report(name).pairs, strict=True):
        failed = suite.get("failures") != "0"
        assert failed is (pair.verdict is Verdict.INCOMPATIBLE)


def test_junit_holds_only_what_xml_can_hold() -> None:
    from vllm_compat.commands.report.junit import _text

    assert _text("a\x00b\x1bc\ud800d\n😀") == "a\ufffdb\ufffdc\ufffdd\n😀"


# GitHub.


@each
def test_github_annotations_are_commands_the_gravest_first(name: str) -> None:
    lines = render(report(name), "github").splitlines()
    levels = []
    for line in lines:
        match = re.fullmatch(r"::(error|warning|notice) (?:[a-z]+=[^,:]*,?)+::.+", line)
        assert match, line
        levels.append(match.group(1))
    assert levels == sorted(levels, key=["error", "warning", "notice"].index)
    findings = sum(len(pair.findings) + len(pair.hazards) for pair in report(name).pairs)
    assert len(lines) == findings + len(report(name).pairs)
    if name == "unmet":
        assert levels.count("error") == 1, "its release is too old for any adapter"


def test_github_annotations_carry_the_repositorys_own_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "repository" / "src" / "other"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from vllm.config import NeverThere\n")
    monkeypatch.chdir(tmp_path / "repository")
    shown = render(check([folder], ["0.26.0"]), "github")
    assert "file=src/other/__init__.py,line=1," in shown


def test_github_commands_escape_what_ends_them() -> None:
    from vllm_compat.commands.report.github import _command

    line = _command("error", "50%\nand more", "a: b, c", file="x.py")
    assert line == "::error file=x.py,title=a%3A b%2C c::50%25%0Aand more"


# Terminal.


@each
def test_a_terminal_gets_tables_with_the_same_content(name: str) -> None:
    console = pytest.importorskip("rich.console")
    from vllm_compat.commands.report import terminal

    page = io.StringIO()
    terminal.show(report(name), console.Console(file=page, width=140, force_terminal=True))
    shown = page.getvalue()
    assert "\x1b[" in shown
    assert ("request.eos_token_id" in shown) is (name in ("repaired", "guarded", "matrix"))
    for downstream in report(name).downstreams:
        assert downstream.split()[-1] in shown


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    show(report("repaired"))
    assert capsys.readouterr().out == render(report("repaired"), "text")


# Words.


def test_releases_are_put_together_where_they_are_neighbours() -> None:
    order = ["1", "2", "3", "4", "5"]
    assert spans(["2"], order) == "2"
    assert spans(["4", "1", "2"], order) == "1 – 2, 4"
    assert spans(order, order) == "1 – 5"


def test_a_signature_is_cut_around_what_the_finding_is_about() -> None:
    seen = "(first, second, mode='a,b', options=(1, 2), wanted=None, **rest) -> None"
    finding = Finding(FindingKind.PARAMETER_RENAMED, "vllm.f", "gone", (), seen)
    assert words.abridged(finding, 200) == seen
    cut = words.abridged(Finding(FindingKind.PARAMETER_RENAMED, "vllm.f", "wanted", (), seen), 40)
    assert cut == "(first, …, wanted=None, …) -> None"
    assert words.abridged(Finding(FindingKind.BEHAVIOUR, "vllm.f", None, (), None), 40) == ""


def test_dates_in_words() -> None:
    finding = Finding(FindingKind.ATTRIBUTE_MISSING, "vllm.A", "b")
    said = {
        Dating(): "",
        Dating("0.17.0", "0.16.0"): "0.17.0 (0.16.0 fits)",
        Dating("0.10.2", None, "0.12.0"): "too old here: 0.12.0 is the first release that fits",
        Dating("0.10.2"): "0.10.2; no recorded release fits",
    }
    for dating, text in said.items():
        assert words.dated(Judged(finding, Standing.UNMET, (), dating)) == text


@pytest.mark.parametrize(
    ("kind", "symbol", "name", "text"),
    [
        (FindingKind.PARAMETER_REMOVED, "vllm.v1.request.Request", "a", "Request(a)"),
        (FindingKind.RETURN_SHAPE, "vllm.x.Executor.run", None, "Executor.run(…)"),
        (FindingKind.ATTRIBUTE_MISSING, "vllm.x.Runner", "a", "Runner.a"),
        (FindingKind.MODULE_MISSING, "vllm.utils.h", "f", "vllm.utils.h, for f"),
        (FindingKind.NAME_MOVED, "vllm.utils.f", None, "vllm.utils.f"),
    ],
)
def test_a_finding_is_headed_by_kind_and_object(
    kind: FindingKind, symbol: str, name: str | None, text: str
) -> None:
    assert words.heading(Finding(kind, symbol, name)) == f"{kind.value}: {text}"
