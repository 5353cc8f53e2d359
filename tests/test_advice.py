"""What our messages advise exists: each option, argument and command that any of them names."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tests import test_advice_functions
from tests.advices import advices

import vllm_compat
from vllm_compat import cli
from vllm_compat.analysis import misread, server_flow
from vllm_compat.analysis.surface.recorded import recorded_versions
from vllm_compat.runtime import env

if TYPE_CHECKING:
    from conftest import MakeSite, Site

SOURCE = Path(vllm_compat.__file__).parent
STOCK = "--assistant-pattern --data-path --target-layer-ids --on-missing"
SERVER_FLOW = (
    "--validate-outputs --fail-on-error --include-last-layer --request-timeout --concurrency"
    " --hidden-states-backend"
)
VLLM = (
    "--no-enable-chunked-prefill --no-enable-prefix-caching --max-num-batched-tokens --enable-scale-out"
    " --kv-cache-dtype --config"
)
OTHERS = {*STOCK.split(), *SERVER_FLOW.split(), *VLLM.split(), "--no-deps"}
"""Options that messages name and that are stock's scripts', its server flow's, vLLM's or pip's."""


def texts() -> Iterator[tuple[str, str]]:
    """Give each text that may be shown (no docstring), with its place."""
    for path in sorted(SOURCE.rglob("*.py")):
        if "trial" in path.parts:  # programs and models with options of their own
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            place = f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
                yield place, "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                yield place, node.value


def options_of_commands() -> set[str]:
    found = set()
    for name in cli.COMMANDS:
        parser = cli._parser(name)
        (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        found |= {option for a in commands.choices[name]._actions for option in a.option_strings}
    return found | {"--version"}


SENTENCES = [(place, text) for place, text in texts() if " " in text.strip()]


def test_every_option_that_a_message_names_exists() -> None:
    known = options_of_commands() | OTHERS
    unknown = {
        (option, place)
        for place, text in SENTENCES
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)
        if option not in known
    }
    named = {option for _, text in SENTENCES for option in re.findall(r"--[a-z][a-z0-9-]+", text)}
    assert len(named) > 5, "the search has found the messages"
    assert unknown == set()
    assert not OTHERS - named, "no message names these any more"


def test_every_command_that_a_message_names_exists() -> None:
    named = {
        (word, place) for place, text in SENTENCES for word in re.findall(r"`vllm-compat ([a-z]+)", text)
    }
    assert named
    assert {(word, place) for word, place in named if word not in cli.COMMANDS} == set()


@pytest.mark.parametrize("function", ["apply", "revert", "check", "verify", "preflight", "diff"])
def test_every_argument_that_a_message_gives_to_a_public_function_exists(function: str) -> None:
    parameters = inspect.signature(getattr(vllm_compat, function)).parameters
    for place, text in SENTENCES:
        for given in re.findall(rf"(?<!\w){function}\((\w+)=", text):
            assert given in parameters, f"{place}: {function}({given}=…)"


# The advice itself, tried against the error that it stands behind.


