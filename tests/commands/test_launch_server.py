"""`run` with a launcher of a vLLM server: real processes, a FAKE launcher, a STAND-IN of vLLM."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.analysis.serving.stand_ins import stand_in_vllm
from tests.analysis.serving.test_models import BEFORE, WITHIN, modules_of

LAUNCHER = Path(__file__).parents[1] / "programs" / "fake_launcher.py"
CHUNKS, PREFIXES = "--no-enable-chunked-prefill", "--no-enable-prefix-caching"
MAIN = "import json, sys\nprint('SERVER', json.dumps(sys.argv[1:]), flush=True)\nsys.exit(9)\n"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(empty_site: Any) -> Callable[..., Run]:
    """Make an environment with a vLLM, and return what runs a launcher of another name in it."""

    def make(version: str, loop: str = WITHIN, **traits: Any) -> Run:
        folder = empty_site.folder
        modules_of(stand_in_vllm(folder, **traits), loop)
        empty_site.describe("vllm", version)
        cli = folder / "vllm/entrypoints/cli"
        cli.mkdir()
        (cli / "__init__.py").touch()
        (cli / "main.py").write_text(MAIN)
        model = {"architectures": ["TinyForCausalLM"], "num_hidden_layers": 8}
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(model))
        shutil.copy(LAUNCHER, folder / "start.py")

        def launch(*words: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
            done: subprocess.CompletedProcess[str] = empty_site.run(
                "-m", "vllm_compat", "run", *options, "start.py", *words
            )
            return done

        return launch

    return make


def served(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the words that the server was started with."""
    (line,) = (each for each in done.stdout.splitlines() if each.startswith("SERVER "))
    words: list[str] = json.loads(line.removeprefix("SERVER "))
    return words


def test_the_launcher_gets_what_it_needs_and_takes_our_place(run: Callable[..., Run]) -> None:
    done = run("0.22.1", refuses_chunks=True)("model", "--", "--max-model-len", "2048")
    assert done.returncode == 9, done.stderr
    assert served(done)[:2] == ["serve", "model"]
    assert served(done)[-4:] == ["--max-model-len", "2048", CHUNKS, PREFIXES]
    assert f"adds {CHUNKS}: This vLLM does not start with chunked prefill." in done.stderr
    assert f"adds {PREFIXES}: With prefix caching" in done.stderr
    assert "--seq-length of at most 2047" in done.stderr
    assert "none of its data is checked" in done.stderr


def test_flags_are_added_where_no_others_are_given(run: Callable[..., Run]) -> None:
    done = run("0.32.0", scale_out=True)("model", "--target-layer-ids", "2", "4", "8")
    assert served(done)[-1] == "--enable-scale-out"
    assert "--" not in served(done)


def test_a_dry_run_prints_the_servers_command_and_starts_nothing(run: Callable[..., Run]) -> None:
    done = run("0.20.2")("model", "--", "--port", "8001", options=("--dry-run",))
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[:3] == ["vllm", "serve", "model"]
    assert words[-3:] == ["--port", "8001", CHUNKS]
    assert json.loads(words[4])["method"] == "extract_hidden_states"


def test_the_launchers_own_dry_run_stays_one(run: Callable[..., Run]) -> None:
    done = run("0.20.2")("--dry-run", "model")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(CHUNKS)
    assert "SERVER" not in done.stdout


@pytest.mark.parametrize(
    ("version", "traits", "words", "says"),
    [
        ("0.16.0", {"extracts": False}, (), "knows no method extract_hidden_states"),
        ("0.22.1", {}, ("--", "--enable-prefix-caching"), "rows of other requests"),
        ("0.24.0", {"loop": BEFORE}, (), "offers no state after its last layer"),
        ("0.32.0", {}, ("--target-layer-ids", "2", "9"), "Layer id 9 is not there"),
    ],
)
def test_wrong_data_and_sure_failures_are_refused_before_loading(
    run: Callable[..., Run], version: str, traits: dict[str, Any], words: tuple[str, ...], says: str
) -> None:
    done = run(version, **traits)("model", *words)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "refused, nothing was started: " in done.stderr
    assert says in done.stderr


def test_a_launcher_that_fails_is_heard(run: Callable[..., Run]) -> None:
    done = run("0.32.0")("nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert "OSError: nowhere is no model" in done.stderr
    assert "ended with exit status 1 before it had a command" in done.stderr


def test_a_model_that_is_not_at_hand_is_said_to_be_unseen(run: Callable[..., Run]) -> None:
    done = run("0.32.0")("somebody/elsewhere")
    assert done.returncode == 9
    assert "the model's class was not looked at" in done.stderr


@pytest.mark.parametrize(
    "option",
    [
        ("--record", "r.json"),
        ("--leave-folder",),
        ("--grace", "3"),
        ("--no-remote-code",),
        ("--without", "proofs"),
        ("--no-canary",),
        ("--max-loss", "0.5"),
        ("--engine", "public"),
        ("--capture", "hooks"),
    ],
    ids=lambda option: option[0],
)
def test_options_that_do_not_fit_a_server_are_usage_errors(
    run: Callable[..., Run], option: tuple[str, ...]
) -> None:
    done = run("0.32.0")("model", options=option)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{option[0]} goes with a program that extracts by itself" in done.stderr


def test_a_servers_output_can_be_logged(run: Callable[..., Run]) -> None:
    launch = run("0.32.0")
    logged = launch("model", options=("--log", "server.log"))
    assert (logged.returncode, logged.stdout) == (9, "")


def test_help_is_the_launchers_own(run: Callable[..., Run]) -> None:
    done = run("0.32.0")("-h")
    assert done.returncode == 0
    assert "--hidden-states-path" in done.stdout


def test_a_dry_run_of_another_program_is_a_usage_error(empty_site: Any) -> None:
    (empty_site.folder / "other.py").write_text("print('extract_hidden_states', \"serve\")\n")
    done = empty_site.run("-m", "vllm_compat", "run", "--dry-run", "other.py")
    assert done.returncode == 2
    assert "--dry-run goes with stock's launcher" in done.stderr
