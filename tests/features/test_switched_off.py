"""A feature that is left out leaves its targets alone, and all others stay; all runs on FAKES."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from vllm_compat.features import names

if TYPE_CHECKING:
    from conftest import MakeSite

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
LOADING = "vllm.model_executor.model_loader.weight_utils"

PROGRAM = f"""
import importlib, json, signal, sys
from concurrent.futures import thread
import logging
import vllm_compat
import {LOADING}
import {GENERATOR}

def stands(target):
    if target.startswith("signal "):
        (line,) = [line for line in open("/proc/self/status") if line.startswith("SigCgt")]
        return bool(int(line.split()[1], 16) >> signal.SIGRTMAX - 3 & 1)
    place = sys if target == "sys.excepthook" else importlib.import_module(target.partition(":")[0])
    for name in (target.partition(":")[2] or "excepthook").split("."):
        place = vars(place)[name]
    return place

# The targets that features may have here, and what stood there.
born = {{target: stands(target) for target in sys.argv[2].split(",")}}
status = vllm_compat.apply(without=json.loads(sys.argv[1]))
layers = {{}}
for target, raw in born.items():
    value, layers[target] = stands(target), 0
    while value is not raw:
        layers[target] += 1
        value = getattr(value, "__wrapped__", raw)
patches = [(p.owner, p.target, p.state) for p in status.patches]
print(json.dumps({{"features": status.features, "layers": layers, "patches": patches,
    "switched_off": status.plan.switched_off, "digest": status.plan.digest}}))
"""

OWN = {
    "clean_scheduler": {f"{GENERATOR}:VllmHiddenStatesGenerator.generate"},
    "shut_down": {
        f"{GENERATOR}:VllmHiddenStatesGenerator.__init__",
        "vllm.v1.executor.multiproc_executor:MultiprocExecutor.__init__",
    },
    "end_orphans": {
        "vllm.v1.executor.multiproc_executor:WorkerProc.__init__",
        "vllm.v1.executor.multiproc_executor:WorkerWrapperBase.init_device",
    },
    "atomic_save": {"torch:save", f"{GENERATOR}:VllmHiddenStatesGenerator.generate"},
    "save_backlog": {
        "concurrent.futures.thread:ThreadPoolExecutor.submit",
        f"{GENERATOR}:VllmHiddenStatesGenerator.generate",
    },
    "progress": {
        "signal SIGRTMAX-2",
        "logging:Logger.makeRecord",
        "sys.excepthook",
        "vllm.v1.executor.multiproc_executor:WorkerProc.__init__",
        f"{LOADING}:tqdm",
    },
    "resume_samples": {f"{GENERATOR}:VllmHiddenStatesGenerator.generate"},
    "leave_out": {"torch:save", f"{GENERATOR}:VllmHiddenStatesGenerator.generate"},
}
"""What each feature touches when everything is imported; those with other owners have them too."""

With = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def applied(tmp_path_factory: pytest.TempPathFactory, make_site: MakeSite) -> With:
    """Return what is in force in a process that applies without what is named."""
    folder = tmp_path_factory.mktemp("switched off")
    site = make_site(folder).add_loading()
    (folder / "status").mkdir()
    found: dict[tuple[str, ...], dict[str, Any]] = {}

    def run(*without: str) -> dict[str, Any]:
        if without not in found:
            done = site.run(
                *("-c", PROGRAM, json.dumps(without), ",".join(set().union(*OWN.values()))),
                VLLM_COMPAT_STATUS=str(folder / "status"),
                VLLM_COMPAT_RESUME=json.dumps(
                    {"folder": str(folder), "next": 0, "kept": True, "left_out": [1]}
                ),
            )
            assert done.returncode == 0, done.stderr
            found[without] = json.loads(done.stdout)
        return found[without]

    return run


def test_every_feature_is_known_here() -> None:
    assert set(OWN) == set(names())


def test_all_features_are_in_force_unless_they_are_left_out(applied: With) -> None:
    found = applied()
    assert tuple(found["features"]) == names()
    assert found["switched_off"] == []
    for feature, targets in OWN.items():
        mine = [(target, state) for owner, target, state in found["patches"] if owner == feature]
        assert mine
        assert {target for target, _ in mine} == targets
        assert {state for _, state in mine} == {"in force"}
    assert min(found["layers"].values()) > 0


@pytest.mark.parametrize("feature", names())
def test_a_feature_that_is_left_out_leaves_exactly_its_own_targets_untouched(
    applied: With, feature: str
) -> None:
    with_all, without = applied(), applied(feature)
    assert without["switched_off"] == [feature]
    assert without["features"] == [name for name in names() if name != feature]
    others = [patch for patch in with_all["patches"] if patch[0] != feature]
    assert without["patches"] == others
    # One layer less at each of its targets, and nothing else: what was its alone is as it was born.
    mine = Counter(target for owner, target, _ in with_all["patches"] if owner == feature)
    gone = Counter(with_all["layers"])
    gone.subtract(without["layers"])
    assert {target: count for target, count in gone.items() if count} == dict(mine)
    alone = OWN[feature] - {target for owner, target, _ in others}
    assert {without["layers"][target] for target in alone} <= {0}


def test_all_features_can_be_left_out_at_once(applied: With) -> None:
    found = applied(*names())
    assert found["features"] == []
    assert {owner for owner, *_ in found["patches"]} & set(names()) == set()
    untouched = {
        "torch:save",
        "signal SIGRTMAX-2",
        "sys.excepthook",
        "logging:Logger.makeRecord",
        f"{LOADING}:tqdm",
    }
    assert {found["layers"][target] for target in untouched} == {0}


def test_an_adapter_and_a_feature_can_be_left_out_together(applied: With) -> None:
    found = applied("worker.capture", "atomic_save")
    owners = {owner for owner, *_ in found["patches"]}
    assert found["switched_off"] == ["atomic_save", "worker.capture"]
    assert owners & {"worker.capture", "atomic_save"} == set()
    assert "save_backlog" in owners


def test_the_proofs_of_what_is_captured_can_be_left_out_like_a_feature(applied: With) -> None:
    with_all, without = applied(), applied("proofs")
    assert without["switched_off"] == ["proofs"]
    assert without["digest"] != with_all["digest"], "workers have to be told"
    assert without["patches"] == with_all["patches"]
