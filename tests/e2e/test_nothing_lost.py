"""A real run that is killed in the middle, and a folder that was damaged, end as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.environments import EnvironmentPaths

pytestmark = pytest.mark.e2e
PROGRAMS = Path(__file__).parent.parent / "programs"
LIMIT = 400
SAMPLES = 80

COMPARE = """
import json, sys
from pathlib import Path
import torch
one, other = map(Path, sys.argv[1:])
names = sorted(p.name for p in one.iterdir())
worst = 0.0
for name in names:
    a, b = (torch.load(folder / name, weights_only=True) for folder in (one, other))
    assert a["input_ids"].tolist() == b["input_ids"].tolist(), name
    assert a["loss_mask"].tolist() == b["loss_mask"].tolist(), name
    for x, y in zip(a["hidden_states"], b["hidden_states"], strict=True):
        x, y = x.float(), y.float()
        worst = max(worst, float(((x - y).norm(dim=1) / x.norm(dim=1)).max()))
print(json.dumps({"names": names, "others": sorted(p.name for p in other.iterdir()), "worst": worst}))
"""


def whole(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("data_*.pt")} if folder.is_dir() else set()


def test_a_killed_run_is_resumed_and_nothing_is_done_twice(
    environment: Callable[[str, str], EnvironmentPaths],
    models: Callable[..., Path],
    tmp_path: Path,
) -> None:
    paths = environment("0.16.0", "0.3.0")
    chats = tmp_path / "chats.jsonl"
    lines = [
        [{"role": "user", "content": f"{n} times {n}?"}, {"role": "assistant", "content": f"{n * n}"}]
        for n in range(SAMPLES)
    ]
    chats.write_text("\n".join(json.dumps({"conversations": line}) for line in lines))

    def command(out: Path) -> list[str]:
        return [
            str(paths.python), "-m", "vllm_compat", "run", "--record", str(tmp_path / "record.json"),
            "--status-file", str(tmp_path / "status.json"), "--log", str(tmp_path / "log.txt"),
            str(PROGRAMS / "extract.py"), "--target-model-path", str(models("llama")),
            "--train-data-path", str(chats), "--output-dir", str(out), "--layer-ids", "0", "3",
            "--batch-size", "1",
        ]  # fmt: skip

    def run(out: Path) -> str:
        done = paths.run(command(out)[1:], timeout=LIMIT)
        assert done.returncode == 0, done.stderr + (tmp_path / "log.txt").read_text()[-3000:]
        return done.stderr

    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    said = run(undisturbed)
    assert f"{SAMPLES} files saved" in said
    assert "object has no attribute" not in (tmp_path / "log.txt").read_text()
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["extracting"]["of"]) == ("finished", SAMPLES)

    process = subprocess.Popen(
        command(killed), env=paths.variables(), stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + LIMIT
        while len(whole(killed)) < 6 and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGTERM, errors
    assert "run killed by SIGTERM" in errors
    assert "To do the rest, and no more, run the same again: " in errors
    there = whole(killed)
    assert there == {f"data_{n}.pt" for n in range(len(there))}
    assert len(there) < SAMPLES
    assert f"{killed} holds {len(there)} whole samples." in errors  # not what the record last said

    # And an accident besides: one torn, one gone.
    torn = killed / "data_1.pt"
    torn.write_bytes(torn.read_bytes()[:1000])
    (killed / "data_3.pt").unlink()
    said = run(killed)
    kept = len(there) - 3  # all but 0, which stands before the gap, and the two
    assert f"{kept} samples taken from their whole files" in said
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["samples"] == SAMPLES - 1 - kept

    compared = paths.run(["-c", COMPARE, undisturbed, killed], timeout=LIMIT)
    assert compared.returncode == 0, compared.stderr
    found = json.loads(compared.stdout.strip().splitlines()[-1])
    assert found["names"] == found["others"] == sorted(f"data_{n}.pt" for n in range(SAMPLES))
    assert found["worst"] < 0.02  # bfloat16; a row of another token is off by 1.4
