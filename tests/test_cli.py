"""The command line's help, and where commands have gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab import __main__ as lab
from vllm_compat import cli

ROOT = Path(__file__).parent.parent


def test_help_lists_each_command_once_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = re.findall(r"^  (\w+)  +[A-Z]", capsys.readouterr().out, flags=re.MULTILINE)
    grouped = [name for names in cli.GROUPS.values() for name in names]
    assert shown == grouped == list(cli.COMMANDS)


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_each_command_explains_all_of_its_options(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert not re.findall(r"^  -[^ ]+(?: [A-Z.]+)?(?:, -[^ ]+(?: [A-Z.]+)?)*$(?!\n {10})", shown, re.M)


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
