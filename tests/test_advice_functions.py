"""Advice that functions give: each error is provoked, the advice is followed, and the error is gone.

`tests/test_advice.py` holds the list of all advices; `TRIED` here says which ones these tests follow.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_compat.analysis import layer_ids
from vllm_compat.analysis.contract import CallSite, SiteKind
from vllm_compat.analysis.server_flow import HAZARDS, Hazard
from vllm_compat.analysis.serving.comparing import find_across
from vllm_compat.analysis.serving.launchers import launcher_of
from vllm_compat.analysis.serving.launching import Judgement, ServeCommand, Served, judge_command
from vllm_compat.analysis.serving.model import Ask, AskKind
from vllm_compat.analysis.serving.recorded import recorded_offer
from vllm_compat.analysis.surface.files import package_at
from vllm_compat.checks import dataset, misread
from vllm_compat.checks.batch import check_prompts
from vllm_compat.checks.losses import Losses
from vllm_compat.commands import demo
from vllm_compat.commands.convert import Flow, Head, Layers, Options, work
from vllm_compat.commands.convert.layers import map_layers
from vllm_compat.commands.run import folder as run_folder
from vllm_compat.commands.verify import (
    Certainty,
    Entry,
    Fault,
    Kind,
    Remedy,
    Report,
    Sample,
    judge,
    list_folder,
    repair,
)
from vllm_compat.commands.verify import text as verify_text
from vllm_compat.engine import driver
from vllm_compat.errors import VllmCompatError

if TYPE_CHECKING:
    from conftest import Site

HEAD = Head("data_0.pt", 0, 100, 7, 5, 4, 8, "bfloat16", "int64", "int64", 320, None)
SERVED = "analysis/serving/launching.py"
LAYERS = "commands/convert/layers.py"
WORK = "commands/convert/work.py"
TRIED: dict[str, str] = {}
"""Advices, by their beginning, and the test that follows each."""

Test = Callable[..., None]


def follows(*starts: str) -> Callable[[Test], Test]:
    """Mark a test as one that follows these advices."""

    def mark(test: Test) -> Test:
        assert not TRIED.keys() & set(starts)
        TRIED.update(dict.fromkeys(starts, f"tests/test_advice_functions.py::{test.__name__}"))
        return test

    return mark


def told(call: Callable[[], object], advice: str) -> str:
    """Return what a call is refused with; the advice has to stand in it."""
    with pytest.raises(VllmCompatError) as caught:
        call()
    assert advice in str(caught.value)
    return str(caught.value)


# Layer ids.


@follows("analysis/layer_ids.py: give at least one", "analysis/layer_ids.py: choose text or json")
def test_layers_are_given_or_left_out_and_shown_in_a_form_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 8}')
    told(lambda: layer_ids.layers_of(tmp_path, ()), "give at least one, or leave the option out")
    assert layer_ids.layers_of(tmp_path, (7,)).asked == (7,)
    found = layer_ids.layers_of(tmp_path)
    told(lambda: layer_ids.render(found, "xml"), "choose text or json")
    assert layer_ids.render(found, "text")
    assert layer_ids.render(found, "json")


# The server's command.


def judged(vllm: str, given: str = "", **traits: object) -> Judgement:
    offered = recorded_offer(vllm)
    assert offered is not None
    served = replace(Served(offered, vllm), **traits)  # type: ignore[arg-type]
    return judge_command(ServeCommand(("m", *given.split()), ()), launcher_of(Version("0.9.0")), served)


@follows(f"{SERVED}: give auto, bfloat16 or float16")
def test_a_cache_of_a_type_that_is_named_is_served() -> None:
    (refused,) = judged("0.32.0", "--kv-cache-dtype fp8").refused
    named = re.findall(r"auto|bfloat16|float16", refused.partition(": give ")[2])
    assert len(named) == 3
    for dtype in named:
        assert judged("0.32.0", f"--kv-cache-dtype {dtype}").refused == []


@follows(f"{SERVED}: give at least {{}}")
def test_as_many_batched_tokens_as_are_named_are_enough() -> None:
    given = "--max-model-len 4096 --max-num-batched-tokens"
    (refused,) = judged("0.20.2", f"{given} 2048").refused
    (least,) = re.findall(r"give at least (\d+)", refused)
    assert judged("0.20.2", f"{given} {least}").refused == []
    assert judged("0.20.2", f"{given} {int(least) - 1}").refused != []


@pytest.mark.parametrize(
    ("vllm", "flag"),
    [("0.20.2", "--enable-chunked-prefill"), ("0.22.1", "--enable-prefix-caching")],
)
@follows(f"{SERVED}: give {{}} instead")
def test_the_flag_that_is_named_instead_is_not_refused(vllm: str, flag: str) -> None:
    (refused,) = judged(vllm, flag).refused
    (instead,) = re.findall(r"give (--\S+) instead", refused)
    assert judged(vllm, instead).refused == []


@follows(f"{SERVED}: use tensor parallelism or one rank", "analysis/server_flow.py: use tensor par")
def test_tensor_parallelism_and_one_rank_are_served() -> None:
    (refused,) = judged("0.32.0", "--pipeline-parallel-size 2").refused
    assert "use tensor parallelism or one rank" in refused
    for given in ("--tensor-parallel-size 2", "--pipeline-parallel-size 1", ""):
        assert judged("0.32.0", given).refused == []


@pytest.mark.parametrize("old", ["0.19.1", "0.22.1", "0.24.0"])
@follows(f"{SERVED}: use 0.25 or later")
def test_a_hybrid_model_is_served_by_the_release_that_is_named(old: str) -> None:
    assert any("use 0.25 or later" in refused for refused in judged(old, hybrid="Mamba").refused)
    for later in ("0.25.0", "0.32.0"):
        assert judged(later, hybrid="Mamba").refused == []


@pytest.mark.parametrize("vllm", ["0.22.1", "0.23.0", "0.34.0"])
@follows("analysis/serving/comparing.py: put it after the launcher's")
def test_a_flag_that_is_put_after_the_dashes_is_no_longer_missed(vllm: str) -> None:
    offered = recorded_offer(vllm)
    assert offered is not None
    render = Ask(
        AskKind.ROUTE,
        "/v1/chat/completions/render",
        site=CallSite(SiteKind.CALL, "render", "client", "client.py", 1),
    )
    asks = (*launcher_of(Version("0.9.0")), render)

    def missed(*given: str) -> list[str]:
        words = [finding.detail for finding in find_across(asks, offered, given)]
        return [word for word in words if "put it after the launcher's `--`" in word]

    flags = [re.findall(r"(?:unless|only with) (--[\w-]+)", said)[0] for said in missed()]
    assert flags
    assert missed(*flags) == []


FLOW = "analysis/server_flow.py"
PUT = [hazard for hazard in HAZARDS if hazard.remedy.startswith("put `--")]


@pytest.mark.parametrize("hazard", PUT, ids=[hazard.key for hazard in PUT])
@follows(
    f"{FLOW}: put `--enable-scale-out`",
    f"{FLOW}: put `--no-enable-chunked-prefill --max-num-batched-tokens N`",
    f"{FLOW}: put `--no-enable-chunked-prefill --no-enable-prefix-caching --max-num-batched-tokens N`",
    f"{FLOW}: put `--no-enable-prefix-caching --no-enable-chunked-prefill`",
)
def test_flags_that_a_hazard_names_leave_nothing_to_add(hazard: Hazard) -> None:
    (flags,) = re.findall("put `([^`]*)` after", hazard.remedy)
    length = "--max-model-len 4096"
    for vllm in ("0.17.1", "0.18.0", "0.21.0", "0.22.1", "0.23.0", "0.30.0", "0.34.0"):
        if vllm not in SpecifierSet(hazard.vllm):
            continue
        assert judged(vllm, length).add, "what the hazard names is missed"
        found = judged(vllm, f"{length} {flags.replace(' N', ' 4096')}")
        assert (found.add, found.refused) == ({}, [])


@follows(f"{FLOW}: give `--max-num-batched-tokens` at least")
def test_as_many_batched_tokens_as_the_longest_prompt_start() -> None:
    given = "--no-enable-chunked-prefill --max-model-len 4096 --max-num-batched-tokens"
    assert judged("0.24.0", f"{given} 4095").refused
    assert judged("0.24.0", f"{given} 4096").refused == []


# Conversion: the layers of a folder.


def mapped(flow: Flow = Flow.IN_PROCESS, recorded: Sequence[int] = (), **options: Any) -> Layers:
    config = {"hidden_states": {"layer_ids": list(recorded)}} if recorded else {}
    head = options.pop("head", HEAD)
    return map_layers(flow, [head], config, **{"num_layers": 32, **options})


def ids_in(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


@follows(f"{LAYERS}: give the ids that the server was started with")
def test_the_choice_that_is_named_for_the_server_is_taken() -> None:
    said = told(lambda: mapped(Flow.SERVER), "give the ids that the server was started with")
    (choice,) = re.findall(r"--layers ([\d ]+)\)", said)
    assert mapped(Flow.SERVER, given=ids_in(choice)).source_ids == ids_in(choice)


@follows(f"{LAYERS}: give those of the files' entries")
def test_the_choice_that_is_named_in_process_is_taken() -> None:
    said = told(mapped, "give those of the files' entries with --layers")
    (choice,) = re.findall(r"32 layers: ([\d ]+)\)", said)
    assert mapped(given=ids_in(choice)).source_ids == ids_in(choice)


@follows(f"{LAYERS}: give --layers {{}}")
def test_the_order_that_is_named_is_taken() -> None:
    said = told(lambda: mapped(Flow.SERVER, given=(6, 2, 4, 32)), "give --layers")
    (order,) = re.findall(r"give --layers ([\d ]+)\.", said)
    assert mapped(Flow.SERVER, given=ids_in(order)).source_ids == (2, 4, 6, 32)


@follows(f"{LAYERS}: give --model, or --num-layers")
def test_a_model_or_a_number_of_layers_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 32}')
    ids = (2, 16, 29, 31)
    told(lambda: mapped(recorded=ids, num_layers=None), "give --model, or --num-layers")
    assert mapped(recorded=ids, num_layers=32).num_layers == 32
    assert mapped(recorded=ids, num_layers=None, model=str(tmp_path)).num_layers == 32


@follows(f"{LAYERS}: give the ids of the files' entries")
def test_as_many_ids_as_the_files_have_entries_are_taken() -> None:
    told(lambda: mapped(recorded=(2, 16, 31)), "give the ids of the files' entries with --layers")
    assert mapped(given=(2, 16, 29, 31)).source_ids == (2, 16, 29, 31)


@follows(f"{LAYERS}: give the ids of their entries, in order")
def test_ids_that_are_given_in_order_settle_it() -> None:
    recorded = (16, 2, 29, 31)
    told(lambda: mapped(recorded=recorded), "give the ids of their entries, in order, with --layers")
    for order in (recorded, tuple(sorted(recorded))):
        assert mapped(recorded=recorded, given=order).source_ids == order


@follows(f"{LAYERS}: leave --layers out")
def test_without_the_option_the_files_are_believed() -> None:
    origin = HEAD.origin_of_target(mapped(given=(2, 16, 29, 31)))
    head = replace(HEAD, origin=origin)
    told(lambda: mapped(Flow.SERVER, head=head, given=(2, 16, 29, 32)), "leave --layers out")
    assert mapped(Flow.SERVER, head=head).target_ids == (2, 16, 29, 31)


@follows(f"{LAYERS}: extract with other ids", f"{LAYERS}: extract with the last layer at the end")
def test_an_extraction_with_other_ids_is_converted() -> None:
    told(lambda: mapped(given=(2, 2, 16, 31)), "extract with other ids")
    told(lambda: mapped(given=(31, 2, 16, 29)), "extract with the last layer at the end")
    assert mapped(given=(2, 16, 29, 31))


# Conversion: the folders.


def options(source: Path, target: Path, **more: Any) -> Options:
    return Options(source, target, **more)


def source_of(folder: Path, *names: str) -> Any:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")
    return work._Source(Flow.IN_PROCESS, list_folder(folder), None, {}, ())


@follows(f"{WORK}: name a folder elsewhere", f"{WORK}: name another.")
def test_a_target_elsewhere_is_taken(tmp_path: Path) -> None:
    source = tmp_path / "data"
    source.mkdir()
    (tmp_path / "file").touch()
    told(lambda: work._refuse_overlap(source, source / "new"), "name a folder elsewhere")
    told(lambda: work._refuse_overlap(source, tmp_path / "file"), "name another.")
    work._refuse_overlap(source, tmp_path / "new")


@follows(f"{WORK}: extract them, or convert what is there with --renumber", f"{WORK}: keep one.")
def test_a_folder_with_gaps_or_doubles_is_mended(tmp_path: Path) -> None:
    gaps = source_of(tmp_path / "gaps", "data_0.pt", "data_2.pt")
    told(lambda: work._refuse_gaps(gaps, False), "extract them, or convert what is there with --renum")
    work._refuse_gaps(gaps, True)
    work._refuse_gaps(source_of(tmp_path / "gaps", "data_1.pt"), False)
    double = source_of(tmp_path / "double", "data_0.pt", "data_1.pt", "data_01.pt")
    told(lambda: work._refuse_gaps(double, False), "keep one.")
    (tmp_path / "double" / "data_01.pt").unlink()
    work._refuse_gaps(source_of(tmp_path / "double"), False)


@follows(f"{WORK}: convert each on its own")
def test_each_of_two_extractions_is_converted_on_its_own() -> None:
    other = replace(HEAD, name="data_1.pt", hidden_size=16)
    layers = mapped(given=(2, 16, 29, 31))
    told(lambda: work._refuse_mixed([HEAD, other], layers), "convert each on its own")
    work._refuse_mixed([HEAD], layers)
    work._refuse_mixed([other], layers)


@follows(f"{WORK}: name another folder, or remove the file")
def test_a_file_that_is_in_the_way_is_removed_or_another_folder_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work.files, "origin_of_file", lambda path: None)
    layers = mapped(given=(2, 16, 29, 31))
    target = tmp_path / "hs_0.safetensors"
    target.write_bytes(b"torn")

    def look(path: Path) -> set[int]:
        return work._there_already(path.parent, [path], [HEAD], layers)

    told(lambda: look(target), "name another folder, or remove the file")
    assert look(tmp_path / "other" / target.name) == set()
    target.unlink()
    assert look(target) == set()


@pytest.mark.parametrize("stranger", ["record", "data set", "sample"])
@follows(f"{WORK}: name another folder.")
def test_another_folder_has_no_strangers(tmp_path: Path, stranger: str) -> None:
    around = {"vllm_compat_convert.json": "ours"}

    def look(target: Path) -> None:
        place = target / "hidden_states"
        work._refuse_strangers(target, place, [place / "hs_0.safetensors"], around, Flow.IN_PROCESS)

    used = tmp_path / "used"
    (used / "hidden_states").mkdir(parents=True)
    if stranger == "record":
        (used / "vllm_compat_convert.json").write_text("another's")
    elif stranger == "data set":
        (used / "state.json").touch()
    else:
        (used / "hidden_states" / "hs_7.safetensors").touch()
    told(lambda: look(used), "name another folder.")
    look(tmp_path / "another")


@follows(f"{WORK}: make room, or name a folder on another disk")
def test_a_disk_with_room_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"full": 10, "other": 10**12}

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=free[path.name])

    for name in free:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(shutil, "disk_usage", usage)
    told(lambda: work._refuse_full(tmp_path / "full" / "new", 1000), "make room, or name a folder")
    assert work._refuse_full(tmp_path / "other" / "new", 1000)
    free["full"] = 10**12
    assert work._refuse_full(tmp_path / "full" / "new", 1000)


@follows(f"{WORK}: move it away")
def test_counts_of_other_tokens_are_moved_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work.files, "load_object", lambda path: {1: 2})
    path = tmp_path / "token_freq.pt"
    path.touch()
    told(lambda: work._refuse_other_counts(path, {3: 4}), "move it away")
    path.rename(tmp_path / "away")
    work._refuse_other_counts(path, {3: 4})


@follows(f"{WORK}: give the folder that stock's preparation wrote with --dataset")
def test_masks_come_from_the_data_set_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work.dataset, "Rows", lambda folder: SimpleNamespace(folder=folder, others=()))
    states, prepared = tmp_path / "states", tmp_path / "prepared"
    source_of(states, "hs_0.safetensors")
    prepared.mkdir()
    told(
        lambda: work._open(options(states, tmp_path / "new"), Flow.SERVER),
        "give the folder that stock's preparation wrote with --dataset",
    )
    opened = work._open(options(states, tmp_path / "new", dataset=prepared), Flow.SERVER)
    assert opened.rows is not None
    assert opened.rows.folder == prepared


# What a run writes to.


@follows("commands/run/folder.py: wait for it, or name another folder")
def test_a_folder_is_free_when_the_other_run_has_ended(tmp_path: Path) -> None:
    def write_into(name: str) -> None:
        with run_folder.own_folder(tmp_path / name):
            pass

    with run_folder.own_folder(tmp_path / "out"):
        told(lambda: write_into("out"), "wait for it, or name another folder")
        write_into("other")
    write_into("out")


# Batches, data sets, models.


@follows("checks/batch.py: give whole numbers", "checks/batch.py: leave empty prompts out")
def test_prompts_of_whole_numbers_pass() -> None:
    told(lambda: check_prompts([[7, 2.0]]), "give whole numbers, as the model's own tokenizer makes")
    check_prompts([[7, 2]])
    told(lambda: check_prompts([[7], []]), "leave empty prompts out of the batch")
    check_prompts([[7]])


@follows("checks/dataset.py: rename the column that holds the turns")
def test_a_column_that_is_renamed_is_found() -> None:
    class Table(dict[str, Any]):
        column_names = property(list)

        def __len__(self) -> int:
            return len(next(iter(self.values())))

    turns = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    said = told(lambda: dataset.check_counts(Table(messages=turns), 0, [], 0.5), "rename the column")
    (column,) = re.findall(r"no column '(\w+)'", said)
    dataset.check_counts(Table({column: turns}), 1, [], 0.5)


class Untold:
    """A FAKE of a downstream's function that keeps three roles, and of a turn its text."""

    def __call__(self, turns: Sequence[Any]) -> list[Any]:
        known = ("user", "assistant", "system")
        return [{k: t[k] for k in ("role", "content")} for t in turns if t["role"] in known]


