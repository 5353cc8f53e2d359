"""Save samples as stock's script does, again and again, and be killed in the middle.

    save_samples.py FOLDER SAMPLES ROUNDS (guarded|stock)

Each round is a forked process that goes on behind the highest number it finds, saves from four
threads and is killed by one of three signals: at a random moment, at the latest when it begins one of
its first saves, so that no machine is too fast to be interrupted. The last line of the output says, as
JSON, how many rounds there were, how many left a torn file or a gap behind, and how often a sample was
saved that was there already.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from vllm_compat.features import atomic_save, resume_samples
from vllm_compat.runtime import run, run_record
from vllm_compat.runtime.patching import Transaction


def sample(number: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(number)
    rows = 200 + number * 37 % 400
    return {
        "input_ids": torch.arange(rows),
        "hidden_states": [torch.randn(rows, 64, generator=generator) for _ in range(4)],
        "loss_mask": torch.ones(rows),
    }


def extract(folder: Path, samples: int) -> None:
    numbers = [re.fullmatch(r"data_(\d+)\.pt", path.name) for path in folder.iterdir()]
    first = max((int(number[1]) for number in numbers if number), default=-1) + 1
    with ThreadPoolExecutor(max_workers=4) as pool:
        futures = [
            pool.submit(torch.save, sample(number), folder / f"data_{number}.pt")
            for number in range(first, samples)
        ]
        for future in futures:
            future.result()


def die_at(count: int, how: int) -> None:
    """Let this process be killed when it begins its save of that number, whatever is under way."""
    save = torch.save
    begun = itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> None:
        if next(begun) == count:
            os.kill(os.getpid(), how)
        save(*args, **kwargs)

    torch.save = counted


def main() -> None:
    folder, samples, rounds, mode = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    chance = random.Random(7)
    damaged = done = stuck = before = 0
    for number in range(rounds):
        begin = time.monotonic()
        how = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[number % 3]
        latest = chance.randint(4, 24)
        child = os.fork()
        if child == 0:
            die_at(latest, how)
            if mode == "guarded":
                run.current().hold(run_record.Account(None))  # type: ignore[arg-type]
                Transaction().wrap("torch:save", atomic_save._save)
            try:
                extract(folder, samples)
            except KeyboardInterrupt:
                os._exit(130)
            os._exit(0)
        time.sleep(chance.uniform(0.005, 0.06) * 2**stuck)
        if os.waitpid(child, os.WNOHANG)[0] == 0:
            os.kill(child, how)
            os.waitpid(child, 0)
        done += 1
        there = {int(p.stem[5:]) for p in folder.iterdir() if not p.name.startswith(".")}
        whole = {i for i in there if resume_samples.is_whole(folder / f"data_{i}.pt")}
        if whole != set(range(len(there))):
            damaged += 1
        # On a busy machine a round may be killed before it has begun: the next one gets twice the time.
        stuck, before = (0 if len(whole) > before else min(stuck + 1, 8)), len(whole)
        if len(whole) == samples:
            break
        assert time.monotonic() - begin < 60
    print(json.dumps({"rounds": done, "damaged": damaged}))


if __name__ == "__main__":
    main()
