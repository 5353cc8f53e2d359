"""Findings: the known history, small cases of every kind, and synthetic nightlies."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.analysis.surface import packages
from tests.analysis.surface.mutations import Mutated, called, calls_of, outcome, valid
from tests.dating import since
from tests.downstreams import VERSIONS, contract

from vllm_compat.analysis.contract import CallSite, Contract, SiteKind, Use
from vllm_compat.analysis.drift import (
    Finding,
    FindingKind,
    bind,
    find_drifts,
    prefixes,
    render,
    union,
)
from vllm_compat.analysis.surface import (
    Parameter,
    ParameterKind,
    Signature,
    SourceSurface,
    SymbolKind,
)
from vllm_compat.analysis.surface.recorded import RecordedSurface, recorded_until, recorded_versions

EXECUTOR = "vllm.v1.executor.multiproc_executor.MultiprocExecutor"
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
REQUEST = "vllm.v1.request.Request"
UTILS = "vllm.v1.core.kv_cache_utils"
PLANNING = "vllm.v1.core.kv_cache_planning"
RUNNER = "vllm.v1.worker.gpu_worker.Worker.model_runner"

K = FindingKind

# kind, symbol, name, first release, last release: as read by people from the sources.
HISTORY: dict[str, list[tuple[FindingKind, str, str | None, str, str]]] = {
    "0.3.0": [
        (K.NAME_MISSING, f"{UTILS}._get_kv_cache_groups_uniform_spec", None, "0.10.2", "0.10.2"),
        (K.NAME_MISSING, f"{UTILS}.get_kv_cache_config_from_groups", None, "0.10.2", "0.10.2"),
        (K.PARAMETER_REQUIRED, SCHEDULER, "block_size", "0.11.1", "0.33.0"),
        (K.RETURN_SHAPE, f"{EXECUTOR}.execute_model", "sample_tokens", "0.11.1", "0.33.0"),
        (K.RETURN_SHAPE, f"{EXECUTOR}.collective_rpc", "unique_reply_rank", "0.11.1", "0.33.0"),
        (
            K.PARAMETER_REMOVED,
            f"{UTILS}.get_kv_cache_config_from_groups",
            "kv_cache_specs",
            "0.12.0",
            "0.33.0",
        ),
        (
            K.PARAMETER_REQUIRED,
            "vllm.config.SchedulerConfig",
            "is_encoder_decoder",
            "0.12.0",
            "0.33.0",
        ),
        (K.PARAMETER_REMOVED, REQUEST, "eos_token_id", "0.17.0", "0.33.0"),
        (K.NAME_MOVED, f"{UTILS}._get_kv_cache_groups_uniform_spec", None, "0.33.0", "0.33.0"),
        (K.NAME_MOVED, f"{UTILS}.get_kv_cache_config_from_groups", None, "0.33.0", "0.33.0"),
        (K.NAME_MOVED, f"{UTILS}.unify_hybrid_kv_cache_specs", None, "0.33.0", "0.33.0"),
    ],
    "0.4.0.1": [
        (K.MODULE_MISSING, "vllm.utils.hashing", "get_hash_fn_by_name", "0.10.2", "0.11.0"),
        (K.NAME_MISSING, f"{UTILS}._get_kv_cache_groups_uniform_spec", None, "0.10.2", "0.10.2"),
        (K.NAME_MISSING, f"{UTILS}.get_kv_cache_config_from_groups", None, "0.10.2", "0.10.2"),
        (K.PARAMETER_REMOVED, SCHEDULER, "block_size", "0.10.2", "0.11.0"),
        (
            K.PARAMETER_REMOVED,
            "vllm.config.SchedulerConfig",
            "is_encoder_decoder",
            "0.10.2",
            "0.11.0",
        ),
        (K.ATTRIBUTE_MISSING, EXECUTOR, "sample_tokens", "0.10.2", "0.11.0"),
        (K.RETURN_SHAPE, f"{EXECUTOR}.collective_rpc", None, "0.10.2", "0.11.0"),
        (
            K.PARAMETER_REQUIRED,
            f"{UTILS}.get_kv_cache_config_from_groups",
            "kv_cache_specs",
            "0.11.0",
            "0.11.2",
        ),
        (K.ARGUMENT_TYPE, f"{EXECUTOR}.sample_tokens", "grammar_output", "0.11.1", "0.33.0"),
        (K.ATTRIBUTE_MISSING, RUNNER, "input_batch", "0.12.0", "0.33.0"),
        (K.PARAMETER_REMOVED, REQUEST, "eos_token_id", "0.17.0", "0.33.0"),
        (K.NAME_MOVED, f"{UTILS}._get_kv_cache_groups_uniform_spec", None, "0.33.0", "0.33.0"),
        (K.NAME_MOVED, f"{UTILS}.get_kv_cache_config_from_groups", None, "0.33.0", "0.33.0"),
        (K.NAME_MOVED, f"{UTILS}.unify_hybrid_kv_cache_specs", None, "0.33.0", "0.33.0"),
    ],
}
HISTORY["0.4.0"] = HISTORY["0.4.0.1"]
DEPENDS_ON_THE_RUN = {("argument type", "grammar_output"), ("attribute missing", "input_batch")}


def found_in(contract: Contract, version: str) -> dict[tuple[str, str, str | None], Finding]:
    return {f.key[:3]: f for f in find_drifts(contract, RecordedSurface(version))}


class TestHistory:
    @pytest.mark.parametrize("speculators", VERSIONS)
    @pytest.mark.parametrize("vllm", [v for v in recorded_versions() if v <= "0.33.0"])
    def test_every_release(self, speculators: str, vllm: str) -> None:
        order = recorded_versions()
        at = order.index(vllm)
        wanted = {
            (kind.value, symbol, name)
            for kind, symbol, name, first, last in HISTORY[speculators]
            if order.index(first) <= at <= order.index(last)
        }
        assert set(found_in(contract(speculators), vllm)) == wanted

    def test_one_fatal_finding_on_0_17(self) -> None:
        (fatal,) = (f for f in found_in(contract("0.4.0.1"), "0.17.0").values() if f.fatal)
        assert (fatal.kind, fatal.symbol, fatal.name) == (
            FindingKind.PARAMETER_REMOVED,
            REQUEST,
            "eos_token_id",
        )
        (site,) = fatal.sites
        assert site.where == "speculators/data_generation/vllm_hidden_states_generator.py:264"
        assert fatal.seen is not None
        assert fatal.seen.startswith("(request_id, prompt_token_ids, ")
        assert fatal.detail == "Request takes no eos_token_id here."

    def test_what_depends_on_the_run_is_not_fatal(self) -> None:
        for version in recorded_versions():
            # Where no runner that a worker may have has it, nothing depends on the run.
            nowhere = RecordedSurface(version).resolve(f"{RUNNER}.input_batch") is None
            for finding in found_in(contract("0.4.0.1"), version).values():
                told = (finding.kind.value, finding.name or "") in DEPENDS_ON_THE_RUN
                assert finding.fatal is not (told and not (finding.name == "input_batch" and nowhere))

    def test_moved_names_say_where_to(self) -> None:
        for finding in found_in(contract("0.4.0"), "0.33.0").values():
            if finding.kind is FindingKind.NAME_MOVED:
                name = finding.symbol.rsplit(".", 1)[-1]
                assert finding.moved_to == f"{PLANNING}.{name}"
        hashing = found_in(contract("0.4.0"), "0.11.0")[
            ("module missing", "vllm.utils.hashing", "get_hash_fn_by_name")
        ]
        assert hashing.moved_to == "vllm.utils.get_hash_fn_by_name"

    def test_a_moved_name_is_judged_in_its_new_place(self) -> None:
        key = ("parameter removed", f"{UTILS}.get_kv_cache_config_from_groups", "kv_cache_specs")
        assert key in found_in(contract("0.3.0"), "0.33.0")

    @pytest.mark.parametrize("speculators", VERSIONS)
    def test_since(self, speculators: str) -> None:
        findings = find_drifts(contract(speculators), RecordedSurface("0.33.0"))
        first = {
            (kind.value, symbol, name): start
            for kind, symbol, name, start, last in HISTORY[speculators]
            if last == "0.33.0"
        }
        for finding in findings:
            found = since(finding, contract(speculators), recorded_until("0.33.0"))
            assert found == first[finding.key[:3]]

    def test_since_looks_back_from_the_release_that_was_judged(self) -> None:
        findings = find_drifts(contract("0.4.0"), RecordedSurface("0.11.0"))
        (attribute,) = (f for f in findings if f.name == "sample_tokens")
        assert since(attribute, contract("0.4.0"), recorded_until("0.11.0")) == "0.10.2"
        assert since(attribute, contract("0.4.0"), recorded_until("0.12.0")) is None

    @pytest.mark.parametrize(
        ("speculators", "wanted"),
        [
            ("0.3.0", ("0.11.0",)),
            ("0.4.0.1", ("0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.0", "0.15.1", "0.16.0")),
        ],
    )
    def test_homes(self, speculators: str, wanted: tuple[str, ...]) -> None:
        """A downstream was written for the releases with the fewest fatal findings."""
        counts = {
            s.version: sum(f.fatal for f in find_drifts(contract(speculators), s))
            for s in recorded_until()
        }
        best = min(counts.values())
        assert tuple(version for version, count in counts.items() if count == best) == wanted

    def test_changed_defaults_are_seen_from_home(self) -> None:
        home, here = RecordedSurface("0.11.0"), RecordedSurface("0.12.0")
        changed = [
            f
            for f in find_drifts(contract("0.3.0"), here, home)
            if f.kind is FindingKind.BEHAVIOUR and f.symbol == "vllm.config.CacheConfig"
        ]
        (caching,) = changed
        assert caching.name == "enable_prefix_caching"
        assert "is True here and was None on 0.11.0." in caching.detail
        assert caching.home == "0.11.0"
        assert not caching.fatal
        # 0.4 gives the argument, and so does not rely on the default.
        assert not any(
            f.name == "enable_prefix_caching" for f in find_drifts(contract("0.4.0"), here, home)
        )


class TestReporting:
    def test_findings_say_what_and_where_in_one_line(self) -> None:
        for version in recorded_versions():
            for speculators in VERSIONS:
                for finding in find_drifts(contract(speculators), RecordedSurface(version)):
                    assert finding.sites
                    assert finding.detail.endswith(".")
                    assert "\n" not in finding.detail

    def test_they_are_found_in_the_same_order_every_time(self) -> None:
        one = find_drifts(contract("0.3.0"), RecordedSurface("0.33.0"))
        assert one == find_drifts(contract("0.3.0"), RecordedSurface("0.33.0"))

    def test_render(self) -> None:
        signature = Signature(
            (
                Parameter("a", ParameterKind.POSITIONAL_ONLY),
                Parameter("b"),
                Parameter("c", default="1"),
                Parameter("d", ParameterKind.KEYWORD_ONLY),
                Parameter("e", ParameterKind.VAR_KEYWORD),
            ),
            "int",
        )
        assert render(signature) == "(a, /, b, c=1, *, d, **e) -> int"


def site(*positional: str, star: bool = False, **keywords: str) -> CallSite:
    return CallSite(
        SiteKind.CALL,
        "vllm.f",
        "m",
        "m.py",
        1,
        positional=positional,
        keywords=tuple(keywords.items()),
        star=star,
    )


def signature(text: str) -> Signature:
    """Return the signature of ``def f(<text>)``, by way of a package."""
    from vllm_compat.analysis.surface.entries import FunctionEntry
    from vllm_compat.analysis.surface.modules import ModuleSyntax

    entry = ModuleSyntax(f"def f({text}): ...", "vllm", True, "vllm").entry("f")
    assert isinstance(entry, FunctionEntry)
    return entry.signature


class TestBinding:
    @pytest.mark.parametrize(
        ("call", "text", "wanted"),
        [
            (site("x", b="1"), "a, b", []),
            (site(a="1", b="2"), "a, b, c=1", []),
            (site("x"), "*args, **kwargs", []),
            (site(z="1"), "**kwargs", []),
            (site(z="1"), "a=1", [(K.PARAMETER_REMOVED, "z")]),
            (site(a="1"), "a, b", [(K.PARAMETER_REQUIRED, "b")]),
            (site(a="1"), "a, *, b", [(K.PARAMETER_REQUIRED, "b")]),
            (site("x", "y"), "a", [(K.PARAMETER_REMOVED, "y")]),
            (site("x", "self.b"), "a, *, b", [(K.PARAMETER_REORDERED, "b")]),
            (site("x", a="1"), "a", [(K.PARAMETER_REORDERED, "a")]),
            (site(a="1"), "a, /", [(K.PARAMETER_REORDERED, "a")]),
            (site(block_size="1"), "hash_block_size", [(K.PARAMETER_RENAMED, "block_size")]),
            (
                site(experts="1"),
                "backend",
                [(K.PARAMETER_REMOVED, "experts"), (K.PARAMETER_REQUIRED, "backend")],
            ),
            (site("b", "a"), "a, b", [(K.PARAMETER_REORDERED, "b"), (K.PARAMETER_REORDERED, "a")]),
            (site("block", "hasher"), "hash_block, hasher", []),
            (site(a="1", star=True), "a, b, c", []),
            (site(z="1", star=True), "a, b, c", [(K.PARAMETER_REMOVED, "z")]),
        ],
    )
    def test_by_signature_alone(
        self, call: CallSite, text: str, wanted: list[tuple[FindingKind, str]]
    ) -> None:
        assert [(p.kind, p.name) for p in bind(call, signature(text))] == wanted

    @pytest.mark.parametrize(
        ("call", "before", "text", "wanted"),
        [
            (
                site("x", "y"),
                "a, b",
                "b, a",
                [(K.PARAMETER_REORDERED, "a"), (K.PARAMETER_REORDERED, "b")],
            ),
            (site("x", "y"), "a, b", "a, c", []),
            (site("x", "y"), "a, b: int", "a, c: str", [(K.PARAMETER_REMOVED, "b")]),
            (site("x", b="1"), "a, b", "a, c", [(K.PARAMETER_RENAMED, "b")]),
            (site("x", b="1"), "a, b: int = 1", "a, c: int = 1", [(K.PARAMETER_RENAMED, "b")]),
            (site("x", b="1"), "a, b: int = 1", "a, c: str = 1", [(K.PARAMETER_REMOVED, "b")]),
            (site("x"), "a, b=1", "a, b=2", [(K.BEHAVIOUR, "b")]),
            (site("x", b="1"), "a, b=1", "a, b=2", []),
            (site("x", "y"), "a, b=1", "a, b=2", []),
        ],
    )
    def test_by_comparison_with_home(
        self, call: CallSite, before: str, text: str, wanted: list[tuple[FindingKind, str]]
    ) -> None:
        problems = bind(call, signature(text), signature(before))
        assert [(p.kind, p.name) for p in problems] == wanted


class TestCases:
    """Small downstreams on small packages called vllm."""

    def drifts(self, tmp_path: Path, use: str, **modules: str) -> list[Finding]:
        from tests.analysis.test_contract import read

        files = {name.replace("__", "/") + ".py": text for name, text in modules.items()}
        surface = SourceSurface.at(packages.write(tmp_path / "site", files))
        return list(find_drifts(read(tmp_path, use), surface))

    def test_a_fallback_that_is_not_needed(self, tmp_path: Path) -> None:
        use = "try:\n    from vllm.new import T\nexcept ImportError:\n    from vllm.old import T\n"
        assert self.drifts(tmp_path, use, new="class T: ...\n") == []

    def test_a_fallback_that_is_missing_too(self, tmp_path: Path) -> None:
        use = "try:\n    from vllm.new import T\nexcept ImportError:\n    from vllm.old import T\n"
        (finding,) = self.drifts(tmp_path, use, other="x = 1\n")
        assert (finding.kind, finding.symbol) == (FindingKind.MODULE_MISSING, "vllm.old")

    def test_a_name_that_moved_to_two_places_is_missing(self, tmp_path: Path) -> None:
        use = "from vllm.a import T\nT(x=1)\n"
        same = "class T:\n    def __init__(self, x): ...\n"
        (finding,) = self.drifts(tmp_path, use, a="", b=same, c=same)
        assert finding.kind is FindingKind.NAME_MISSING
        assert [s.line for s in finding.sites] == [1, 2]

    def test_a_namesake_is_not_taken_for_a_moved_name(self, tmp_path: Path) -> None:
        use = "from vllm.a import T\nT(x=1, y=2)\nT.make\n"
        other = "class T:\n    def __init__(self, q): ...\n"
        (finding,) = self.drifts(tmp_path, use, a="", b=other)
        assert finding.kind is FindingKind.NAME_MISSING

    def test_the_nearest_of_several_is_where_it_moved(self, tmp_path: Path) -> None:
        use = "from vllm.a.b import T\n"
        same = "class T: ...\n"
        (finding,) = self.drifts(tmp_path, use, a__b="", a__c=same, z=same)
        assert finding.moved_to == "vllm.a.c.T"

    def test_a_missing_module(self, tmp_path: Path) -> None:
        (finding,) = self.drifts(tmp_path, "import vllm.gone\nvllm.gone.f()\n", a="")
        assert (finding.kind, finding.symbol) == (FindingKind.MODULE_MISSING, "vllm.gone")

    def test_a_missing_module_whose_names_are_elsewhere(self, tmp_path: Path) -> None:
        use = "import vllm.gone as g\ng.f(1)\ng.T.x\n"
        there = "def f(a): ...\nclass T:\n    x = 1\n"
        (finding,) = self.drifts(tmp_path, use, here=there, other="def f(a): ...\n")
        assert (finding.kind, finding.moved_to) == (FindingKind.MODULE_MISSING, "vllm.here")
        assert finding.detail.endswith("What is used of it is in vllm.here here.")

    def test_a_missing_module_whose_names_are_in_two_places(self, tmp_path: Path) -> None:
        use = "import vllm.gone as g\ng.f(1)\n"
        same = "def f(a): ...\n"
        (finding,) = self.drifts(tmp_path, use, here=same, there=same)
        assert (finding.kind, finding.moved_to) == (FindingKind.MODULE_MISSING, None)

    @pytest.mark.parametrize(
        "use",
        [
            # The other arm of an ``if`` makes the call in a way that fits.
            """
            from vllm.a import f
            def call(x=None):
                if x is not None:
                    f(y=1, x=x)
                else:
                    f(y=1)
            """,
            # An object that may be the downstream's own.
            """
            from vllm.a import T
            class Mine:
                def own(self): ...
            class Other(T):
                def __init__(self, new):
                    if new:
                        self.t = T()
                    else:
                        self.t = Mine()
                    self.t.own()
            """,
            # An attribute that the downstream gives to vLLM's objects, or an object that it puts there.
            """
            from vllm.a import T
            def give(t: T):
                t.mine = 1
            def take(t: T):
                return t.mine
            """,
            """
            from vllm.a import T
            class Mine: ...
            def give(t: T):
                setattr(t, "part", Mine())
            def take(t: T):
                return t.part.own
            """,
            # A function that is called under a test of the version only.
            """
            from importlib.metadata import version
            from packaging.version import Version
            def old():
                from vllm.gone import f
                f()
            def new(): ...
            chosen = new if Version(version("vllm")) > Version("1") else old
            """,
            """
            import importlib.util
            import vllm.envs as envs
            class Worker:
                def profile(self):
                    if importlib.util.find_spec("vllm.profiler") is None:
                        return self.legacy()
                    return 1
                def legacy(self):
                    return envs.GONE
            """,
            # What is given by a metaclass or a decorator.
            """
            from vllm.a import D, E
            D.__dataclass_fields__
            E.__members__
            """,
            # A protocol promises less than there is.
            """
            from vllm.a import P
            def f(p: P):
                return p.layer_name
            """,
            # A class of the downstream's own inside one that derives from vLLM's.
            """
            from vllm.a import T
            class Mine(T):
                class Policy: ...
                def f(self):
                    return self.Policy
            """,
            # An annotation that a base from outside vLLM makes good.
            """
            from vllm.a import Queue, S
            def f(s: S):
                s.waiting.popleft()
            """,
            # Values whose items can't be followed are named by their text, and are no names of vLLM.
            """
            import torch
            from vllm.a import S
            def f(s: S):
                for item in s.waiting:
                    if isinstance(item["x"].data[0], torch.Tensor):
                        item["x"].data[0].item()
            """,
            # A generator is an iterable.
            """
            from vllm.a import take, make
            take(make())
            """,
            # Imports that only type checkers see, and those that may fail.
            """
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                from vllm.gone import T
            def f(t: "T"):
                return t.x
            """,
            """
            import contextlib
            try:
                from vllm.gone import g
            except ImportError:
                g = None
            with contextlib.suppress(ImportError):
                import vllm.lost
            if g is not None:
                g(1)
            """,
            # What is asked for before it is used.
            """
            from vllm.a import T
            def f(t: T):
                if hasattr(t, "later"):
                    t.later()
                return getattr(t, "other", None)
            """,
        ],
    )
    def test_what_is_not_certain_is_no_failure(self, tmp_path: Path, use: str) -> None:
        there = textwrap.dedent(
            """
            from collections import deque
            from collections.abc import Generator, Iterable
            from dataclasses import dataclass
            from enum import Enum
            from typing import Protocol
            def f(y, x): ...
            class T:
                part: "int" = 1
            @dataclass
            class D: ...
            class E(Enum): ...
            class P(Protocol):
                def forward(self): ...
            class Queue:
                def add(self): ...
            class Deque(deque[int], Queue): ...
            class S:
                waiting: Queue
            def take(items: Iterable[int]): ...
            def make() -> Generator[int, None, None]: ...
            """
        )
        found = self.drifts(tmp_path, use, a=there, envs="X = 1\n", profiler="")
        assert [f.detail for f in found if f.fatal] == []

    @pytest.mark.parametrize(
        ("use", "detail"),
        [
            ("from vllm.a import f\nif f:\n    f(1, 2)\nelse:\n    f(1)\nf(1)\n", "requires x"),
            ("from vllm.a import T\ndef f(t: T):\n    return t.mine\n", "has no mine"),
            ("from vllm.gone import f\n", "no module vllm.gone"),
            ("def old():\n    from vllm.gone import f\nold()\n", "no module vllm.gone"),
        ],
    )
    def test_what_is_certain_is_one(self, tmp_path: Path, use: str, detail: str) -> None:
        found = self.drifts(tmp_path, use, a="def f(y, x): ...\nclass T: ...\n")
        assert any(detail in f.detail for f in found if f.fatal)

    def test_downstreams_own_additions_are_there(self, tmp_path: Path) -> None:
        use = """
            from vllm.a import T
            T._mine = 1
            def f(t: T):
                return t._mine
        """
        assert self.drifts(tmp_path, use, a="class T: ...\n") == []

    def test_unbound_methods_take_the_instance(self, tmp_path: Path) -> None:
        use = "from vllm.a import T\ndef f(self):\n    T.run(self, 1)\n"
        assert self.drifts(tmp_path, use, a="class T:\n    def run(self, x): ...\n") == []

    def test_one_of_several_types_is_enough(self, tmp_path: Path) -> None:
        use = """
            from vllm.a import A, B
            def f(x: A | B):
                x.only_a
        """
        given = "class A:\n    only_a: int\nclass B: ...\n"
        assert self.drifts(tmp_path, use, a=given) == []

    def test_an_annotation_may_promise_less_than_there_is(self, tmp_path: Path) -> None:
        use = "from vllm.a import make\nmake().extra\n"
        given = "class A: ...\nclass B(A):\n    extra: int\ndef make() -> A: ...\n"
        (finding,) = self.drifts(tmp_path, use, a=given)
        assert finding.kind is FindingKind.ATTRIBUTE_MISSING
        assert not finding.fatal

    def test_a_subclass_is_a_fitting_argument(self, tmp_path: Path) -> None:
        use = "from vllm.a import make, take\nx = make()\ntake(x)\n"
        given = "class A: ...\nclass B(A): ...\ndef make() -> B: ...\ndef take(a: A): ...\n"
        assert self.drifts(tmp_path, use, a=given) == []
        given = "class A: ...\nclass B: ...\ndef make() -> B: ...\ndef take(a: A): ...\n"
        (finding,) = self.drifts(tmp_path / "other", use, a=given)
        assert finding.kind is FindingKind.ARGUMENT_TYPE
        assert finding.fatal

    def test_a_list_is_no_mapping(self, tmp_path: Path) -> None:
        use = "from vllm.a import f\nx = f()\nx['key']\n"
        (finding,) = self.drifts(tmp_path, use, a="def f() -> list[int]: ...\n")
        assert finding.kind is FindingKind.RETURN_SHAPE

    def test_a_worker_extension_may_not_shadow(self, tmp_path: Path) -> None:
        use = """
            from vllm.config import ParallelConfig
            ParallelConfig(worker_extension_cls="down.use.Ext")
            class Ext:
                def load_model(self): ...
                def _own(self): ...
        """
        worker = "class Worker:\n    def load_model(self): ...\n"
        config = "class ParallelConfig:\n    def __init__(self, worker_extension_cls): ...\n"
        (finding,) = self.drifts(tmp_path, use, config=config, v1__worker__gpu_worker=worker)
        assert (finding.kind, finding.name) == (FindingKind.NAME_TAKEN, "load_model")


HOME = {"0.3.0": "0.11.0", "0.4.0": "0.12.0", "0.4.0.1": "0.16.0"}
NIGHTLY = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def new_findings(contract: Contract, mutated: Mutated, *, home: bool = True) -> list[Finding]:
    """Return what a mutation adds."""
    base = mutated.base
    known = {f.key for f in find_drifts(contract, base, base if home else None)}
    found = find_drifts(contract, mutated, base if home else None)
    return [f for f in found if f.key not in known]


@st.composite
def changed_signatures(draw: st.DrawFn) -> tuple[str, str, Signature, Signature]:
    """Draw (speculators, symbol, old signature, new signature)."""
    speculators = draw(st.sampled_from(VERSIONS))
    surface = RecordedSurface(HOME[speculators])
    symbol = draw(st.sampled_from(called(contract(speculators), surface)))
    old = surface.signature(symbol)
    assert old is not None
    parameters = list(old.parameters)
    kind = draw(st.sampled_from(["drop", "add", "rename", "swap", "default", "keyword", "retype"]))
    at = draw(st.integers(0, max(0, len(parameters) - 1)))
    if kind == "add":
        added = Parameter("appeared", draw(st.sampled_from(list(ParameterKind)[1:4:2])))
        default = draw(st.sampled_from([None, "0"]))
        parameters.insert(draw(st.integers(0, len(parameters))), replace(added, default=default))
    elif parameters and kind == "drop":
        del parameters[at]
    elif parameters and kind == "rename":
        parameters[at] = replace(parameters[at], name="renamed")
    elif parameters and kind == "swap":
        other = draw(st.integers(0, len(parameters) - 1))
        parameters[at], parameters[other] = parameters[other], parameters[at]
    elif parameters and kind == "default":
        parameters[at] = replace(parameters[at], default=draw(st.sampled_from([None, "'changed'"])))
    elif parameters and kind == "keyword":
        parameters[at] = replace(parameters[at], kind=ParameterKind.KEYWORD_ONLY)
        parameters.append(parameters.pop(at))
    elif parameters and kind == "retype":
        parameters[at] = replace(parameters[at], annotation="Other")
    new = valid(parameters)
    if new is None:
        new = old
    return speculators, symbol, old, replace(new, returns=old.returns, unwraps=old.unwraps)


def every_change(old: Signature) -> Iterator[tuple[str, Signature]]:
    """Iterate over every single change of a signature, with its kind."""
    parameters = list(old.parameters)
    word = ParameterKind.POSITIONAL_OR_KEYWORD
    changes: list[tuple[str, list[Parameter]]] = []
    for at, parameter in enumerate(parameters):
        before, after = parameters[:at], parameters[at + 1 :]
        changes += [
            ("drop", before + after),
            ("rename", [*before, replace(parameter, name="renamed"), *after]),
            ("require", [*before, replace(parameter, default=None), *after]),
            ("default", [*before, replace(parameter, default="'changed'"), *after]),
            ("keyword", [*before, *after, replace(parameter, kind=ParameterKind.KEYWORD_ONLY)]),
            ("add", [*before, Parameter("appeared", word), parameter, *after]),
            ("add optional", [*before, Parameter("appeared", word, "0"), parameter, *after]),
        ]
        if after:
            changes.append(("reorder", [*before, after[0], parameter, *after[1:]]))
    only = ParameterKind.KEYWORD_ONLY
    changes += [
        ("add keyword", [*parameters, Parameter("appeared", only)]),
        ("add optional keyword", [*parameters, Parameter("appeared", only, "0")]),
    ]
    for kind, changed in changes:
        new = valid(changed)
        if new is not None:
            yield kind, replace(new, returns=old.returns, unwraps=old.unwraps)


class TestNightlies:
    @pytest.mark.parametrize("speculators", VERSIONS)
    def test_every_single_change_of_every_symbol(self, speculators: str) -> None:
        surface = RecordedSurface(HOME[speculators])
        read = contract(speculators)
        broken: dict[str, int] = {}
        harmless: dict[str, int] = {}
        for symbol in called(read, surface):
            resolved = surface.resolve(symbol)
            assert resolved is not None
            assert resolved.signature is not None
            sites = tuple(s for s in read.sites if symbol.startswith(s.symbol) or s.store)
            part = replace(read, sites=sites, other_calls=())
            for kind, new in every_change(resolved.signature):
                mutated = Mutated(surface, signatures=((resolved.path, new),))
                found = new_findings(part, mutated)
                wanted = outcome(calls_of(read, symbol), resolved.signature, new)
                told = (symbol, kind, str(new), [f.detail for f in found])
                assert any(f.fatal for f in found) is wanted.broken, told
                assert any(not f.fatal for f in found) is wanted.changed, told
                count = broken if wanted.broken else harmless
                count[kind] = count.get(kind, 0) + 1
        assert set(broken) >= {"drop", "rename", "require", "keyword", "add", "reorder", "add keyword"}
        assert set(harmless) >= {"drop", "rename", "default", "add optional", "add optional keyword"}

    @pytest.mark.parametrize("speculators", VERSIONS)
    def test_every_module_and_every_imported_name_may_go_or_move(self, speculators: str) -> None:
        surface = RecordedSurface(HOME[speculators])
        read = contract(speculators)
        imports = {s.symbol for s in read.sites if s.kind is SiteKind.IMPORT and not s.is_module}
        part = replace(read, other_calls=())
        for symbol in sorted(imports):
            resolved = surface.resolve(symbol)
            assert resolved is not None
            gone = tuple({symbol, resolved.path})
            target = f"vllm.v1.elsewhere.{symbol.rpartition('.')[2]}"
            for moved in ((), ((symbol, target),), ((symbol, symbol + "Renamed"),)):
                found = new_findings(part, Mutated(surface, hidden=gone, moved=moved))
                kinds = {(f.kind, f.symbol, f.moved_to) for f in found if f.fatal}
                if moved and moved[0][1] == target:
                    assert kinds == {(FindingKind.NAME_MOVED, symbol, target)}
                else:
                    assert kinds == {(FindingKind.NAME_MISSING, symbol, None)}
        for module in sorted({symbol.rpartition(".")[0] for symbol in imports} - {"vllm"}):
            found = new_findings(part, Mutated(surface, hidden=(module,)))
            lost = {f"{f.symbol}.{f.name}" for f in found if f.kind is FindingKind.MODULE_MISSING}
            assert lost == {symbol for symbol in imports if symbol.startswith(module + ".")}

    @NIGHTLY
    @given(changed_signatures())
    def test_every_signature_that_breaks_a_call_is_reported_and_no_other(
        self, drawn: tuple[str, str, Signature, Signature]
    ) -> None:
        speculators, symbol, old, new = drawn
        surface = RecordedSurface(HOME[speculators])
        resolved = surface.resolve(symbol)
        assert resolved is not None
        mutated = Mutated(surface, signatures=((resolved.path, new),))
        found = new_findings(contract(speculators), mutated)
        wanted = outcome(calls_of(contract(speculators), symbol), old, new)
        assert any(f.fatal for f in found) is wanted.broken, [f.detail for f in found]
        assert any(not f.fatal for f in found) is wanted.changed, [f.detail for f in found]
        assert {f.symbol for f in found} <= {symbol}

    @NIGHTLY
    @given(changed_signatures())
    def test_without_home_what_does_not_bind_is_reported_still(
        self, drawn: tuple[str, str, Signature, Signature]
    ) -> None:
        from tests.analysis.surface.mutations import landing

        speculators, symbol, _, new = drawn
        surface = RecordedSurface(HOME[speculators])
        resolved = surface.resolve(symbol)
        assert resolved is not None
        mutated = Mutated(surface, signatures=((resolved.path, new),))
        found = new_findings(contract(speculators), mutated, home=False)
        calls = calls_of(contract(speculators), symbol)
        if any(landing(call, new) is None for call in calls):
            assert any(f.fatal and f.symbol == symbol for f in found)

    @NIGHTLY
    @given(st.sampled_from(VERSIONS), st.data(), st.sampled_from(["hide", "move", "rename"]))
    def test_names(self, speculators: str, data: st.DataObject, how: str) -> None:
        surface = RecordedSurface(HOME[speculators])
        read = contract(speculators)
        names = [
            s.symbol
            for s in read.sites
            if s.kind is not SiteKind.HOOK and not s.optional and s.symbol != "vllm"
        ]
        symbol = data.draw(st.sampled_from(sorted(set(names))))
        resolved = surface.resolve(symbol)
        assert resolved is not None
        owner = symbol.rpartition(".")[0]
        inside = surface.resolve(owner)
        # Of what has no known type nothing can be missing.
        assume(
            inside is None
            or inside.kind is not SymbolKind.ATTRIBUTE
            or surface.value_types(owner) is not None
        )
        hidden = tuple({symbol, resolved.path})
        imported = any(s.kind is SiteKind.IMPORT and s.symbol == symbol for s in read.sites)
        target = f"vllm.v1.elsewhere.{symbol.rsplit('.', 1)[-1]}"
        moved: tuple[tuple[str, str], ...] = ()
        if how == "move" and imported:
            moved = ((symbol, target),)
        elif how == "rename" and imported:
            moved = ((symbol, symbol + "Renamed"),)
        found = new_findings(read, Mutated(surface, hidden=hidden, moved=moved))
        assert found, symbol
        assert any(f.fatal for f in found)
        if how == "move" and imported:
            (move,) = (f for f in found if f.moved_to)
            assert (move.kind, move.symbol) == (FindingKind.NAME_MOVED, symbol)
            assert move.moved_to == target
            assert {f.kind for f in found} == {FindingKind.NAME_MOVED}
        elif imported:
            assert {f.kind for f in found} == {FindingKind.NAME_MISSING}

    @NIGHTLY
    @given(st.sampled_from(VERSIONS), st.data())
    def test_deleted_modules(self, speculators: str, data: st.DataObject) -> None:
        surface = RecordedSurface(HOME[speculators])
        read = contract(speculators)
        imported = {s.symbol.rpartition(".")[0] for s in read.sites if s.kind is SiteKind.IMPORT} - {
            "vllm",
            "",
        }
        module = data.draw(st.sampled_from(sorted(imported)))
        found = new_findings(read, Mutated(surface, hidden=(module,)))
        assert any(f.kind is FindingKind.MODULE_MISSING and f.symbol == module for f in found)
        users = {
            s.symbol for s in read.sites if s.kind is SiteKind.IMPORT and s.symbol.startswith(module)
        }
        told = {f"{f.symbol}.{f.name}" for f in found if f.kind is FindingKind.MODULE_MISSING}
        assert users <= told

    @NIGHTLY
    @given(st.sampled_from(VERSIONS), st.data())
    def test_what_the_downstream_does_not_use_may_go(
        self, speculators: str, data: st.DataObject
    ) -> None:
        surface = RecordedSurface(HOME[speculators])
        read = contract(speculators)
        owners = [SCHEDULER, EXECUTOR, REQUEST, "vllm.config.VllmConfig", "vllm.config.CacheConfig"]
        owner = data.draw(st.sampled_from(owners))
        symbol = surface.resolve(owner)
        assert symbol is not None
        used = {s.symbol for s in read.sites}
        unused = sorted(
            m for m in symbol.members if f"{owner}.{m}" not in used and not m.startswith("__")
        )
        member = data.draw(st.sampled_from(unused))
        resolved = surface.resolve(f"{owner}.{member}")
        assert resolved is not None
        hidden = tuple({f"{owner}.{member}", resolved.path})
        assert new_findings(read, Mutated(surface, hidden=hidden)) == []

    def test_a_worker_that_takes_an_extensions_name(self) -> None:
        surface = RecordedSurface("0.16.0")
        worker = "vllm.v1.worker.gpu_worker.Worker"
        mutated = Mutated(surface, members=((worker, "_reset_capture"),))
        (finding,) = new_findings(contract("0.4.0.1"), mutated)
        assert (finding.kind, finding.name) == (FindingKind.NAME_TAKEN, "_reset_capture")


class TestWords:
    def test_prefixes(self) -> None:
        assert list(prefixes("a.b().c[].d")) == [
            "a",
            "a.b",
            "a.b()",
            "a.b().c",
            "a.b().c[]",
            "a.b().c[].d",
        ]

    @pytest.mark.parametrize(
        ("text", "wanted"),
        [
            ("X | None", {"X", "None"}),
            ("Optional[a.X]", {"a.X", "None"}),
            ("Union[X, 'Y', None]", {"X", "Y", "None"}),
            ("list[X] | dict[str, Y]", {"list", "dict"}),
            ("Annotated[X, 1]", {"X"}),
            (None, set()),
            ("not valid[", set()),
        ],
    )
    def test_union(self, text: str | None, wanted: set[str]) -> None:
        assert union(text) == wanted


def test_uses_are_plain_data() -> None:
    assert json.dumps(Use("subscript", "0").__dict__)
