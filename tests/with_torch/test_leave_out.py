"""Issue 18, fault 11: one bad sample blocks the rest for ever. It is named, and left out on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_compat.analysis.environment import Environment  # noqa: E402
from vllm_compat.analysis.plan import Plan, Roles  # noqa: E402
from vllm_compat.checks import batch  # noqa: E402
from vllm_compat.commands.run import records  # noqa: E402
from vllm_compat.commands.run.folder import numbers_to_leave_out  # noqa: E402
from vllm_compat.errors import GuardError, UsageError  # noqa: E402
from vllm_compat.features import atomic_save, leave_out, resume_samples  # noqa: E402
from vllm_compat.runtime import env, numbering, run_record  # noqa: E402
from vllm_compat.runtime import run as runs  # noqa: E402
from vllm_compat.runtime.patching import Transaction  # noqa: E402


class Generator:
    """Answers with one row a token, and cannot do prompts that hold the token 13."""

    layer_ids = (0, 1)

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.vllm_config: Any = type("C", (), {"model_config": type("M", (), {"max_model_len": 99})})

    def generate(self, token_ids: list[list[int]]) -> list[dict[str, Any]]:
        prompts = {f"req_{place}": ids for place, ids in enumerate(token_ids)}
        for request, ids in prompts.items():
            if 13 in ids:
                error = f"request {request}: 1 row of layer 0 is not finite"
                raise GuardError(f"{error}. {batch.name_prompt(error, prompts)}")
        self.seen += token_ids
        run_record.add([answer(ids) for ids in token_ids])
        return [answer(ids) for ids in token_ids]


def answer(ids: list[int]) -> dict[str, Any]:
    states = [torch.full((len(ids), 4), float(ids[0] + 1)) for _ in range(2)]
    return {"input_ids": torch.tensor(ids), "hidden_states": states, "loss_mask": None}


PROMPTS = [[n, n + 100] for n in range(12)]
PROMPTS[5] = [5, 13]


def launch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *left_out: int, batch_size: int = 4
) -> tuple[Generator, dict[str, Any]]:
    """Do what stock's script does, with the features that save, resume and leave out."""
    found = resume_samples.prepare(folder, leave_out=left_out)
    monkeypatch.setenv(
        env.VLLM_COMPAT_RESUME, resume_samples.tell(found or resume_samples.Folder(folder, 0))
    )
    roles = Roles("speculators", generator=f"{__name__}:Generator")
    plan: Any = Plan("speculators", "0.4.0", "0.16.0", roles, Environment("3.11", (), "cpu"))
    monkeypatch.setattr(run_record, "write", lambda: None)
    runs.end()
    run_record.open_for(plan)
    transaction = Transaction()
    features = [atomic_save.AtomicSave(), resume_samples.ResumeSamples(), leave_out.LeaveOut()]
    for feature in features:
        if feature.applies(plan):
            feature.install(transaction, plan, "driver")
    generator = Generator()
    try:
        folder.mkdir(exist_ok=True)
        first = max((int(path.stem[5:]) for path in folder.glob("data_*.pt")), default=-1) + 1
        for start in range(first, len(PROMPTS), batch_size):
            results = generator.generate(PROMPTS[start : start + batch_size])
            for place, result in enumerate(results):
                torch.save(
                    {**result, "hidden_states": [h.contiguous() for h in result["hidden_states"]]},
                    folder / f"data_{start + place}.pt",
                )
    finally:
        transaction.revert()
        resume_samples.put_back(folder)
        account = runs.current().part(run_record.Account) if run_record.is_ours() else None
        assert account is not None
        record = run_record._as_record(account)
        runs.end()
    return generator, record


def numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in folder.glob("data_*.pt"))


def test_fault_11_one_bad_sample_is_named_by_file_and_left_out_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    with pytest.raises(GuardError) as caught:
        launch(folder, monkeypatch)
    assert "prompt 1 of this generate() call (2 tokens: 5, 13), which belongs to data_5.pt" in str(
        caught.value
    )
    assert "`vllm-compat run --leave-out 5`" in str(caught.value)
    assert numbers(folder) == [0, 1, 2, 3]
    with pytest.raises(GuardError, match=r"data_5\.pt"):  # again and again, until it is left out
        launch(folder, monkeypatch)

    generator, record = launch(folder, monkeypatch, 5)
    assert numbers(folder) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11], "the others keep their numbers"
    assert generator.seen == [PROMPTS[n] for n in (4, 6, 7, 8, 9, 10, 11)]
    for number in numbers(folder):
        sample = torch.load(folder / f"data_{number}.pt", weights_only=True)
        assert sample["input_ids"].tolist() == PROMPTS[number]
        assert sample["hidden_states"][0].shape == (2, 4)
    assert record["left_out"] == [5]
    assert "1 left out on request (5)" in record["summary"]
    assert json.loads((folder / numbering.LIST).read_text()) == {"left_out": [5]}


