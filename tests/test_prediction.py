"""Prediction equals reality: what ``check`` says of a pair is held to every record of a real run.

Generic over whatever lies in ``records/``: a cell is any mapping with an outcome and versions.
"""

from __future__ import annotations

import json
import re
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lab.matrix import ELSEWHERE, WITNESSES
from lab.matrix_report import Outcome
from tests.downstreams import VERSIONS, contract, wheel

from vllm_compat.adapters import make_plan, registry
from vllm_compat.analysis.environment import STOCK, Environment
from vllm_compat.analysis.fact_reading import own_features
from vllm_compat.analysis.plan import Plan, Step, loads
from vllm_compat.analysis.surface.recorded import RecordedSurface, closest_record
from vllm_compat.commands.checking.judging import judge
from vllm_compat.commands.report.model import Standing, Verdict

RECORDS = Path(__file__).parent.parent / "records"

KNOWN = frozenset(adapter.name for adapter in registry())
BY_TRANSFORMERS = {adapter.name for adapter in registry() if "transformers" in adapter.decided_by}

FEATURES = frozenset({"generator.save_backlog"})
"""What records name as adapters, and what has become features since."""


@cache
def own(version: str) -> tuple[str, ...]:
    """Return the features that a downstream's source shows by itself."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel(version)) as archive:
        archive.extractall(folder)
        return own_features(Path(folder, "speculators"))


@dataclass(frozen=True)
class Cell:
    """One judged run of stock speculators on a real vLLM."""

    name: str
    record: dict[str, Any]

    @property
    def pair(self) -> tuple[str, str]:
        return self.record["versions"]["speculators"], self.record["versions"]["vllm"]

    @property
    def in_force(self) -> set[str] | None:
        """The adapters in force; None where the run was stock's, or ended before there was a plan."""
        plan = self.record.get("plan")
        return {step["adapter"] for step in plan["steps"]} - FEATURES if plan else None

    @property
    def off(self) -> set[str]:
        """The adapters that were left out."""
        plan = self.record.get("plan") or {}
        return set(self.record.get("without") or plan.get("switched_off") or ()) - FEATURES

    @property
    def environment(self) -> Environment:
        """What the plan was made for, as far as the record tells."""
        plan = self.record.get("plan") or {}
        if "environment" in plan:
            return loads(json.dumps(plan)).environment
        # Cells on the CPU keep no more of a plan than its steps.
        versions = tuple((n, v) for n, v in self.record["versions"].items() if v)
        features = own(self.record["versions"]["speculators"])
        second = any(name.startswith("engine.") for name in (self.in_force or set()) | self.off)
        engine = "auto" if second else STOCK
        return Environment(str(self.record["python"]), versions, "cpu", engine=engine, features=features)

    @property
    def knows_all(self) -> bool:
        """Whether the record tells the whole environment."""
        return "environment" in (self.record.get("plan") or {})

    @property
    def outcome(self) -> str:
        return str(self.record["outcome"])

    @property
    def error(self) -> str:
        """The error's words, without what differs from run to run."""
        text = " ".join(str(self.record.get("error")).split())
        return re.sub(r"(/[\w.+-]+)+", "PATH", text)[:200]

    @property
    def traceback(self) -> str:
        log = self.record.get("log") or ()
        return "\n".join([str(self.record.get("traceback") or ""), *map(str, log)])


