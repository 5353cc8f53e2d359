"""Issue 18, fault 9: remote code only of the named model, said before, and switched off on request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from vllm_compat.analysis.remote_code import remote_code_of, sentence
from vllm_compat.checks import SWITCHES, remote_code
from vllm_compat.errors import GuardError
from vllm_compat.runtime.patching import Transaction

if TYPE_CHECKING:
    from conftest import MakeSite


def model(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}, "model_type": "own"}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_what_a_model_brings_is_read_without_running_it(tmp_path: Path) -> None:
    found = remote_code_of(model(tmp_path))
    assert found == ("configuration_own.OwnConfig", "tokenization_own.OwnTokenizer")
    assert "--no-remote-code refuses it" in sentence("own", found)
    assert remote_code_of(tmp_path / "nowhere") == ()


@pytest.mark.parametrize("text", ["", "[]", '{"auto_map": 3}', '{"auto_map": [[]]}', "[" * 10**5, "\0"])
def test_files_that_cannot_be_read_bring_no_code(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert remote_code_of(tmp_path) == ()


@pytest.mark.parametrize("off", [False, True])
def test_fault_9_no_remote_code_is_imported_where_it_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: bool
) -> None:
    assert remote_code.SWITCH in SWITCHES
    place: Any = SimpleNamespace(get_class_in_module=lambda name, path: f"{name} imported")
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(dynamic_module_utils=place))
    monkeypatch.setitem(sys.modules, "transformers.dynamic_module_utils", place)
    plan: Any = SimpleNamespace(switched_off=("remote_code",) if off else ())
    transaction = Transaction()
    remote_code.install(transaction, plan)
    try:
        if off:
            with pytest.raises(GuardError, match=r"Own is code that the model brings \(own\.py\)"):
                place.get_class_in_module("Own", "own.py")
        else:
            assert place.get_class_in_module("Own", "own.py") == "Own imported"
    finally:
        transaction.revert()
    assert place.get_class_in_module("Own", "own.py") == "Own imported"


IN_EVERY_PROCESS = """
import json, os, subprocess, sys
import vllm_compat
status = vllm_compat.apply(without=["remote_code"])
child = "import vllm_compat.plugin as p, vllm_compat as v; p.load();"
child += "print([x.owner for x in v.status().patches])"
done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
print(json.dumps([[x.owner for x in status.patches], done.stdout, done.stderr]))
"""


def test_it_is_switched_off_in_the_workers_too(tmp_path: Path, make_site: MakeSite) -> None:
    done = make_site(tmp_path).run("-c", IN_EVERY_PROCESS)
    assert done.returncode == 0, done.stderr
    driver, worker, errors = json.loads(done.stdout.splitlines()[-1])
    assert remote_code.OWNER in driver
    assert remote_code.OWNER in worker, errors


def test_the_launcher_says_it_before_the_program_starts(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; print('begun', file=sys.stderr)")
    words = [str(program), "--target-model-path", str(model(tmp_path / "own"))]

    def run(*options: str) -> str:
        command = [sys.executable, "-m", "vllm_compat", "run", *options, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    said = run()
    assert "brings code of its own, which is run (configuration_own.OwnConfig" in said
    assert "which is run" not in run("--no-remote-code")


def test_preflight_says_it_before_it_asks_and_runs_none_where_it_is_switched_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_compat.commands.preflight import judge

    asked: list[Any] = []

    class Asking:
        def __init__(self, options: Any) -> None:
            asked.append((options.remote_code, capsys.readouterr().err))

        def answer(self) -> dict[str, Any]:
            return {"stage": "importing vLLM", "error": "FAKE"}

        def close(self) -> None:
            pass

    monkeypatch.setattr(judge, "_Asking", Asking)
    config = json.loads((model(tmp_path) / "config.json").read_text())
    sizes = {"num_hidden_layers": 4, "hidden_size": 8, "architectures": ["Own"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    report = judge.preflight(judge.Options(model=str(tmp_path)))
    assert asked[0][0] is True
    assert "which is run" in asked[0][1], "said before vLLM is asked"
    assert any(item.question == "remote code" for item in report.items)
    report = judge.preflight(judge.Options(model=str(tmp_path), remote_code=False))
    assert asked[1] == (False, "")
    answers = {item.question: item for item in report.items}
    assert "none of it was run" in answers["remote code"].answer
    assert answers["tokenizer"].state == "fail"