@follows("checks/losses.py: Rename the roles", "checks/losses.py: Write them into the turns' text")
def test_turns_of_a_role_that_is_named_with_all_in_their_text_are_not_lost() -> None:
    def lost(*turns: dict[str, Any]) -> list[str]:
        losses = Losses()
        losses.add_turns(turns, Untold(), "{{ m.content }}{{ m.tool_calls }}")
        return [advice for _, _, advice in losses.sentences()]

    (roles,) = lost({"role": "human", "content": "a"})
    named = re.findall(r"user|assistant|system", roles)
    assert len(named) == 3
    assert lost(*({"role": role, "content": "a"} for role in named)) == []
    called = {"role": "assistant", "content": "a", "tool_calls": ["get_weather"]}
    assert lost(called) == ["Write them into the turns' text"]
    assert lost({"role": "assistant", "content": "a get_weather"}) == []


def parallel(eager: bool = True, **sizes: Any) -> Any:
    hf_config = SimpleNamespace(architectures=[])
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config, model="the/model", enforce_eager=eager),
        parallel_config=SimpleNamespace(**sizes),
    )


@pytest.mark.parametrize("name", sorted(misread._NOT_SERVED))
@follows("checks/misread.py: use tensor_parallel_size alone")
def test_tensor_parallelism_alone_is_served(name: str) -> None:
    told(lambda: misread.refuse_parallel(parallel(**{name: 2})), "use tensor_parallel_size alone")
    misread.refuse_parallel(parallel(tensor_parallel_size=2))