def run(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_compat", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=cwd)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that is known as stock's script, and does nothing."""
    path = tmp_path / "program.py"
    path.write_text("'VllmHiddenStatesGenerator --output-dir data_'")
    return path


def test_advice_a_status_file_is_written_by_the_option_that_is_named(
    tmp_path: Path, program: Path
) -> None:
    status = tmp_path / "status"
    status.write_text("{}")
    refused = run("status", status)
    assert refused.returncode == 2
    assert "`vllm-compat run --status-file` writes one" in refused.stderr
    run("run", "--status-file", status, program)
    assert "program.py" in run("status", status).stdout


def test_advice_a_list_that_cannot_be_read_is_taken_away_and_its_numbers_named(
    tmp_path: Path, program: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "left_out.json").write_text("[")
    refused = run("run", program, "--output-dir", out)
    assert refused.returncode == 2
    assert "mend it, or take it away and name its numbers with --leave-out" in refused.stderr
    (out / "left_out.json").unlink()
    done = run("run", "--leave-out", "3", program, "--output-dir", out)
    assert "Left out on request: 3" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (["--leave-out", "3"], ["--leave-out", "3", "OUT"]),
        (["--leave-out", "x", "OUT"], ["--leave-out", "17,42", "OUT"]),
        (["--leave-out", "3", "--leave-folder", "OUT"], ["--leave-out", "3", "OUT"]),
        (["--leave-out", "3", "--without", "atomic_save", "OUT"], ["--leave-out", "3", "OUT"]),
    ],
)
def test_advice_what_leave_out_refuses_is_taken_as_it_says(
    tmp_path: Path, program: Path, wrong: list[str], right: list[str]
) -> None:
    def started(words: list[str]) -> subprocess.CompletedProcess[str]:
        to = ["--output-dir", str(tmp_path / "out")] if "OUT" in words else []
        return run("run", *(word for word in words if word != "OUT"), program, *to)

    refused = started(wrong)
    assert refused.returncode == 2
    assert "--leave-out" in refused.stderr
    assert "Left out on request" in started(right).stderr


@pytest.mark.parametrize("given", ["", "lora", " vllm_compat", "a, vllm_compat ,b", ","])
def test_advice_the_allow_list_that_is_named_lets_us_in(given: str) -> None:
    said = env.allow_list_shuts_us_out({"VLLM_PLUGINS": given})
    assert said is not None
    (cure,) = re.findall(r'set VLLM_PLUGINS="([^"]*)"', said)
    assert env.allow_list_shuts_us_out({"VLLM_PLUGINS": cure}) is None
    assert env.allow_list_shuts_us_out({}) is None


def test_advice_a_script_that_begins_with_a_dash_is_named_with_m(tmp_path: Path) -> None:
    refused = run("run", "--", "-x")
    assert "name a script, or -m and a module" in refused.stderr
    assert "name a script" not in run("run", "-m", "this").stderr


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def places(tmp_path: Path, make_site: MakeSite) -> dict[str, str]:
    """Folders for the words of a command, by the name that stands for each."""
    site = make_site(tmp_path).folder
    folders = {name: tmp_path / name for name in ("MODEL", "EMPTY", "DATA", "BOTH", "OLD", "STATES")}
    folders |= {name: tmp_path / name for name in ("NAMELESS", "SMALL")}
    for folder in folders.values():
        folder.mkdir()
    (folders["MODEL"] / "config.json").write_text(json.dumps(CONFIG))
    (folders["NAMELESS"] / "config.json").write_text('{"hidden_size": 64}')
    (folders["SMALL"] / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 2}))
    for name in ("data_0.pt", "data_1.pt"):
        (folders["DATA"] / name).write_bytes(b"x")
        (folders["BOTH"] / name).write_bytes(b"x")
    for name in ("hs_0.safetensors", "hs_1.safetensors"):
        (folders["BOTH"] / name).write_bytes(b"x")
        (folders["STATES"] / name).write_bytes(b"x")
    (tmp_path / "FILE").write_text("x")
    (tmp_path / "program.py").write_text("print('ran')\n")
    (tmp_path / "program.sh").write_text("#!/bin/sh\necho ran\n")
    given = {name: str(folder) for name, folder in folders.items()}
    given |= {"SPECULATORS": str(site / "speculators"), "VLLM": str(site / "vllm")}
    return given | {name: str(tmp_path / name) for name in ("FILE", "NEW", "program.py", "program.sh")}


