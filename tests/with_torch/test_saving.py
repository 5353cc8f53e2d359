"""Samples are whole or absent and in order, whatever ends the run."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_compat.analysis.environment import Environment  # noqa: E402
from vllm_compat.analysis.plan import Plan, Roles  # noqa: E402
from vllm_compat.errors import GuardError  # noqa: E402
from vllm_compat.features import atomic_save, resume_samples  # noqa: E402
from vllm_compat.runtime import run as runs  # noqa: E402
from vllm_compat.runtime import run_record  # noqa: E402
from vllm_compat.runtime.patching import Transaction  # noqa: E402

PROGRAM = Path(__file__).parents[1] / "programs" / "save_samples.py"
SOURCE = Path(__file__).parents[2] / "src"


def sample(rows: int, value: float = 1.0) -> dict[str, Any]:
    states = [torch.full((rows, 8), value)]
    return {"input_ids": torch.arange(rows), "hidden_states": states, "loss_mask": torch.ones(rows)}


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plan: Any = Plan(
        "speculators", "0.4.0", "0.16.0", Roles("speculators"), Environment("3.11", (), "cpu")
    )
    monkeypatch.setattr(run_record, "write", lambda: None)
    run_record.open_for(plan)
    transaction = Transaction()
    transaction.wrap("torch:save", atomic_save._save)
    yield
    transaction.revert()


def run(folder: Path, samples: int, rounds: int, mode: str) -> dict[str, int]:
    environ = {**os.environ, "PYTHONPATH": f"{SOURCE}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), str(samples), str(rounds), mode],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_killed_at_random_moments_the_folder_equals_an_undisturbed_runs(tmp_path: Path) -> None:
    for name in ("stock", "killed", "undisturbed"):
        (tmp_path / name).mkdir()
    # The same without the guard leaves torn files and gaps, which nobody makes again.
    assert run(tmp_path / "stock", 120, 12, "stock")["damaged"] > 0
    found = run(tmp_path / "killed", 120, 400, "guarded")
    assert found["damaged"] == 0
    assert found["rounds"] > 3
    for number in range(120):
        from_run = torch.load(tmp_path / "killed" / f"data_{number}.pt", weights_only=True)
        assert len(from_run["input_ids"]) == 200 + number * 37 % 400
        generator = torch.Generator().manual_seed(number)
        for layer in from_run["hidden_states"]:
            assert torch.equal(layer, torch.randn(len(layer), 64, generator=generator))
    names = [p.name for p in (tmp_path / "killed").iterdir() if not p.name.startswith(".")]
    assert len(names) == 120


def test_a_sample_appears_after_the_one_before_it(
    guarded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = threading.Event()
    original = atomic_save._publish
    seen: list[list[str]] = []

    def publish(saves: Any, state: Any, index: int, folder: str, part: str) -> None:
        if index == 0:
            slow.wait(10)
        original(saves, state, index, folder, part)
        seen.append(sorted(p.name for p in tmp_path.glob("data_*.pt")))

    monkeypatch.setattr(atomic_save, "_publish", publish)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(torch.save, sample(3), tmp_path / f"data_{i}.pt") for i in range(3)]
        time.sleep(0.3)
        assert not list(tmp_path.glob("data_*.pt"))
        slow.set()
        for future in futures:
            future.result()
    assert len(seen[0]) >= 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"data_{i}.pt" for i in range(3)]


def test_a_row_may_begin_anywhere_and_have_gaps(guarded: None, tmp_path: Path) -> None:
    begin = time.monotonic()
    for number in (100, 101, 200, 300, 400, 500):
        torch.save(sample(2), tmp_path / f"data_{number}.pt")
    assert len(list(tmp_path.iterdir())) == 6
    assert time.monotonic() - begin < 30  # it waits for the one before it a few times only


def test_other_files_and_other_content_are_left_alone(guarded: None, tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "data_5.pt")
    torch.save(sample(2), tmp_path / "token_freq.pt")
    with (tmp_path / "data_9.pt").open("wb") as file:
        torch.save(sample(2), file)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data_5.pt", "data_9.pt", "token_freq.pt"]


def test_a_full_disk_leaves_nothing_torn_and_ends_the_run(guarded: None, tmp_path: Path) -> None:
    torch.save(sample(2), tmp_path / "data_0.pt")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # no file may grow beyond it
    try:
        with pytest.raises(GuardError, match=r"data_1\.pt could not be saved"):
            torch.save(sample(5000), tmp_path / "data_1.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    # Behind it nothing is put in place, though it would fit.
    with pytest.raises(GuardError, match="nothing is saved behind it"):
        torch.save(sample(2), tmp_path / "data_2.pt")
    assert [p.name for p in tmp_path.iterdir()] == ["data_0.pt"]
    with pytest.raises(GuardError, match=r"No further batch is extracted: data_1\.pt"):
        atomic_save.refuse_after_failure()
    account = runs.current().find(run_record.Account)
    assert account is not None
    assert "data_1.pt could not be saved" in account.saving_failure


class Generator:
    """A FAKE generator: it counts the prompts that it has to compute."""

    class vllm_config:
        class model_config:
            max_model_len = 100

    layer_ids = (0,)

    def __init__(self) -> None:
        self.computed: list[list[int]] = []

    def generate(self, token_ids: list[list[int]]) -> list[dict[str, Any]]:
        self.computed += token_ids
        return [
            {"input_ids": torch.tensor(ids), "hidden_states": [torch.ones(len(ids), 8)]}
            for ids in token_ids
        ]


def test_kept_samples_answer_their_own_prompts_only(guarded: None, tmp_path: Path) -> None:
    prompts = [[n, n + 1, n + 2] for n in range(6)]
    for number, prompt in enumerate(prompts):
        data = {**sample(3, number + 10.0), "input_ids": torch.tensor(prompt)}
        torch.save(data, tmp_path / f"data_{number}.pt")
    (tmp_path / "data_2.pt").unlink()
    other = {**sample(3, 99.0), "input_ids": torch.tensor([7, 7, 7])}
    torch.save(other, tmp_path / "data_5.pt")  # of another data set
    folder = resume_samples.prepare(tmp_path)
    assert folder is not None
    told = json.loads(resume_samples.tell(folder))
    kept = resume_samples._Kept(Path(told["folder"]), told["next"])
    generator = Generator()

    def generate(batch: list[list[int]]) -> Any:
        return kept.generate(generator.generate, generator, (batch,), {})

    # Whatever a torn file makes torch.load raise, it is computed again.
    for content in (b"", b"PK\x03\x04", b"\x80\x02}q", (tmp_path / "data_0.pt").read_bytes()[:900]):
        (tmp_path / ".data_9.pt.kept").write_bytes(content)
        assert kept._read(9, [1, 2, 3], 1) is None
    (tmp_path / ".data_9.pt.kept").unlink()
    results = generate(prompts[2:4]) + generate(prompts[4:6])
    assert generator.computed == [prompts[2], prompts[5]]
    values = [float(result["hidden_states"][0][0, 0]) for result in results]
    assert values == [1.0, 13.0, 14.0, 1.0]
    for number, result in enumerate(results, start=2):
        torch.save({**result, "loss_mask": torch.ones(3)}, tmp_path / f"data_{number}.pt")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"data_{i}.pt" for i in range(6)]