@follows("checks/misread.py: leave enforce_eager=True")
def test_an_eager_model_is_served() -> None:
    told(lambda: misread.refuse_parallel(parallel(eager=False)), "leave enforce_eager=True")
    misread.refuse_parallel(parallel(eager=True))


@follows("analysis/surface/files.py: name one.")
def test_one_of_several_packages_is_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    said = told(lambda: package_at(tmp_path), "name one.")
    (names,) = re.findall(r"\(([^)]*)\): name one", said)
    for name in names.split(", "):
        assert package_at(tmp_path, name).package == name


# The second engine.


@follows("engine/driver.py: build a new generator")
def test_a_new_generator_has_an_engine_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        dead = False

        def __init__(self, **_: Any) -> None:
            self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

        def generate(self, prompts: Any, *_: Any, **__: Any) -> list[Any]:
            if self.dead:
                raise RuntimeError("engine dead")
            return [SimpleNamespace(request_id=str(i), **p) for i, p in enumerate(prompts)]

    llm = SimpleNamespace(LLM=Engine, SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", llm)  # type: ignore[arg-type]
    monkeypatch.setattr(driver, "SECONDS_TO_END", 0.1)
    broken = driver.PublicExecutor({})
    monkeypatch.setattr(Engine, "dead", True)
    with pytest.raises(RuntimeError):
        broken.compute([[1]])
    told(broken.clean, "build a new generator")
    broken.shutdown()
    told(lambda: broken.compute([[1]]), "build a new generator")
    monkeypatch.setattr(Engine, "dead", False)
    new = driver.PublicExecutor({})
    new.clean()
    assert len(new.compute([[1]])) == 1


@follows("engine/driver.py: leave it out, or use engine='stock'")
def test_an_argument_that_is_left_out_is_not_missed() -> None:
    def construct(model_path: str, tensor_parallel_size: int = 1, seed: int = 0) -> None: ...

    said = told(lambda: driver._bound(construct, ("m",), {"seed": 1}), "leave it out, or use engine=")
    (argument,) = re.findall(r"argument (\w+):", said)
    given = {"seed": 1, "tensor_parallel_size": 2}
    del given[argument]
    assert driver._bound(construct, ("m",), given)["tensor_parallel_size"] == 2


# Verifying and repairing.

SAMPLE = Sample(
    entry=Entry("data_0.pt", 0, 1000, 0),
    tokens=20,
    mask=20,
    shapes=((20, 64),) * 4,
    dtypes=("bfloat16",) * 4,
    trained=5,
    token_key="tokens",
    state_key="states",
    first_token=1,
    first_row=(1.0, -2.0, 3.0, 0.5),
    before_spans=((9, 2),),
)


def faults_of(folder: Path) -> list[Fault]:
    return judge(list_folder(folder), (SAMPLE,))[0]


@follows("commands/verify/judging.py: move what is none out of the folder")
def test_what_is_no_sample_is_moved_out(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "data_0.pt").write_bytes(b"x")
    (folder / "token_freq.pt").write_bytes(b"x")
    (fault,) = faults_of(folder)
    assert "move what is none out of the folder" in fault.message
    (folder / "token_freq.pt").rename(tmp_path / "token_freq.pt")
    assert faults_of(folder) == []


@follows("commands/verify/judging.py: delete it, and lengths are estimated")
def test_wrong_lengths_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "data_0.pt").write_bytes(b"x")
    lengths = tmp_path / "sample_lengths.json"
    lengths.write_text('{"0": 31}')
    (fault,) = faults_of(tmp_path)
    assert "delete it, and lengths are estimated" in fault.message
    lengths.unlink()
    assert faults_of(tmp_path) == []


