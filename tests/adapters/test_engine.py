"""The second engine in a plan: when it is there, what it leaves out, and what it supplies."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version
from tests.analysis.surface.mutations import Mutated

from vllm_compat.adapters import by_name, make_plan, registry
from vllm_compat.adapters.base import Case
from vllm_compat.adapters.engine import ARGUMENTS, offers
from vllm_compat.analysis.contract import Contract
from vllm_compat.analysis.downstream import read_contract
from vllm_compat.analysis.environment import PUBLIC, STOCK, Environment
from vllm_compat.analysis.installed import OLDEST
from vllm_compat.analysis.plan import Plan, loads
from vllm_compat.analysis.surface.recorded import RecordedSurface, recorded_versions
from vllm_compat.errors import IncompatibleError
from vllm_compat.runtime.patching import Transaction

FAKES = Path(__file__).parents[1] / "fakes"
RELEASES = [v for v in recorded_versions() if Version(v) >= Version(OLDEST)]
REQUEST = "vllm.v1.request"

Install = Callable[..., Plan]


def contract(fake: str = "speculators_0_4") -> Contract:
    return replace(read_contract(FAKES / fake), version="0.4.0.1")


def plan(engine: str, surface: object | None = None, device: str = "cpu") -> Plan:
    given = Environment("3.11.0", (), device, engine=engine)
    return make_plan(contract(), surface or RecordedSurface("0.32.0"), given)  # type: ignore[arg-type]


def test_it_is_in_a_plan_where_it_is_asked_for_and_named_there() -> None:
    asked = plan(PUBLIC)
    assert (asked.engine, asked.is_public) == (PUBLIC, True)
    assert "engine.public" in asked.adapters
    assert loads(asked.dumps()).engine == PUBLIC
    assert plan(STOCK).engine == plan("auto").engine == STOCK
    assert "engine.public" not in plan("auto").adapters


def test_it_leaves_out_what_fits_the_other_engine_and_nothing_else() -> None:
    first, second = set(plan(STOCK).adapters), set(plan(PUBLIC).adapters)
    out = {adapter.name for adapter in registry() if "engine.public" in adapter.excluded_by}
    assert first - second == first & out
    assert second - first == {"engine.public"}
    assert {name.partition(".")[0] for name in out} >= {"scheduler", "kv_cache", "executor", "request"}


@pytest.mark.parametrize("release", RELEASES)
def test_every_recorded_release_offers_what_it_relies_on(release: str) -> None:
    assert offers(RecordedSurface(release))
    assert plan(PUBLIC, RecordedSurface(release)).unmet == ()


def test_its_arguments_are_those_that_are_looked_for() -> None:
    from vllm_compat.engine.driver import arguments

    given = dict.fromkeys(("model_path", "gpu_memory_utilization", "max_num_batched_tokens"))
    assert tuple(arguments({**given, "max_model_len": 9, "tensor_parallel_size": 1})) == ARGUMENTS


def test_a_public_interface_that_does_not_fit_is_refused() -> None:
    path = "vllm.entrypoints.llm.LLM.collective_rpc"
    surface = Mutated(RecordedSurface("0.32.0"), hidden=(path,))
    assert not offers(surface)
    with pytest.raises(IncompatibleError, match="second engine does not fit vLLM"):
        plan(PUBLIC, surface)


def without_requests() -> Mutated:
    names = [
        s for s in ("Request", "RequestStatus") if RecordedSurface("0.32.0").resolve(f"{REQUEST}.{s}")
    ]
    return Mutated(RecordedSurface("0.32.0"), hidden=tuple(f"{REQUEST}.{name}" for name in names))


def test_names_that_are_gone_are_no_reason_to_refuse_and_are_supplied() -> None:
    surface = without_requests()
    assert plan(STOCK, surface).unmet
    chosen = plan("auto", surface)
    assert (chosen.engine, chosen.unmet, chosen.environment.engine) == (PUBLIC, (), "auto")
    assert (
        f"since no adapter repairs name missing: {REQUEST}.Request"
        in chosen.step("engine.public").reason
    )
    asked = plan(PUBLIC, surface)
    assert asked.unmet == ()
    assert asked.step("engine.stand_ins").targets == (f"{REQUEST}:Request", f"{REQUEST}:RequestStatus")


def test_a_stand_in_is_there_until_it_is_taken_back_and_refuses_to_be_called(
    fake_modules: Callable[..., None],
) -> None:
    fake_modules("vllm")
    module = importlib.import_module("vllm.v1.request")
    vars(module).pop("Request")
    asked = plan(PUBLIC, Mutated(RecordedSurface("0.32.0"), hidden=(f"{REQUEST}.Request",)))
    transaction = Transaction()
    by_name("engine.stand_ins").install(transaction, asked)
    with pytest.raises(NotImplementedError, match=r"vllm\.v1\.request\.Request is not in vLLM"):
        module.Request()
    transaction.revert()
    assert not hasattr(module, "Request")


def test_a_module_that_is_gone_is_supplied_with_all_that_lies_above_it() -> None:
    from vllm_compat.adapters.engine import StandIns

    steps = ("gone:*", "gone.below:*")
    asked = plan(PUBLIC)
    step = replace(asked.steps[0], adapter="engine.stand_ins", targets=steps)
    transaction = Transaction()
    StandIns().install(transaction, replace(asked, steps=(step,)))
    anything = importlib.import_module("gone.below").anything
    with pytest.raises(NotImplementedError, match=r"gone\.below\.anything is not in vLLM"):
        anything()
    transaction.revert()
    assert not {"gone", "gone.below"} & sys.modules.keys()


def test_it_is_not_needed_in_a_case_of_the_other_engine() -> None:
    case = Case(
        contract(), RecordedSurface("0.32.0"), Environment("3.11.0", (), "cpu"), (), plan(STOCK).roles
    )
    assert by_name("engine.public").need(case) is None
    assert by_name("engine.public").need(replace(case, engine=PUBLIC)) is not None


def test_it_is_not_chosen_where_it_would_not_help_or_was_not_wanted() -> None:
    surface = without_requests()
    assert plan("auto").engine == STOCK
    assert plan(STOCK, surface).engine == STOCK
    for given in (
        Environment("3.11.0", (), "cpu", capture="stock"),
        Environment("3.11.0", (), "cpu"),
    ):
        gone = () if given.capture == "stock" else ("vllm.entrypoints.llm.LLM.generate",)
        made = make_plan(contract(), Mutated(surface, hidden=gone), given)
        assert made.engine == STOCK
        assert made.unmet
