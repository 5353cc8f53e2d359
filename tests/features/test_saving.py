"""Saving and resuming: what one failure leaves, what is handed on, and sizes that nobody tells."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_compat.analysis.environment import Environment
from vllm_compat.analysis.plan import Plan, Roles
from vllm_compat.errors import GuardError
from vllm_compat.features import atomic_save, resume_samples, save_backlog
from vllm_compat.runtime import run, run_record

PLAN = Plan("speculators", "0.4.0", "0.16.0", Roles("speculators"), Environment("3.11", (), "cpu"))
Put = Callable[[int], None]


class Disk:
    full = False


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Save a sample of that number, through the feature, on a disk that may be full."""
    run_record.open_for(PLAN)
    monkeypatch.setattr(Disk, "full", False)

    def write(obj: Any, target: str) -> None:
        if Disk.full:
            raise OSError(28, "No space left on device")
        Path(target).write_text("whole")

    def save(number: int) -> None:
        atomic_save._save(write, None, ({"hidden_states": []}, tmp_path / f"data_{number}.pt"), {})

    return save


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_notebook_goes_on_when_the_disk_has_room_again(put: Put, tmp_path: Path) -> None:
    put(0)
    Disk.full = True
    with pytest.raises(GuardError, match=r"data_1\.pt could not be saved"):
        put(1)
    Disk.full = False
    with pytest.raises(GuardError, match="nothing is saved behind it"):
        put(2)  # of a batch that was under way: no gap is left
    with pytest.raises(GuardError, match=r"No further batch .* data_1\.pt .* call generate\(\) again"):
        atomic_save.refuse_after_failure()
    atomic_save.refuse_after_failure()  # the caller knows, and asks again
    account = run.current().find(run_record.Account)
    assert account is not None
    assert account.saving_failure
    for number in (1, 2, 3):
        put(number)
        atomic_save.refuse_after_failure()
    assert names(tmp_path) == [f"data_{i}.pt" for i in range(4)]
    assert not account.saving_failure
    assert not account.failure


def test_who_goes_on_without_the_lost_sample_saves_nothing_behind_it(put: Put, tmp_path: Path) -> None:
    Disk.full = True
    with pytest.raises(GuardError):
        put(0)
    Disk.full = False
    for number in (1, 2):
        with pytest.raises(GuardError, match="No further batch"):
            atomic_save.refuse_after_failure()
        with pytest.raises(GuardError, match="nothing is saved behind it"):
            put(number)
    assert names(tmp_path) == []


@pytest.mark.parametrize("by_name", [False, True])
def test_all_further_arguments_of_generate_are_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    run_record.open_for(PLAN)
    kept = resume_samples._Kept(tmp_path, 0)
    monkeypatch.setattr(kept, "_read", lambda index, *_: {"from": "file"} if index == 0 else None)
    generator = SimpleNamespace(
        layer_ids=[0],
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(max_model_len=100)),
    )
    seen: list[Any] = []

    def generate(token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((token_ids, args, kwargs))
        return ["computed"] * len(token_ids)

    prompts = [[1], [2], [3]]
    if by_name:
        found = kept.generate(generate, generator, (), {"token_ids": prompts, "loss_mask": "m"})
        assert seen == [([[2], [3]], (), {"loss_mask": "m"})]
    else:
        found = kept.generate(generate, generator, (prompts, "more"), {"loss_mask": "m"})
        assert seen == [([[2], [3]], ("more",), {"loss_mask": "m"})]
    assert found == [{"from": "file"}, "computed", "computed"]


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError, KeyError, EOFError])
def test_every_way_in_which_a_torn_file_fails_to_load_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise error("torn")

    torch = ModuleType("torch")
    monkeypatch.setattr(torch, "load", load, raising=False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    (tmp_path / ".data_0.pt.kept").write_bytes(b"")
    assert resume_samples._Kept(tmp_path, 0)._read(0, [1], 1) is None


def test_a_tensor_that_does_not_tell_its_size_is_submitted_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Tensor:
        """FAKE: some bytes on the CPU."""

        device = SimpleNamespace(type="cpu")
        layout = "strided"

        def untyped_storage(self) -> Any:
            return SimpleNamespace(data_ptr=lambda: id(self), nbytes=lambda: 100)

    class Wrapper(Tensor):
        """FAKE: a subclass without a storage."""

        def untyped_storage(self) -> Any:
            raise NotImplementedError("no storage")

    class Strange(dict[str, Any]):
        def values(self) -> Any:
            raise RuntimeError("no values")

    torch = ModuleType("torch")
    for name, value in {"Tensor": Tensor, "strided": "strided"}.items():
        monkeypatch.setattr(torch, name, value, raising=False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    run_record.open_for(PLAN)
    assert save_backlog.tensor_bytes([Wrapper(), Tensor(), Strange()]) == 100
    with ThreadPoolExecutor(1) as pool:
        future = save_backlog.submit(pool.submit, pool, (lambda *_: "done", Wrapper(), Strange()), {})
        assert future.result(10) == "done"
