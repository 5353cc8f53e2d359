"""A report as JUnit XML: a suite for each pair, a case for its verdict, finding and hazard."""

from __future__ import annotations

import re
from xml.etree import ElementTree as xml

from vllm_compat.commands.report import words
from vllm_compat.commands.report.model import Judged, Pair, Report, Standing, Verdict

# Characters that XML 1.0 has no way to hold.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _text(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)


def render(report: Report) -> str:
    """Return the report as JUnit XML."""
    suites = [_suite(pair, report.strict) for pair in report.pairs]
    root = xml.Element("testsuites", {"name": "vllm-compat check"})
    for count in ("tests", "failures", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in suites)))
    root.extend(suites)
    xml.indent(root, " ")
    return '<?xml version="1.0" encoding="utf-8"?>\n' + xml.tostring(root, encoding="unicode")


def _suite(pair: Pair, strict: bool) -> xml.Element:
    suite = xml.Element("testsuite", {"name": _text(pair.title)})
    properties = xml.SubElement(suite, "properties")
    for name, value in (
        ("verdict", pair.verdict.value),
        ("vllm", pair.surface.origin),
        ("downstream", pair.contract.root),
        ("environment", words.environment(pair)),
        ("knowledge", words.knowledge(pair)),
        ("adapters", ", ".join(pair.plan.adapters) if pair.plan else ""),
    ):
        xml.SubElement(properties, "property", {"name": name, "value": _text(value)})
    failed = pair.verdict is Verdict.INCOMPATIBLE or (strict and pair.verdict is Verdict.UNKNOWN)
    case = xml.SubElement(suite, "testcase", {"classname": _text(pair.title), "name": "verdict"})
    if failed:
        xml.SubElement(case, "failure", {"message": _text(pair.reason)})
    elif pair.verdict is Verdict.UNKNOWN:
        xml.SubElement(case, "skipped", {"message": _text(pair.reason)})
    else:
        xml.SubElement(case, "system-out").text = _text(pair.reason)
    for judged in pair.findings:
        _case(suite, pair, judged, strict)
    for hazard in pair.hazards:
        named = {"classname": _text(pair.title), "name": f"hazard: {hazard.key}"}
        case = xml.SubElement(suite, "testcase", named)
        message = {"message": _text(hazard.sentence)}
        if strict:
            element = xml.SubElement(case, "failure", {**message, "type": hazard.harm.value})
        else:
            element = xml.SubElement(case, "skipped", message)
        element.text = _text(
            f"harm: {hazard.harm.value}\nby hand: {hazard.remedy}\nknown of: {hazard.ranges}"
            f"\nsource: {hazard.source}"
        )
    suite.set("tests", str(len(suite.findall("testcase"))))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    return suite


def _case(suite: xml.Element, pair: Pair, judged: Judged, strict: bool) -> None:
    finding = judged.finding
    attributes = {"classname": pair.title, "name": words.heading(finding)}
    if finding.sites:
        attributes["file"] = finding.sites[0].file
        attributes["line"] = str(finding.sites[0].line)
    case = xml.SubElement(suite, "testcase", {k: _text(v) for k, v in attributes.items()})
    lines = [finding.detail, f"call sites: {words.sites(finding, 20)}"]
    if finding.seen:
        lines.append(f"seen: {finding.seen}")
    if words.dated(judged):
        lines.append(f"since: {words.dated(judged)}")
    lines.append(f"repair: {words.repair(judged)}")
    lines += [f"changed: {change}" for change in words.changes(judged)]
    text = _text("\n".join(lines))
    message = {"message": _text(finding.detail)}
    possible = judged.standing is Standing.POSSIBLE and not finding.home
    if judged.standing is Standing.UNMET or (possible and strict):
        xml.SubElement(case, "failure", {**message, "type": finding.kind.value}).text = text
    elif possible:
        xml.SubElement(case, "skipped", message).text = text
    else:
        xml.SubElement(case, "system-out").text = text