DOWNSTREAM = "check --downstream SPECULATORS --vllm"
SERVER_CHECK = "check --downstream speculators==0.9.0"
TRIES = (
    ("analysis/downstream.py: install it, name", "check --vllm 0.16.0", f"{DOWNSTREAM} 0.16.0"),
    (
        "analysis/downstream.py: name a distr",
        "check --downstream= --vllm 0.16.0",
        f"{DOWNSTREAM} 0.16.0",
    ),
    (
        "analysis/downstream.py: name an inst",
        "check --downstream ==1 --vllm 0.16.0",
        f"{DOWNSTREAM} 0.16.0",
    ),
    (
        "commands/check.py: Ask `vllm-compat check --downstream ",
        "diff 0.24.0 0.30.0 --downstream speculators==0.9.0",
        "check --downstream speculators==0.9.0 --vllm 0.24.0",
    ),
    ("commands/check.py: install it, name", "check --downstream SPECULATORS", f"{DOWNSTREAM} VLLM"),
    (
        "analysis/surface/__init__.py: name a",
        "check --downstream SPECULATORS --vllm=",
        f"{DOWNSTREAM} VLLM",
    ),
    ("analysis/layer_ids.py: name the folder that holds a model", "layers EMPTY", "layers MODEL"),
    ("analysis/layer_ids.py: name a folder with a config", "layers NEW", "layers MODEL"),
    ("analysis/layer_ids.py: name a model's folder, or", "layers FILE", "layers MODEL/config.json"),
    ("analysis/layer_ids.py: name the folder of a language", "layers NAMELESS", "layers MODEL"),
    ("analysis/layer_ids.py: give layer ids", "layers SMALL", "layers SMALL --layer-ids 0 1"),
    (
        "commands/checking/server.py: give the architecture's name itself",
        f"{SERVER_CHECK} --vllm 0.34.0 --model NAMELESS",
        f"{SERVER_CHECK} --vllm 0.34.0 --model LlamaForCausalLM",
    ),
    (
        "commands/preflight/judge.py: give --samples, of",
        "preflight MODEL --tokens 5",
        "preflight MODEL --samples 5",
    ),
    (
        "commands/preflight/server.py: leave --device-cap",
        "preflight MODEL --server --read-speed 1GiB",
        "preflight MODEL --server",
    ),
    (
        "commands/preflight/judge.py: write 96",
        "preflight MODEL --device-memory lots",
        "preflight MODEL --device-memory 96GiB",
    ),
    (
        "commands/preflight/judge.py: write 9.0",
        "preflight MODEL --device-capability nine",
        "preflight MODEL --device-capability 9.0",
    ),
    ("commands/verify/__init__.py: give a p", "verify DATA --jobs 0", "verify DATA --jobs 1"),
    ("commands/verify/reading.py: name the one", "verify NEW", "verify DATA"),
    ("commands/verify/reading.py: move one kind", "verify BOTH", "verify DATA"),
    (
        "commands/convert/work.py: give a positive",
        "convert DATA NEW --jobs 0",
        "convert DATA NEW --jobs 1",
    ),
    ("commands/convert/work.py: name the one", "convert FILE NEW", "convert DATA NEW"),
    ("commands/convert/work.py: move one kind", "convert BOTH NEW", "convert DATA NEW"),
    (
        "commands/convert/work.py: give one such",
        "convert DATA NEW --speculators x",
        "convert DATA NEW --speculators 0.9.0",
    ),
    (
        "commands/convert/work.py: leave --spec",
        "convert DATA NEW --speculators 0.3.0",
        "convert DATA NEW",
    ),
    ("cli.py: leave --model out", "demo --pipeline --model llama", "demo --pipeline"),
    ("commands/bench.py: leave it out", "bench --model MODEL --shape tiny", "bench --model MODEL"),
    ("commands/run/launch.py: name a script", "run -- -x", "run program.py"),
    ("commands/run/launch.py: let it start", "run program.sh", "run program.py"),
    (
        "commands/run/launch.py: leave conv",
        "run --leave-out 3 program.py",
        "run program.py",
    ),
)
"""An advice, a command that ends with it, and the same command once the advice is taken."""
HINTS = (
    (
        "commands/preflight/judge.py: give --samples to compare",
        "preflight MODEL --static",
        "preflight MODEL --static --samples 5",
    ),
    (
        "commands/preflight/server.py: give --tokens or --samples",
        "preflight MODEL --server",
        "preflight MODEL --server --tokens 5",
    ),
    (
        "commands/preflight/server.py: give --tokens or --samples",
        "preflight MODEL --server",
        "preflight MODEL --server --samples 5",
    ),
)
"""The same of advices that stand in a report, and end nothing."""


