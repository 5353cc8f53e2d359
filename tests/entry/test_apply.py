"""apply, revert and status on FAKE packages, each case in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest
from packaging.specifiers import SpecifierSet

from vllm_compat.adapters import registry

if TYPE_CHECKING:
    from conftest import MakeSite, Site

PROGRAM = str(Path(__file__).parents[1] / "fakes" / "programs" / "orders.py")
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"

CALM = """
import json, os, sys
import vllm_compat
from vllm_compat.errors import *

def calm(**more):
    '''Print that nothing is in force, or what is.'''
    from vllm_compat.entry import apply as process
    state = {"in_force": vllm_compat.status().in_force, "open": "VLLM_COMPAT_PLAN" in os.environ}
    wrapped = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("vllm", "speculators", "torch", "transformers"):
            for value in list(vars(module).values()):
                inner = list(vars(value).values()) if isinstance(value, type) else [value]
                wrapped += [str(v) for v in inner if type(v).__name__ == "FunctionWrapper"]
    print(json.dumps({**state, "wrapped": wrapped, **more}))
"""
NOTHING = {"in_force": False, "open": False, "wrapped": []}


def program(site: Site, code: str, **environ: str) -> list[Any]:
    """Run code behind CALM; return what it printed, a JSON value a line."""
    done = site.run("-c", CALM + dedent(code), **environ)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


ORDERS = (
    *("A", "AV", "AD", "VA", "DA", "AVD", "VAD", "VDA", "DAV"),
    *("AR", "ARD", "ADR", "DAR", "VARD", "AVRD", "VADR", "DRA", "RAD"),
    *("AAD", "ADAR", "DAAR", "ARAD", "ADRAR", "DARAR", "ARR", "R", "DR", "AVRAD"),
)


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory, make_site: MakeSite) -> dict[str, list[Any]]:
    """Return what was found after each letter of each order, in a process of its own."""
    done = make_site(tmp_path_factory.mktemp("orders")).run(PROGRAM, *ORDERS)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = {}
    for line in done.stdout.splitlines():
        answer = json.loads(line)
        found.setdefault(answer["order"], []).append(answer)
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_imports_apply_and_revert_ends_in_the_same_state(
    orders: dict[str, list[Any]], order: str
) -> None:
    in_force = imported = False
    for letter, answer in zip(order, orders[order], strict=True):
        in_force = {"A": True, "R": False}.get(letter, in_force)
        imported = imported or letter in "VD"
        assert answer["letter"] == letter
        assert answer["in_force"] is in_force
        assert answer["left"] == []
        expected = {"wrapped", "absent"} if in_force else {"original", "absent"}
        assert set(answer["targets"].values()) <= expected, answer
        assert imported or answer["imported"] == [], "apply() imports neither vLLM nor torch"
    assert ("absent" in orders[order][-1]["targets"].values()) is ("D" not in order)


def test_applying_again_changes_nothing(site: Site) -> None:
    first, second, alike = program(
        site,
        f"""
        import {GENERATOR}
        first = vllm_compat.apply()
        before = {{n: vars(m).copy() for n, m in list(sys.modules.items())}}
        second = vllm_compat.apply(capture="auto", without=())
        after = {{n: vars(m) for n, m in list(sys.modules.items()) if n in before}}
        print(json.dumps([first.plan.digest, len(first.patches)]))
        print(json.dumps([second.plan.digest, len(second.patches)]))
        print(json.dumps(first == second and all(before[n].keys() == after[n].keys()
            for n in before if n.startswith("vllm."))))
        """,
    )
    assert first == second
    assert alike is True


def test_a_pair_that_nobody_has_run_is_said_to_be_inferred_once(site: Site) -> None:
    code = """
    import json, vllm_compat
    first, second = vllm_compat.apply(), vllm_compat.apply()
    assert first.knowledge == second.knowledge == vllm_compat.status().knowledge
    print(json.dumps([first.in_force, first.knowledge.word.value]))
    """
    done = site.run("-c", dedent(code))
    assert json.loads(done.stdout) == [True, "known"]
    assert "inferred" not in done.stderr
    (site.folder / "vllm-0.16.0+cpu.dist-info").rename(site.folder / "vllm-0.99.0+cpu.dist-info")
    site.edit("vllm-0.99.0+cpu.dist-info/METADATA", "0.16.0", "0.99.0")
    done = site.run("-c", dedent(code))
    assert json.loads(done.stdout) == [True, "inferred"]
    told = [row for row in done.stderr.splitlines() if "is inferred" in row]
    assert len(told) == 1, done.stderr
    assert "judged by its source alone. The rows that are captured are proven." in told[0]
    done = site.run("-c", "import vllm_compat; vllm_compat.apply(without=['proofs'])")
    assert "captured are NOT proven (proofs left out)." in done.stderr


def test_status_tells_every_patch_and_its_owner(site: Site) -> None:
    before, held, after = program(
        site,
        """
        print(json.dumps([str(vllm_compat.status().plan), len(vllm_compat.status().patches)]))
        s = vllm_compat.apply()
        patches = [(p.owner, p.target, p.state) for p in s.patches]
        print(json.dumps({"pid": s.pid == os.getpid(), "seconds": s.seconds,
            "adapters": s.plan.adapters, "patches": patches}))
        calm(plan=str(vllm_compat.revert().plan))
        """,
    )
    assert before == ["None", 0]
    assert held["pid"] is True
    assert 0 < held["seconds"] < 30
    owners = [owner for owner, _, _ in held["patches"]]
    checks = {"check: batch", "check: ranks"}
    features = {"clean_scheduler", "shut_down", "end_orphans", "atomic_save", "save_backlog"}
    dataset = {"check: dataset"} & set(owners)
    assert set(owners) == {*held["adapters"], *checks, *dataset, *features}
    first = min(owners.index(name) for name in checks) - 1
    assert owners[first] == "clean_scheduler", "in force in each batch that a check asks for"
    assert set(held["adapters"]) == set(owners[:first]), "checks stand outside of the adapters"
    assert owners[-1] in features, "features stand outside of the checks"
    assert {state for _, _, state in held["patches"]} == {"waiting"}
    assert after == {**NOTHING, "plan": "None"}


@pytest.mark.parametrize(
    "options",
    ["capture='stock'", "transfer='rpc'", "without=['worker.capture']", "downstream='other'"],
)
def test_other_options_while_in_force_are_refused(site: Site, options: str) -> None:
    (words,) = program(
        site,
        f"""
        vllm_compat.apply()
        try:
            vllm_compat.apply({options})
        except UsageError as error:
            assert vllm_compat.status().in_force
            print(json.dumps(str(error)))
        """,
    )
    assert "in force already with other options (speculators, capture='auto', " in words
    assert "without=()); call revert() first" in words


def test_the_order_of_adapters_left_out_makes_no_difference(site: Site) -> None:
    (left_out,) = program(
        site,
        """
        a, b = "worker.capture", "scheduler.block_size"
        vllm_compat.apply(without=[a, b])
        plan = vllm_compat.apply(without=[b, a, b]).plan
        print(json.dumps([plan.switched_off, set(plan.adapters) & {a, b} == set()]))
        """,
    )
    assert left_out == [["scheduler.block_size", "worker.capture"], True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("without=['nothing.known']", "There is no adapter 'nothing.known'"),
        ("without='worker.capture'", "There is no adapter"),
        ("capture='never'", "capture is 'never'; it must be one of auto, hooks, auxiliary, stock"),
        ("transfer='pigeon'", "transfer is 'pigeon'; it must be 'auto' or 'rpc'"),
    ],
)
def test_options_that_make_no_sense_are_refused(site: Site, options: str, words: str) -> None:
    said, state = program(
        site,
        f"""
        try:
            vllm_compat.apply({options})
        except UsageError as error:
            print(json.dumps(str(error)))
        calm()
        """,
    )
    assert words in said
    assert state == NOTHING


def refused(site: Site, error: str, **environ: str) -> str:
    """Return what apply() says; nothing must be in force then, before and after the imports."""
    said, state = program(
        site,
        f"""
        try:
            vllm_compat.apply()
        except {error} as error:
            print(json.dumps(str(error)))
        calm()
        """,
        **environ,
    )
    assert state == NOTHING
    return str(said)


def test_a_missing_vllm_is_named(empty_site: Site) -> None:
    empty_site.add("speculators_0_3", "0.3.0")
    assert refused(empty_site, "UsageError").startswith("vllm is not installed in")


def test_a_missing_downstream_is_named(empty_site: Site) -> None:
    empty_site.add("vllm", "0.16.0")
    said = refused(empty_site, "UsageError")
    assert said.startswith("speculators is not installed in")
    assert "`pip install --no-deps speculators==0.4.0.1`" in said


def test_the_server_flow_is_refused_and_the_way_to_its_hazards_is_named(
    empty_site: Site,
) -> None:
    empty_site.add("vllm", "0.17.0").add("speculators_0_5", "0.5.0")
    said = refused(empty_site, "IncompatibleError")
    assert said.startswith("speculators 0.5.0 has no in-process generator")
    assert "vllm serve" in said
    assert "does not serve the server flow yet" in said
    assert "`vllm-compat check` lists the hazards" in said
    assert "needs no" not in said


def test_a_vllm_that_is_too_old_is_named_with_the_oldest_that_is_served(site: Site) -> None:
    next(site.folder.glob("vllm-*.dist-info")).rename(site.folder / "gone")
    site.describe("vllm", "0.10.2")
    said = refused(site, "IncompatibleError")
    assert "vLLM 0.10.2 is older than 0.11.0" in said
    assert "install vllm>=0.11.0" in said


def test_a_drift_without_an_adapter_is_told_with_its_place_and_its_signature(site: Site) -> None:
    site.edit("vllm/v1/request.py", "arrival_time: float | None = None,", "")
    said = refused(site, "IncompatibleError")
    assert said.startswith("speculators 0.3.0 cannot run on vLLM 0.16.0+cpu: 1 call site(s)")
    assert "parameter removed: Request takes no arrival_time here." in said
    assert "speculators/data_generation/vllm_hidden_states_generator.py:" in said
    assert "vllm-compat check" in said


def test_an_allow_list_that_shuts_us_out_of_vllms_processes_is_told_before_anything_starts(
    site: Site,
) -> None:
    said = refused(site, "IncompatibleError", VLLM_PLUGINS="another")
    assert 'VLLM_PLUGINS="another" does not name vllm_compat' in said
    assert 'set VLLM_PLUGINS="another,vllm_compat"' in said


def break_schedule(site: Site) -> None:
    """Let the live scheduler lack what its source shows."""
    path = site.folder / "vllm/v1/core/sched/scheduler.py"
    path.write_text(path.read_text() + "\n\nsetattr, delattr(Scheduler, 'schedule')\n")


def test_a_patch_that_does_not_fit_takes_back_all_the_others(site: Site) -> None:
    break_schedule(site)
    said, state = program(
        site,
        f"""
        import {GENERATOR}
        try:
            vllm_compat.apply()
        except PatchError as error:
            print(json.dumps(str(error)))
        calm()
        """,
    )
    assert said.startswith("The patch of scheduler.whole_prompts does not fit this process, so every")
    assert f"{SCHEDULE} is not there" in said
    assert state == NOTHING


def test_a_patch_that_fails_with_a_later_import_fails_that_import_and_shuts_the_door(
    site: Site,
) -> None:
    break_schedule(site)
    held, said, state, again, after = program(
        site,
        f"""
        from vllm_compat.entry import apply as process
        vllm_compat.apply()
        import vllm.v1.request
        calm(wrapped=[])
        try:
            import {GENERATOR}
        except PatchError as error:
            print(json.dumps(str(error)))
        calm(error=process.report()["error"], digest=process.report()["digest"])
        plan = vllm_compat.apply(without=["scheduler.whole_prompts"]).plan
        import {GENERATOR}
        print(json.dumps([plan.switched_off, "VLLM_COMPAT_PLAN" in os.environ]))
        vllm_compat.revert()
        calm()
        """,
    )
    assert held == {"in_force": True, "open": True, "wrapped": []}
    assert "The patch of scheduler.whole_prompts does not fit this process" in said
    error = f"scheduler.whole_prompts: {SCHEDULE} is not there, although the plan read it from source."
    assert state == {**NOTHING, "error": error, "digest": None}
    assert again == [["scheduler.whole_prompts"], True], "a new plan is made, with what is asked now"
    assert after == NOTHING


@pytest.mark.parametrize(
    ("cause", "error"),
    [
        ("from vllm_compat.runtime import env as doors; doors.LONGEST_PLAN = 99", "PatchError"),
        ("from vllm_compat import checks; checks.install = None", "PatchError"),
        (
            "def stop(*a): raise KeyboardInterrupt\n"
            "from vllm_compat import checks; checks.install = stop",
            "KeyboardInterrupt",
        ),
    ],
    ids=["plan too long", "a bug of ours", "control-C"],
)
def test_whatever_goes_wrong_on_the_way_everything_is_taken_back(
    site: Site, cause: str, error: str
) -> None:
    code = f"import {GENERATOR}\n{cause}\ntry:\n    vllm_compat.apply()\n"
    code += f"except {error}:\n    os.environ.pop('VLLM_COMPAT_RECORD', None)\n    calm()\n"
    assert program(site, code) == [NOTHING]


def test_a_record_that_cannot_be_written_is_said_and_keeps_nothing_from_being_in_force(
    site: Site,
) -> None:
    code = "os.environ['VLLM_COMPAT_RECORD'] = '/nowhere/at/all'\nvllm_compat.apply()\n"
    done = site.run("-c", CALM + code + "print(vllm_compat.status().in_force)")
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert done.stderr.count("could not be told to the launcher") == 1


def test_threads_that_apply_together_patch_once(site: Site) -> None:
    (patches,) = program(
        site,
        f"""
        import threading
        import {GENERATOR}
        together = threading.Barrier(8)
        found = []
        def go():
            together.wait()
            found.append(vllm_compat.apply())
        threads = [threading.Thread(target=go) for _ in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        from vllm.v1.request import Request
        from vllm.v1.core.sched.scheduler import Scheduler
        once = type(Scheduler.schedule.__wrapped__).__name__
        print(json.dumps([len(found), len({{s.patches for s in found}}), once]))
        """,
    )
    assert patches == [8, 1, "function"]


def test_a_wrapper_of_somebody_else_is_named_by_the_revert(site: Site) -> None:
    left, calls = program(
        site,
        f"""
        vllm_compat.apply()
        import {GENERATOR}
        from vllm.v1.core.sched.scheduler import Scheduler
        ours = Scheduler.schedule
        Scheduler.schedule = lambda self: ours(self)
        status = vllm_compat.revert()
        print(json.dumps([(p.owner, p.target, p.state) for p in status.left]))
        print(json.dumps(vllm_compat.status().in_force))
        """,
    )
    assert left == [["scheduler.whole_prompts", SCHEDULE, "inert"]]
    assert calls is False


def test_a_downstream_that_cannot_be_imported_can_be_after_apply(empty_site: Site) -> None:
    site = empty_site.add("vllm", "0.24.0+cpu").add("speculators_0_4", "0.4.0.1")
    site.add("transformers_5", "5.19.0").add("torch", "2.10.0")
    without, adapters, names, state = program(
        site,
        f"""
        try:
            import {GENERATOR}
        except ModuleNotFoundError as error:
            print(json.dumps(error.name))
        print(json.dumps(vllm_compat.apply().plan.adapters))
        import {GENERATOR}
        from transformers import configuration_utils, modeling_attn_mask_utils as supplied
        try:
            supplied.AttentionMaskConverter(1)
        except NotImplementedError as error:
            print(json.dumps([str(error), configuration_utils.torch.__name__]))
        vllm_compat.revert()
        calm(
            left=[n for n in sys.modules if "attn_mask" in n],
            torch=hasattr(configuration_utils, "torch"),
        )
        """,
    )
    assert without == "transformers.modeling_attn_mask_utils"
    assert {"transformers.missing_modules", "transformers.torch_annotation"} <= set(adapters)
    assert "AttentionMaskConverter is not in transformers 5.19.0" in names[0]
    assert names[1] == "torch"
    assert state == {**NOTHING, "left": [], "torch": False}


def test_what_a_pair_does_not_need_is_not_in_force(empty_site: Site) -> None:
    site = empty_site.add("vllm", "0.16.0").add("speculators_0_4", "0.4.0.1")
    site.add("transformers_4", "4.57.0").add("torch", "2.10.0")
    (adapters,) = program(site, "print(json.dumps(vllm_compat.apply().plan.adapters))")
    meant = [
        adapter.name
        for adapter in registry()
        if "0.16.0" in SpecifierSet(adapter.vllm) and "0.4.0.1" in SpecifierSet(adapter.downstream)
    ]
    assert "worker.capture" in adapters
    assert set(adapters) < set(meant) < {adapter.name for adapter in registry()}


def test_a_forked_child_has_the_patches_once_and_takes_only_its_own_back(site: Site) -> None:
    child, parent = program(
        site,
        f"""
        vllm_compat.apply()
        import {GENERATOR}
        from vllm_compat import plugin
        from vllm_compat.entry import apply as process
        from vllm.v1.core.sched.scheduler import Scheduler
        digest = vllm_compat.status().plan.digest
        wrapper = Scheduler.__dict__["schedule"]
        sys.stdout.flush()
        if os.fork() == 0:
            inherited = Scheduler.__dict__["schedule"] is wrapper
            plugin.load()
            again = vllm_compat.apply()
            print(json.dumps({{"inherited": inherited, "role": again.role,
                "drivers_alone": Scheduler.__dict__["schedule"] is wrapper,
                "digest": process.report()["digest"] == digest, "error": process.report()["error"],
                "pid": again.pid == os.getpid(), "left": len(vllm_compat.revert().left),
                "reverted": Scheduler.__dict__["schedule"] is wrapper.__wrapped__}}), flush=True)
            os._exit(0)
        os.wait()
        same = Scheduler.__dict__["schedule"] is wrapper
        print(json.dumps([same, vllm_compat.status().in_force]))
        """,
    )
    assert child == {
        "inherited": True,
        "role": "worker",
        "drivers_alone": False,
        "digest": True,
        "error": None,
        "pid": True,
        "left": 0,
        "reverted": True,
    }
    assert parent == [True, True]


def test_a_forked_child_that_asks_for_other_options_is_refused(site: Site) -> None:
    (said,) = program(
        site,
        """
        vllm_compat.apply()
        if os.fork() == 0:
            try:
                vllm_compat.apply(capture="stock")
            except UsageError as error:
                print(json.dumps(str(error)), flush=True)
            os._exit(0)
        os.wait()
        """,
    )
    assert "in force already with other options" in said


def test_a_child_takes_its_parents_plan_and_reads_no_source(site: Site) -> None:
    child, other = program(
        site,
        """
        import subprocess, textwrap
        def child(code):
            command = [sys.executable, "-c", "import vllm_compat\\n" + textwrap.dedent(code)]
            return subprocess.run(command, capture_output=True, text=True)
        digest = vllm_compat.apply().plan.digest
        done = child('''
            import json, sys
            digest = vllm_compat.apply().plan.digest
            print(json.dumps([digest, "vllm_compat.analysis.installed" in sys.modules]))
        ''')
        answer = json.loads(done.stdout)
        print(json.dumps([answer[0] == digest, answer[1]]))
        done = child("vllm_compat.apply(without=['worker.capture'])")
        print(json.dumps(done.stderr.splitlines()[-1]))
        """,
    )
    assert child == [True, False]
    assert "UsageError: vllm_compat is in force already with other options" in other


def test_children_of_a_reverted_process_are_left_alone(site: Site) -> None:
    (in_force,) = program(
        site,
        """
        import subprocess
        vllm_compat.apply()
        vllm_compat.revert()
        code = "import vllm_compat; from vllm_compat import plugin; plugin.load();"
        code += "print(vllm_compat.status().in_force)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        print(json.dumps(done.stdout.strip()))
        """,
    )
    assert in_force == "False"


RANKS = """
import json, multiprocessing, os, sys

import vllm_compat

{before}
def describe(worker):
    from vllm_compat.entry import apply as process
    from {generator} import VllmHiddenStatesGenerator
    from speculators.data_generation.custom_worker import HiddenStatesWorkerExtension
    kinds = [type(VllmHiddenStatesGenerator.__dict__["generate"]).__name__,
        type(HiddenStatesWorkerExtension.__dict__["_setup_hidden_states_capture"]).__name__]
    return [worker.rank, os.getpid(), process.report()["digest"], kinds]

def main():
    {inside}
    from {generator} import VllmHiddenStatesGenerator
    {late}
    try:
        generator = VllmHiddenStatesGenerator("model", [0], tensor_parallel_size=2)
    except Exception as error:
        alive = [child.name for child in multiprocessing.active_children()]
        print(json.dumps([type(error).__name__, str(error), alive]))
        return
    for _ in range(2):
        generator.executor.execute_model(None)
    print(json.dumps(generator.executor.collective_rpc(describe)))
    print(json.dumps([os.getpid(), vllm_compat.status().plan.digest,
        generator.vllm_config.cache_config.enable_prefix_caching, generator.scheduler.block_size]))
    generator.executor.shutdown()

if __name__ == "__main__":
    main()
"""


def ranks(site: Site, method: str, *, run: tuple[str, ...] = (), **parts: str) -> list[Any]:
    """Build the FAKE generator on two ranks, which are processes of their own."""
    parts = {"before": "", "inside": "", "late": "", "generator": GENERATOR, **parts}
    path = site.folder / "program.py"
    path.write_text(RANKS.format(**parts))
    done = site.run(*run, str(path), VLLM_WORKER_MULTIPROC_METHOD=method, VLLM_CPU_KVCACHE_SPACE="1")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


IMPORT = f"from {GENERATOR} import VllmHiddenStatesGenerator"


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(
    "parts",
    [
        {"before": "vllm_compat.apply()"},
        {"before": f"vllm_compat.apply()\n{IMPORT}"},
        {"before": f"{IMPORT}\nvllm_compat.apply()"},
        {"inside": "vllm_compat.apply()"},
        {"before": IMPORT, "late": "vllm_compat.apply()"},
    ],
    ids=["top", "top before imports", "top after imports", "main", "main after imports"],
)
def test_every_rank_holds_the_drivers_plan(site: Site, method: str, parts: dict[str, str]) -> None:
    workers, driver = ranks(site, method, **parts)
    pid, digest, *config = driver
    assert [rank for rank, *_ in workers] == [0, 1]
    assert len({pid, *(worker_pid for _, worker_pid, *_ in workers)}) == 3
    assert {held for _, _, held, _ in workers} == {digest}
    # What is the driver's alone is not there, what is the worker's is.
    assert [kinds for *_, kinds in workers] == [["function", "FunctionWrapper"]] * 2
    assert config == [False, 16]


def test_a_rank_without_the_plan_is_named_and_all_workers_are_stopped(site: Site) -> None:
    parts = {"inside": "vllm_compat.apply(); os.environ['VLLM_PLUGINS'] = 'another'"}
    ((error, said, alive),) = ranks(site, "spawn", **parts)
    assert error == "GuardError"
    assert said.startswith("Rank 0 (pid ")
    assert 'runs without the plan: VLLM_PLUGINS="another" does not name vllm_compat' in said
    assert alive == []


def test_a_rank_whose_plan_cannot_be_read_is_named_with_the_cause(site: Site) -> None:
    parts = {"inside": "vllm_compat.apply(); os.environ['VLLM_COMPAT_PLAN'] = '{}'"}
    ((error, said, alive),) = ranks(site, "spawn", **parts)
    assert error == "GuardError"
    assert "could not patch: UsageError: VLLM_COMPAT_PLAN holds no readable plan" in said
    assert alive == []


def test_workers_that_do_not_answer_which_plan_they_hold_are_stopped(site: Site) -> None:
    parts = {
        "inside": "import vllm_compat.entry.apply as a; a.report_rank = 'no_such'; vllm_compat.apply()"
    }
    ((error, said, alive),) = ranks(site, "spawn", **parts)
    assert error == "RuntimeError"
    assert "no_such" in said
    assert alive == []
