"""Every pair of speculators 0.5 to 0.9 and a recorded vLLM is answered from records, as was found.

The table is what people found who read the sources of five releases of speculators and of thirty of
vLLM, pair by pair, and ran pairs where a CPU can. A letter is one fault.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from packaging.version import Version
from tests.downstreams import wheel

from vllm_compat.analysis.drift import Finding, FindingKind
from vllm_compat.analysis.recorded_downstreams import recorded_names
from vllm_compat.analysis.surface.recorded import recorded_versions
from vllm_compat.commands.check import check, diff
from vllm_compat.commands.report.model import Pair, Verdict
from vllm_compat.errors import UsageError

# fmt: off
BANDS = ("0.11", "0.17", "0.18", "0.22", "0.24", "0.25", "0.30", "0.31")
"""Each begins with this release and ends before the next."""

FOUND = {
    #          <=0.16 0.17   0.18-0.21 0.22-0.23 0.24   0.25-0.29 0.30  0.31-0.34
    "0.5.0":   ("A",  "BC",  "CDE",    "F",      "GHD", "GH",     "GH", "G"),
    "0.6.0.2": ("A",  "B",   "DE",     "IDE",    "HD",  "H",      "H",  ""),
    "0.7.0.2": ("A",  "B",   "DE",     "IDE",    "HD",  "H",      "H",  ""),
    "0.8.1":   ("AJ", "BCJ", "CDE",    "F",      "HD",  "H",      "KH", "K"),
    "0.9.0":   ("AJ", "BCJ", "LCDE",   "F",      "HD",  "H",      "KH", "K"),
}
# What a cell leaves out because the server does not get so far, or because only some models have it:
# the faults behind a refused start, hybrids refused (0.17) or all zero (0.24).
BEHIND = {
    "0.5.0":   ("",   "E",   "",       "GIDE",   "E",   "",       "",   ""),
    "0.6.0.2": ("",   "E",   "",       "",       "E",   "",       "",   ""),
    "0.7.0.2": ("",   "E",   "",       "",       "E",   "",       "",   ""),
    "0.8.1":   ("",   "E",   "",       "IDE",    "E",   "",       "",   ""),
    "0.9.0":   ("L",  "EL",  "",       "IDE",    "E",   "",       "",   ""),
}
# fmt: on

HAZARDS = {
    "last-layer.any-model": "B",
    "chunked-prefill.assert": "C",
    "chunked-prefill.rows": "C",
    "last-layer.deepseek": "D",
    "hybrid.refused": "E",
    "hybrid.nan": "E",
    "hybrid.zero": "E",
    "writer.lock": "G",
    "abort": "H",
    "prefix-caching.rows": "I",
}
FINDINGS = {
    (FindingKind.NAME_MISSING, None): "A",
    (FindingKind.PARAMETER_REQUIRED, "--no-enable-chunked-prefill"): "F",
    (FindingKind.PARAMETER_REQUIRED, "--enable-scale-out"): "K",
    (FindingKind.BEHAVIOUR, "truncation_side"): "L",
}
RENDER = "/v1/chat/completions/render"
RELEASES = [v for v in recorded_versions() if Version(v) >= Version("0.11")]


def letter(finding: Finding) -> str:
    if finding.symbol == RENDER and finding.kind is not FindingKind.PARAMETER_REQUIRED:
        return "J"  # no such route, or one that answers with something else
    return FINDINGS[finding.kind, finding.name]


def letters(pair: Pair) -> set[str]:
    known = {HAZARDS[hazard.key] for hazard in pair.hazards if hazard.key in HAZARDS}
    return known | {letter(judged.finding) for judged in pair.findings}


@pytest.mark.parametrize("downstream", FOUND)
def test_every_pair_is_answered_as_it_was_found(downstream: str) -> None:
    pairs = check([f"speculators=={downstream}"], RELEASES).pairs
    assert [pair.surface.version for pair in pairs] == RELEASES
    for pair in pairs:
        version = Version(pair.surface.version)
        band = max(i for i, first in enumerate(BANDS) if version >= Version(first))
        found = set(FOUND[downstream][band]) | set(BEHIND[downstream][band])
        assert letters(pair) == found, pair.title
        assert pair.verdict is (Verdict.INCOMPATIBLE if found & {"A", "J"} else Verdict.UNKNOWN)
        assert pair.asks > 20


@pytest.mark.parametrize("version", ["0.5.0", "0.9.0"])
def test_a_record_answers_as_the_wheel_does(version: str) -> None:
    for vllm in ("0.16.0", "0.24.0", "0.32.0"):
        (read,) = check([wheel(version)], [vllm]).pairs
        (recorded,) = check([f"speculators=={version}"], [vllm]).pairs
        assert recorded.findings == read.findings
        assert recorded.hazards == read.hazards
        assert (recorded.verdict, recorded.reason) == (read.verdict, read.reason)
        assert (recorded.asks, recorded.notes) == (read.asks, read.notes)


def test_one_pair_is_answered_in_about_a_second_with_nothing_installed(empty_site: Any) -> None:
    arguments = ("check", "--speculators", "0.9.0", "--vllm", "0.24.0", "--format", "json")
    begun = os.times()
    done = empty_site.run("-X", "importtime", "-m", "vllm_compat", *arguments)
    ended = os.times()
    assert done.returncode == 3, done.stderr
    (pair,) = json.loads(done.stdout)["pairs"]
    assert (pair["downstream"]["version"], pair["downstream"]["origin"]) == ("0.9.0", "recorded")
    assert {"hybrid.zero", "abort"} <= {hazard["key"] for hazard in pair["hazards"]}
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "vllm", "speculators"} & imported
    used = ended.children_user + ended.children_system - begun.children_user - begun.children_system
    assert used < 1.5, "CPU seconds, import times printed: 0.4 measured"


def test_an_in_process_release_is_planned_from_its_record() -> None:
    (read,) = check([wheel("0.4.0.1")], ["0.24.0"], device="cpu").pairs
    (recorded,) = check(["speculators==0.4.0.1"], ["0.24.0"], device="cpu").pairs
    assert recorded.plan == read.plan
    assert recorded.findings == read.findings
    assert recorded.contract.root == "recorded"


def test_the_releases_that_are_recorded_are_those_that_extract() -> None:
    assert recorded_names()[0] == "speculators==0.3.0"
    assert set(recorded_names()) >= {f"speculators=={v}" for v in FOUND}
    assert len(recorded_names()) >= 13


def test_a_model_is_judged_from_records() -> None:
    for vllm, last in (("0.24.0", False), ("0.25.0", True)):
        (pair,) = check(["speculators==0.9.0"], [vllm], model="DeepseekV3ForCausalLM").pairs
        assert (pair.verdict is Verdict.INCOMPATIBLE) is not last
        told = " ".join([*pair.notes, *(j.finding.detail for j in pair.findings)])
        says = "offers states of all layers" if last else "offers no state after its last layer"
        assert f"DeepseekV3ForCausalLM {says}" in told


def test_diff_does_not_say_that_nothing_changed_for_a_downstream_that_asks_a_server() -> None:
    with pytest.raises(UsageError, match="asks a server, whose flags and routes diff does not compare"):
        diff("0.24.0", "0.30.0", "speculators==0.9.0")