def _cells() -> Iterator[Cell]:
    for path in sorted(RECORDS.rglob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("kind") == "faults":  # injected into one plan, which is no cell's
            continue
        for number, cell in enumerate(record.get("cells") or [record]):
            if "outcome" in cell and {"vllm", "speculators"} <= set(cell.get("versions") or ()):
                yield Cell(f"{path.stem}[{number}]", cell)


CELLS = list(_cells())


def cells(*, recorded: bool = True) -> list[Cell]:
    """Return the cells that were run, on releases whose surface is recorded: all but nightlies."""
    run = (c for c in CELLS if c.record["outcome"] != Outcome.SURFACE)
    return [c for c in run if (closest_record(c.pair[1]) is not None) is recorded]


def each(chosen: list[Cell]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cell", chosen, ids=[c.name for c in chosen])


@cache
def surface(release: str) -> RecordedSurface:
    return RecordedSurface(release)


@cache
def plan_now(pair: tuple[str, str], environment: Environment) -> Plan:
    return make_plan(contract(pair[0]), surface(pair[1]), environment)


def ablations() -> list[Cell]:
    return [cell for cell in cells() if cell.off]


def stock() -> list[Cell]:
    """Return the cells that ran without vllm_compat, or with no more of it than a CPU build needs."""
    bare = [c for c in ablations() if len(c.off) > 2 and c.off <= KNOWN]
    return [c for c in cells() if c.in_force is None and not c.off and c.outcome == "failed"] + bare


def places(step: Step) -> set[str]:
    """Return the call sites that a step of a plan names, as ``file:line``."""
    return {*step.sites, *re.findall(r"[\w/]+\.py:\d+", step.reason)}


def test_there_are_records_of_many_kinds() -> None:
    assert {cell.pair[0] for cell in CELLS} == set(VERSIONS)
    assert len({cell.pair[1] for cell in CELLS}) >= 6
    assert any(cell.environment.device == "cuda" for cell in cells())
    assert ablations()
    assert stock()


@each([cell for cell in cells() if cell.in_force is not None])
def test_the_adapters_named_now_are_those_that_were_in_force(cell: Cell) -> None:
    assert cell.in_force is not None
    plan = plan_now(cell.pair, cell.environment)
    recorded = (cell.in_force | cell.off) & KNOWN
    unseen = set() if cell.knows_all else recorded & BY_TRANSFORMERS
    assert recorded - unseen <= set(plan.adapters)
    # What no signature shows may have become known after the record was made; what one shows was there.
    assert {step.adapter for step in plan.steps if step.findings} <= recorded


@each([cell for cell in cells() if cell.in_force and cell.outcome == "right"])
def test_a_pair_that_ran_is_called_usable(cell: Cell) -> None:
    pair = judge(contract(cell.pair[0]), surface(cell.pair[1]), cell.environment, True)
    assert pair.verdict in (Verdict.USABLE, Verdict.WITH_SHIM)
    assert not pair.standing(Standing.UNMET)


@each(ablations())
def test_an_adapter_without_which_a_run_fails_is_named(cell: Cell) -> None:
    assert cell.outcome != "right", "it ran, so that the adapter is not needed"
    unseen = set() if cell.knows_all else cell.off & BY_TRANSFORMERS
    assert cell.off - unseen <= set(plan_now(cell.pair, cell.environment).adapters)


@each([cell for cell in cells() if "needed" in cell.record])
def test_the_adapters_named_are_just_those_that_ablation_shows_to_be_needed(cell: Cell) -> None:
    needed, unshown = (KNOWN & set(cell.record[key]) for key in ("needed", "not_shown"))
    assert cell.record["not_needed"] == []
    assert unshown <= ELSEWHERE | set(WITNESSES)
    named = set(plan_now(cell.pair, cell.environment).adapters)
    unseen = (needed - named) & BY_TRANSFORMERS
    # What no cell can show may be younger than the record.
    younger = (named - needed - unshown) & ELSEWHERE
    assert needed | unshown == (named | unseen) - younger


def test_each_adapter_that_repairs_a_finding_is_shown_to_be_needed() -> None:
    shown = {name for cell in ablations() for name in cell.off if len(cell.off) == 1}
    plans = [plan_now(cell.pair, cell.environment) for cell in cells()]
    repairing = {step.adapter for plan in plans for step in plan.steps if step.findings}
    assert len(repairing) >= 8
    assert repairing <= shown


@each(stock())
def test_a_pair_that_fails_without_the_shim_fails_where_check_says(cell: Cell) -> None:
    plan = plan_now(cell.pair, cell.environment)
    assert plan.steps
    assert cell.outcome == "failed"
    lines = set(re.findall(r'File "[^"]*(speculators/[^"]*)", line (\d+)', cell.traceback))
    named = {place for step in plan.steps for place in places(step)}
    if {f"{file}:{line}" for file, line in lines} & named:
        return
    assert not lines or cell.off, "stock's own traceback names other lines"
    if cell.record.get("worst"):  # no error at all, but rows of other prompts
        assert "worker.capture" in plan.adapters
        return
    # Behaviour that no line shows: it fails as where just one of the adapters named is left out.
    same = {
        name
        for other in ablations()
        if other.pair[1] == cell.pair[1] and other.error == cell.error and len(other.off) == 1
        for name in other.off
    }
    unseen = set() if cell.knows_all else cell.off & BY_TRANSFORMERS
    assert same & (set(plan.adapters) | unseen), cell.error
    assert all(places(plan.step(name)) for name in same & set(plan.adapters))


def of_model(cell: Cell) -> bool:
    """Whether the model was refused and not the pair."""
    return "Hidden states of this model cannot be extracted" in str(cell.record["error"])


@each([cell for cell in cells() if cell.outcome == "refused" and of_model(cell)])
def test_a_refused_model_says_nothing_against_its_pair(cell: Cell) -> None:
    pair = judge(contract(cell.pair[0]), surface(cell.pair[1]), cell.environment, True)
    assert pair.verdict is Verdict.WITH_SHIM


@each([cell for cell in cells() if cell.outcome == "refused" and not of_model(cell)])
def test_what_apply_refused_is_called_incompatible(cell: Cell) -> None:
    pair = judge(contract(cell.pair[0]), surface(cell.pair[1]), cell.environment, True)
    assert pair.verdict is Verdict.INCOMPATIBLE
    unmet = pair.standing(Standing.UNMET)
    assert f"{len(unmet)} call site(s) do not fit" in cell.record["error"]
    assert unmet[0].finding.detail in cell.record["error"]
    assert unmet[0].finding.sites[0].where in cell.record["error"]
