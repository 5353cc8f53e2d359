"""`vllm-compat run` hands its own options on to `apply()`, and the program's to the program."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_compat.cli import main
from vllm_compat.commands.run import launch
from vllm_compat.commands.run.options import LaunchOptions


def test_the_options_of_run_end_where_the_program_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(argv: list[str], *, module: bool, options: LaunchOptions) -> int:
        seen.update(argv=argv, module=module, apply=dict(options.apply))
        return 0

    monkeypatch.setattr(launch, "run", run)
    assert main(["run", "--transfer", "rpc", "extract.py", "--transfer", "mine"]) == 0
    assert seen["argv"] == ["extract.py", "--transfer", "mine"]
    assert seen["apply"]["transfer"] == "rpc"
    assert main(["run", "extract.py"]) == 0
    assert seen["apply"]["transfer"] == "auto"


def test_another_transfer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--transfer", "pigeon", "extract.py"]) == 2
    assert "invalid choice: 'pigeon'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "handed_on"),
    [
        (["extract.py", "--", "--log"], ["extract.py", "--", "--log"]),
        (["--", "extract.py", "-x"], ["extract.py", "-x"]),
        (["extract.py", "-h", "--version"], ["extract.py", "-h", "--version"]),
        # Would be ambiguous, or short for one of ours: --l for --log and --leave-folder.
        (["--no-canary", "extract.py", "--l", "--can", "-m"], ["extract.py", "--l", "--can", "-m"]),
        (["--every", "5", "extract.py", "--every=6", "-1"], ["extract.py", "--every=6", "-1"]),
        (["--log=run.log", "extract.py", "--unknown"], ["extract.py", "--unknown"]),
    ],
)
def test_all_words_behind_the_program_are_the_programs(
    given: list[str], handed_on: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def run(argv: list[str], *, module: bool, options: LaunchOptions) -> int:
        assert not module
        seen.append(argv)
        return 7

    monkeypatch.setattr(launch, "run", run)
    assert main(["run", *given]) == 7
    assert seen == [handed_on]


def test_a_module_may_have_options_of_run_before_and_its_own_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        launch, "run", lambda argv, *, module, options: seen.update(argv=argv, module=module) or 0
    )
    assert main(["run", "--every", "5", "-m", "package.program", "-m", "mine"]) == 0
    assert seen == {"argv": ["package.program", "-m", "mine"], "module": True}


@pytest.mark.parametrize("words", [[], ["-m"], ["--no-canary"], ["--"]], ids=str)
def test_run_without_a_program_is_a_usage_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 2
    assert capsys.readouterr().err == ("vllm-compat: run needs a script, or -m and a module, to run.\n")


def test_an_option_that_run_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--unknown", "extract.py"]) == 2
    assert "`vllm-compat run` has no option --unknown" in capsys.readouterr().err
