"""What a rehearsal lacks itself says nothing of the run: exit status 3, and it says so."""

from __future__ import annotations

import errno
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.cli import main
from vllm_compat.commands.rehearse import program
from vllm_compat.commands.rehearse import rehearse as r
from vllm_compat.trial import checkpoint

MODELS = Path(__file__).parents[1] / "models"
NOT_OF_THE_RUN = "nothing is said of the run"


def rehearsed(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    found: dict[str, Any] | None,
    output: str = "",
    model: Path = MODELS / "llama-3.1-8b",
) -> r.Report:
    """Rehearse with a FAKE program that only writes an output and what it found, if anything."""
    monkeypatch.setattr(r.tempfile, "tempdir", str(folder))

    def program(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if found is not None:
            Path(command[-1]).write_text(json.dumps(found))
        Path(command[command.index("--log") + 1]).write_text(output)
        return subprocess.CompletedProcess(command, 1, stderr="vllm-compat: FAILED")

    monkeypatch.setattr(r.subprocess, "run", program)
    return r.rehearse(r.Options(model=str(model)))


def test_a_small_model_that_could_not_be_made_is_not_the_runs_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = rehearsed(monkeypatch, tmp_path, {"outcome": "not made", "error": "ValueError: odd widths"})
    text = r.render(report)
    assert report.exit_status == 3
    assert "The small model could not be made: ValueError: odd widths." in text
    assert "The run fails" not in text
    assert "THE REHEARSAL FAILED" not in text
    assert NOT_OF_THE_RUN in text
    assert json.loads(r.render(report, "json"))["exit_status"] == 3


def test_a_program_that_was_killed_while_it_made_the_model_said_so_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = rehearsed(monkeypatch, tmp_path, {"outcome": "not made"}, "the last line\n")
    assert report.exit_status == 3
    assert "the last line" in report.words


def test_a_run_that_never_reached_the_program_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert rehearsed(monkeypatch, tmp_path, None).exit_status == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("OSError: Can't load image processor: it has no preprocessor_config.json", 3),
        ("ValueError: Couldn't instantiate the backend tokenizer", 3),
        ("ValueError: There is no module or parameter named 'model.altup' in Gemma3n", 3),
        ("ValueError: Following weights were not initialized from checkpoint: {'a'}", 3),
        ("RuntimeError: no kernel image is available", 1),
        ("ValueError: No valid attention backend found", 1),
    ],
)
def test_a_fault_of_what_stood_in_is_told_from_one_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str, status: int
) -> None:
    report = rehearsed(monkeypatch, tmp_path, {"outcome": "failed", "error": error})
    assert report.exit_status == status
    assert error in " ".join(report.words)
    assert (NOT_OF_THE_RUN in r.render(report)) == (status == 3)


@pytest.mark.parametrize(
    ("error", "advice", "name"),
    [
        (
            "ValueError: tokenizer of another class",
            "put the model's own beside config.json",
            "tokenizer.json",
        ),
        (
            "OSError: no image processor",
            "there is no preprocessor_config.json",
            "preprocessor_config.json",
        ),
    ],
)
def test_what_stands_beside_the_configuration_is_the_runs_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str, advice: str, name: str
) -> None:
    model, temporary = tmp_path / "model", tmp_path / "temporary"
    model.mkdir()
    temporary.mkdir()
    (model / "config.json").write_text((MODELS / "llama-3.1-8b" / "config.json").read_text())
    found = {"outcome": "failed", "error": error}
    before = rehearsed(monkeypatch, temporary, found, model=model)
    assert (before.exit_status, advice in r.render(before)) == (3, True)
    (model / name).write_text("{}")
    after = rehearsed(monkeypatch, temporary, found, model=model)
    assert (after.exit_status, advice in r.render(after)) == (1, False)


def test_after_the_engine_stands_such_words_are_the_runs_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    force = {"attention": ["X"], "quant_methods": [], "runner": "a.V1", "capture": "hooks"}
    found = {"outcome": "failed", "error": "ValueError: the tokenizer is gone", "in_force": force}
    assert rehearsed(monkeypatch, tmp_path, found).exit_status == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_no_space_for_its_folder_is_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, "it cannot be written", str(tmp_path / "x"))

    monkeypatch.setattr(r.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(r.shutil, "copyfile", full)
    monkeypatch.setattr("vllm_compat.analysis.installed.require_installed", lambda _: None)
    assert main(["rehearse", str(MODELS / "kimi-k2.5")]) == 3
    text = capsys.readouterr().out
    assert "it cannot be written" in text
    assert "--keep DIR" in text
    assert NOT_OF_THE_RUN in text
    assert list(tmp_path.iterdir()) == [], "what it has begun is taken away"


def test_no_folder_at_all_is_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(r.tempfile, "tempdir", str(tmp_path / "gone"))
    assert r.rehearse(r.Options(model=str(MODELS / "llama-3.1-8b"))).exit_status == 3


def asked(tmp_path: Path) -> tuple[str, str]:
    """Write a request; return it, and where the result goes."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    request = {"model": str(folder), "reference": str(tmp_path / "ref"), "own_tokenizer": True}
    (tmp_path / "request.json").write_text(json.dumps(request))
    return str(tmp_path / "request.json"), str(tmp_path / "result.json")


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'safetensors'"), OSError(errno.ENOSPC, "no space")]
)
def test_the_program_says_what_it_lacks_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "make_checkpoint", fails)
    request, out = asked(tmp_path)
    with pytest.raises(type(error)):
        program.main([request, out])
    found = json.loads(Path(out).read_text())
    assert found["outcome"] == "not made"
    assert str(error) in found["error"]


def test_the_program_says_before_it_begins_that_nothing_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request, out = asked(tmp_path)

    def look(*_: object, **__: object) -> None:
        assert json.loads(Path(out).read_text())["outcome"] == "not made"
        raise SystemExit(9)

    monkeypatch.setattr(checkpoint, "make_checkpoint", look)
    with pytest.raises(SystemExit):
        program.main([request, out])


def test_what_fails_once_the_model_is_there_is_the_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This environment has no speculators, so that its import fails as a broken one's would."""
    monkeypatch.setattr(checkpoint, "make_checkpoint", lambda *_, **__: ["made"])
    monkeypatch.setitem(__import__("sys").modules, "speculators", None)
    request, out = asked(tmp_path)
    with pytest.raises(ImportError):
        program.main([request, out])
    assert json.loads(Path(out).read_text())["outcome"] == "failed"


def test_help_says_what_status_3_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["rehearse", "--help"])
    assert "lacks something of its own" in " ".join(capsys.readouterr().out.split())