def test_a_later_run_honours_the_list_and_makes_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(tmp_path / "out", monkeypatch, 5)
    for number in (2, 9):
        (tmp_path / "out" / f"data_{number}.pt").unlink()
    generator, record = launch(tmp_path / "out", monkeypatch)
    assert generator.seen == [PROMPTS[2], PROMPTS[9]]
    assert (record["left_out"], record["from_files"]) == ([5], 7)
    assert numbers(tmp_path / "out") == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("out", [(0, 5), (5, 11), (5, 6, 7), (4, 5), tuple(range(12))])
@pytest.mark.parametrize("size", [1, 3, 12])
def test_any_of_them_may_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: tuple[int, ...], size: int
) -> None:
    launch(tmp_path / "out", monkeypatch, *out, batch_size=size)
    assert numbers(tmp_path / "out") == [n for n in range(12) if n not in out]
    generator, _ = launch(tmp_path / "out", monkeypatch, batch_size=size)
    assert generator.seen == [], "nothing is made twice"


def test_a_bad_sample_among_kept_ones_has_the_right_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(tmp_path / "out", monkeypatch, 5, 3)
    (tmp_path / "out" / numbering.LIST).unlink()
    with pytest.raises(GuardError, match=r"which belongs to data_5\.pt"):
        launch(tmp_path / "out", monkeypatch, batch_size=12)
    assert 11 in numbers(tmp_path / "out"), "and what was set aside is back"


def test_an_answer_without_rows_is_saved_under_no_other_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        env.VLLM_COMPAT_RESUME,
        resume_samples.tell(resume_samples.Folder(tmp_path, 0, left_out=(5,))),
    )
    monkeypatch.setattr(run_record, "is_ours", lambda: True)
    nothing = leave_out._nothing(Generator(), [1, 2])
    with pytest.raises(GuardError, match="not its own name"):
        leave_out._save(torch.save, None, (nothing, tmp_path / "data_6.pt"), {})
    assert leave_out._save(torch.save, None, (nothing, tmp_path / "data_5.pt"), {}) is None
    assert list(tmp_path.iterdir()) == []
    runs.end()


@pytest.mark.parametrize(
    "given", [["17,42"], ["17", "42"], ["17, 42,"], ["42 17"], ["LIST"], ["17", "LIST"]]
)
def test_what_to_leave_out_is_a_list_or_a_file(tmp_path: Path, given: list[str]) -> None:
    (tmp_path / "list").write_text("17\n42\n")
    given = [str(tmp_path / "list") if word == "LIST" else word for word in given]
    assert numbers_to_leave_out(given) == (17, 42)


@pytest.mark.parametrize("given", ["x", "-1", "1;2", "", "1" * 30, "²", "a\0b", "/"])
def test_anything_else_is_refused_in_a_sentence(given: str) -> None:
    with pytest.raises(UsageError, match="takes numbers, as 17,42, or a file"):
        numbers_to_leave_out([given])


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("17 b")
    with pytest.raises(UsageError, match="holds something else than numbers"):
        numbers_to_leave_out([str(tmp_path / "list")])


@pytest.mark.parametrize("text", ["", "[]", '{"left_out": [-1]}', '{"left_out": [true]}', "[" * 10**5])
def test_a_list_that_cannot_be_read_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / numbering.LIST).write_text(text)
    with pytest.raises(UsageError, match=r"left_out\.json cannot be read .*--leave-out"):
        resume_samples.prepare(tmp_path)


def test_the_launchers_sum_names_what_each_process_has_left_out() -> None:
    base = {"summary": "", "failed": False}
    children = [{"left_out": [5], "samples": 2, "bad_sample": None}, {"left_out": [3], "bad_sample": 9}]
    found = records.summed(base, children)
    assert found is not None
    assert (found["left_out"], found["bad_sample"]) == ([3, 5], 9)


def test_verify_does_not_take_what_was_left_out_for_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_compat.commands.verify import verify_directory

    def gaps() -> list[str]:
        return [f.message for f in verify_directory(tmp_path / "out").faults if f.kind.value == "gap"]

    launch(tmp_path / "out", monkeypatch, 5)
    assert gaps() == []
    (tmp_path / "out" / numbering.LIST).unlink()
    assert len(gaps()) == 1