@pytest.mark.parametrize(
    ("advice", "wrong", "right"), TRIES + HINTS, ids=[row[0] for row in TRIES + HINTS]
)
def test_an_advice_that_is_taken_is_not_given_again(
    places: dict[str, str], tmp_path: Path, advice: str, wrong: str, right: str
) -> None:
    def told(words: str) -> tuple[int, str]:
        by_length = sorted(places, key=len, reverse=True)
        found = []
        for word in words.split():
            name = next((name for name in by_length if word.endswith(name)), "")
            found.append(word.removesuffix(name) + places[name] if name else word)
        done = run(*found, cwd=tmp_path)
        assert "Traceback" not in done.stderr
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    words = advice.partition(": ")[2]
    status, text = told(wrong)
    assert status == 2 or (advice, wrong, right) in HINTS, text
    assert words in text
    assert words not in told(right)[1]


TRIED = test_advice_functions.TRIED | {
    "cli.py: run `python3 -m lab": "tests/test_cli.py",
    "features/resume_samples.py: mend it, or": (
        "test_advice_a_list_that_cannot_be_read_is_taken_away_and_its_numbers_named"
    ),
    "runtime/env.py: set VLLM_PLUGINS=": "test_advice_the_allow_list_that_is_named_lets_us_in",
    "analysis/server_flow.py: use vLLM": "test_advice_a_later_release_that_is_named_has_no_such_hazard",
    "analysis/server_flow.py: use speculators": (
        "test_advice_a_later_release_that_is_named_has_no_such_hazard"
    ),
    "analysis/misread.py: use a vLLM before": "test_advice_a_layer_that_is_refused_is_read_as_it_says",
    "analysis/misread.py: use tensor": "test_advice_a_layer_that_is_refused_is_read_as_it_says",
    "commands/report/words.py: put `vllm-compat run` in front of the launcher": (
        "tests/commands/test_launch_server.py"
    ),
    "commands/preflight/judge.py: take --devices": "tests/commands/test_preflight.py",
    "commands/bench_report.py: ask it with": "tests/commands/test_bench_report.py",
    "commands/rehearse/rehearse.py: put the model's own": "tests/commands/test_rehearse_own.py",
    "entry/apply.py: call revert() first": "test_advice_other_options_can_be_had_after_a_revert",
    "commands/run/launch.py: start the launcher without": (
        "test_advice_a_launcher_without_the_options_of_isolation_runs"
    ),
    "capture/auxiliary.py: leave capture='auxiliary' out": (
        "tests/with_torch/test_worker.py::test_a_model_without_auxiliary_states_is_told"
    ),
    "capture/auxiliary.py: use capture='hooks'": (
        "tests/with_torch/test_worker.py::test_a_state_that_the_model_leaves_out_is_an_error"
    ),
    "commands/checking/judging.py: Ask an installed vLLM": (
        "tests/commands/test_names_only.py::test_a_source_tree_that_is_asked_instead_tells"
    ),
    "commands/preflight/judge.py: give --read-speed": (
        "tests/commands/test_preflight.py::test_loading_takes_as_long_as_the_disk_needs"
    ),
    "entry/bootstrap/sitecustomize.py: install it into the environment": (
        "tests/runtime/test_env.py::test_a_program_that_cannot_import_vllm_compat_does_not_start"
    ),
    "runtime/patching.py: call vllm_compat.apply() before": (
        "tests/runtime/test_patching.py::test_a_target_is_wrapped_before_its_import_or_after_it"
    ),
    "runtime/engines.py: Build a new generator": (
        "tests/runtime/test_engines.py"
        "::test_the_generator_refuses_in_one_sentence_whatever_its_workers_say"
    ),
    "commands/verify/repairing.py: see to it": (
        "tests/commands/test_verify.py"
        "::test_a_disk_that_fails_leaves_all_as_it_was_and_the_same_can_be_done_again"
    ),
}
"""Advices that have a test of their own, here or in the file that is named, by their beginning."""


