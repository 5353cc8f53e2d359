"""Kill a real run at random moments, again and again, and look at what is left each time.

    python3 scripts/campaign_kills.py [--kills N] [--minutes M] [--at-once K] [--vllm 0.16.0]

A series is one output folder: the same command is started into it, killed at a random moment, and
started again, some times over; then it is left alone until it has finished, and the folder is compared
with that of an undisturbed run. A kill hits the launcher, the program's process, a worker or whatever
else there is, often two of them at once, by SIGKILL, SIGTERM or SIGINT. After each, every file must be
whole, and no process of the run and nothing of its shared memory be left. Several series can be under
way at once.

The record (``records/reliability/kills.json``) grows by one entry a round; started again, the script
goes on where it was. It needs an environment with vLLM (``lab.environments``) and Linux.
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
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "scripts")]

import campaign_record  # noqa: E402
from lab.environments import EnvironmentPaths, ensure  # noqa: E402

from vllm_compat.features.resume_samples import is_whole  # noqa: E402

RECORD = ROOT / "records" / "reliability" / "kills.json"
SAMPLES = 60
LIMIT = 300.0
LEFT_AFTER = 45.0
"""Seconds after which what is still there counts as left; `end_orphans` gives a driver's end 30."""
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
        self.lock = threading.RLock()
        self.under_way: set[int] = set()
        self.record = campaign_record.opened(record, "kills", entries=[], series=[])
        self.record.update(vllm=paths.vllm_version, speculators=paths.speculators_version)
        work.mkdir(parents=True, exist_ok=True)

    @property
    def hits(self) -> int:
        """The number of processes that were hit so far."""
        return sum(len(entry["hit"]) for entry in self.record["entries"])

    def pick(self) -> int:
        """Return the number of a series that is to go on: one that was begun, or a new one."""
        with self.lock:
            over = {series["number"] for series in self.record["series"]} | self.under_way
            begun = {entry["series"] for entry in self.record["entries"]}
            open_ones = sorted(n for n in begun - over if (self.work / f"series-{n}").is_dir())
            number = open_ones[0] if open_ones else max(begun | over, default=-1) + 1
            self.under_way.add(number)
            return number

    def go_on(self, number: int, wanted: int, end: float) -> None:
        """Disturb one series and finish it, until there are enough hits or the time is over."""
        out = self.work / f"series-{number}"
        before = sum(entry["series"] == number for entry in self.record["entries"])
        kills, finished = max(1, self.chance.randint(4, 12) - before), False
        while not finished and time.monotonic() < end:
            # A series that is not disturbed any more is finished even when there are hits enough.
            finished = self.one(out, number, disturb=kills > 0 and self.hits < wanted)
            kills -= 1
            print(f"{self.hits} hits, {len(self.record['entries'])} rounds", flush=True)
        if finished:
            self.compare(out, number)
        with self.lock:
            self.under_way.discard(number)

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

    def one(self, out: Path, number: int, *, disturb: bool = True) -> bool:
        """Start a run and kill some of it; note what is left. Return whether the run has finished."""
        token = secrets.token_hex(8)
        log = self.work / f"log-{number}.txt"
        with log.open("w") as file:
            process = subprocess.Popen(
                self.command(out), env={**self.paths.variables(), TOKEN: token}, stdout=file,
                stderr=file, start_new_session=True,
            )  # fmt: skip
        moment, memory = self.wait(process, out, token, disturb=disturb)
        hit = self.kill(token, process.pid) if disturb and process.poll() is None else []
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            hit.append("hung")
        last = time.monotonic() + LEFT_AFTER
        while (left := members(token, process.pid)) and time.monotonic() < last:
            memory |= shared_memory(left)
            time.sleep(0.5)
        roles = [role_of(pid, process.pid) for pid in left]
        if hit:
            files = sorted(out.glob("data_*.pt")) if out.is_dir() else []
            numbers = sorted(int(path.stem[5:]) for path in files)
            said = log.read_text(errors="replace").strip().rpartition("\n")[2]
            entry = {
                "series": number,
                "hit": hit,
                "after_seconds": round(moment, 1),
                "exit_status": process.returncode,
                "verdict": said.startswith("vllm-compat: run "),
                "launcher_hit": any(each.startswith("launcher") for each in hit),
                "samples": len(files),
                "torn": [path.name for path in files if not is_whole(path)],
                "gaps": numbers != list(range(len(numbers))),
                "processes_left": len(left),
                "roles_left": roles,
                "shared_memory_left": len([name for name in memory if os.path.exists(name)]),
            }
            with self.lock:
                self.record["entries"].append(entry)
                self.write()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return process.returncode == 0

    def wait(
        self, process: subprocess.Popen[bytes], out: Path, token: str, *, disturb: bool
    ) -> tuple[float, set[str]]:
        """Wait for the moment of a kill, or for the end; return the seconds, and memory seen so far."""
        # Half of the kills come at any moment, half while samples are written: a small part of a run.
        there = len(list(out.glob("data_*.pt")))
        moment, files = self.chance.uniform(0, float((self.work / "seconds").read_text())), SAMPLES
        if there < SAMPLES - 1 and self.chance.random() < 0.5:
            moment, files = LIMIT, self.chance.randint(there, SAMPLES - 2)
        if not disturb:
            moment, files = LIMIT, SAMPLES
        memory: set[str] = set()
        begin, looked = time.monotonic(), 0.0
        while time.monotonic() - begin < moment and process.poll() is None:
            if time.monotonic() - looked > 0.5:
                memory |= shared_memory(members(token, process.pid))
                looked = time.monotonic()
            if files < SAMPLES and len(list(out.glob("data_*.pt"))) > files:
                break
            time.sleep(0.02)
        return time.monotonic() - begin, memory | shared_memory(members(token, process.pid))

    def kill(self, token: str, launcher: int) -> list[str]:
        """Kill one to three processes of a run; return which, by which signal."""
        roles = {pid: role_of(pid, launcher) for pid in members(token, launcher)}
        wanted = self.chance.choice(["launcher", "program", "worker", "worker"])
        chosen = [pid for pid, role in roles.items() if role == wanted] or list(roles)
        if not chosen:
            return []
        victims = self.chance.sample(chosen, 1)
        while len(victims) < min(3, len(roles)) and self.chance.random() < 0.5:
            victims.append(self.chance.choice([pid for pid in roles if pid not in victims]))
        hit = []
        for pid in victims:
            how = self.chance.choice(SIGNALS)
            with suppress(ProcessLookupError):
                os.kill(pid, how)
                hit.append(f"{roles[pid]} {how.name}")
        return hit

    def compare(self, out: Path, number: int) -> None:
        """Compare a finished series with the undisturbed run."""
        kills = sum(entry["series"] == number for entry in self.record["entries"])
        done = self.paths.run(["-c", COMPARE, self.work / "undisturbed", out], timeout=LIMIT)
        found = json.loads(done.stdout.strip().splitlines()[-1]) if not done.returncode else {}
        with self.lock:
            self.record["series"].append(
                {"number": number, "kills": kills, **(found or {"error": done.stderr[-500:]})}
            )
            self.write()

    def write(self) -> None:
        """Write the record."""
        campaign_record.put(self.path, self.record)


