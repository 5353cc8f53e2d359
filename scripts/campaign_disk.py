"""Write to disks that are full, read-only, slow or gone, and keep a record of what came of it.

    python3 scripts/campaign_disk.py [--times N] [--only WORD] [--vllm 0.16.0] [--speculators 0.3.0]

Each target is a command of ours and one of the places that it writes to; each fault befalls the disk
of that place, before the command starts or while it is under way. The disks are real file systems in a
mount namespace of their own, which goes with the script: a tmpfs that is filled to the last byte, or has
no inode left, or is mounted read-only; an ext4 that is frozen for some seconds (as a slow disk or a
hanging server is); a folder that is taken away under its users. Afterwards the disk is healed, and the
same command must end as if nothing had been, with nothing lost.

It needs root, Linux, and an environment with torch (``lab.environments``), but no engine: the rows that
are saved are made up. The record is ``records/reliability/disk.json``; started again, the script goes on
where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "scripts")]

import campaign_record  # noqa: E402
from lab.environments import EnvironmentPaths, ensure  # noqa: E402

from vllm_compat.features.resume_samples import is_whole  # noqa: E402

RECORD = ROOT / "records" / "reliability" / "disk.json"
SAMPLES = 24
LIMIT = 120.0
INSIDE = "VLLM_COMPAT_CAMPAIGN_INSIDE"
BEFORE = ("full", "out of inodes", "read-only", "vanished")
DURING = ("full", "read-only", "vanished", "slow")
SIZE = "24m"
PROGRAM = '''
"""Save made-up samples as stock's script does; FAKE: no VllmHiddenStatesGenerator makes the rows."""
import argparse, re, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--output-dir", type=Path)
folder = parser.parse_args().output_dir
folder.mkdir(parents=True, exist_ok=True)
numbers = [re.fullmatch(r"data_(\\d+)\\.pt", path.name) for path in folder.iterdir()]
first = max((int(number[1]) for number in numbers if number), default=-1) + 1
with ThreadPoolExecutor(max_workers=4) as pool:
    futures = []
    for number in range(first, SAMPLES):
        generator = torch.Generator().manual_seed(number)
        rows = 20 + number
        sample = {
            "input_ids": torch.arange(rows) + number,
            "hidden_states": [torch.randn(rows, 64, generator=generator) for _ in range(4)],
            "loss_mask": torch.ones(rows, dtype=torch.long),
        }
        futures.append(pool.submit(torch.save, sample, folder / f"data_{number}.pt"))
        print("sample", number, flush=True)
        time.sleep(0.12)
    for future in futures:
        future.result()