REPORT = Report(
    folder="out",
    files=6,
    size=4_000_000_000,
    seconds=2.0,
    tokens=2048,
    trained=100,
    layers=4,
    hidden_size=7168,
    dtype="bfloat16",
    faults=(),
    batches=(),
    notes=(),
)


def torn(folder: Path) -> Report:
    """Return the report of a folder of six samples, of which two are torn."""
    folder.mkdir(exist_ok=True)
    for index in range(6):
        (folder / f"data_{index}.pt").touch()
        os.utime(folder / f"data_{index}.pt", (1000, 1000))
    faults = tuple(
        Fault(Kind.TRUNCATED, Certainty.CERTAIN, (name,), f"{name} is cut off.", Remedy.SET_ASIDE)
        for name in ("data_2.pt", "data_5.pt")
    )
    return replace(REPORT, folder=str(folder), entries=list_folder(folder).entries, faults=faults)


@follows("commands/verify/repairing.py: name a new one elsewhere")
def test_a_new_backup_folder_elsewhere_is_taken(tmp_path: Path) -> None:
    report = torn(tmp_path / "out")
    (tmp_path / "there").mkdir()
    for wrong in (tmp_path / "there", tmp_path / "out" / "backup"):
        told(lambda backup=wrong: repair(report, backup=backup), "name a new one elsewhere")  # type: ignore[misc]
    assert repair(report, backup=tmp_path / "new").exit_status == 0


