"""Torn and missing samples are found before a run, and only they are made again."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest

from vllm_compat.commands.run.folder import output_folder
from vllm_compat.errors import UsageError
from vllm_compat.features import resume_samples

STOCK = """
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
parser.add_argument("--output-dir")
torch.save(sample, output_dir / f"data_{index}.pt")
"""


def write(folder: Path, *numbers: int) -> None:
    folder.mkdir(exist_ok=True)
    for number in numbers:
        # What torch.save writes is a zip archive without compression.
        with zipfile.ZipFile(folder / f"data_{number}.pt", "w") as archive:
            archive.writestr(f"data_{number}/data.pkl", bytes(range(100)) * 10)
            archive.writestr(f"data_{number}/data/0", bytes([number]) * 3000)


def cut(folder: Path, number: int, size: int) -> None:
    path = folder / f"data_{number}.pt"
    path.write_bytes(path.read_bytes()[:size])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_unbroken_row_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2)
    before = names(tmp_path)
    found = resume_samples.prepare(tmp_path)
    assert found is not None
    assert (found.next, found.torn, found.missing, found.kept) == (3, (), (), ())
    assert names(tmp_path) == before


def test_there_may_be_nothing(tmp_path: Path) -> None:
    assert resume_samples.prepare(tmp_path / "not there") is None
    assert resume_samples.prepare(tmp_path) is None


@pytest.mark.parametrize("size", [0, 1, 30, 2000, 3500, -1, -20, -50])
def test_a_torn_file_is_found_wherever_it_ends(tmp_path: Path, size: int) -> None:
    write(tmp_path, 0, 1)
    cut(tmp_path, 1, size)
    found = resume_samples.prepare(tmp_path)
    assert found is not None
    assert (found.next, found.torn) == (1, (1,))
    assert names(tmp_path) == [".data_1.pt.torn", "data_0.pt"]


def test_a_file_of_zeros_is_torn(tmp_path: Path) -> None:
    write(tmp_path, 0)
    (tmp_path / "data_1.pt").write_bytes(bytes(4000))  # after a loss of power
    found = resume_samples.prepare(tmp_path)
    assert found is not None
    assert found.torn == (1,)


def test_whole_files_behind_a_gap_are_kept_for_the_run(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2, 4, 5, 7)
    cut(tmp_path, 2, 500)
    found = resume_samples.prepare(tmp_path)
    assert found is not None
    assert (found.next, found.torn, found.missing, found.kept) == (2, (2,), (3, 6), (4, 5, 7))
    assert "1 torn (2) and 2 missing (3, 6); the run goes on at 2" in str(found)
    assert [n for n in names(tmp_path) if not n.startswith(".")] == ["data_0.pt", "data_1.pt"]
    # A second attempt finds the same; what a killed run has half written goes.
    (tmp_path / ".data_2.pt.part").write_bytes(b"half")
    again = resume_samples.prepare(tmp_path)
    assert again is not None
    assert (again.next, again.kept) == (2, (4, 5, 7))
    assert not (tmp_path / ".data_2.pt.part").exists()


def test_kept_files_that_a_finished_run_did_not_need_come_back(tmp_path: Path) -> None:
    write(tmp_path, 0, 2, 3)
    resume_samples.prepare(tmp_path)
    write(tmp_path, 1, 2)
    assert resume_samples.put_back(tmp_path) == (3,)
    assert names(tmp_path) == [f"data_{i}.pt" for i in range(4)]


def test_a_run_may_begin_at_another_number(tmp_path: Path) -> None:
    write(tmp_path, 100, 101, 103)
    found = resume_samples.prepare(tmp_path, start=100)
    assert found is not None
    assert (found.next, found.kept) == (102, (103,))


def test_a_folder_that_cannot_be_changed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0, 2)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(UsageError, match="cannot be made ready"):
        resume_samples.prepare(tmp_path)


def test_a_folder_below_a_file_is_refused_by_its_own_name(tmp_path: Path) -> None:
    """Seen: the advice was to mend left_out.json, of which nobody had heard."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"output folder .*out cannot be there") as refused:
        resume_samples.prepare(tmp_path / "file" / "out")
    assert "--leave-out" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (["--output-dir", "out", "--x"], Path("out")),
        (["--output-dir=a b"], Path("a b")),
        (["--output-dir"], None),
        ([], None),
    ],
)
def test_the_output_folder_is_the_scripts_own_option(
    tmp_path: Path, arguments: list[str], folder: Path | None
) -> None:
    script = tmp_path / "any_name.py"
    script.write_text(STOCK)
    assert output_folder([str(script), *arguments]) == folder


def test_run_acts_only_for_what_is_known_to_be_stocks_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stock.py").write_text(STOCK)
    (tmp_path / "train.py").write_text("# --output-dir and data_")
    monkeypatch.chdir(tmp_path)
    option = ["--output-dir", "out"]
    assert output_folder(["stock.py", *option]) == Path("out")
    assert output_folder(["stock", *option], module=True) == Path("out")
    assert output_folder(["torchrun", "--nproc=1", "stock.py", *option]) == Path("out")
    for other in (["train.py"], ["missing.py"], ["-"], ["."]):
        assert output_folder([*other, *option]) is None
    for module in ("train", "vllm.entrypoints", "json.tool"):
        assert output_folder([module, *option], module=True) is None


@pytest.mark.parametrize("content", [b"\x80\x02ctorch", b"some text", b"\0\0\0\0x"])
def test_a_file_that_is_no_archive_is_somebody_elses(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, 0, 3)
    (tmp_path / "data_1.pt").write_bytes(content)
    (tmp_path / "data_5.pt").mkdir()
    found = resume_samples.prepare(tmp_path)
    assert found is not None
    assert (found.next, found.torn, found.kept, found.foreign) == (2, (), (3,), (1, 5))
    assert "also holds 2 data_<i>.pt (1, 5) that torch.save has not written" in str(found)
    assert names(tmp_path) == [".data_3.pt.kept", "data_0.pt", "data_1.pt", "data_5.pt"]


def test_torn_files_come_back_too_unless_they_were_made_again(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2, 4)
    cut(tmp_path, 1, 700)
    cut(tmp_path, 2, 700)
    resume_samples.prepare(tmp_path)
    write(tmp_path, 1)
    assert resume_samples.put_back(tmp_path) == (2, 4)
    assert names(tmp_path) == [f"data_{i}.pt" for i in (0, 1, 2, 4)]
    assert (tmp_path / "data_2.pt").stat().st_size == 700


@pytest.mark.parametrize("error", [RuntimeError, struct.error, MemoryError, IndexError])
def test_whatever_a_torn_archive_makes_its_reader_raise_it_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise error("torn")

    write(tmp_path, 0)
    monkeypatch.setattr(zipfile.ZipFile, "infolist", fail)
    assert not resume_samples.is_whole(tmp_path / "data_0.pt")