'''.replace("SAMPLES", str(SAMPLES))


class Disk:
    """A file system of its own, which can be struck by a fault and healed again."""

    def __init__(self, folder: Path, fault: str) -> None:
        self.fault = fault
        self.parent = folder / "parent"
        self.place = self.parent / "disk"
        self.frozen: threading.Thread | None = None
        self.place.mkdir(parents=True)
        if fault == "slow":
            image = folder / "image"
            with image.open("wb") as file:
                file.truncate(64 * 2**20)
            call("mkfs.ext4", "-q", image)
            call("mount", "-o", "loop,noatime", image, self.place)
        else:
            call("mount", "-t", "tmpfs", "-o", f"size={SIZE},nr_inodes=400", "tmpfs", self.place)

    def strike(self, *, before: bool) -> bool:
        """Let the fault befall the disk; return whether it did."""
        if self.fault == "full":
            with suppress(OSError), (self.place / ".filler").open("ab", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
        elif self.fault == "out of inodes":
            (self.place / ".filler").mkdir()
            with suppress(OSError):
                for number in range(1000):
                    (self.place / ".filler" / str(number)).touch()
        elif self.fault == "read-only":
            return self._remount("ro")
        elif self.fault == "vanished":
            self.parent.rename(self.parent.with_name("gone"))  # what is mounted below moves with it
            if before:
                self.parent.touch()  # so that nobody makes the folders anew and goes on there
        elif self.fault == "slow":
            self.frozen = threading.Thread(target=self._freeze)
            self.frozen.start()
        return True

    def _remount(self, how: str) -> bool:
        end = time.monotonic() + 3
        while time.monotonic() < end:  # refused as long as a file is open to be written
            if not call("mount", "-o", f"remount,{how}", self.place, may_fail=True):
                return True
        return False

    def _freeze(self) -> None:
        for _ in range(3):
            call("fsfreeze", "-f", self.place)
            time.sleep(1.0)
            call("fsfreeze", "-u", self.place)
            time.sleep(0.2)

    def heal(self) -> None:
        """Take the fault away again; what was written is there."""
        if self.frozen is not None:
            self.frozen.join()
        if self.fault == "read-only" and not self._remount("rw"):
            raise SystemExit(f"{self.place} could not be made writable again.")
        if self.fault == "vanished":
            if self.parent.is_file():
                self.parent.unlink()
            elif self.parent.exists():
                shutil.rmtree(self.parent)  # somebody has made it anew
            self.parent.with_name("gone").rename(self.parent)
        filler = self.place / ".filler"
        if filler.is_dir():
            shutil.rmtree(filler)
        else:
            filler.unlink(missing_ok=True)

    def end(self) -> None:
        """Take the file system away."""
        call("umount", "-R", "-l", self.place)


class Target:
    """A command of ours and one of the places that it writes to.

    Attributes:
        name: What is written, for the page.
        work: Whether the work itself is written there, so that it may end for it; what only tells of
            it must not be able to end it once it has begun.
    """

    name = ""
    work = True
    faults = (*((fault, True) for fault in BEFORE), *((fault, False) for fault in DURING))

    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def prepare(self) -> None:
        """Put there what the command reads, before the fault."""

    def command(self) -> tuple[list[Any], dict[str, str]]:
        """Return the arguments of the environment's Python, and variables."""
        raise NotImplementedError

    def has_begun(self) -> bool:
        """Whether the command is under way, so that a fault during it can strike."""
        raise NotImplementedError

    def done(self) -> str:
        """Return what is wrong with what was written, after a run that should have done all."""
        raise NotImplementedError

    def damage(self) -> str:
        """Return what is wrong with what is there after a run, whatever came of it."""
        return ""


class Trial:
    """One target, one fault, one time."""

    def __init__(
        self, paths: EnvironmentPaths, folder: Path, fault: str, chance: random.Random, model: Path
    ) -> None:
        self.paths, self.folder, self.chance, self.undisturbed = paths, folder, chance, model
        self.disk = Disk(folder, fault)
        self.sick = self.disk.place
        self.well = folder / "well"
        self.well.mkdir()

    def start(self, target: Target) -> tuple[subprocess.Popen[str], list[str]]:
        """Start the command of a target; what it says is gathered in a list."""
        words, variables = target.command()
        process = subprocess.Popen(
            [str(self.paths.python), *map(str, words)],
            env={**self.paths.variables(), "VLLM_COMPAT_CACHE": "off", **variables},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            cwd=self.well,
        )  # fmt: skip
        said: list[str] = []
        stream = process.stderr
        assert stream is not None
        threading.Thread(target=lambda: said.extend(stream), daemon=True).start()
        return process, said

    def judge(self, target: Target, *, before: bool) -> tuple[str, str]:
        """Return what came of it, one of :data:`OUTCOMES`, and what was said or is wrong."""
        target.prepare()
        struck = self.disk.strike(before=True) if before else False
        process, said = self.start(target)
        if not before:
            end = time.monotonic() + LIMIT
            while process.poll() is None and not target.has_begun() and time.monotonic() < end:
                time.sleep(0.002)
            time.sleep(self.chance.uniform(0, 0.5))
            struck = process.poll() is None and self.disk.strike(before=False)
        try:
            process.wait(LIMIT)
            time.sleep(0.1)
        except subprocess.TimeoutExpired:
            process.kill()
            said.append("it hung")
        if struck:
            self.disk.heal()
        elif not before:
            return "not struck", ""
        text = "".join(said).strip()
        if wrong := _not_in_words(process.returncode, text) or target.damage():
            return "wrong", wrong
        unharmed = process.returncode == 0
        if unharmed and (wrong := target.done()):
            return "wrong", f"exit status 0, but {wrong}"
        last = text.rpartition("\n")[2]
        if not unharmed and not target.work and target.has_begun() and (wrong := target.done()):
            return "wrong", f"what only tells of the work has ended it: {wrong}; {last}"
        if unharmed:
            return "unharmed", last
        again, said = self.start(target)
        if again.wait(LIMIT):
            time.sleep(0.1)
            return "lost", "not done by the same command again: " + "".join(said[-3:])
        if wrong := target.done():
            return "lost", f"after the same command again: {wrong}"
        return "in words", last


def _not_in_words(status: int, text: str) -> str:
    """Return what is wrong with how a command of ours has ended, by what it has said."""
    last = text.rpartition("\n")[2]
    if "Traceback (most recent call last)" in text:
        return f"a traceback: {last}"
    if "it hung" in text or status < 0:
        return f"it hung, or was ended by signal {-status}: {last}"
    if status and not last.startswith("vllm-compat: "):
        return f"exit status {status} without a word of ours: {last!r}"
    return ""


OUTCOMES = ("unharmed", "in words", "wrong", "lost")


class Extraction(Target):
    """`run` of a program that saves; nothing of it lies on the sick disk but what a subclass says."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self.out = trial.well / "out"
        self.options: list[Any] = []
        self.log = trial.well / "log.txt"
        self.variables: dict[str, str] = {}

    def command(self) -> tuple[list[Any], dict[str, str]]:
        program = self.trial.well / "program.py"
        program.write_text(PROGRAM)
        options = [*self.options, "--log", self.log]
        return ["-m", "vllm_compat", "run", *options, program, "--output-dir", self.out], self.variables

    def has_begun(self) -> bool:
        return len(list(self.out.glob("data_*.pt"))) > 0

    def done(self) -> str:
        found = {path.name: print_of(path) for path in self.out.glob("data_*.pt")}
        names = [f"data_{number}.pt" for number in range(SAMPLES)]
        if sorted(found) != sorted(names):
            return f"{len(found)} of {SAMPLES} samples are there"
        rest = {path.name for path in self.out.iterdir()} - set(found)
        if rest:
            return f"{', '.join(sorted(rest))} is left"
        wanted = {path.name: print_of(path) for path in self.trial.undisturbed.glob("data_*.pt")}
        return "" if found == wanted else "samples differ from those of an undisturbed run"

    def damage(self) -> str:
        if not self.out.is_dir():
            return ""
        files = list(self.out.glob("data_*.pt"))
        torn = [path.name for path in files if not is_whole(path)]
        numbers = sorted(int(path.stem[5:]) for path in files)
        if torn:
            return f"torn: {', '.join(torn)}"
        return "" if numbers == list(range(len(numbers))) else f"a gap: {numbers}"


class Samples(Extraction):
    name = "`run`: samples"

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self.out = trial.sick / "out"


class Lock(Extraction):
    """The output folder is a disk of its own, and well; what lies beside it does not."""

    name = "`run`: the lock beside the output folder"
    work = False
    faults = (("full", True), ("out of inodes", True), ("read-only", True), ("full", False))

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self.out = trial.sick / "out"

    def prepare(self) -> None:
        self.out.mkdir()
        call("mount", "-t", "tmpfs", "tmpfs", self.out)


class Record(Extraction):
    name = "`run --record`: the record"
    work = False

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self.options = ["--record", trial.sick / "record.json"]


class Status(Extraction):
    name = "`run --status-file`: the status file"
    work = False

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self.options = ["--status-file", trial.sick / "status.json"]


class Log(Extraction):
    name = "`run --log`: the program's output"  # its own `print` may raise, and end it

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self.log = trial.sick / "log.txt"


class Account(Extraction):
    name = "`run`: what processes say, and the account (TMPDIR)"
    work = False

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self.variables = {"TMPDIR": str(trial.sick / "tmp")}

    def prepare(self) -> None:
        (self.trial.sick / "tmp").mkdir()


class Cache(Target):
    name = "`check`: its cache"
    work = False
    faults = tuple((fault, True) for fault in BEFORE)

    def command(self) -> tuple[list[Any], dict[str, str]]:
        out = self.trial.well / "report.json"
        return (
            ["-m", "vllm_compat", "check", "--format", "json", "--output", out, "--vllm", "0.16.0"],
            {"VLLM_COMPAT_CACHE": str(self.trial.sick / "cache")},
        )

    def done(self) -> str:
        return "" if read_json(self.trial.well / "report.json") else "there is no report"


class Report(Target):
    name = "`check --output`, `diff --output`: a report"
    faults = tuple((fault, True) for fault in BEFORE)

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self.out = trial.sick / "report.json"
        self.words = trial.chance.choice((["check", "--vllm", "0.16.0"], ["diff", "0.16.0", "0.17.0"]))

    def command(self) -> tuple[list[Any], dict[str, str]]:
        return ["-m", "vllm_compat", *self.words, "--format", "json", "--output", self.out], {}

    def done(self) -> str:
        return "" if read_json(self.out) else "there is no report"


class Repair(Target):
    """`verify --repair`, with the folder or the backup on the sick disk."""

    name = "`verify --repair`: the folder"
    faults = (*((fault, True) for fault in ("full", "out of inodes", "read-only")), ("slow", False))
    place = "sick"

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self.data = (trial.sick if self.place == "sick" else trial.well) / "data"
        self.backup = (trial.sick if self.place == "backup" else trial.well) / "backup"
        self.prints: dict[str, bytes] = {}

    def prepare(self) -> None:
        shutil.copytree(self.trial.undisturbed, self.data)
        torn = self.data / "data_7.pt"
        torn.write_bytes(torn.read_bytes()[:1000])
        for path in self.data.iterdir():
            os.utime(path, (0, 0))  # nobody writes there any more
        self.prints = {path.name: path.read_bytes() for path in self.data.iterdir()}

    def command(self) -> tuple[list[Any], dict[str, str]]:
        words = ["-m", "vllm_compat", "verify", self.data, "--repair", "--backup", self.backup]
        return [*words, "--batch-size", 1, "--quiet"], {}

    def has_begun(self) -> bool:
        return True

    def done(self) -> str:
        return "the torn sample is still there" if (self.data / "data_7.pt").exists() else self.damage()

    def damage(self) -> str:
        for name, content in self.prints.items():
            places = [folder / name for folder in (self.data, self.backup)]
            if not any(path.is_file() and path.read_bytes() == content for path in places):
                return f"{name} is neither in its folder nor in the backup as it was"
        return ""


class Backup(Repair):
    name = "`verify --repair --backup`: the backup"
    faults = (*((fault, True) for fault in BEFORE), ("slow", False))
    place = "backup"


class Conversion(Target):
    name = "`convert`: converted samples and data set"
    faults = (*((fault, True) for fault in BEFORE), *((fault, False) for fault in DURING))

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self.out = trial.sick / "new" / "converted"
        self.source = trial.undisturbed

    def prepare(self) -> None:
        self.out.parent.mkdir()

    def command(self) -> tuple[list[Any], dict[str, str]]:
        words = ["-m", "vllm_compat", "convert", self.source, self.out, "--layers", 2, 4, 6, 7]
        return [*words, "--num-layers", 8, "--quiet", "--jobs", 1], {}

    def has_begun(self) -> bool:
        return any(self.out.glob("hidden_states/hs_*.safetensors"))

    def done(self) -> str:
        found = len(list(self.out.glob("hidden_states/hs_*.safetensors")))
        if found != SAMPLES or not (self.out / "state.json").exists():
            return f"{found} of {SAMPLES} samples are converted"
        return self.damage()

    def damage(self) -> str:
        for path in self.out.glob("hidden_states/hs_*.safetensors"):
            head = path.read_bytes()
            size = int.from_bytes(head[:8], "little")
            tensors = json.loads(head[8 : 8 + size])
            ends = [value["data_offsets"][1] for key, value in tensors.items() if key[:2] != "__"]
            if 8 + size + max(ends) != len(head):
                return f"{path.name} is torn"
        return ""


TARGETS: tuple[type[Target], ...] = (
    Samples, Lock, Record, Status, Log, Account, Cache, Report, Repair, Backup, Conversion,
)  # fmt: skip


def call(*command: object, may_fail: bool = False) -> int:
    """Run a command of the system; return its exit status."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode and not may_fail:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.returncode


def read_json(path: Path) -> Any:
    """Return what a file holds; None where it holds no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def print_of(path: Path) -> list[tuple[str, int]]:
    """Return what tells two samples apart: the checksums of their members, not the archive's name."""
    with zipfile.ZipFile(path) as archive:
        found = [(each.filename.partition("/")[2], each.CRC) for each in archive.infolist()]
    return sorted(each for each in found if each[0].startswith("data"))


def cells(only: str) -> list[tuple[type[Target], str, bool]]:
    """Return all that can be tried: target, fault, and whether it is there before the start."""
    return [
        (target, fault, before)
        for target in TARGETS
        if only in target.name
        for fault, before in target.faults
    ]


class Campaign:
    """All trials, and their record."""

    def __init__(self, paths: EnvironmentPaths, work: Path, record: Path) -> None:
        self.paths, self.work, self.path = paths, work, record
        self.record = campaign_record.opened(record, "disk", cells=[])
        self.record.update(speculators=paths.speculators_version, vllm=paths.vllm_version)
        self.lock = threading.Lock()
        (work / "program.py").write_text(PROGRAM)
        done = paths.run([work / "program.py", "--output-dir", work / "undisturbed"], timeout=LIMIT)
        if done.returncode:
            raise SystemExit(done.stderr)

    def cell(self, target: type[Target], fault: str, before: bool) -> dict[str, Any]:
        """Return what is known of a cell so far."""
        what = {"target": target.name, "fault": fault, "when": "before" if before else "during"}
        for cell in self.record["cells"]:
            if {name: cell[name] for name in what} == what:
                found: dict[str, Any] = cell
                return found
        cell = {**what, **dict.fromkeys(OUTCOMES, 0), "said": [], "errors": []}
        self.record["cells"].append(cell)
        return cell

    def one(self, target: type[Target], fault: str, before: bool) -> None:
        """Try one cell once."""
        folder = Path(tempfile.mkdtemp(dir=self.work))
        trial = Trial(self.paths, folder, fault, random.Random(), self.work / "undisturbed")
        try:
            outcome, said = trial.judge(target(trial), before=before)
        finally:
            trial.disk.end()
        said = said.replace(str(folder), "…")[:600]
        print(
            f"{target.name}, {fault}, {'before' if before else 'during'}: {outcome}: {said}", flush=True
        )
        with self.lock:
            cell = self.cell(target, fault, before)
            if outcome != "not struck":
                cell[outcome] += 1
            if outcome in ("wrong", "lost"):
                cell["errors"].append(said)
            elif outcome == "in words":
                cell["said"] = [said]
            campaign_record.put(self.path, self.record)


def main() -> int:
    """Try each cell as often as wanted; return 1 where something was wrong or lost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=3, help="how often each cell is tried")
    parser.add_argument("--only", default="", help="only targets with this word in their names")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--vllm", default="0.16.0")
    parser.add_argument("--speculators", default="0.3.0")
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    if os.environ.get(INSIDE) != "1":  # mounts that go with this process, however it ends
        command = ["unshare", "-m", "--propagation", "private", sys.executable, *sys.argv]
        return subprocess.run(command, env={**os.environ, INSIDE: "1"}).returncode
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="vllm-compat-disk-", ignore_cleanup_errors=True) as work:
        paths = ensure(options.vllm, options.speculators)
        campaign = Campaign(paths, Path(work), options.record)

        def one(cell: tuple[type[Target], str, bool]) -> None:
            known = campaign.cell(*cell)
            if sum(known[each] for each in OUTCOMES) < options.times and time.monotonic() < end:
                campaign.one(*cell)

        with ThreadPoolExecutor(options.at_once) as pool:
            for _ in range(options.times):
                list(pool.map(one, cells(options.only)))
    bad = [cell for cell in campaign.record["cells"] if cell["wrong"] or cell["lost"]]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