@follows("commands/verify/repairing.py: move the samples in {}")
@pytest.mark.parametrize("named", [True, False])
def test_a_repair_that_stopped_half_way_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    folder, move = tmp_path / "out", shutil.move
    backup = tmp_path / "backup" if named else None

    def fail(source: Path, target: Path) -> None:
        if source.name == "data_5.pt" or target.parent == folder:
            raise OSError(30, "Read-only file system")
        move(source, target)

    report = torn(folder)
    with monkeypatch.context() as broken:
        broken.setattr(shutil, "move", fail)
        broken.setattr(shutil, "copy2", fail)
        broken.setattr(os, "replace", fail)
        said = told(lambda: repair(report, backup=backup), "stopped half-way")
    (place,) = map(Path, re.findall(r"move the samples in (\S+) back, remove that folder", said))
    for path in place.glob("data_*.pt"):
        path.rename(folder / path.name)
    shutil.rmtree(place)
    assert repair(torn(folder), backup=backup).exit_status == 0


@follows("commands/verify/text.py: choose text or json")
def test_a_report_is_shown_in_a_form_that_is_named(tmp_path: Path) -> None:
    done = repair(torn(tmp_path / "out"), dry_run=True)
    for show, what in ((verify_text.render, REPORT), (verify_text.render_repair, done)):
        told(lambda show=show, what=what: show(what, "xml"), "choose text or json")  # type: ignore[misc]
        assert show(what, "text")  # type: ignore[operator]
        assert show(what, "json")  # type: ignore[operator]


