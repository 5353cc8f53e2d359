"""Kill a real run at random moments, again and again, and look at what is left each time.

    python3 scripts/campaign_kills.py [--kills N] [--minutes M] [--vllm 0.16.0] [--speculators 0.3.0]

A series is one output folder: the same command is started into it until it has finished, and killed at
random moments on the way; then the folder is compared with that of an undisturbed run. A kill hits the
launcher, the program's process or a worker, sometimes two of them at once, by SIGKILL, SIGTERM or
SIGINT. After each, every file must be whole, and no process of the run and nothing of its shared memory
be left.

The record (``records/reliability/kills.json``) grows by one entry a kill; started again, the script goes
on where it was. It needs an environment with vLLM (``lab.environments``) and Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from lab.environments import EnvironmentPaths, ensure  # noqa: E402

from vllm_compat.features.resume_samples import is_whole  # noqa: E402
from vllm_compat.trial import origin  # noqa: E402

RECORD = ROOT / "records" / "reliability" / "kills.json"
SAMPLES = 60
LIMIT = 300.0
TOKEN = "VLLM_COMPAT_CAMPAIGN"
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MAKE = "import sys; from vllm_compat.trial.families import make_tiny; make_tiny('llama', sys.argv[1])"
COMPARE = """
import json, sys
from pathlib import Path
import torch
one, other = map(Path, sys.argv[1:])
names = sorted(p.name for p in one.glob("data_*.pt"))
worst, wrong = 0.0, []
for name in names:
    a, b = (torch.load(folder / name, weights_only=True) for folder in (one, other))
    if any(a[key].tolist() != b[key].tolist() for key in ("input_ids", "loss_mask")):
        wrong.append(name)
        continue
    for x, y in zip(a["hidden_states"], b["hidden_states"], strict=True):
        x, y = x.float(), y.float()
        worst = max(worst, float(((x - y).norm(dim=1) / x.norm(dim=1)).max()))
