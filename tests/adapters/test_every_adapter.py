"""What holds for every adapter, whatever it does: it goes in, is what its header says, and comes out.

Generic over the registry: a new adapter needs nothing here. The FAKE downstreams are planned on every
recorded release of the real vLLM until a plan has the adapter. What the headers of that plan name as
targets is then made in this process, as callables with the signatures of that release, and nothing
else: a patch of anything else, or of what has another signature than the plan has read, fails.
"""

from __future__ import annotations

import inspect
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest
from packaging.specifiers import SpecifierSet
from wrapt import FunctionWrapper

from vllm_compat.adapters import by_name, make_plan, planner, registry
from vllm_compat.adapters.base import Adapter
from vllm_compat.analysis.contract import Contract
from vllm_compat.analysis.downstream import read_contract
from vllm_compat.analysis.environment import PUBLIC, STOCK, Environment
from vllm_compat.analysis.fact_reading import read_features
from vllm_compat.analysis.installed import OLDEST
from vllm_compat.analysis.plan import Plan
from vllm_compat.analysis.surface import Signature, Surface
from vllm_compat.analysis.surface.recorded import RecordedSurface, recorded_versions
from vllm_compat.runtime.patching import Transaction

FAKES = Path(__file__).parents[1] / "fakes"
DOWNSTREAMS = {"0.3.0": "speculators_0_3", "0.4.0.1": "speculators_0_4"}
DEVICES = ("cpu", "cuda")
RELEASES = [r for r in reversed(recorded_versions()) if SpecifierSet(f">={OLDEST}").contains(r)]
PERMUTATIONS = 100

NOT_WITH_FAKES: dict[str, str] = {
    "engine.stand_ins": "no recorded release lacks a name that has not moved; see test_engine.py"
}
"""Adapters that no plan of a FAKE has, each with the reason."""

MISSING = {"imports.moved_names": "it sets names where they are missing because they have moved"}
"""Adapters whose targets are not there, each with the reason."""

ALSO_IMPORTED = {
    # The FAKE has no EAGLE-1 model; the real one imports this, as that of 0.4 does.
    "0.3.0": ("missing transformers.modeling_attn_mask_utils:_prepare_4d_causal_attention_mask",),
    "0.4.0.1": (),
}
"""Features of the real downstreams that their FAKES lack."""

ANY = Signature()

each = pytest.mark.parametrize("adapter", registry(), ids=lambda adapter: adapter.name)


class Where(NamedTuple):
    """One downstream on one release on one device, served by one engine."""

    version: str
    release: str
    device: str
    engine: str = STOCK


EVERYWHERE = [Where(*where) for where in product(DOWNSTREAMS, RELEASES, DEVICES)]
EVERYWHERE += [Where(*where, PUBLIC) for where in product(DOWNSTREAMS, RELEASES[:1], DEVICES)]


@cache
def contract(version: str) -> Contract:
    return replace(read_contract(FAKES / DOWNSTREAMS[version]), version=version)


@cache
def surface(release: str) -> Surface:
    return RecordedSurface(release)


@cache
def environment(version: str, device: str) -> Environment:
    """Return one with a transformers 5, so that what depends on that is needed too."""
    downstream, transformers = FAKES / DOWNSTREAMS[version], FAKES / "transformers_5"
    features = read_features(downstream / "speculators", transformers / "transformers")
    features += ALSO_IMPORTED[version]
    return Environment("3.11.0", (("transformers", "5.0.0"),), device, features=features)


@cache
def plan_of(where: Where) -> Plan:
    given = replace(environment(where.version, where.device), engine=where.engine)
    return make_plan(contract(where.version), surface(where.release), given)


@cache
def needing(*names: str) -> Where | None:
    """Return where a plan has all these adapters, on the newest release that has one."""
    return next((w for w in EVERYWHERE if set(names) <= set(plan_of(w).adapters)), None)


def declared(adapter: Adapter) -> set[Where]:
    """Return where an adapter's header says that it is needed."""
    return {
        where
        for where in EVERYWHERE
        if adapter.name not in NOT_WITH_FAKES
        and ("engine" not in adapter.decided_by or where.engine == PUBLIC)
        and ("engine.public" not in adapter.excluded_by or where.engine != PUBLIC)
        and SpecifierSet(adapter.vllm).contains(where.release)
        and SpecifierSet(adapter.downstream).contains(where.version)
        and not any(
            exception.device == where.device
            and SpecifierSet(exception.vllm).contains(where.release)
            and SpecifierSet(exception.downstream).contains(where.version)
            for exception in adapter.not_on
        )
    }