# The demo.


@follows("commands/demo.py: name a new folder", "commands/demo.py: use an environment with transform")
def test_the_demo_runs_in_a_new_folder_with_transformers_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_compat.trial import pipeline

    here = {"transformers": "5.0.0"}
    monkeypatch.setattr(demo, "_need", lambda *packages: None)
    monkeypatch.setattr(demo, "_suit_this_machine", lambda: None)
    monkeypatch.setattr(metadata, "version", lambda name: here[name])
    monkeypatch.setattr(pipeline, "run_pipeline", lambda place, **_: SimpleNamespace(right=True))
    monkeypatch.setattr(pipeline, "render", lambda verdict: "")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "data_0.pt").touch()
    said = told(lambda: demo.run_pipeline_demo(), "use an environment with transformers")
    here["transformers"] = re.findall(r"use an environment with transformers (\d+)", said)[0] + ".57.1"
    assert demo.run_pipeline_demo() == 0
    told(lambda: demo.run_pipeline_demo(str(tmp_path / "used")), "name a new folder")
    assert demo.run_pipeline_demo(str(tmp_path / "new")) == 0


# Where vllm_compat is installed.


@pytest.fixture
def launched(site: Site) -> Callable[[Path], subprocess.CompletedProcess[str]]:
    """Launch a program with a copy of the package, without its records, in a folder."""
    found = importlib.util.find_spec("vllm_compat")
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    program = site.folder / "program.py"
    program.write_text("print('ran')\n")

    def launch(folder: Path) -> subprocess.CompletedProcess[str]:
        if not (folder / "vllm_compat").exists():
            kept = shutil.ignore_patterns("__pycache__", "surfaces")
            shutil.copytree(package, folder / "vllm_compat", ignore=kept)
        start = f"import sys; sys.path.insert(0, {str(folder)!r}); from vllm_compat.__main__ import main"
        return site.run("-c", f"{start}; sys.exit(main(['run', {str(program)!r}]))")

    return launch