same = names == sorted(p.name for p in other.iterdir())
print(json.dumps({"same": same, "wrong": wrong, "worst": worst}))
"""


class Campaign:
    """One campaign: its environment, its work folder and its record."""

    def __init__(self, paths: EnvironmentPaths, work: Path, record: Path) -> None:
        self.paths, self.work, self.path = paths, work, record
        self.chance = random.Random()
        self.record: dict[str, Any] = {"kind": "kills", "entries": [], "series": []}
        if record.exists():
            self.record = json.loads(record.read_text(encoding="utf-8"))
        self.record["vllm_compat"] = origin.made_by()
        self.record.update(vllm=paths.vllm_version, speculators=paths.speculators_version)
        work.mkdir(parents=True, exist_ok=True)

    def prepare(self) -> None:
        """Make the model, the conversations and the undisturbed folder, where they are not there yet."""
        model, chats, whole = self.work / "model", self.work / "chats.jsonl", self.work / "undisturbed"
        if not model.exists():
            self.paths.run(["-c", MAKE, model], timeout=LIMIT).check_returncode()
        lines = [
            [
                {"role": "user", "content": f"{n} times {n}?"},
                {"role": "assistant", "content": f"{n * n}"},
            ]
            for n in range(SAMPLES)
        ]
        chats.write_text("\n".join(json.dumps({"conversations": line}) for line in lines))
        if not (self.work / "seconds").exists():
            begin = time.monotonic()
            done = self.paths.run(self.command(whole)[1:], timeout=LIMIT)
            if done.returncode:
                raise SystemExit(f"The undisturbed run failed:\n{done.stderr[-3000:]}")
            (self.work / "seconds").write_text(str(time.monotonic() - begin))

    def command(self, out: Path) -> list[str]:
        """Return the command line of a run into a folder."""
        return [
            str(self.paths.python), "-m", "vllm_compat", "run", str(ROOT / "tests/programs/extract.py"),
            "--target-model-path", str(self.work / "model"), "--train-data-path",
            str(self.work / "chats.jsonl"), "--output-dir", str(out), "--layer-ids", "0", "3",
            "--batch-size", "1",
        ]  # fmt: skip

    def one(self, out: Path) -> bool:
        """Start a run and kill some of it; note what is left. Return whether the run has finished."""
        token = secrets.token_hex(8)
        environ = {**self.paths.variables(), TOKEN: token}
        # Half of the kills come at any moment, half while samples are written: a small part of a run.
        span = float((self.work / "seconds").read_text()) * 1.2
        moment, files = self.chance.uniform(0, span), SAMPLES
        if self.chance.random() < 0.5:
            there = len(list(out.glob("data_*.pt")))
            moment, files = LIMIT, self.chance.randint(there, SAMPLES)
        with (self.work / "log.txt").open("w") as log:
            process = subprocess.Popen(
                self.command(out), env=environ, stdout=log, stderr=log, start_new_session=True
            )
        memory: set[str] = set()
        begin, looked = time.monotonic(), 0.0
        while time.monotonic() - begin < moment and process.poll() is None:
            if time.monotonic() - looked > 0.5:
                memory |= shared_memory(members(token))
                looked = time.monotonic()
            if files < SAMPLES and len(list(out.glob("data_*.pt"))) > files:
                break
            time.sleep(0.02)
        moment = time.monotonic() - begin
        hit = self.kill(token, process.pid) if process.poll() is None else []
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            hit.append("hung")
        last = time.monotonic() + 40
        while (left := members(token)) and time.monotonic() < last:
            time.sleep(0.2)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        files = sorted(out.glob("data_*.pt")) if out.is_dir() else []
        numbers = sorted(int(path.stem[5:]) for path in files)
        said = (self.work / "log.txt").read_text(errors="replace").strip().rpartition("\n")[2]
        if hit:
            self.record["entries"].append(
                {
                    "series": len(self.record["series"]),
                    "hit": hit,
                    "after_seconds": round(moment, 1),
                    "exit_status": process.returncode,
                    "verdict": said.startswith("vllm-compat: run "),
                    "launcher_hit": any(each.startswith("launcher") for each in hit),
                    "samples": len(files),
                    "torn": [path.name for path in files if not is_whole(path)],
                    "gaps": numbers != list(range(len(numbers))),
                    "processes_left": len(left),
                    "shared_memory_left": len([name for name in memory if os.path.exists(name)]),
                }
            )
            self.write()
        return process.returncode == 0

    def kill(self, token: str, launcher: int) -> list[str]:
        """Kill one or two processes of a run; return which, by which signal."""
        roles = {pid: role_of(pid, launcher) for pid in members(token)}
        wanted = self.chance.choice(["launcher", "program", "worker", "worker"])
        chosen = [pid for pid, role in roles.items() if role == wanted] or list(roles)
        victims = self.chance.sample(chosen, 1)
        if self.chance.random() < 0.25 and len(roles) > 1:
            victims.append(self.chance.choice([pid for pid in roles if pid not in victims]))
        hit = []
        for pid in victims:
            how = self.chance.choice(SIGNALS)
            with suppress(ProcessLookupError):
                os.kill(pid, how)
                hit.append(f"{roles[pid]} {how.name}")
        return hit

    def compare(self, out: Path) -> None:
        """Compare a finished series with the undisturbed run."""
        number = len(self.record["series"])
        kills = sum(entry["series"] == number for entry in self.record["entries"])
        done = self.paths.run(["-c", COMPARE, self.work / "undisturbed", out], timeout=LIMIT)
        found = json.loads(done.stdout.strip().splitlines()[-1]) if not done.returncode else {}
        self.record["series"].append({"kills": kills, **(found or {"error": done.stderr[-500:]})})
        self.write()

    def write(self) -> None:
        """Write the record as a whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self.path)


def members(token: str) -> list[int]:
    """Return the processes that have a run's token in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if token.encode() in path.read_bytes() and state_of(int(path.parent.name)) not in "ZX":
                found.append(int(path.parent.name))
    return sorted(found)


def state_of(pid: int) -> str:
    """Return the letter of a process's state, X where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def role_of(pid: int, launcher: int) -> str:
    """Return what a process of a run is."""
    if pid == launcher:
        return "launcher"
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if any(word.endswith("extract.py") for word in words):
            return "program" if parent == launcher else "worker"
        if any("spawn_main" in word or "Worker" in word for word in words):
            return "worker"
    return "other"


def shared_memory(pids: list[int]) -> set[str]:
    """Return the files of /dev/shm that these processes have mapped."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                place = line.partition("/dev/shm/")
                if place[1] and not line.endswith("(deleted)"):
                    found.add(f"/dev/shm/{place[2]}")
    return found


def main() -> int:
    """Run the campaign until it has as many kills as wanted, or the time is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--vllm", default="0.16.0")
    parser.add_argument("--speculators", default="0.3.0")
    parser.add_argument("--work", type=Path, default=Path("/tmp/vllm-compat-kills"))
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    campaign = Campaign(ensure(options.vllm, options.speculators), options.work, options.record)
    campaign.prepare()
    end = time.monotonic() + 60 * options.minutes
    entries = campaign.record["entries"]
    while len(entries) < options.kills and time.monotonic() < end:
        out = options.work / f"series-{len(campaign.record['series'])}"
        finished = False
        while not finished and time.monotonic() < end:
            finished = campaign.one(out)
            print(f"{len(entries)} kills, last: {entries[-1] if entries else None}", flush=True)
        if finished:
            campaign.compare(out)
    campaign.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
