"""What our messages advise exists: each option, argument and command that any of them names."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_compat
from vllm_compat import cli
from vllm_compat.runtime import env

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


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_compat", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


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
