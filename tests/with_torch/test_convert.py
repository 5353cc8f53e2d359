"""Converting data between the flows: tensors stay, and what cannot be right is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
datasets = pytest.importorskip("datasets")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from vllm_compat.cli import main  # noqa: E402
from vllm_compat.commands.convert import (  # noqa: E402
    ConversionError,
    Options,
    convert,
    files,
    work,
)
from vllm_compat.commands.verify import list_folder, read_sample  # noqa: E402
from vllm_compat.commands.verify.model import Sample  # noqa: E402
from vllm_compat.errors import UsageError  # noqa: E402

datasets.disable_progress_bars()

N = 32
IDS = (2, 16, 29, 31)


def states(rows: int, width: int, dtype: Any = torch.bfloat16) -> Any:
    """Return rows with every kind of bit pattern, those that are no number too."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (rows, width * size), dtype=torch.uint8).view(dtype)


def sample(
    rows: int = 5, layers: int = 4, width: int = 8, dtype: Any = torch.bfloat16, mask: Any = torch.long
) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(0, 1000, (rows,)),
        "hidden_states": [states(rows, width, dtype) for _ in range(layers)],
        "loss_mask": torch.randint(0, 2, (rows,)).to(mask),
    }


def extracted(folder: Path, samples: list[dict[str, Any]], ids: tuple[int, ...] = IDS) -> Path:
    folder.mkdir(parents=True)
    for index, one in enumerate(samples):
        torch.save(one, folder / f"data_{index}.pt")
    (folder / "data_config.json").write_text(json.dumps({"hidden_states": {"layer_ids": list(ids)}}))
    return folder


def served(folder: Path, samples: list[dict[str, Any]], kind: str = "int64", **more: Any) -> Path:
    """Write what stock's preparation and generation write for the same samples."""
    rows = {
        "input_ids": [one["input_ids"].tolist() for one in samples],
        "loss_mask": [one["loss_mask"].tolist() for one in samples],
        "seq_len": [len(one["input_ids"]) for one in samples],
    }
    whole = datasets.Sequence
    features = datasets.Features(
        input_ids=whole(datasets.Value("int64")),
        loss_mask=whole(datasets.Value(kind)),
        seq_len=datasets.Value("int64"),
    )
    prepared = datasets.Dataset.from_dict(rows, features=features)
    prepared.set_format(type="torch")
    prepared.save_to_disk(str(folder))
    (folder / "hidden_states").mkdir()
    for index, one in enumerate(samples):
        tensors = {
            "hidden_states": torch.stack(one["hidden_states"], 1),
            "token_ids": one["input_ids"],
            **{key: make(one) for key, make in more.items()},
        }
        save_file(tensors, folder / "hidden_states" / f"hs_{index}.safetensors")
    return folder


def go(source: Path, target: Path, **options: Any) -> Any:
    options.setdefault("num_layers", N)
    return convert(Options(source, target, **options))


def bits(tensor: Any) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def assert_same(one: Any, other: Any) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert bits(one) == bits(other)


def assert_same_sample(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert_same(one["input_ids"], other["input_ids"])
    assert_same(one["loss_mask"], other["loss_mask"])
    assert len(one["hidden_states"]) == len(other["hidden_states"])
    for left, right in zip(one["hidden_states"], other["hidden_states"], strict=True):
        assert_same(left, right)


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
    return found


DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])
MASKS = st.sampled_from([torch.long, torch.bool, torch.int32, torch.uint8])


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    auxiliary=st.sets(st.integers(0, N - 2), min_size=1, max_size=5).flatmap(
        lambda ids: st.permutations(sorted(ids))
    ),
    width=st.integers(1, 33),
    dtype=DTYPES,
    mask=MASKS,
    token=st.sampled_from([torch.int64, torch.int32]),
    jobs=st.integers(1, 4),
)
def test_in_process_data_come_back_bit_for_bit(
    tmp_path_factory: Any,
    lengths: list[int],
    auxiliary: list[int],
    width: int,
    dtype: Any,
    mask: Any,
    token: Any,
    jobs: int,
) -> None:
    tmp = tmp_path_factory.mktemp("round")
    ids = (*auxiliary, N - 1)
    samples = [sample(rows, len(ids), width, dtype, mask) for rows in lengths]
    for one in samples:
        one["input_ids"] = one["input_ids"].to(token)
    source = extracted(tmp / "in", samples, ids)
    go(source, tmp / "server", layers=ids, jobs=jobs)
    convert(Options(tmp / "server", tmp / "back", jobs=jobs))
    assert len(list((tmp / "back").glob("data_*.pt"))) == len(samples)
    for index, one in enumerate(samples):
        assert_same_sample(load(tmp / "back" / f"data_{index}.pt"), one)
    recorded = json.loads((tmp / "back" / "data_config.json").read_text())
    assert recorded["hidden_states"]["layer_ids"] == list(ids)
    found = json.loads((tmp / "back" / "sample_lengths.json").read_text())
    assert found == {str(index): rows for index, rows in enumerate(lengths)}
    shutil.rmtree(tmp)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    width=st.integers(1, 33),
    dtype=DTYPES,
    kind=st.sampled_from(["int64", "bool"]),
)
def test_server_data_come_back_bit_for_bit(
    tmp_path_factory: Any, lengths: list[int], width: int, dtype: Any, kind: str
) -> None:
    tmp = tmp_path_factory.mktemp("round")
    samples = [sample(rows, 4, width, dtype, getattr(torch, kind)) for rows in lengths]
    source = served(tmp / "server", samples, kind)
    go(source, tmp / "in", layers=(2, 16, 29, 32))
    convert(Options(tmp / "in", tmp / "back"))
    old, new = (datasets.load_from_disk(str(folder)) for folder in (source, tmp / "back"))
    assert old.features == new.features
    assert (old.format["type"], new.format["type"]) == ("torch", "torch")
    for index in range(len(samples)):
        name = f"hidden_states/hs_{index}.safetensors"
        left, right = load_file(source / name), load_file(tmp / "back" / name)
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
        for key in ("input_ids", "loss_mask"):
            assert_same(old[index][key], new[index][key])
        assert old[index]["seq_len"] == new[index]["seq_len"]
    shutil.rmtree(tmp)