class World:
    """The modules that a plan's targets stand in, made for one test."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self.plan = plan_of(where)
        self.modules: dict[str, ModuleType] = {}
        self._module("torch")
        for step in self.plan.steps:
            for target in by_name(step.adapter).targets_of(self.plan):
                self._add(target)
            for told in step.targets:  # what has moved is in its new place, ``old=new``
                new = told.partition("=")[2]
                if new:
                    self._add(":".join(new.rsplit(".", 1)))

    def _module(self, name: str) -> ModuleType:
        parent = name.rpartition(".")[0]
        if parent:
            self._module(parent)
        made = self.modules.setdefault(name, ModuleType(name))
        made.__path__ = []
        return made

    def _add(self, target: str) -> None:
        module, colon, path = target.partition(":")
        if not colon or path == "*" or module.partition(".")[0] in sys.stdlib_module_names:
            return
        parent: Any = self._module(module)
        *classes, name = path.split(".")
        for part in classes:
            if part not in vars(parent):
                setattr(parent, part, type(part, (), {}))
            parent = vars(parent)[part]
        if name not in vars(parent):
            signature = self._signature(module, path)
            setattr(parent, name, _callable(name, signature))
            if name == "__init__":
                parent.__signature__ = signature

    def _signature(self, module: str, path: str) -> inspect.Signature:
        """Return the signature that this release's callable has, wherever it is bound."""
        name = path.removesuffix(".__init__")
        symbols = [f"{module}.{name}"]
        symbols += [
            s.symbol for s in contract(self.where.version).sites if s.symbol.endswith(f".{name}")
        ]
        known = (surface(self.where.release).signature(symbol) for symbol in symbols)
        read = next(filter(None, known), ANY)
        return inspect.Signature(
            [
                inspect.Parameter(p.name, inspect._ParameterKind[p.kind.name], default=default)
                for p in read.parameters
                for default in [inspect.Parameter.empty if p.required else p.default]
            ],
            __validate_parameters__=False,
        )

    def install(self, names: Sequence[str]) -> Transaction:
        """Put adapters in force, in this order."""
        transaction = Transaction()
        for name in names:
            by_name(name).install(transaction.owned_by(name), self.plan)
        return transaction

    def chain(self, target: str) -> list[str]:
        """Return the wrappers around a target, the outermost first."""
        module, _, path = target.partition(":")
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = vars(found).get(part) if found is not None else None
        names = []
        while isinstance(found, FunctionWrapper):
            wrapper = found._self_wrapper
            names.append(f"{wrapper.__module__}.{wrapper.__qualname__}")
            found = found.__wrapped__
        return names

    def snapshot(self) -> dict[str, object]:
        """Return all that a patch could have touched, by name."""
        found: dict[str, object] = {f"environment {k}": v for k, v in os.environ.items()}
        found |= {f"finder {number}": finder for number, finder in enumerate(sys.meta_path)}
        modules = {**self.modules, "concurrent.futures.thread": sys.modules["concurrent.futures.thread"]}
        for module in modules.values():
            for name, value in vars(module).items():
                found[f"{module.__name__}:{name}"] = value
                if isinstance(value, type) and value.__module__ in (__name__, module.__name__):
                    found |= {f"{module.__name__}:{name}.{k}": v for k, v in vars(value).items()}
        return found


def _callable(name: str, signature: inspect.Signature) -> Any:
    def stand_in(*args: Any) -> None: ...

    made = FunctionType(stand_in.__code__, stand_in.__globals__, name)
    made.__signature__ = signature  # type: ignore[attr-defined]
    return made


@contextmanager
def world(where: Where) -> Iterator[World]:
    """Make a world importable, and forget it again."""
    import concurrent.futures.thread  # noqa: F401  what adapters patch of the standard library

    made, kept = World(where), sys.modules.copy()
    sys.modules.update(made.modules)
    try:
        yield made
    finally:
        sys.modules.clear()
        sys.modules.update(kept)


def same(one: dict[str, object], other: dict[str, object]) -> bool:
    return one.keys() == other.keys() and all(
        one[k] is other[k] or (k.startswith("environment ") and one[k] == other[k]) for k in one
    )


def test_what_the_fakes_cannot_give_is_known() -> None:
    assert {a.name for a in registry() if needing(a.name) is None} == set(NOT_WITH_FAKES)


with_fakes = pytest.mark.parametrize(
    "adapter", [a for a in registry() if a.name not in NOT_WITH_FAKES], ids=lambda adapter: adapter.name
)


def place(*names: str) -> Where:
    found = needing(*names)
    assert found is not None, f"no plan of a FAKE has {names}"
    return found


@with_fakes
def test_it_enlists_just_the_targets_that_its_header_names(adapter: Adapter) -> None:
    with world(place(adapter.name)) as made:
        transaction = made.install([adapter.name])
        try:
            assert {patch.state for patch in transaction.patches} == {"in force"}
            assert {patch.owner for patch in transaction.patches} == {adapter.name}
            enlisted = [patch.target for patch in transaction.patches]
            assert enlisted == list(adapter.targets_of(made.plan))
            assert len(set(enlisted)) == len(enlisted)
        finally:
            transaction.revert()


