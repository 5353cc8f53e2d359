"""Dates of findings: what only may fail on one release and is sure to on the next are two findings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_compat.analysis.contract import CallSite, Contract, SiteKind
from vllm_compat.analysis.drift import Finding, FindingKind
from vllm_compat.commands.checking import dating

SITE = CallSite(SiteKind.ATTRIBUTE, "vllm.Runner.batch", "a", "a.py", 1)
VERSIONS = ("1.0", "2.0", "3.0", "4.0")


def missing(fatal: bool) -> Finding:
    return Finding(FindingKind.ATTRIBUTE_MISSING, "vllm.Runner", "batch", (SITE,), fatal=fatal)


FOUND = {"1.0": (), "2.0": (missing(False),), "3.0": (missing(True),), "4.0": (missing(True),)}


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> dating.History:
    monkeypatch.setattr(dating, "recorded_versions", lambda: VERSIONS)
    monkeypatch.setattr(dating, "find_drifts", lambda contract, surface: FOUND[surface.version])
    monkeypatch.setattr(dating, "untold", lambda contract, surface: ())
    releases = dating.Releases()
    monkeypatch.setattr(
        releases, "fresh", lambda version: SimpleNamespace(version=version, alike=(version,))
    )
    return dating.History(Contract("x", "1", "x", "", (SITE,)), releases)


def test_what_is_sure_dates_from_when_it_was(history: dating.History) -> None:
    (date,) = history.dates([missing(True)], SimpleNamespace(version="4.0"))  # type: ignore[arg-type]
    assert (date.since, date.fitted_last) == ("3.0", "2.0")


def test_what_may_be_dates_from_when_it_could(history: dating.History) -> None:
    (date,) = history.dates([missing(False)], SimpleNamespace(version="2.0"))  # type: ignore[arg-type]
    assert (date.since, date.fitted_last) == ("2.0", "1.0")
