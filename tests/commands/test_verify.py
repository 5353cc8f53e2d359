"""Tests of the verifier: judging on small records, without torch; files with it (marked e2e)."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.commands.verify import (
    STOCK_BATCHES,
    Batch,
    Broken,
    Certainty,
    Entry,
    Fault,
    Kind,
    Listing,
    Masks,
    Progress,
    Remedy,
    Report,
    Sample,
    explained,
    judge,
    judge_masks,
    list_folder,
    render,
    render_repair,
    repair,
    stock_order,
    verify_directory,
)
from vllm_compat.errors import UsageError, VllmCompatError

CAP = 600
USER, ROLE, ANSWER, END = 7, 8, 9, 10

# A folder that a stock run of the given batch size leaves: its prompts, then one file each.


@dataclass
class Stored:
    """One file: token ids, the loss mask beside them, and the mask that belongs to them."""

    tokens: list[int]
    mask: list[int]
    own: list[int]


Folder = dict[int, Stored]


Chat = tuple[list[int], list[int]]


def conversations(count: int, seed: int, *, full: bool = False) -> list[Chat]:
    """Return chats as (token ids, loss mask): an answer begins behind the token ``ANSWER``."""
    rng = random.Random(seed)
    chats = []
    for _ in range(count):
        tokens, mask = [1], [0]
        for turn in range(50 if full else rng.randint(1, 4)):
            question, answer = rng.randint(3, 60), rng.randint(3, 100)
            words = [1000 + int(30000 ** rng.random()) for _ in range(question + answer)]
            tokens += [USER, *words[:question], ROLE, ANSWER, *words[question:], END]
            mask += [0] * (question + 3) + [1] * answer + [0]
            if len(tokens) > CAP and turn:
                break
        chats.append((tokens[: CAP + 1], mask[: CAP + 1]))
    return chats


def extract(
    chats: Sequence[Chat],
    batch: int,
    *,
    into: Folder | None = None,
    until: int | None = None,
    ordered: bool = False,
) -> Folder:
    """Store chats as the offline script does with speculators 0.4, or (``ordered``) as it should.

    Goes on where ``into`` ends; is killed before index ``until``.
    """
    folder = {} if into is None else into
    for at in range(max(folder, default=-1) + 1, len(chats), batch):
        part = chats[at : at + batch]
        order = range(len(part)) if ordered else sorted(range(len(part)), key=str)
        for place, prompt in enumerate(order):
            tokens = part[prompt][0][:CAP]
            if until is None or at + place < until:
                folder[at + place] = Stored(
                    tokens, part[place][1][: len(tokens)], part[prompt][1][: len(tokens)]
                )
        if until is not None and at + batch >= until:
            break
    return folder


def lengths_of(folder: Folder) -> dict[int, tuple[int, int]]:
    return {index: (len(file.tokens), len(file.mask)) for index, file in folder.items()}


def settled(folder: Folder) -> list[Batch]:
    samples = sorted(samples_of(folder), key=lambda sample: sample.entry.index)
    return judge_masks(samples, STOCK_BATCHES, pairing_of(folder))[0]


def pairing_of(folder: Folder) -> Any:
    def pairing(index: int) -> tuple[list[int], list[int]] | None:
        return (folder[index].tokens, folder[index].mask) if index in folder else None

    return pairing


def assert_sure_ones_are_right(folder: Folder, batches: Sequence[Batch]) -> int:
    """Check every file that a batch is sure of; return how many there are."""
    count = 0
    for batch in batches:
        for index in batch.sure:
            count += 1
            file, source = folder[index], batch.mask_of(index)
            if source not in batch.indices or source not in folder:
                assert file.mask != file.own, f"file {index} would be set aside for nothing"
                continue
            mask = folder[source].mask[: len(file.tokens)]
            assert mask == file.own[: len(mask)], f"file {index} would get another's mask"
    return count


def entry(index: int, name: str | None = None) -> Entry:
    return Entry(name or f"data_{index}.pt", index, 1000, 0)


def sample(index: int, **changes: Any) -> Sample:
    """Return a sound sample of four layers, with rows and tokens of its own."""
    plain = Sample(
        entry=entry(index),
        tokens=20,
        mask=20,
        shapes=((20, 64),) * 4,
        dtypes=("bfloat16",) * 4,
        trained=5,
        token_key=f"tokens {index}",
        state_key=f"states {index}",
        first_token=1,
        first_row=(1.0, -2.0, 3.0, 0.5),
        before_spans=((ANSWER, 2),),
    )
    return replace(plain, **changes)


def found(
    *readings: Sample | Broken,
    listing: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Fault]:
    entries = tuple(reading.entry for reading in readings)
    return judge(Listing(Path("out"), entries, **(listing or {})), readings, **options)[0]


def samples_of(folder: Folder) -> list[Sample]:
    made = []
    for index, file in folder.items():
        before = [
            file.tokens[place - 1]
            for place in range(1, len(file.mask))
            if file.mask[place] and not file.mask[place - 1]
        ]
        made.append(
            sample(
                index,
                tokens=len(file.tokens),
                mask=len(file.mask),
                shapes=((len(file.tokens), 64),) * 4,
                trained=sum(file.mask),
                before_spans=tuple((token, before.count(token)) for token in set(before)),
            )
        )
    return made


class TestStockOrder:
    def test_results_stand_in_the_order_of_request_ids_as_text(self) -> None:
        assert stock_order(12) == (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)

    def test_up_to_ten_prompts_keep_their_order(self) -> None:
        assert all(stock_order(size) == tuple(range(size)) for size in range(11))

    def test_prompts_of_rising_length_explain_their_cut_masks(self) -> None:
        # Public: twelve prompts of one to twelve tokens come back as 1, 2, 11, 12, 3, …
        tokens = [1, 2, 11, 12, 3, 4, 5, 6, 7, 8, 9, 10]
        lengths = {place: (rows, min(rows, place + 1)) for place, rows in enumerate(tokens)}
        assert explained(Masks(lengths), 0, 12, 12) == (2, 0)
        assert explained(Masks(lengths), 0, 11, 11) is None


class TestOrderOfLossMasks:
    @pytest.mark.parametrize("batch", [11, 12, 16, 27, 32])
    def test_every_batch_is_found_and_every_file_gets_its_own_mask(self, batch: int) -> None:
        folder = extract(conversations(200, seed=batch), batch)
        batches = settled(folder)
        assert {found.start for found in batches} == {
            start for start in range(0, 200, batch) if min(batch, 200 - start) > 10
        }
        assert assert_sure_ones_are_right(folder, batches) > 100

    @pytest.mark.parametrize("batch", [1, 8, 10])
    def test_small_batches_have_none(self, batch: int) -> None:
        assert settled(extract(conversations(100, seed=1), batch)) == []

    @pytest.mark.parametrize("seed", range(50))
    def test_right_folders_raise_nothing(self, seed: int) -> None:
        chats = conversations(60, seed, full=seed % 5 == 0)
        folder = extract(chats, 16, ordered=True)
        assert found(*samples_of(folder), pairing=pairing_of(folder)) == []

    def test_runs_that_were_killed_and_resumed(self) -> None:
        chats = conversations(200, seed=2)
        folder = extract(chats, 16, until=71)
        folder = extract(chats, 16, into=folder, until=150)
        folder = extract(chats, 16, into=folder)
        batches = settled(folder)
        assert {b.start for b in batches} >= {0, 16, 32, 48, 71, 87, 103, 119, 150, 166, 182}
        front = next(b for b in batches if b.start == 135)
        assert (front.size, front.files) == (16, 15)
        assert assert_sure_ones_are_right(folder, batches) > 120

    def test_what_a_repaired_run_added_is_left_alone(self) -> None:
        chats = conversations(100, seed=3) + conversations(100, seed=4, full=True)
        folder = extract(chats, 16, until=80)
        folder = extract(chats, 16, into=folder, ordered=True)
        batches = settled(folder)
        assert max(batch.indices.stop for batch in batches) == 80
        assert assert_sure_ones_are_right(folder, batches) > 40

    @pytest.mark.parametrize("witness", [True, False])
    @pytest.mark.parametrize("seed", range(40))
    def test_what_is_sure_is_right_in_the_worst_of_folders(self, seed: int, witness: bool) -> None:
        """Several runs, sizes and versions in one folder, killed anywhere, files missing."""
        rng = random.Random(seed)
        chats = conversations(rng.choice([30, 100]), seed, full=seed % 6 == 0)
        if not witness:
            chats = [([rng.randint(1, 30000) for _ in tokens], mask) for tokens, mask in chats]
        folder: Folder = {}
        while max(folder, default=-1) + 1 < len(chats):
            until = rng.randint(max(folder, default=-1) + 2, len(chats))
            size = rng.choice([8, 11, 12, 16, 32])
            extract(chats, size, into=folder, until=until, ordered=rng.random() < 0.3)
        for index in rng.sample(sorted(folder), len(folder) // 30):
            del folder[index]
        assert_sure_ones_are_right(folder, settled(folder))

    def test_equal_lengths_are_told_by_the_tokens_before_the_spans(self) -> None:
        folder = extract(conversations(96, seed=5, full=True), 16)
        assert all(tokens == mask for tokens, mask in lengths_of(folder).values())
        faults = found(*samples_of(folder), pairing=pairing_of(folder))
        assert {fault.kind for fault in faults} == {Kind.ORDER}
        assert sum(len(f.files) for f in faults if f.certainty is Certainty.CERTAIN) > 70

    def test_without_witness_equal_lengths_say_nothing(self) -> None:
        rng = random.Random(6)
        chats = [
            ([rng.randint(1, 30000) for _ in tokens], mask)
            for tokens, mask in conversations(64, seed=6, full=True)
        ]
        folder = extract(chats, 16)
        assert found(*samples_of(folder), pairing=pairing_of(folder)) == []

    def test_a_given_batch_size_is_the_only_one_tried(self) -> None:
        folder = extract(conversations(64, seed=7), 16)
        samples, pairing = samples_of(folder), pairing_of(folder)
        kinds = {f.kind for f in found(*samples, pairing=pairing, batch_size=8)}
        assert Kind.MASK in kinds
        assert Kind.ORDER not in kinds
        assert Kind.ORDER in {f.kind for f in found(*samples, pairing=pairing, batch_size=16)}

    def test_a_lone_short_mask_is_a_fault_of_its_own(self) -> None:
        (fault,) = found(sample(0), sample(1, mask=17), sample(2))
        assert (fault.kind, fault.certainty) == (Kind.MASK, Certainty.CERTAIN)
        assert fault.remedy is Remedy.SET_ASIDE
        assert "data_1.pt" in fault.message
        assert "17 for 20 tokens" in fault.message


def only(faults: Sequence[Fault]) -> Fault:
    assert len(faults) == 1, faults
    return faults[0]


class TestOneFile:
    def test_a_layer_cut_into_rows(self) -> None:
        """The known wrong run: 771 tensors of [512] instead of four of [512, 7168]."""
        cut = sample(1, tokens=512, mask=512, shapes=((512,),) * 771, dtypes=("bfloat16",) * 771)
        fault = only(found(sample(0), cut, sample(2)))
        assert fault.kind is Kind.SHAPE
        assert "has 771 tensors of shape [512] for 512 tokens" in fault.message

    @pytest.mark.parametrize(
        ("change", "kind", "said"),
        [
            ({"shapes": ((17, 64),) * 4}, Kind.ROWS, "17 rows for 20 tokens"),
            ({"shapes": ((0, 64),) * 4}, Kind.ROWS, "0 rows for 20 tokens"),
            ({"zero": ((2, 3, 7),)}, Kind.ZERO, "3 of 20 rows all zero in layer number 2"),
            ({"not_finite": ((0, 1, 5),)}, Kind.NOT_FINITE, "the first is row 5"),
            ({"repeated": (4, 12, 8)}, Kind.REPEATED, "row 12, equal to row 8"),
            ({"shapes": ((20, 64),) * 3}, Kind.LAYERS, "3, where 3 of 4 files have 4"),
            ({"shapes": ((20, 32),) * 4}, Kind.HIDDEN_SIZE, "32, where 3 of 4 files have 64"),
            ({"dtypes": ("float32",) * 4}, Kind.DTYPE, "float32, where 3 of 4 files have bfloat16"),
            ({"mask": 21}, Kind.MASK, "a loss mask of 21 for 20 tokens"),
        ],
    )
    def test_what_no_right_run_writes(self, change: dict[str, Any], kind: Kind, said: str) -> None:
        fault = only(found(sample(0), sample(1, **change), sample(2), sample(3)))
        assert (fault.kind, fault.certainty) == (kind, Certainty.CERTAIN)
        assert fault.files == ("data_1.pt",)
        assert fault.message.startswith("data_1.pt ")
        assert said in fault.message

    def test_a_file_that_cannot_be_read(self) -> None:
        torn = Broken(entry(1), Kind.TRUNCATED, "is cut off after 12 bytes.")
        fault = only(found(sample(0), torn))
        assert fault.message == "data_1.pt is cut off after 12 bytes."
        assert fault.remedy is Remedy.SET_ASIDE

    def test_a_mask_without_a_one_is_only_noted(self) -> None:
        fault = only(found(sample(0), sample(1, trained=0)))
        assert fault.certainty is Certainty.NOTE


class TestFilesTogether:
    def test_the_same_rows_for_other_tokens(self) -> None:
        fault = only(found(sample(0), sample(1, state_key="states 0")))
        assert (fault.kind, fault.certainty) == (Kind.FOREIGN, Certainty.CERTAIN)
        assert fault.files == ("data_0.pt", "data_1.pt")

    def test_the_same_tokens_with_other_rows(self) -> None:
        twins = (sample(0), sample(1, token_key="tokens 0"))
        assert only(found(*twins, difference=lambda a, b: 1.4)).kind is Kind.CONTRADICTION
        assert found(*twins, difference=lambda a, b: 0.02) == []

    def test_a_repeated_conversation_is_noted_and_a_repeated_stretch_suspected(self) -> None:
        def copy(index: int, of: int) -> Sample:
            return sample(index, token_key=f"tokens {of}", state_key=f"states {of}")

        assert only(found(sample(0), copy(1, of=0))).certainty is Certainty.NOTE
        firsts = [sample(index) for index in range(4)]
        faults = found(*firsts, *(copy(index + 4, of=index) for index in range(4)))
        assert {fault.certainty for fault in faults} == {Certainty.SUSPECTED}
        assert len(faults) == 4

    def test_a_first_row_unlike_the_others(self) -> None:
        """Rows shifted by one: the first is not that of the first token."""
        others = [sample(i, first_row=(1.0, -2.0 + i / 100, 3.0, 0.5)) for i in range(5)]
        fault = only(found(*others, sample(5, first_row=(-1.0, 0.5, 1.0, 2.0))))
        assert (fault.kind, fault.certainty) == (Kind.FOREIGN, Certainty.SUSPECTED)
        assert fault.files == ("data_5.pt",)

    def test_first_rows_that_have_nothing_in_common(self) -> None:
        rng = random.Random(0)
        rows = [tuple(rng.gauss(0, 1) for _ in range(16)) for _ in range(8)]
        fault = only(found(*(sample(i, first_row=row) for i, row in enumerate(rows))))
        assert "nothing in common" in fault.message

    def test_first_rows_of_other_tokens_are_not_compared(self) -> None:
        others = [sample(i) for i in range(5)]
        assert found(*others, sample(5, first_token=2, first_row=(9.0, 9.0, 9.0, 9.0))) == []


class TestSurroundings:
    def test_gaps_and_what_a_new_run_does_about_them(self) -> None:
        fault = only(found(sample(0), sample(3), sample(7)))
        assert "5 indices are missing, 1 to 2, 4 to 6" in fault.message
        assert "goes on at 8 and never fills them" in fault.message

    def test_an_index_far_off_costs_nothing(self) -> None:
        fault = only(found(sample(0), sample(1, mask=5), sample(10**12))[:1])
        assert fault.kind is Kind.MASK
        assert "999999999998 indices are missing" in found(sample(1), sample(10**12))[0].message

    def test_samples_that_the_record_promises(self) -> None:
        config = {"data": {"num_samples": 4}}
        fault = only(found(sample(0), sample(1), listing={"config": config}))
        assert "2 indices are missing, 2 to 3" in fault.message

    def test_what_the_trainer_would_take_for_a_sample(self) -> None:
        fault = only(found(sample(0), listing={"strays": ("token_freq.pt", "old/data_1.pt")}))
        assert "token_freq.pt, old/data_1.pt" in fault.message

    def test_a_write_that_has_not_ended(self) -> None:
        fault = only(found(sample(0), listing={"unfinished": ("data_1.pt.tmp",)}))
        assert (fault.certainty, fault.remedy) == (Certainty.SUSPECTED, Remedy.SET_ASIDE)

    def test_sample_lengths(self) -> None:
        wrong = found(sample(0), sample(1), listing={"lengths": {"0": 20, "1": 31}})
        assert "data_1.pt: 31 for 20 tokens" in only(wrong).message
        lacking = found(sample(0), sample(1), listing={"lengths": {"0": 20}})
        assert only(lacking).certainty is Certainty.NOTE

    def test_layer_ids_of_the_record(self) -> None:
        config = {"hidden_states": {"layer_ids": [2, 30, 60]}}
        assert only(found(sample(0), listing={"config": config})).kind is Kind.RECORD

    def test_the_recorded_batch_size(self) -> None:
        command = {"reproducibility": {"command": "script.py --batch-size 48 --max-samples 9"}}
        assert Listing(Path("out"), (entry(0),), config=command).batch_size == 48
        assert Listing(Path("out"), (entry(0),)).batch_size is None


class TestListing:
    def test_samples_in_the_order_of_their_numbers(self, tmp_path: Path) -> None:
        for name in ("data_10.pt", "data_9.pt", "data_config.json", "notes.txt", "data_3.pt.part"):
            (tmp_path / name).write_bytes(b"{}")
        (tmp_path / "more").mkdir()
        (tmp_path / "more" / "extra.pt").touch()
        (tmp_path / "token_freq.pt").touch()
        listing = list_folder(tmp_path)
        assert [e.name for e in listing.entries] == ["data_9.pt", "data_10.pt"]
        assert listing.strays == (os.path.join("more", "extra.pt"), "token_freq.pt")
        assert listing.unfinished == ("data_3.pt.part",)
        assert not listing.server_flow

    def test_the_server_flows_files(self, tmp_path: Path) -> None:
        (tmp_path / "hs_0.safetensors").touch()
        assert list_folder(tmp_path).server_flow

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="There is no folder"):
            list_folder(tmp_path / "absent")

    def test_no_samples_but_some_further_down(self, tmp_path: Path) -> None:
        (tmp_path / "gen").mkdir()
        (tmp_path / "gen" / "data_0.pt").touch()
        with pytest.raises(UsageError, match=r"there are some in .*gen"):
            list_folder(tmp_path)

    def test_two_flows_in_one_folder(self, tmp_path: Path) -> None:
        (tmp_path / "hs_0.safetensors").touch()
        (tmp_path / "data_0.pt").touch()
        with pytest.raises(UsageError, match="two different flows"):
            list_folder(tmp_path)

    @pytest.mark.parametrize("options", [{"batch_size": 0}, {"jobs": -1}])
    def test_numbers_that_make_no_sense(self, tmp_path: Path, options: dict[str, int]) -> None:
        with pytest.raises(UsageError, match="makes no sense"):
            verify_directory(tmp_path, **options)  # type: ignore[arg-type]


def report(*faults: Fault, folder: Path = Path("out"), entries: Sequence[Entry] = ()) -> Report:
    return Report(
        folder=str(folder),
        files=max(1, len(entries)),
        size=4_000_000_000,
        seconds=2.0,
        tokens=2048,
        trained=100,
        layers=4,
        hidden_size=7168,
        dtype="bfloat16",
        faults=faults,
        batches=(),
        notes=("Something was tested.",),
        entries=tuple(entries),
    )


def fault(index: int, certainty: Certainty = Certainty.CERTAIN) -> Fault:
    name = f"data_{index}.pt"
    said = f"{name} is cut off."
    return Fault(Kind.TRUNCATED, certainty, (name,), said, Remedy.SET_ASIDE)


class TestRendering:
    def test_a_clean_folder(self) -> None:
        clean = report(fault(0, Certainty.NOTE))
        assert clean.exit_status == 0
        assert "No fault found." in render(clean)
        assert "4 layers of 7168 in bfloat16" in render(clean)
        assert "2.00 GB/s" in render(clean)

    def test_many_faults_of_one_kind_are_summed_up(self) -> None:
        text = render(report(*(fault(i) for i in range(9))))
        assert "certain: truncated (9)" in text
        assert text.count("is cut off") == 5
        assert "… and 4 more" in text

    def test_what_no_repair_makes_good_is_to_be_extracted_again(self) -> None:
        entries = [Entry(f"data_{i}.pt", i, 1, 1) for i in range(12)]
        moved = replace(fault(7), kind=Kind.ORDER, remedy=Remedy.REORDER)
        told = replace(fault(9), kind=Kind.RECORD)
        doubt = replace(fault(5, Certainty.SUSPECTED), kind=Kind.FOREIGN, remedy=Remedy.NONE)
        found = report(
            fault(2), fault(3), doubt, moved, told, fault(11, Certainty.NOTE), entries=entries
        )
        assert render(found).endswith("\nExtract these again: 2 to 3, 5.\n")
        assert "again" not in render(report(moved, entries=entries))

    @pytest.mark.parametrize("certainty", [Certainty.CERTAIN, Certainty.SUSPECTED])
    def test_faults_end_in_status_one(self, certainty: Certainty) -> None:
        assert report(fault(0, certainty)).exit_status == 1

    def test_json_has_a_schema_version_and_every_fault(self) -> None:
        record = json.loads(render(report(*(fault(i) for i in range(9))), "json"))
        assert record["schema_version"] == 1
        assert record["clean"] is False
        assert record["megabytes_per_second"] == 2000.0
        assert len(record["faults"]) == 9
        assert record["faults"][3] == {
            "kind": "truncated",
            "certainty": "certain",
            "files": ["data_3.pt"],
            "message": "data_3.pt is cut off.",
            "remedy": "set aside",
        }

    def test_a_form_that_does_not_exist(self) -> None:
        with pytest.raises(UsageError, match="'yaml'"):
            render(report(), "yaml")


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class TestProgress:
    def test_a_bar_on_a_terminal(self) -> None:
        stream = Stream(terminal=True)
        Progress(stream)(10, 10, 5_000_000)
        assert stream.getvalue().startswith("\r")
        assert "█" * 30 in stream.getvalue()
        assert stream.getvalue().endswith("\n")

    def test_plain_and_few_lines_elsewhere(self) -> None:
        stream = Stream(terminal=False)
        progress = Progress(stream)
        for done in range(1, 101):
            progress(done, 100, done * 1000)
        assert stream.getvalue().startswith("verify: 100 of 100 files")
        assert stream.getvalue().count("\n") == 1


class TestSettingAside:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "out"
        folder.mkdir()
        for index in range(6):
            (folder / f"data_{index}.pt").write_bytes(bytes([index]))
            os.utime(folder / f"data_{index}.pt", (1000, 1000))
        return folder

    def faulty(self, folder: Path, *indices: int) -> Report:
        faults = [fault(index) for index in indices]
        return report(*faults, folder=folder, entries=list_folder(folder).entries)

    def test_originals_go_to_a_folder_beside(self, folder: Path) -> None:
        done = repair(self.faulty(folder, 2, 5))
        assert done.backup is not None
        backup = Path(done.backup)
        assert backup.parent == folder.parent
        assert sorted(p.name for p in backup.iterdir()) == [
            "data_2.pt",
            "data_5.pt",
            "repair.json",
        ]
        assert (backup / "data_5.pt").read_bytes() == b"\x05"
        assert sorted(p.name for p in folder.iterdir()) == [f"data_{i}.pt" for i in (0, 1, 3, 4)]
        journal = json.loads((backup / "repair.json").read_text())
        assert journal["schema_version"] == 1
        assert done.exit_status == 0
        assert [action["file"] for action in journal["actions"]] == ["data_2.pt", "data_5.pt"]

    def test_what_a_new_run_does(self, folder: Path) -> None:
        resume = repair(self.faulty(folder, 2, 5), dry_run=True).resume
        assert "goes on at the highest index plus one, 5, and so extracts 5 again" in resume
        assert "2 stay missing" in resume
        server = replace(self.faulty(folder, 2), server_flow=True)
        assert "every index that is missing" in repair(server, dry_run=True).resume

    def test_a_dry_run_changes_nothing(self, folder: Path) -> None:
        planned = repair(self.faulty(folder, 2), dry_run=True)
        assert planned.backup is None
        assert planned.exit_status == 1
        assert len(list(folder.parent.rglob("*.pt"))) == 6
        assert "would set aside: data_2.pt is cut off." in render_repair(planned)

    def test_nothing_to_do(self, folder: Path) -> None:
        done = repair(report(folder=folder, entries=list_folder(folder).entries))
        assert done.backup is None
        assert list(folder.parent.iterdir()) == [folder]
        assert "nothing to repair" in render_repair(done)

    def test_a_suspicion_is_left(self, folder: Path) -> None:
        doubt = replace(fault(3, Certainty.SUSPECTED), remedy=Remedy.NONE)
        done = repair(report(doubt, folder=folder, entries=list_folder(folder).entries))
        assert (done.actions, done.left, done.exit_status) == ((), (doubt,), 1)

    def test_a_folder_that_is_being_written(self, folder: Path) -> None:
        os.utime(folder / "data_5.pt")
        with pytest.raises(UsageError, match="may still be writing"):
            repair(self.faulty(folder, 2))

    def test_a_folder_that_has_changed_since(self, folder: Path) -> None:
        seen = self.faulty(folder, 2)
        (folder / "data_4.pt").write_bytes(b"longer")
        os.utime(folder / "data_4.pt", (1000, 1000))
        with pytest.raises(UsageError, match=r"data_4.pt has changed"):
            repair(seen)

    @pytest.mark.parametrize("when", ["backup full", "folder read-only"])
    def test_a_disk_that_fails_leaves_all_as_it_was_and_the_same_can_be_done_again(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, when: str
    ) -> None:
        """Seen: a backup that was full kept a part, and the same command was refused for it."""
        move = shutil.move

        def fail(source: Path, target: Path) -> None:
            if source.name != "data_5.pt":
                move(source, target)
                return
            # As shutil.move does across disks: it copies, then takes the original away.
            target.write_bytes(b"" if when == "backup full" else source.read_bytes())
            raise OSError(28, "No space left on device")

        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        backup = folder.parent / "backup"
        monkeypatch.setattr(shutil, "move", fail)
        with pytest.raises(VllmCompatError, match=r"No space left .* everything is as it was"):
            repair(self.faulty(folder, 2, 5), backup=backup)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert not backup.exists()
        monkeypatch.undo()
        for path in folder.iterdir():
            os.utime(path, (1000, 1000))
        assert repair(self.faulty(folder, 2, 5), backup=backup).exit_status == 0

    def test_a_backup_below_a_file_changes_nothing(self, folder: Path) -> None:
        (folder.parent / "file").touch()
        with pytest.raises(VllmCompatError, match="everything is as it was"):
            repair(self.faulty(folder, 2), backup=folder.parent / "file" / "backup")

    def test_what_cannot_be_moved_back_is_told(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        move = shutil.move

        def fail(source: Path, target: Path) -> None:
            if source.name == "data_5.pt" or target.parent == folder:
                raise OSError(30, "Read-only file system")
            move(source, target)

        monkeypatch.setattr(shutil, "move", fail)
        monkeypatch.setattr(shutil, "copy2", fail)
        monkeypatch.setattr(os, "replace", fail)
        backup = folder.parent / "backup"
        with pytest.raises(
            VllmCompatError, match=r"stopped half-way .* move the samples in .*backup back"
        ):
            repair(self.faulty(folder, 2, 5), backup=backup)
        assert (backup / "data_2.pt").read_bytes() == b"\x02"
        assert (folder / "data_5.pt").read_bytes() == b"\x05"

    def test_a_backup_that_the_trainer_would_read(self, folder: Path) -> None:
        with pytest.raises(UsageError, match="lies in"):
            repair(self.faulty(folder, 2), backup=folder / "backup")
        (folder.parent / "there").mkdir()
        with pytest.raises(UsageError, match="exists"):
            repair(self.faulty(folder, 2), backup=folder.parent / "there")


@pytest.mark.e2e
class TestFiles:
    """Real files, as stock and as newer speculators write them; needs torch."""

    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    def rows(self, torch: Any, tokens: Sequence[int]) -> list[Any]:
        """Return four layers whose first row depends on the first token only, as in a model."""
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(4, 32000, 64, generator=generator)
        place = torch.arange(len(tokens)).unsqueeze(1)
        moved = torch.sin(place * 0.37 + torch.arange(64)) * (place > 0)
        return [(table[layer][list(tokens)] + moved).bfloat16() for layer in range(4)]

    def save(self, torch: Any, path: Path, file: Stored, states: Any = None) -> None:
        torch.save(
            {
                "input_ids": torch.tensor(file.tokens),
                "hidden_states": self.rows(torch, file.tokens) if states is None else states,
                "loss_mask": torch.tensor(file.mask),
            },
            path,
        )

    @pytest.fixture
    def folder(self, torch: Any, tmp_path: Path) -> Path:
        folder = tmp_path / "out"
        folder.mkdir()
        for index, file in extract(conversations(24, seed=8), 8).items():
            self.save(torch, folder / f"data_{index}.pt", file)
        return folder

    def test_a_right_folder_is_clean(self, folder: Path) -> None:
        seen: list[tuple[int, int, int]] = []
        right = verify_directory(folder, progress=lambda *state: seen.append(state))
        assert right.faults == ()
        assert (right.files, right.layers, right.hidden_size) == (24, 4, 64)
        assert right.dtype == "bfloat16"
        assert seen[-1] == (24, 24, right.size)

    @pytest.mark.parametrize(
        ("spoil", "kinds"),
        [
            ("shift rows by one", {Kind.FOREIGN}),
            ("swap two requests", {Kind.FOREIGN, Kind.CONTRADICTION, Kind.ROWS}),
            ("zero a layer", {Kind.ZERO}),
            ("drop the last layer", {Kind.LAYERS}),
            ("repeat a chunk", {Kind.REPEATED}),
            ("cut a chunk", {Kind.ROWS}),
            ("NaN in one row", {Kind.NOT_FINITE}),
            ("infinity in one row", {Kind.NOT_FINITE}),
            ("another dtype", {Kind.DTYPE}),
            ("another width", {Kind.HIDDEN_SIZE}),
            ("a layer cut into rows", {Kind.SHAPE}),
            ("the mask of another", {Kind.MASK}),
        ],
    )
    def test_faults_that_were_put_in(
        self, torch: Any, folder: Path, spoil: str, kinds: set[Kind]
    ) -> None:
        file = extract(conversations(24, seed=8), 8)[5]
        states = self.rows(torch, file.tokens)
        if spoil == "shift rows by one":
            states = [torch.cat([rows[1:], rows[:1]]) for rows in states]
        elif spoil == "swap two requests":
            states = self.rows(torch, extract(conversations(24, seed=8), 8)[6].tokens)
        elif spoil == "zero a layer":
            states[1].zero_()
        elif spoil == "drop the last layer":
            states = states[:3]
        elif spoil == "repeat a chunk":
            states = [torch.cat([rows[:8], rows[:8], rows[16:]]) for rows in states]
        elif spoil == "cut a chunk":
            states = [rows[:-8] for rows in states]
        elif spoil == "NaN in one row":
            states[2][3, 5] = float("nan")
        elif spoil == "infinity in one row":
            states[2][3, 5] = float("-inf")
        elif spoil == "another dtype":
            states = [rows.half() for rows in states]
        elif spoil == "another width":
            states = [rows[:, :32].contiguous() for rows in states]
        elif spoil == "a layer cut into rows":
            states = [rows[:, 0].contiguous() for rows in states] * 100
        else:
            file = replace(file, mask=file.mask[:-3])
        self.save(torch, folder / "data_5.pt", file, states)
        bad = verify_directory(folder)
        faults = [f for f in bad.faults if f.certainty is not Certainty.NOTE]
        assert {f.kind for f in faults} <= kinds
        assert faults
        assert all("data_5.pt" in f.files for f in faults)
        assert bad.exit_status == 1

    def test_files_that_cannot_be_read(self, torch: Any, folder: Path) -> None:
        class Runs:
            def __reduce__(self) -> tuple[Any, ...]:
                return (os.mkdir, (str(folder / "executed"),))

        whole = (folder / "data_1.pt").read_bytes()
        (folder / "data_1.pt").write_bytes(whole[: len(whole) // 2])
        (folder / "data_2.pt").write_bytes(b"")
        (folder / "data_3.pt").write_bytes(b"no archive at all")
        torch.save(Runs(), folder / "data_4.pt")
        torch.save({"input_ids": torch.tensor([1])}, folder / "data_5.pt")
        said = {f.files[0]: f.message for f in verify_directory(folder).faults if f.files}
        assert "is cut off after" in said["data_1.pt"]
        assert "is cut off after 0 bytes" in said["data_2.pt"]
        assert "no file that torch.save writes" in said["data_3.pt"]
        assert "can run code" in said["data_4.pt"]
        assert "hidden_states" in said["data_5.pt"]
        assert not (folder / "executed").exists()

    def test_safetensors_of_newer_speculators(self, torch: Any, tmp_path: Path) -> None:
        save_file = pytest.importorskip("safetensors.torch").save_file
        for index, file in extract(conversations(6, seed=9), 8).items():
            states = torch.stack(self.rows(torch, file.tokens), dim=1)
            save_file(
                {"hidden_states": states, "token_ids": torch.tensor(file.tokens)},
                tmp_path / f"hs_{index}.safetensors",
            )
        right = verify_directory(tmp_path)
        assert right.faults == ()
        assert (right.layers, right.trained) == (4, None)
        torn = tmp_path / "hs_2.safetensors"
        torn.write_bytes(torn.read_bytes()[:-10])
        (tmp_path / "hs_4.safetensors").unlink()
        kinds = [f.kind for f in verify_directory(tmp_path).faults]
        assert kinds == [Kind.TRUNCATED, Kind.GAP]

    @pytest.fixture
    def float8(self, torch: Any, tmp_path: Path) -> Callable[..., dict[str, list[str]]]:
        """Twelve files of float8 states with a scale a token; changes what it is told, and judges."""
        save_file = pytest.importorskip("safetensors.torch").save_file
        files = {}
        for index, file in extract(conversations(12, seed=9), 8).items():
            states = torch.stack(self.rows(torch, file.tokens), dim=1).float()
            scales = states.abs().amax(dim=(1, 2), keepdim=True) / 448
            files[index] = {
                "token_ids": torch.tensor(file.tokens),
                "hidden_states": (states / scales).to(torch.float8_e4m3fn),
                "hidden_states_scales": scales,
            }

        def judged(
            change: Callable[[dict[int, Any]], None] = lambda files: None,
        ) -> dict[str, list[str]]:
            change(files)
            for index, tensors in files.items():
                save_file(tensors, tmp_path / f"hs_{index}.safetensors")
            report = verify_directory(tmp_path)
            said: dict[str, list[str]] = {"": list(report.notes), "dtype": [report.dtype]}
            for fault in report.faults:
                said.setdefault(" ".join(fault.files), []).append(fault.message)
            return said

        return judged

    def test_float8_states_are_judged_by_what_they_stand_for(self, float8: Any) -> None:
        said = float8()
        assert said.keys() == {"", "dtype"}
        assert said["dtype"] == ["float8_e4m3fn with scales"]
        assert not [note for note in said[""] if "not judged" in note]

    @pytest.mark.parametrize(
        ("scale", "words"),
        [(float("nan"), "1 of {n} rows not finite"), (0.0, "1 of {n} rows all zero")],
    )
    def test_a_scale_that_spoils_a_row_is_found(self, float8: Any, scale: float, words: str) -> None:
        rows = 0

        def change(files: dict[int, Any]) -> None:
            nonlocal rows
            files[3]["hidden_states_scales"][2] = scale
            rows = len(files[3]["hidden_states_scales"])

        (said,) = float8(change)["hs_3.safetensors"]
        assert words.format(n=rows) in said
        assert "the first is row 2" in said

    def test_scales_that_are_missing_or_too_few_are_found(self, float8: Any) -> None:
        def change(files: dict[int, Any]) -> None:
            del files[3]["hidden_states_scales"]
            files[4]["hidden_states_scales"] = files[4]["hidden_states_scales"][:-1].clone()

        said = float8(change)
        assert "has states of float8_e4m3fn and no hidden_states_scales" in said["hs_3.safetensors"][0]
        assert "one scale a token is needed" in said["hs_4.safetensors"][0]

    def test_a_member_that_most_files_have_is_missed_and_an_unknown_one_told(
        self, float8: Any, torch: Any
    ) -> None:
        def change(files: dict[int, Any]) -> None:
            for index, tensors in files.items():
                if index != 5:
                    tensors["router"] = torch.ones(2)

        said = float8(change)
        assert said["hs_5.safetensors"] == ["hs_5.safetensors has no router, which 11 of 12 files have."]
        assert "What files hold as router was not judged." in said[""]

    @pytest.mark.parametrize("scale", [-0.01, float("-inf"), float("inf")])
    def test_a_scale_that_is_no_size_is_found(self, float8: Any, scale: float) -> None:
        def change(files: dict[int, Any]) -> None:
            files[3]["hidden_states_scales"][2] = scale

        (said,) = float8(change)["hs_3.safetensors"]
        assert ("row 2" if scale == float("inf") else "token 2") in said

    def test_float8_states_by_layer_need_scales_too(self, torch: Any, tmp_path: Path) -> None:
        for index in range(3):
            states = [torch.ones(4, 8).to(torch.float8_e4m3fn)] * 4
            mask = torch.ones(4, dtype=torch.long)
            sample = {"input_ids": torch.arange(4), "hidden_states": states, "loss_mask": mask}
            torch.save(sample, tmp_path / f"data_{index}.pt")
        messages = [fault.message for fault in verify_directory(tmp_path).faults]
        assert sum("has states of float8_e4m3fn and no hidden_states_scales" in m for m in messages) == 3

    @pytest.mark.parametrize("name", ["hs_3.safetensors", "sample_lengths.json", "token_freq.pt.json"])
    @pytest.mark.parametrize("form", ["{}.lock", ".{}.lock"])
    def test_the_lock_of_a_whole_file_is_no_unfinished_write(
        self, float8: Any, tmp_path: Path, name: str, form: str
    ) -> None:
        (tmp_path / form.format(name)).touch()
        (tmp_path / form.format("hs_99.safetensors")).touch()
        if not name.startswith("hs_"):
            (tmp_path / name).write_text("{}")
        said = float8()
        assert form.format(name) not in said
        gone = form.format("hs_99.safetensors")
        assert said[gone] == [f"{gone} looks like a write that has not ended."]

    def test_loss_masks_are_put_back(self, torch: Any, tmp_path: Path) -> None:
        folder = tmp_path / "out"
        folder.mkdir()
        stored = extract(conversations(48, seed=10), 16)
        for index, file in stored.items():
            self.save(torch, folder / f"data_{index}.pt", file)
        wrong = verify_directory(folder)
        done = repair(wrong, backup=tmp_path / "originals", settled_s=0)
        assert {action.action for action in done.actions} == {"reorder"}
        assert verify_directory(folder).clean
        for index, file in stored.items():
            data = torch.load(folder / f"data_{index}.pt", weights_only=True)
            assert data["input_ids"].tolist() == file.tokens
            states = self.rows(torch, file.tokens)
            assert all(map(torch.equal, data["hidden_states"], states))
            mask = data["loss_mask"].tolist()
            assert len(mask) == len(file.own)
            assert not any(new and not right for new, right in zip(mask, file.own, strict=True))
        moved = done.actions[0].file
        kept = torch.load(tmp_path / "originals" / moved, weights_only=True)
        assert kept["loss_mask"].tolist() == stored[int(moved[5:-3])].mask
        assert not list(folder.glob(".*"))

    def test_a_full_disk_leaves_the_masks_as_they_were(
        self, torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """torch makes a RuntimeError of a full disk."""
        folder = tmp_path / "out"
        folder.mkdir()
        for index, file in extract(conversations(48, seed=10), 16).items():
            self.save(torch, folder / f"data_{index}.pt", file)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        save, count = torch.save, itertools.count()

        def fail(data: Any, target: Path) -> None:
            save(data, target)
            if next(count) == 2:
                os.truncate(target, 100)
                raise RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos")

        monkeypatch.setattr(torch, "save", fail)
        with pytest.raises(VllmCompatError, match="everything is as it was"):
            repair(verify_directory(folder), backup=tmp_path / "originals", settled_s=0)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert not (tmp_path / "originals").exists()