class TestWhatIsWritten:
    @pytest.fixture
    def samples(self) -> list[dict[str, Any]]:
        return [sample(rows) for rows in (5, 9, 3)]

    def test_each_server_file_says_what_it_is(self, tmp_path: Path, samples: Any) -> None:
        go(extracted(tmp_path / "in", samples), tmp_path / "out")
        with safe_open(tmp_path / "out/hidden_states/hs_1.safetensors", "pt") as file:
            header = file.metadata()
        assert (header["layer_ids"], header["source_layer_ids"]) == ("[3, 17, 30, 32]", str(list(IDS)))
        assert header["source"] == "data_1.pt"
        assert "before layer k" in header["layer_numbering"]

    def test_tokens_that_are_trained_on_are_counted(self, tmp_path: Path, samples: Any) -> None:
        source = extracted(tmp_path / "in", samples)
        go(source, tmp_path / "out")
        counts: dict[int, int] = {}
        for one in samples:
            for token in one["input_ids"][one["loss_mask"] == 1].tolist():
                counts[token] = counts.get(token, 0) + 1
        assert load(tmp_path / "out/token_freq.pt") == counts
        convert(Options(tmp_path / "out", tmp_path / "back"))
        assert load(tmp_path / "back.token_freq.pt") == counts
        ends = {path.name for path in (tmp_path / "back").rglob("*pt")}
        assert ends == {f"data_{index}.pt" for index in range(3)}

    def test_both_forms_are_what_verify_reads(self, tmp_path: Path) -> None:
        samples = [sample(5) for _ in range(2)]
        for one in samples:
            one["hidden_states"] = [torch.randn(5, 8).bfloat16() for _ in range(4)]
        go(extracted(tmp_path / "in", samples), tmp_path / "out")
        convert(Options(tmp_path / "out", tmp_path / "back"))
        for folder in (tmp_path / "out/hidden_states", tmp_path / "back"):
            listing = list_folder(folder)
            found = [read_sample(folder, entry) for entry in listing.entries]
            assert all(isinstance(one, Sample) and one.well_formed for one in found)

    def test_nothing_half_written_is_left(self, tmp_path: Path, samples: Any) -> None:
        go(extracted(tmp_path / "in", samples), tmp_path / "out")
        hidden = [path.name for path in (tmp_path / "out").rglob(".*")]
        assert hidden == []

    def test_a_dry_run_writes_nothing(self, tmp_path: Path, samples: Any) -> None:
        report = go(extracted(tmp_path / "in", samples), tmp_path / "out", dry_run=True)
        assert report.written == 3
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]

    def test_fp8_states_are_decoded_with_their_scales(self, tmp_path: Path, samples: Any) -> None:
        fp8 = torch.float8_e4m3fn
        for one in samples:
            rows = len(one["input_ids"])
            one["hidden_states"] = [torch.randn(rows, 8).to(fp8) for _ in range(4)]
            one["scales"] = torch.rand(rows, 1, 1) + 0.1
        source = served(tmp_path / "s", samples, hidden_states_scales=lambda one: one["scales"])
        report = go(source, tmp_path / "out", layers=(2, 16, 29, 32))
        assert any("decoded to bfloat16" in note for note in report.notes)
        for index, one in enumerate(samples):
            found = load(tmp_path / "out" / f"data_{index}.pt")["hidden_states"]
            for layer in range(4):
                whole = one["hidden_states"][layer].bfloat16() * one["scales"][:, 0].bfloat16()
                assert_same(found[layer], whole)

    def test_samples_that_are_there_are_numbered_anew(self, tmp_path: Path, samples: Any) -> None:
        source = extracted(tmp_path / "in", samples)
        (source / "data_1.pt").unlink()
        with pytest.raises(ConversionError, match=r"1 samples are missing .* \(1\)"):
            go(source, tmp_path / "out")
        go(source, tmp_path / "out", renumber=True)
        assert_same(
            load_file(tmp_path / "out/hidden_states/hs_1.safetensors")["token_ids"],
            samples[2]["input_ids"],
        )
        assert len(datasets.load_from_disk(str(tmp_path / "out"))) == 2


