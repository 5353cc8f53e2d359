"""The command line's help, and where commands have gone."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lab import __main__ as lab
from vllm_compat import cli, features

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
sys.path.append(str(ROOT / "scripts"))
import demo as demo_script  # noqa: E402


def test_help_lists_each_command_once_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = re.findall(r"^  (\w+)  +[A-Z]", capsys.readouterr().out, flags=re.MULTILINE)
    grouped = [name for names in cli.GROUPS.values() for name in names]
    assert shown == grouped == list(cli.COMMANDS)


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return one command's parser, with its options set up."""
    (commands,) = cli._parser(name)._subparsers._group_actions  # type: ignore[union-attr]
    parser: argparse.ArgumentParser = commands.choices[name]  # type: ignore[index,call-overload]
    return parser


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_each_command_explains_all_of_its_options(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out
    for action in parser_of(name)._actions:
        words = (action.help or "").split("(default")[0].split()
        assert len(words) >= 3 or action.help == argparse.SUPPRESS, action.option_strings or action.dest


@pytest.mark.parametrize("name", ["check", "preflight", "rehearse", "verify"])
def test_a_command_that_judges_lists_its_exit_statuses(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    statuses = text.partition("Exit status: ")[2].partition("\n")[0]
    assert re.findall(r"\b([0-3]) [a-z]", statuses)[:3] == ["0", "1", "2"]
    assert ("Needs torch" in text) is (name == "verify")


@pytest.mark.parametrize("name", list(cli.MOVED))
def test_a_command_that_has_moved_says_where_it_is_now(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert name in lab.COMMANDS
    assert cli.main([name, "0.16.0", "--all"]) == 2
    said = capsys.readouterr().err
    assert f"run `python3 -m lab {name}` from a checkout" in said
    assert said.count("\n") == 1


def test_the_table_in_the_readme_has_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `vllm-compat (\w+)", text, flags=re.MULTILINE)
    assert listed == list(cli.COMMANDS)
    assert set(re.findall(r"^\| `python3 -m lab (\w+)", text, flags=re.MULTILINE)) == set(lab.COMMANDS)


def test_the_readme_says_what_changes_in_a_process() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## What it changes in a process")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+_\w+|progress)`[: ]", section)) >= set(features.names())
    for target in (target for feature in features.registry() for target in feature.targets):
        if target.startswith(("torch.", "concurrent.")):
            assert f"`{'.'.join(target.split('.')[-2:])}`" in section


@pytest.mark.parametrize(
    ("words", "said"),
    [(["bench"], "nothing was measured"), (["rehearse", "m"], "nothing was rehearsed")],
)
@pytest.mark.parametrize("has", [(), ("vllm",), ("speculators",)], ids=str)
def test_a_command_that_needs_the_pair_says_in_one_sentence_that_it_is_not_there(
    words: list[str],
    said: str,
    has: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in has else None)
    assert cli.main(words) == 2
    out, error = capsys.readouterr()
    missing = " and ".join(name for name in ("vllm", "speculators") if name not in has)
    assert error.startswith(f"vllm-compat: {missing} {'is' if has else 'are'} not installed in ")
    assert said in error
    assert error.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("word", "said"), [("chekc", "did you mean `check`?"), ("zzz", "there are check, preflight, ")]
)
def test_a_misspelt_command_is_told_in_one_sentence(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([word, "--all"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"vllm-compat: There is no command {word!r}: {said}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_a_misspelt_option_is_told_in_one_sentence(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each long option without its third letter, and one that resembles none."""
    for option in sorted(options_of(parser_of(name))):
        if option.startswith("--") and len(option) > 5:
            wrong = option[:3] + option[4:]
            assert cli.main([name, wrong, "x"]) == 2
            out, error = capsys.readouterr()
            assert (
                error
                == f"vllm-compat: `vllm-compat {name}` has no option {wrong}: did you mean {option}?\n"
            )
            assert out == ""
    assert cli.main([name, "--zzzz=1"]) == 2
    said = capsys.readouterr().err
    assert said.endswith(
        f"has no option --zzzz: `vllm-compat {name} --help` shows those that there are.\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--verison"], "`vllm-compat` has no option --verison: did you mean --version?"),
        (["verify"], "verify: the following arguments are required: DIR (`vllm-compat verify --help`"),
        (["check", "--device", "gpu"], "check: argument --device: invalid choice: 'gpu'"),
        (["check", "speculators"], "unrecognized arguments: speculators"),
    ],
)
def test_a_line_that_cannot_be_understood_is_told_in_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("vllm-compat: ")
    assert error.count("\n") == 1


def test_options_of_the_program_that_run_starts_are_its_own(tmp_path: Path) -> None:
    words = ["run", "--log", str(tmp_path), "--canary", "-m", "module", "--capturr", "--log"]
    options = cli._parser("run").parse_args(words)
    assert options.argv == ["module", "--capturr", "--log"]
    assert cli._parser("run").parse_args(["run", "--", "x.py", "--capturr"]).argv[-2:] == [
        "x.py",
        "--capturr",
    ]


def test_a_shortened_option_is_understood_as_before() -> None:
    options = cli._parser("layers").parse_args(["layers", "m", "--layer", "-1", "2"])
    assert options.layer_ids == [-1, 2]


def test_the_maintainers_commands_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.main(["matrix", "--modles", "drafted"]) == 2
    said = capsys.readouterr().err
    assert said == "lab: `python3 -m lab matrix` has no option --modles: did you mean --models?\n"


@pytest.mark.parametrize("path", ["", "src"])
def test_a_checkout_that_is_not_installed_is_told_in_one_sentence(path: str) -> None:
    """A bare checkout, and one whose sources are on the path but not what they need."""
    variables = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-S", "-m", "lab", "matrix", "0.16.0", "--list"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "-m pip install -e .` in its folder." in done.stderr
    assert done.stderr.count("\n") == 1


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {word for action in parser._actions for word in action.option_strings} - {"-h", "--help"}


def test_the_demos_script_takes_the_options_of_the_command() -> None:
    assert options_of(demo_script.parser()) == options_of(parser_of("demo")) | {
        "--vllm",
        "--speculators",
    }
    words = ["--pipeline", "--folder", "kept", "--without", "tokenizer.offsets"]
    options = demo_script.parser().parse_args(words)
    assert demo_script.command(options)[3:] == ["--model", "kimi_k25", *words]


def commands(page: Path) -> list[list[str]]:
    """Return the command lines on a page, of this project."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.removeprefix("$ ") for line in re.findall(r"^ *\$ .*$", text, flags=re.MULTILINE)]
    own = ("vllm-compat ", "python -m vllm_compat ", "python3 scripts/", "python3 -m lab ")
    return [shlex.split(line.strip().removeprefix("$ "), comments=True) for line in lines
            if line.strip().removeprefix("$ ").startswith(own)]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_on_the_pages_have_options_that_there_are(page: Path) -> None:
    for words in commands(page):
        given = [word for word in words if word != "\u2026"]
        if given[:3] == ["python", "-m", "vllm_compat"]:
            given = ["vllm-compat", *given[3:]]
        if given[0] == "vllm-compat":
            cli._parser(given[1]).parse_args(given[1:])  # ends the test where it cannot be
        elif given[1] == "scripts/demo.py":
            demo_script.parser().parse_args(given[2:])
        elif given[1:3] == ["-m", "lab"]:
            lab.parser_for(given[3:]).parse_args(given[3:])
        else:
            assert given[1] in ("scripts/test.py",), words