def test_every_advice_is_tried_or_known_not_to_be() -> None:
    """A new advice needs a try: a row of TRIES, or a test named in TRIED.

    What had none when this was written is listed in `untried_advice.json`, which may only get shorter.
    """
    known = list(advices())
    tried = {*(row[0] for row in TRIES + HINTS), *TRIED}
    assert {start for start in tried if not any(a.startswith(start) for a in known)} == set()
    without = [a for a in known if not any(a.startswith(start) for start in tried)]
    untried = json.loads(Path(__file__).with_name("untried_advice.json").read_text())
    assert sorted(set(without) - set(untried)) == [], "a new advice, which no test tries"
    assert sorted(set(untried) - set(without)) == [], "tried now, or gone: take it off the list"


def test_every_test_that_is_said_to_try_an_advice_is_there() -> None:
    for name in TRIED.values():
        file, _, test = name.partition("::")
        path = Path(__file__).parents[1] / file
        assert name in globals() or (path.is_file() and f"def {test}" in path.read_text())


def test_advice_other_options_can_be_had_after_a_revert(site: Site) -> None:
    first = "import vllm_compat as v\nv.apply()\n"
    refused = site.run("-c", f"{first}v.apply(canary=True)")
    assert "call revert() first" in refused.stderr
    assert site.run("-c", f"{first}v.revert()\nv.apply(canary=True)").returncode == 0


def test_advice_a_launcher_without_the_options_of_isolation_runs(site: Site) -> None:
    program = site.folder / "program.py"
    program.write_text("print('ran')\n")
    refused = site.run("-S", "-m", "vllm_compat", "run", str(program))
    assert refused.returncode == 2
    assert "start the launcher without them" in refused.stderr
    assert site.run("-m", "vllm_compat", "run", str(program)).stdout == "ran\n"


LATER = [
    (hazard, found[1], found[2])
    for hazard in server_flow.HAZARDS
    if (found := re.match(r"use (vLLM|speculators) ([\d.]+) or later", hazard.remedy))
]


@pytest.mark.parametrize(("hazard", "package", "release"), LATER, ids=[row[0].key for row in LATER])
def test_advice_a_later_release_that_is_named_has_no_such_hazard(
    hazard: server_flow.Hazard, package: str, release: str
) -> None:
    def keys(vllm: str, speculators: str) -> set[str]:
        kind = hazard.key.partition(".")[0]
        found = server_flow.hazards_of(speculators, vllm)
        return {each.key for each in found if each.key.partition(".")[0] == kind}

    old_vllm = next(v for v in recorded_versions() if v in SpecifierSet(hazard.vllm))
    old = next(v for v in ("0.5.0", "0.6.0", "0.7.0", "0.9.0") if v in SpecifierSet(hazard.downstream))
    assert hazard.key in keys(old_vllm, old)
    new = keys(release, old) if package == "vLLM" else keys(old_vllm, release)
    assert new - keys(old_vllm, old) == set(), "not out of the frying pan into the fire"
    assert hazard.key not in new


@pytest.mark.parametrize("row", misread.TABLE, ids=[row.layer for row in misread.TABLE])
def test_advice_a_layer_that_is_refused_is_read_as_it_says(row: misread.Misread) -> None:
    configured: object = True
    for name in reversed(row.option.split(".") if row.option else []):
        configured = SimpleNamespace(**{name: configured})

    def refused(vllm: str, ranks: int) -> bool:
        told = misread.before_loading(row.architectures, ranks, vllm, "cuda", configured=configured)
        return told is not None

    assert refused(row.since, 2)
    assert refused(row.since, 1) is ("use tensor_parallel_size=1" not in row.advice)
    earlier = [v for v in recorded_versions() if Version(v) < Version(row.since)]
    assert earlier
    if "use a vLLM before" in row.advice:
        assert not any(refused(release, 2) for release in earlier)
