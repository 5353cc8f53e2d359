"""Plans are pure: the same for the same three inputs, whole when handed on as text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from vllm_compat.adapters import by_name, make_plan, registry
from vllm_compat.adapters.base import Case
from vllm_compat.analysis.contract import Contract
from vllm_compat.analysis.downstream import read_contract
from vllm_compat.analysis.environment import STOCK, Environment
from vllm_compat.analysis.fact_reading import read_features
from vllm_compat.analysis.plan import Plan, Roles, Step, loads
from vllm_compat.analysis.planner import roles_of
from vllm_compat.analysis.surface.recorded import RecordedSurface, recorded_versions
from vllm_compat.errors import IncompatibleError, UsageError
from vllm_compat.runtime.patching import Transaction

FAKES = Path(__file__).parents[1] / "fakes"
DOWNSTREAMS = {"0.3.0": "speculators_0_3", "0.4.0.1": "speculators_0_4"}
RELEASES = [v for v in recorded_versions() if SpecifierSet(">=0.11.0").contains(v)]
DEVICES = ("cpu", "cuda")

words = st.text(st.characters(codec="utf-8"), max_size=20)
plans = st.builds(
    Plan,
    downstream=words,
    downstream_version=words,
    vllm=words,
    roles=st.builds(Roles, package=words, generator=words, extension=words),
    environment=st.builds(
        Environment,
        python=words,
        versions=st.lists(st.tuples(words, words), max_size=3).map(tuple),
        device=st.sampled_from(["cpu", "cuda", "rocm", "unknown"]),
        capture=st.sampled_from(["auto", "hooks", "stock"]),
        transfer=st.sampled_from(["auto", "rpc"]),
        features=st.lists(words, max_size=3).map(tuple),
    ),
    steps=st.lists(
        st.builds(
            Step,
            adapter=words,
            reason=words,
            processes=st.lists(words, max_size=2).map(tuple),
            sites=st.lists(words, max_size=2).map(tuple),
            targets=st.lists(words, max_size=2).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
    guarded=st.lists(words, max_size=2).map(tuple),
    switched_off=st.lists(words, max_size=2).map(tuple),
)


@settings(deadline=None)
@given(plans)
def test_a_plan_survives_being_text(plan: Plan) -> None:
    again = loads(plan.dumps())
    assert again == plan
    assert again.dumps() == plan.dumps()
    assert again.digest == plan.digest
    assert len(plan.digest) == 12
    assert set(plan.digest) <= set("0123456789abcdef")


@settings(deadline=None)
@given(plans, plans)
def test_the_digest_tells_plans_apart(one: Plan, other: Plan) -> None:
    assert (one.digest == other.digest) is (one == other)


def test_the_digest_of_a_plan_is_the_same_everywhere(make_case: Callable[..., Case]) -> None:
    plan = Plan("d", "1", "0.16.0", Roles("d"), Environment("3.11.0", (), "cpu"))
    assert plan.digest == loads(plan.dumps()).digest == replace(plan).digest
    assert plan.digest != replace(plan, vllm="0.17.0").digest
    unused = ("vllm/sequence.py", "FAKE", "SHAM")  # read anew, in another folder
    cases = [make_case(), make_case("speculators_0_3", unused)]
    assert len({make_plan(c.contract, c.surface, c.environment).digest for c in cases}) == 1


def changed(**parts: object) -> str:
    plan = Plan("d", "1", "0.16.0", Roles("d"), Environment("3.11.0", (), "cpu"))
    record = json.loads(plan.dumps())
    for name, value in parts.items():
        if value is None:
            del record[name]
        else:
            record[name] = value
    return json.dumps(record)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        "[]",
        "null",
        '"plan"',
        "{}",
        changed(steps=None),
        changed(steps=[{}]),
        changed(steps=7),
        changed(environment={}),
        changed(environment={"versions": [], "features": []}),
        changed(environment="cpu"),
        changed(roles={"unknown": 1}),
        changed(roles=[]),
        changed(guarded=7),
    ],
)
def test_a_text_that_is_no_plan_is_refused_in_words(text: str) -> None:
    with pytest.raises(UsageError, match="VLLM_COMPAT_PLAN holds no readable plan"):
        loads(text)


def test_a_plan_of_another_vllm_compat_is_refused_with_the_cure() -> None:
    with pytest.raises(UsageError, match="schema 2, this vllm_compat reads 1: driver and worker"):
        loads(changed(schema=2))


def test_every_step_has_a_reason_and_its_adapters_processes(
    make_case: Callable[..., Case],
) -> None:
    case = make_case()
    plan = make_plan(case.contract, case.surface, case.environment)
    assert (plan.downstream, plan.vllm, plan.unmet) == ("speculators", "0.16.0", ())
    assert plan.adapters == tuple(sorted(plan.adapters)), "the order of module and definition"
    for step in plan.steps:
        assert step.reason
        assert step.processes == tuple(sorted(by_name(step.adapter).processes))
        assert plan.step(step.adapter) is step


def test_the_roles_are_read_from_the_call_sites(make_case: Callable[..., Case]) -> None:
    package = "speculators.data_generation"
    for downstream in DOWNSTREAMS.values():
        roles = roles_of(make_case(downstream).contract)
        assert roles.package == "speculators"
        assert roles.generator_module == f"{package}.vllm_hidden_states_generator"
        assert roles.generator.endswith(":VllmHiddenStatesGenerator")
        assert roles.extension_module == f"{package}.custom_worker"
        assert roles.extension.endswith(":HiddenStatesWorkerExtension")
    assert roles_of(make_case("speculators_0_5").contract) == Roles("speculators")


def test_an_adapter_that_is_left_out_is_not_there_and_its_drift_does_not_count(
    make_case: Callable[..., Case],
) -> None:
    case = make_case()
    plan = make_plan(
        case.contract, case.surface, case.environment, switched_off=["config.is_encoder_decoder"]
    )
    assert "config.is_encoder_decoder" not in plan.adapters
    assert plan.switched_off == ("config.is_encoder_decoder",)
    plan.refuse()


def test_an_unknown_adapter_cannot_be_left_out(make_case: Callable[..., Case]) -> None:
    case = make_case()
    with pytest.raises(UsageError, match=r"no adapter 'config\.nothing'.*config\.block_size"):
        make_plan(case.contract, case.surface, case.environment, switched_off=["config.nothing"])


def test_what_stays_unmet_is_refused_with_places_and_a_way_on(
    make_case: Callable[..., Case],
) -> None:
    case = make_case(
        "speculators_0_4",
        ("vllm/v1/request.py", "arrival_time: float | None = None,", ""),
        ("vllm/sampling_params.py", "class SamplingParams", "class Sampling"),
    )
    plan = make_plan(case.contract, case.surface, case.environment)
    assert len(plan.unmet) == 2
    with pytest.raises(IncompatibleError) as caught:
        plan.refuse()
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("speculators ")
    assert "cannot run on vLLM 0.16.0: 2 call site(s) do not fit" in lines[0]
    for line in lines[1:3]:
        assert "speculators/data_generation/vllm_hidden_states_generator.py:" in line
    assert "vllm-compat check" in lines[-1]


def test_a_value_that_fits_only_sometimes_is_guarded_not_refused(
    make_case: Callable[..., Case],
) -> None:
    case = make_case("speculators_0_4")
    plan = make_plan(case.contract, case.surface, case.environment)
    assert plan.guarded == ("vllm.v1.executor.multiproc_executor.MultiprocExecutor.sample_tokens",)
    assert plan.unmet == ()


@cache
def fake_contract(version: str) -> Contract:
    contract = read_contract(FAKES / DOWNSTREAMS[version])
    return replace(contract, version=version)


@cache
def recorded_plan(version: str, release: str, device: str) -> Plan:
    """Plan a FAKE downstream on a recorded release of the real vLLM."""
    features = read_features(FAKES / DOWNSTREAMS[version] / "speculators", None)
    environment = Environment("3.11", (), device, engine=STOCK, features=features)
    return make_plan(fake_contract(version), RecordedSurface(release), environment)


SURFACE_ADAPTERS = [a for a in registry() if not {"transformers", "engine"} & set(a.decided_by)]


@pytest.mark.parametrize("adapter", SURFACE_ADAPTERS, ids=lambda adapter: adapter.name)
def test_the_declared_range_is_where_the_recorded_releases_need_it(adapter: object) -> None:
    name, header = adapter.name, SpecifierSet(adapter.vllm)  # type: ignore[attr-defined]
    downstream = SpecifierSet(adapter.downstream)  # type: ignore[attr-defined]
    needed, served = set(), set()
    for version in DOWNSTREAMS:
        for release in RELEASES:
            plans = [recorded_plan(version, release, device) for device in DEVICES]
            if any(name in plan.adapters for plan in plans):
                needed.add(release)
                assert downstream.contains(version), f"{name} is needed by {version}"
                assert header.contains(release), f"{name} is needed on {release}"
            if not plans[0].unmet and downstream.contains(version):
                served.add(release)
    missing = {r for r in served if header.contains(r)} - needed
    assert not missing, f"{name} declares releases that do not need it"


@pytest.mark.parametrize("version", DOWNSTREAMS)
def test_no_two_adapters_of_a_plan_change_one_thing(version: str) -> None:
    for release in RELEASES:
        plan = recorded_plan(version, release, "cpu")
        transaction = Transaction()
        try:
            for step in plan.steps:
                by_name(step.adapter).install(transaction.owned_by(step.adapter), plan)
            targets = Counter(patch.target for patch in transaction.patches)
            assert max(targets.values()) == 1, f"{release}: {targets.most_common(1)}"
        finally:
            transaction.revert()


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.3.0", r) for r in ("0.11.0", "0.12.0", "0.16.0", "0.17.0", "0.32.0")]
    + [("0.4.0.1", r) for r in ("0.12.0", "0.16.0", "0.17.0", "0.32.0")],
)
def test_the_pairs_that_are_served_have_nothing_unmet(version: str, release: str) -> None:
    assert recorded_plan(version, release, "cpu").unmet == ()


def test_a_later_downstream_needs_fewer_adapters_on_its_own_releases() -> None:
    for release in ("0.12.0", "0.16.0", "0.17.0"):
        older = set(recorded_plan("0.3.0", release, "cpu").adapters)
        newer = set(recorded_plan("0.4.0.1", release, "cpu").adapters)
        assert newer - older == {"generator.input_order", "device.accelerator_name"}
        assert len(newer) < len(older)