def members(token: str, launcher: int) -> list[int]:
    """Return the processes of a run: those of its session, and those with its token.

    The token alone does not find vLLM's workers: setproctitle writes their titles over what they show
    of their environment.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            if int(fields[3]) == launcher or token.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return sorted(found)


def role_of(pid: int, launcher: int) -> str:
    """Return what a process of a run is: launcher, program, worker, tracker or other."""
    if pid == launcher:
        return "launcher"
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if any("resource_tracker" in word for word in words):
            return "tracker"
        if words[0].startswith("VLLM::") or any("spawn_main" in word for word in words):
            return "worker"
        if any(word.endswith("extract.py") for word in words):
            return "program" if parent == launcher else "worker"
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
    parser.add_argument("--kills", type=int, default=200, help="processes to hit")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--at-once", type=int, default=1, help="series under way at once")
    parser.add_argument("--vllm", default="0.16.0")
    parser.add_argument("--speculators", default="0.3.0")
    parser.add_argument("--work", type=Path, default=Path("/tmp/vllm-compat-kills"))
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    campaign = Campaign(ensure(options.vllm, options.speculators), options.work, options.record)
    campaign.prepare()
    end = time.monotonic() + 60 * options.minutes

    def work(_: int) -> None:
        while campaign.hits < options.kills and time.monotonic() < end:
            campaign.go_on(campaign.pick(), options.kills, end)

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(work, range(options.at_once)))
    campaign.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
