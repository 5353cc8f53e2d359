"""`vllm-compat run` hands its own options on to `apply()`, and the program's to the program."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_compat.cli import main
from vllm_compat.commands.run import launch


def test_the_options_of_run_end_where_the_program_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(argv: list[str], *, module: bool, options: launch.LaunchOptions) -> int:
        seen.update(argv=argv, module=module, apply=dict(options.apply))
        return 0

    monkeypatch.setattr(launch, "run", run)
    assert main(["run", "--transfer", "rpc", "extract.py", "--transfer", "mine"]) == 0
    assert seen["argv"] == ["extract.py", "--transfer", "mine"]
    assert seen["apply"]["transfer"] == "rpc"
    assert main(["run", "extract.py"]) == 0
    assert seen["apply"]["transfer"] == "auto"


def test_another_transfer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--transfer", "pigeon", "extract.py"])
    assert ended.value.code == 2
    assert "invalid choice: 'pigeon'" in capsys.readouterr().err
