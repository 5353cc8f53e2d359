"""The real downstreams on every recorded release: headers against plans, and synthetic nightlies.

Two sources say where an adapter is needed: its header, written by hand, and the plans that the
recorded surfaces give. They are held against each other here, release by release and device by device.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tests.analysis.surface.mutations import Mutated, called, calls_of, outcome, valid
from tests.downstreams import VERSIONS, contract

from vllm_compat.adapters import by_name, make_plan, registry
from vllm_compat.analysis.contract import SiteKind
from vllm_compat.analysis.drift import Finding, FindingKind, find_drifts
from vllm_compat.analysis.environment import STOCK, Environment
from vllm_compat.analysis.facts import TORCH_FOR_TYPING
from vllm_compat.analysis.installed import OLDEST
from vllm_compat.analysis.plan import Plan
from vllm_compat.analysis.surface import Parameter, ParameterKind, Surface
from vllm_compat.analysis.surface.recorded import RecordedSurface, recorded_versions

RELEASES = [v for v in recorded_versions() if Version(v) >= Version(OLDEST)]
ADAPTERS = [adapter.name for adapter in registry()]

# Environments in which every adapter that depends on one is asked for.
FEATURES = (
    TORCH_FOR_TYPING,
    "missing transformers.modeling_attn_mask_utils:x",
    "offsets asked a.py:1 a:build",
    "draft made by a.py:1 a:Draft _setup text_config prefix norm",
)
ENVIRONMENTS = [
    Environment("3.11.0", (("transformers", "5.19.0"),), device, engine=STOCK, features=FEATURES)
    for device in ("cpu", "cuda")
]

# kv_cache.engine_core answers this call by itself, whatever it takes.
ANSWERED = {"vllm.v1.core.kv_cache_utils.get_kv_cache_config_from_groups"}


@cache
def surface(release: str) -> Surface:
    return RecordedSurface(release)


@cache
def plan(version: str, release: str, number: int = 0) -> Plan:
    return make_plan(contract(version), surface(release), ENVIRONMENTS[number])


@pytest.mark.parametrize("number", range(len(ENVIRONMENTS)), ids=[e.device for e in ENVIRONMENTS])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_is_needed_just_where_its_header_says(
    adapter: str, version: str, number: int
) -> None:
    header = by_name(adapter)
    excepted = [
        SpecifierSet(exception.vllm)
        for exception in header.not_on
        if exception.device == ENVIRONMENTS[number].device
        and SpecifierSet(exception.downstream).contains(version)
    ]
    declared = [
        release
        for release in RELEASES
        if SpecifierSet(header.downstream).contains(version)
        and SpecifierSet(header.vllm).contains(release)
        and not any(releases.contains(release) for releases in excepted)
    ]
    found = [r for r in RELEASES if adapter in plan(version, r, number).adapters]
    if "engine" in header.decided_by:
        assert not found, "nobody has asked for another engine"
    elif header.decided_by:  # these environments have what makes it needed, on every release
        assert set(declared) <= set(found)
    else:
        assert found == declared


@pytest.mark.parametrize("version", VERSIONS)
def test_a_plan_repairs_each_finding_or_says_that_it_stays(version: str) -> None:
    for release in RELEASES:
        for finding in plan(version, release).unmet:
            assert finding.kind is not FindingKind.BEHAVIOUR
            assert finding.sites
            assert finding.detail


# Synthetic nightlies, end to end. The newest release that has nothing unmet is mutated.


@cache
def nightly_base(version: str) -> str:
    return next(r for r in reversed(RELEASES) if not plan(version, r).unmet)


def mutated(version: str, **mutation: object) -> Plan:
    base = surface(nightly_base(version))
    return make_plan(contract(version), Mutated(base, **mutation), ENVIRONMENTS[0])  # type: ignore[arg-type]


def callables(version: str) -> list[str]:
    """Return what a downstream calls and a plan does not mend anyway."""
    base = nightly_base(version)
    mended = {site for step in plan(version, base).steps for site in step.sites}
    return [
        symbol
        for symbol in called(contract(version), surface(base))
        if symbol not in ANSWERED
        and mended.isdisjoint(site.where for site in calls_of(contract(version), symbol))
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_nightly_of_which_nothing_is_known_but_its_name_has_the_same_plan(version: str) -> None:
    same = plan(version, nightly_base(version))
    again = mutated(version)
    assert again.adapters == same.adapters
    assert again.unmet == ()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_keyword_that_went_without_an_adapter_is_refused(version: str) -> None:
    base, tried = surface(nightly_base(version)), 0
    for symbol in callables(version):
        signature = base.signature(symbol)
        resolved = base.resolve(symbol)
        assert signature is not None
        assert resolved is not None
        sites = calls_of(contract(version), symbol)
        for keyword in sorted({k for site in sites for k, _ in site.keywords}):
            rest = valid([p for p in signature.parameters if p.name != keyword])
            if rest is None or not signature.get(keyword) or rest.accepts(keyword):
                continue
            tried += 1
            unmet = mutated(version, signatures=((resolved.path, rest),)).unmet
            assert any(f.symbol == symbol and f.name == keyword for f in unmet), (symbol, keyword)
    assert tried > 10


@pytest.mark.parametrize("version", VERSIONS)
def test_a_new_required_parameter_is_refused_and_an_optional_one_is_not(version: str) -> None:
    base, tried = surface(nightly_base(version)), 0
    for symbol in callables(version):
        signature = base.signature(symbol)
        resolved = base.resolve(symbol)
        assert signature is not None
        assert resolved is not None
        for default in (None, "None"):
            new = Parameter("of_a_nightly", ParameterKind.KEYWORD_ONLY, default)
            last = [p for p in signature.parameters if p.kind is ParameterKind.VAR_KEYWORD]
            others = [p for p in signature.parameters if p.kind is not ParameterKind.VAR_KEYWORD]
            longer = valid([*others, new, *last])
            if longer is None:
                continue
            sites = calls_of(contract(version), symbol)
            tried += 1
            found = mutated(version, signatures=((resolved.path, longer),))
            refused = any(f.symbol == symbol and f.name == new.name for f in found.unmet)
            assert refused is outcome(sites, signature, longer).broken, (symbol, default)
            if default:
                assert found.adapters == plan(version, nightly_base(version)).adapters
    assert tried > 10


def concern(imported: str, findings: Iterable[Finding]) -> bool:
    module, _, name = imported.rpartition(".")
    return any(f.symbol == imported or (f.symbol, f.name) == (module, name) for f in findings)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_import_that_went_is_refused(version: str) -> None:
    base = surface(nightly_base(version))
    for symbol in imports(version):
        resolved = base.resolve(symbol)
        assert resolved is not None
        unmet = mutated(version, hidden=(symbol, resolved.path)).unmet
        assert concern(symbol, unmet), symbol


@pytest.mark.parametrize("version", VERSIONS)
def test_an_import_that_moved_is_followed_or_refused(version: str) -> None:
    base, followed = surface(nightly_base(version)), 0
    for symbol in imports(version):
        module, _, name = symbol.rpartition(".")
        elsewhere = f"{module.rpartition('.')[0] or 'vllm'}.nightly.{name}"
        resolved = base.resolve(symbol)
        assert resolved is not None
        found = mutated(version, hidden=(symbol, resolved.path), moved=((resolved.path, elsewhere),))
        refused = concern(symbol, found.unmet)
        assert refused is not ("imports.moved_names" in found.adapters), symbol
        followed += not refused
    assert followed


def imports(version: str) -> list[str]:
    """Return the names that a downstream imports and the base has where they are imported."""
    moved = {
        f.moved_to for f in find_drifts(contract(version), surface(nightly_base(version))) if f.moved_to
    }
    return sorted(
        {
            site.symbol
            for site in contract(version).sites
            if site.kind is SiteKind.IMPORT
            and not site.optional
            and "." in site.symbol
            and surface(nightly_base(version)).resolve(site.symbol) is not None
        }
        - moved
    )


def test_what_an_adapter_needs_only_now_is_planned_only_now() -> None:
    """An older release that loses what a newer one lost gets that one's adapter, and no other."""
    before, after = plan("0.4.0.1", "0.16.0"), "request.eos_token_id"
    assert after not in before.adapters
    request = surface("0.16.0").signature("vllm.v1.request.Request")
    assert request is not None
    rest = valid([p for p in request.parameters if p.name != "eos_token_id"])
    assert rest is not None
    nightly = Mutated(surface("0.16.0"), signatures=(("vllm.v1.request.Request", rest),))
    found = make_plan(contract("0.4.0.1"), nightly, ENVIRONMENTS[0])
    assert set(found.adapters) - set(before.adapters) == {after}
    assert found.unmet == ()


@pytest.mark.parametrize(
    ("version", "release", "torch", "wanted"),
    [
        ("0.4.0.1", "0.29.0", "2.13.0+cpu", False),
        ("0.4.0", "0.33.0", "2.13.0+cpu", False),
        ("0.4.0.1", "0.29.0", "2.13.0", True),  # built for CUDA: torch raises
        ("0.4.0.1", "0.28.0", "2.13.0+cpu", True),  # (0, 0) would plan a cache of no blocks
        ("0.3.0", "0.29.0", "2.13.0+cpu", True),  # asks torch.cuda itself
    ],
)
def test_memory_is_answered_where_nothing_else_will_do(
    version: str, release: str, torch: str, wanted: bool
) -> None:
    environment = Environment("3.11.7", (("torch", torch),), "cpu")
    made = make_plan(contract(version), surface(release), environment)
    assert ("device.mem_get_info" in made.adapters) is wanted