@follows("commands/run/launch.py: install it elsewhere")
def test_an_installation_without_a_colon_in_its_path_launches(
    tmp_path: Path, launched: Callable[[Path], subprocess.CompletedProcess[str]]
) -> None:
    refused = launched(tmp_path / "a:b")
    assert refused.returncode == 2
    assert "install it elsewhere" in refused.stderr
    assert launched(tmp_path / "elsewhere").stdout == "ran\n"


@follows("commands/run/launch.py: install vllm_compat again")
def test_an_installation_that_is_made_again_launches(
    tmp_path: Path, launched: Callable[[Path], subprocess.CompletedProcess[str]]
) -> None:
    assert launched(tmp_path).stdout == "ran\n"
    (tmp_path / "vllm_compat" / "entry" / "bootstrap" / "sitecustomize.py").unlink()
    refused = launched(tmp_path)
    assert refused.returncode == 2
    assert "install vllm_compat again" in refused.stderr
    shutil.rmtree(tmp_path / "vllm_compat")
    assert launched(tmp_path).stdout == "ran\n"


@follows("entry/apply.py: leave one of them out")
@pytest.mark.parametrize("kept", ["capture='stock'", "engine='public'"])
def test_of_two_options_that_exclude_each_other_one_is_left_out(site: Site, kept: str) -> None:
    first = "import vllm_compat as v\n"
    refused = site.run("-c", f"{first}v.apply(capture='stock', engine='public')")
    assert "leave one of them out" in refused.stderr
    assert "leave one of them out" not in site.run("-c", f"{first}v.apply({kept})").stderr
