"""Fixtures around the fakes (tests/fakes): environments, cases, modules in this process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import vllm_compat
from vllm_compat.adapters import by_name, make_plan
from vllm_compat.adapters.base import Case
from vllm_compat.analysis.downstream import read_contract
from vllm_compat.analysis.drift import find_drifts
from vllm_compat.analysis.environment import Environment
from vllm_compat.analysis.fact_reading import read_features
from vllm_compat.analysis.plan import Plan
from vllm_compat.analysis.planner import roles_of
from vllm_compat.analysis.surface import SourceSurface
from vllm_compat.runtime import run
from vllm_compat.runtime.patching import Transaction

FAKES = Path(__file__).parent / "fakes"
SOURCE = Path(vllm_compat.__file__).parents[1]
PLUGIN = "[vllm.general_plugins]\nvllm_compat = vllm_compat.plugin:load\n"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "torch: looks into real tensors; skipped without torch")
    os.environ["VLLM_COMPAT_CACHE"] = "off"  # what one test remembers is no other's business
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what runs in its background so, and every child would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--beyond", action="store_true", help="run also what is marked `beyond`")


@pytest.hookimpl(trylast=True)  # of what other options have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `beyond`, unless it is asked for."""
    if config.getoption("--beyond") or "beyond" in config.option.markexpr:
        return
    beyond = [item for item in items if item.get_closest_marker("beyond")]
    if beyond:
        config.hook.pytest_deselected(items=beyond)
        items[:] = [item for item in items if item not in beyond]
        config.stash[LEFT_OUT] = len(beyond)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many were left out: what nobody sees missing is lost."""
    if number := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{number} tests marked `beyond` were left out (--beyond runs them)")


LEFT_OUT = pytest.StashKey[int]()
WORKER_PROC = """

class WorkerWrapperBase:
    def __init__(self, vllm_config=None) -> None:
        self.vllm_config = vllm_config

    def init_device(self) -> None: ...


class WorkerProc:
    def __init__(self, rank: int = 0, vllm_config=None) -> None:
        self.rank = rank
"""
TQDM = """
class tqdm:
    def __init__(self, iterable=None, total=None):
        self.iterable, self.total = iterable, total or len(iterable)

    def __iter__(self):
        return iter(self.iterable)
"""

Edit = tuple[str, str, str]
"""A file below the fakes' packages, the text in it that goes, and the text that comes."""


class Site:
    """A folder of fake packages, as an interpreter of its own finds them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, fake: str, version: str = "", *, entry_points: str = "") -> Site:
        """Copy a fake and, where a version is given, write its distribution's metadata."""
        shutil.copytree(FAKES / fake, self.folder, dirs_exist_ok=True)
        if version:
            self.describe(fake.partition("_")[0], version, entry_points)
        return self

    def describe(self, name: str, version: str, entry_points: str = "") -> None:
        """Write the metadata of a distribution."""
        info = self.folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)

    def edit(self, file: str, old: str, new: str) -> Site:
        """Replace a text that stands in a file."""
        path = self.folder / file
        text = path.read_text()
        assert old in text, f"{file} has no {old!r}"
        path.write_text(text.replace(old, new))
        return self

    def add_loading(self) -> Site:
        """Add what a launched run watches of vLLM: the worker's process and the bar of its shards."""
        executor = self.folder / "vllm/v1/executor/multiproc_executor.py"
        executor.write_text(executor.read_text() + WORKER_PROC)
        loader = self.folder / "vllm/model_executor/model_loader"
        loader.mkdir()
        (loader / "__init__.py").write_text("")
        (loader / "weight_utils.py").write_text(TQDM)
        return self

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a fresh interpreter that sees these packages, and vllm_compat."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYTHON"))}
        return subprocess.run(
            [sys.executable, *command],
            env={
                **clean,
                "PYTHONPATH": os.pathsep.join([str(self.folder), str(SOURCE)]),
                "PYTHONDONTWRITEBYTECODE": "1",
                "VLLM_COMPAT_CACHE": "off",
                **environ,
            },
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )


MakeSite = Callable[[Path], Site]


@pytest.fixture
def empty_site(tmp_path: Path) -> Site:
    """An environment with vllm_compat's metadata and nothing else."""
    return _empty(tmp_path)


def _empty(folder: Path) -> Site:
    site = Site(folder / "site")
    site.folder.mkdir()
    site.describe("vllm_compat", vllm_compat.__version__, PLUGIN)
    return site


@pytest.fixture(scope="session")
def make_site() -> MakeSite:
    """Make environments with FAKES of vLLM 0.16 (CPU), speculators 0.3, transformers 4, torch."""
    return made_site


def made_site(folder: Path) -> Site:
    """Return an environment with these fakes in a folder."""
    site = _empty(folder).add("vllm", "0.16.0+cpu").add("speculators_0_3", "0.3.0")
    return site.add("transformers_4", "4.57.0").add("torch", "2.10.0")


@pytest.fixture
def site(tmp_path: Path, make_site: MakeSite) -> Site:
    """One such environment."""
    return make_site(tmp_path)


@pytest.fixture(scope="session")
def make_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """Make cases by reading the fakes' source, edited where a test says so."""

    @cache
    def make(
        downstream: str = "speculators_0_3",
        *edits: Edit,
        transformers: str = "transformers_4",
        device: str = "cpu",
        capture: str = "auto",
    ) -> Case:
        folder = tmp_path_factory.mktemp("case")
        site = Site(folder).add("vllm").add(downstream).add(transformers)
        for edit in edits:
            site.edit(*edit)
        contract = read_contract(folder / "speculators")
        surface = SourceSurface.at(folder / "vllm")
        environment = Environment(
            python="3.11.0",
            versions=(("transformers", transformers.removeprefix("transformers_") + ".0.0"),),
            device=device,
            capture=capture,
            features=read_features(folder / "speculators", folder / "transformers"),
        )
        findings = find_drifts(contract, surface)
        return Case(contract, surface, environment, findings, roles_of(contract))

    return make


@pytest.fixture
def fake_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Make fakes importable in this process; their modules are forgotten after the test."""
    packages: set[str] = set()

    def add(*folders: str) -> None:
        for folder in folders:
            package = folder.partition("_")[0]
            assert package not in sys.modules, f"a {package} is imported already"
            packages.add(package)
            monkeypatch.syspath_prepend(FAKES / folder)

    yield add
    for name in [n for n in sys.modules if n.partition(".")[0] in packages]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin as a process in which nothing has been in force yet."""
    monkeypatch.setattr(run, "_current", None)


@pytest.fixture
def transaction() -> Iterator[Transaction]:
    """A transaction that is taken back after the test."""
    opened = Transaction()
    yield opened
    opened.revert()


@pytest.fixture
def install(transaction: Transaction) -> Callable[[str, Case], Plan]:
    """Put one adapter in force, as the plan of a case has it."""

    def put(name: str, case: Case) -> Plan:
        plan = make_plan(case.contract, case.surface, case.environment)
        assert name in plan.adapters
        by_name(name).install(transaction.owned_by(name), plan)
        return plan

    return put