class TestResuming:
    def test_goes_on_where_it_was(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = extracted(tmp_path / "in", [sample(rows) for rows in (5, 9, 3, 4)])
        whole, written = files.write_server, []

        def broken(target: Path, *rest: Any) -> None:
            if target.name == "hs_2.safetensors":
                raise KeyboardInterrupt
            written.append(target.name)
            whole(target, *rest)

        monkeypatch.setattr(files, "write_server", broken)
        with pytest.raises(KeyboardInterrupt):
            go(source, tmp_path / "out", jobs=1)
        monkeypatch.setattr(files, "write_server", whole)
        there = {path: path.stat().st_ino for path in (tmp_path / "out").rglob("hs_*")}
        assert there
        report = go(source, tmp_path / "out")
        assert (report.kept, report.written) == (len(there), 4 - len(there))
        assert {path: path.stat().st_ino for path in there} == there
        again = go(source, tmp_path / "out")
        assert (again.kept, again.written) == (4, 0)
        go(source, tmp_path / "other")
        for index in range(4):
            name = f"hidden_states/hs_{index}.safetensors"
            left, right = load_file(tmp_path / "out" / name), load_file(tmp_path / "other" / name)
            for key in left:
                assert_same(left[key], right[key])

    def test_files_of_another_source_are_not_overwritten(self, tmp_path: Path) -> None:
        go(extracted(tmp_path / "in", [sample()]), tmp_path / "out")
        before = (tmp_path / "out/hidden_states/hs_0.safetensors").read_bytes()
        other = extracted(tmp_path / "other", [sample()])
        with pytest.raises(ConversionError, match="nothing is overwritten"):
            go(other, tmp_path / "out")
        assert (tmp_path / "out/hidden_states/hs_0.safetensors").read_bytes() == before

    def test_a_second_conversion_is_kept_out(self, tmp_path: Path) -> None:
        source = extracted(tmp_path / "in", [sample()])
        (tmp_path / "out").mkdir()
        with (
            work._locked(tmp_path / "out", tmp_path / "out"),
            pytest.raises(ConversionError, match="Another conversion"),
        ):
            go(source, tmp_path / "out")


Spoil = Callable[[Path], Any]


def rewrite(index: int, **changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / f"data_{index}.pt"
        found = torch.load(path, weights_only=True)
        found.update(changes)
        torch.save({key: value for key, value in found.items() if value is not None}, path)

    return spoil


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-500])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: cut(folder / "data_1.pt"), "data_1.pt is cut off after"),
        (lambda folder: (folder / "data_1.pt").write_bytes(b"x" * 99), "data_1.pt cannot be read"),
        (lambda folder: (folder / "data_0.pt").unlink(), "1 samples are missing"),
        (rewrite(1, loss_mask=None), "data_1.pt has no loss mask of its own"),
        (rewrite(1, loss_mask=torch.ones(4)), "5 tokens and a loss mask of 4"),
        (rewrite(1, loss_mask=torch.full((5,), 2)), "other values than 0 and 1"),
        (rewrite(1, hidden_states=[states(5, 8)] * 3), "differ in their layers"),
        (rewrite(1, hidden_states=[states(5, 9)] * 4), "differ in their values a state"),
        (rewrite(1, hidden_states=[states(4, 8)] * 4), "one row a token"),
        (rewrite(1, hidden_states=[states(5, 8), states(5, 8, torch.float32)] * 2), "be alike"),
        (rewrite(1, hidden_states=states(5, 32).view(5, 4, 8)), "is of neither flow"),
        (rewrite(1, hidden_states=[states(5, 8, torch.float8_e4m3fn)] * 4), "no hidden_states_scales"),
    ],
)
def test_in_process_data_that_cannot_be_right_are_refused(
    tmp_path: Path, spoil: Spoil, words: str
) -> None:
    source = extracted(tmp_path / "in", [sample() for _ in range(3)])
    spoil(source)
    with pytest.raises(ConversionError, match=words):
        go(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_that_changes_under_way_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = extracted(tmp_path / "in", [sample() for _ in range(3)])
    whole = files.write_server

    def changing(target: Path, *rest: Any) -> None:
        if target.name == "hs_0.safetensors":
            torch.save(sample(), source / "data_2.pt")
        whole(target, *rest)

    monkeypatch.setattr(files, "write_server", changing)
    with pytest.raises(ConversionError, match=r"data_2\.pt has changed"):
        go(source, tmp_path / "out", jobs=1)
    assert not (tmp_path / "out/hidden_states/hs_2.safetensors").exists()


def test_a_write_that_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ConversionError, match="could not be written: no space left on device"):
        go(extracted(tmp_path / "in", [sample()]), tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.part"))


class TestServerDataThatCannotBeRight:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        return served(tmp_path / "s", [sample() for _ in range(3)])

    def refused(self, source: Path, tmp_path: Path, words: str, **options: Any) -> None:
        options.setdefault("layers", (2, 16, 29, 32))
        with pytest.raises(ConversionError, match=words):
            go(source, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    def test_missing_samples(self, source: Path, tmp_path: Path) -> None:
        (source / "hidden_states/hs_2.safetensors").unlink()
        self.refused(source, tmp_path, r"1 samples are missing .* \(2\)")

    def test_torn_samples(self, source: Path, tmp_path: Path) -> None:
        cut(source / "hidden_states/hs_2.safetensors")
        self.refused(source, tmp_path, "hs_2.safetensors is cut off")

    def test_samples_without_a_row(self, source: Path, tmp_path: Path) -> None:
        shutil.copy(source / "hidden_states/hs_2.safetensors", source / "hidden_states/hs_3.safetensors")
        self.refused(source, tmp_path, "has no row in the data set")

    def test_tokens_of_another_run(self, source: Path, tmp_path: Path) -> None:
        one, other = (source / f"hidden_states/hs_{index}.safetensors" for index in (1, 2))
        shutil.copy(one, other)
        self.refused(source, tmp_path, "other tokens than row 2")

    def test_no_data_set(self, source: Path, tmp_path: Path) -> None:
        alone = (source / "hidden_states").rename(tmp_path / "alone")
        self.refused(alone, tmp_path, "no loss masks")
        report = go(alone, tmp_path / "out", dataset=source, layers=(2, 16, 29, 32))
        assert report.written == 3

    def test_states_folder_finds_the_data_set_above_it(self, source: Path, tmp_path: Path) -> None:
        report = go(source / "hidden_states", tmp_path / "out", layers=(2, 16, 29, 32))
        assert report.written == 3

    def test_fp8_without_scales(self, tmp_path: Path) -> None:
        one = sample()
        one["hidden_states"] = [states(5, 8).to(torch.float8_e4m3fn) for _ in range(4)]
        self.refused(served(tmp_path / "fp8", [one]), tmp_path, "and no hidden_states_scales")

    def test_a_sample_in_the_new_folder_that_is_no_part_of_it(
        self, source: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "out/below").mkdir(parents=True)
        (tmp_path / "out/below/token_freq.pt").touch()
        with pytest.raises(ConversionError, match="would take it for a sample"):
            go(source, tmp_path / "out", layers=(2, 16, 29, 32))


class TestTheCommand:
    def test_says_what_it_did(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source = extracted(tmp_path / "in", [sample()])
        line = ["convert", str(source), str(tmp_path / "out"), "--num-layers", str(N)]
        assert main(line) == 0
        said = capsys.readouterr()
        assert "--target-layer-ids 3 17 30" in said.out
        assert "convert: 1 of 1 files" in said.err

    def test_does_not_know_the_last_layer(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = extracted(tmp_path / "in", [sample()])
        assert main(["convert", str(source), str(tmp_path / "out")]) == 3
        assert "--num-layers" in capsys.readouterr().err

    def test_fails_where_the_data_are_wrong(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = extracted(tmp_path / "in", [sample()], (2, 16, 29, 30))
        line = ["convert", str(source), str(tmp_path / "out"), "--num-layers", str(N)]
        assert main(line) == 1
        assert capsys.readouterr().err.count("\n") == 1

    def test_a_full_disk_is_told_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = extracted(tmp_path / "in", [sample()])
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(work.shutil, "disk_usage", lambda _: usage)
        line = ["convert", str(source), str(tmp_path / "out"), "--num-layers", str(N)]
        assert main(line) == 1
        assert "has 1,000 free" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    def test_folders_in_one_another_are_refused(self, tmp_path: Path) -> None:
        source = extracted(tmp_path / "in", [sample()])
        for target in (source, source / "new", tmp_path):
            with pytest.raises(UsageError, match="lie in one another"):
                go(source, target)