def is_there(target: str, where: Where) -> bool:
    """Tell whether a target is in the recorded vLLM, or in the source of a FAKE."""
    module, colon, path = target.partition(":")
    package = module.partition(".")[0]
    if not colon or path == "*" or package in sys.stdlib_module_names:
        return True
    if package == "vllm":
        symbol = f"{module}.{path.removesuffix('.__init__').removesuffix('.__post_init__')}"
        return surface(where.release).resolve(symbol) is not None
    folders = {"speculators": DOWNSTREAMS[where.version], "transformers": "transformers_5"}
    folder = FAKES / folders.get(package, package)
    source = folder.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    return all(re.search(rf"\b{name}\b", source) for name in path.split("."))


@with_fakes
def test_what_it_patches_is_there_unless_it_is_needed_because_that_is_missing(adapter: Adapter) -> None:
    for where in EVERYWHERE:
        if adapter.name in plan_of(where).adapters:
            for target in adapter.targets_of(plan_of(where)):
                there = adapter.name not in MISSING
                assert is_there(target, where) is there, f"{target} on {where}"


@with_fakes
def test_every_target_of_its_header_is_filled_in(adapter: Adapter) -> None:
    plan = plan_of(place(adapter.name))
    assert len(adapter.targets_of(plan)) >= len(adapter.targets)
    assert set(adapter.told(plan)) <= {*adapter.targets_of(plan), *plan.step(adapter.name).targets}


@with_fakes
def test_it_leaves_nothing_behind_and_goes_in_once_when_it_is_applied_again(adapter: Adapter) -> None:
    with world(place(adapter.name)) as made:
        before = made.snapshot()
        first = made.install([adapter.name])
        assert not same(made.snapshot(), before)
        chains = {patch.target: made.chain(patch.target) for patch in first.patches}
        assert first.revert() == []
        assert same(made.snapshot(), before)
        again = made.install([adapter.name])
        assert {patch.target: made.chain(patch.target) for patch in again.patches} == chains
        assert max(map(len, chains.values())) <= 1
        assert again.revert() == []
        assert same(made.snapshot(), before)


@pytest.mark.parametrize(
    ("one", "other"),
    [pytest.param(*pair, id=f"{pair[0].name}-{pair[1].name}") for pair in combinations(registry(), 2)],
)
def test_two_adapters_of_a_plan_stand_side_by_side(one: Adapter, other: Adapter) -> None:
    where = needing(one.name, other.name)
    if where is None:
        excluded = other.name in one.excluded_by or one.name in other.excluded_by
        assert excluded or not declared(one) & declared(other), "no plan has both, and no header says it"
        return
    with world(where) as made:
        before, found = made.snapshot(), []
        for names in ((one.name, other.name), (other.name, one.name)):
            transaction = made.install(names)
            assert {patch.state for patch in transaction.patches} == {"in force"}
            found.append({patch.target: made.chain(patch.target) for patch in transaction.patches})
            assert transaction.revert() == []
            assert same(made.snapshot(), before)
        assert found[0] == found[1]


def fullest() -> list[Where]:
    """Return, for each downstream and device, the release whose plan has most adapters."""
    return [
        max(
            (w for w in EVERYWHERE if (w.version, w.device, w.engine) == (*kind, STOCK)),
            key=lambda where: len(plan_of(where).adapters),
        )
        for kind in product(DOWNSTREAMS, DEVICES)
    ]


@pytest.mark.parametrize("where", fullest(), ids="-".join)
def test_the_order_of_installation_does_not_matter(where: Where) -> None:
    drawn = random.Random(20)
    with world(where) as made:
        before, found = made.snapshot(), []
        for _ in range(PERMUTATIONS):
            names = list(made.plan.adapters)
            drawn.shuffle(names)
            transaction = made.install(names)
            assert {patch.state for patch in transaction.patches} == {"in force"}
            found.append({p.target: (p.owner, made.chain(p.target)) for p in transaction.patches})
            assert transaction.revert() == []
            assert same(made.snapshot(), before)
        assert len(found[0]) > len(made.plan.steps)
        assert all(result == found[0] for result in found)


@pytest.mark.parametrize("where", fullest(), ids="-".join)
def test_a_plan_has_its_adapters_by_their_order_however_they_are_found(where: Where) -> None:
    drawn, adapters = random.Random(20), list(registry())
    for _ in range(PERMUTATIONS // 10):
        drawn.shuffle(adapters)
        given = replace(environment(where.version, where.device), engine=where.engine)
        plan = planner.make_plan(contract(where.version), surface(where.release), given, adapters)
        assert plan.digest == plan_of(where).digest
    places = [by_name(name).order for name in plan_of(where).adapters]
    assert places == sorted(places)


def test_an_adapter_that_another_one_excludes_is_in_no_plan_with_it() -> None:
    for adapter in registry():
        for other in adapter.excluded_by:
            assert needing(adapter.name, other) is None
            above = set(by_name(other).excluded_by)
            assert above <= set(adapter.excluded_by), (
                "what excludes is in the plan, or excluded likewise"
            )
