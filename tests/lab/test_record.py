"""Recording: what is read back is what was there, byte for byte the same whatever the order."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest
from lab.record import Recorder, in_digests, in_full, in_names, record_release, record_releases
from tests.analysis.surface import packages
from tests.downstreams import VERSIONS, contract

from vllm_compat.analysis.surface import SourceSurface, Surface, open_surface
from vllm_compat.analysis.surface.recorded import (
    DATA,
    DIGESTS,
    RecordedBody,
    RecordedSurface,
    closest_record,
    group_of,
    mask_of,
    ranges_of,
    recognized,
    recorded_until,
    recorded_versions,
    store,
)
from vllm_compat.errors import UsageError

ONE = {
    "config/__init__.py": "from vllm.config.cache import CacheConfig\n",
    "config/cache.py": """
        from dataclasses import dataclass
        from typing import ClassVar
        @dataclass
        class CacheConfig:
            size: int
            kind: str = "x"
            top: ClassVar[int] = 1
            class Inner:
                def f(self, a): ...
            def method(self, b: "str", *, c=None) -> int:
                self.made = CacheConfig(1)
                self.made = None
    """,
    "v1/core/sched.py": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from vllm.config.cache import CacheConfig
        try:
            from vllm.gone import f
        except ImportError:
            def f(x): ...
        def make() -> "CacheConfig": ...
        LIMIT = 3
    """,
    "model_executor/models/llama.py": "import torch\nclass Llama(torch.nn.Module): ...\nX = 1\n",
    "third_party/odd.py": "class Odd: ...\n",
    "envs.py": """
        import os
        environment_variables = {"VLLM_A": lambda: os.getenv("VLLM_A")}
        def __getattr__(name):
            if name in environment_variables:
                return environment_variables[name]()
            raise AttributeError(name)
    """,
}
TWO = {
    **ONE,
    "config/cache.py": ONE["config/cache.py"].replace(
        "size: int", "size: int\n            more: int = 0"
    ),
    "v1/new.py": "def g(): ...\n",
    "model_executor/models/llama.py": "import torch\nclass Llama(torch.nn.Module): ...\nY = 1\n",
}
NAMES = [
    "vllm.config.CacheConfig",
    "vllm.config.cache.CacheConfig.method",
    "vllm.config.CacheConfig.Inner.f",
    "vllm.config.CacheConfig.made",
    "vllm.config.CacheConfig.nothing",
    "vllm.v1.core.sched.f",
    "vllm.v1.core.sched.make().kind",
    "vllm.v1.core.sched.make().nothing",
    "vllm.v1.core.sched.LIMIT",
    "vllm.v1.core.sched.CacheConfig",
    "vllm.v1.new.g",
    "vllm.v1.core",
    "vllm.nothing",
    "vllm.envs.VLLM_A",
    "vllm.envs.VLLM_B",
]


def same(one: Surface, other: Surface) -> None:
    """Hold two surfaces against each other."""
    assert sorted(one.modules()) == sorted(other.modules())
    for name in NAMES:
        assert one.resolve(name) == other.resolve(name), name
    for name in ("CacheConfig", "f", "g", "Llama", "nothing"):
        assert one.find(name) == other.find(name), name


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of records: 1.0 from a folder, 2.0 from an sdist."""
    folder = tmp_path / "data"
    record_releases(
        [
            packages.write(tmp_path / "one", ONE, "1.0.0"),
            packages.sdist(tmp_path, TWO, "2.0.0"),
        ],
        data=folder,
    )
    return folder


class TestRoundTrip:
    def test_what_is_read_back_is_what_was_there(self, tmp_path: Path, data: Path) -> None:
        assert recorded_versions(data) == ("1.0.0", "2.0.0")
        same(SourceSurface.at(tmp_path / "one"), RecordedSurface("1.0.0", data))
        same(SourceSurface.at(tmp_path / "vllm-2.0.0.tar.gz"), RecordedSurface("2.0.0", data))

    def test_fields_keep_their_order(self, data: Path) -> None:
        signature = RecordedSurface("2.0.0", data).signature("vllm.config.CacheConfig")
        assert signature is not None
        assert [p.name for p in signature.parameters] == ["size", "more", "kind"]

    def test_other_modules_are_known_by_their_names(self, data: Path) -> None:
        surface = RecordedSurface("1.0.0", data)
        model = surface.resolve("vllm.model_executor.models.llama.Llama")
        assert model is not None
        assert model.open_ended
        assert model.signature is None
        assert surface.resolve("vllm.model_executor.models.llama.X") is not None
        assert surface.resolve("vllm.model_executor.models.llama.Y") is None  # 2.0.0 has it
        # Imported from outside vLLM, maybe: such names are not recorded.
        other = surface.resolve("vllm.model_executor.models.llama.torch")
        assert other is not None
        assert other.open_ended
        assert surface.resolve("vllm.third_party.odd.Anything") is not None

    def test_a_module_of_a_release_is_recognized_by_its_bytes(
        self, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known = partial(recognized, folder=data)
        monkeypatch.setattr("vllm_compat.analysis.surface.recorded.recognized", known)
        folder = packages.write(tmp_path / "again", ONE, "1.0.0")
        surface = SourceSurface.at(folder)
        same(surface, RecordedSurface("1.0.0", data))
        assert isinstance(surface._bodies["vllm.config.cache"], RecordedBody)
        edited = folder / "vllm" / "config" / "cache.py"
        edited.write_text(edited.read_text().replace("size: int", "space: int"))
        signature = SourceSurface.at(folder).signature("vllm.config.CacheConfig")
        assert signature is not None
        assert [p.name for p in signature.parameters] == ["space", "kind"]

    def test_a_damaged_record_recognizes_nothing(self, data: Path) -> None:
        source = textwrap.dedent(ONE["config/cache.py"]).encode()
        assert recognized("vllm.config.cache", source, False, data) is not None
        assert recognized("vllm.config.cache", source, True, data) is None
        assert recognized("vllm.config.other", source, False, data) is None
        store.cache_clear()
        (data / "surfaces" / "digests.xz").write_bytes(b"damaged")
        assert recognized("vllm.config.cache", source, False, data) is None

    def test_a_surface_knows_which_releases_answer_alike(self, data: Path) -> None:
        surface = RecordedSurface("1.0.0", data)
        assert surface.alike == ("1.0.0", "2.0.0")
        surface.has_module("vllm.config")
        surface.resolve("vllm.nothing")
        assert surface.alike == ("1.0.0", "2.0.0")
        surface.resolve("vllm.config.CacheConfig")  # 2.0.0 has one field more
        assert surface.alike == ("1.0.0",)

    @pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
    def test_alike_is_never_said_of_what_differs(self, data: Path, version: str) -> None:
        for name in NAMES:
            surface = RecordedSurface(version, data)
            answer = surface.resolve(name)
            for other in surface.alike:
                assert RecordedSurface(other, data).resolve(name) == answer, name

    def test_each_line_has_origin_and_digest(self, tmp_path: Path, data: Path) -> None:
        index = json.loads((data / "releases.json").read_text())
        one, two = index["releases"]
        assert (one["file"], two["file"]) == ("one", "vllm-2.0.0.tar.gz")
        assert two["sha256"] == SourceSurface.at(tmp_path / "vllm-2.0.0.tar.gz").digest()
        assert two["distribution"] == "vllm"
        surface = RecordedSurface("2.0.0", data)
        assert surface.origin == "record of vllm-2.0.0.tar.gz"
        assert surface.sha256 == two["sha256"]

    def test_ranges(self) -> None:
        for text in ("0", "3", "0-4", "1,3,5-9", "0,35"):
            assert ranges_of(mask_of(text)) == text


class TestAdding:
    def test_the_order_does_not_matter(self, tmp_path: Path, data: Path) -> None:
        other = tmp_path / "other"
        record_release(tmp_path / "vllm-2.0.0.tar.gz", data=other)
        record_release(tmp_path / "one", data=other)
        for path in sorted(data.rglob("*.*")):
            assert path.read_bytes() == (other / path.relative_to(data)).read_bytes(), path.name

    def test_recording_again_changes_nothing(self, tmp_path: Path, data: Path) -> None:
        before = {p: p.read_bytes() for p in data.rglob("*.*")}
        record_release(tmp_path / "one", data=data)
        assert before == {p: p.read_bytes() for p in data.rglob("*.*")}

    def test_a_release_in_between(self, tmp_path: Path, data: Path) -> None:
        record_release(packages.wheel(tmp_path, TWO, "1.5.0"), data=data)
        assert recorded_versions(data) == ("1.0.0", "1.5.0", "2.0.0")
        same(SourceSurface.at(tmp_path / "one"), RecordedSurface("1.0.0", data))
        same(RecordedSurface("1.5.0", data), RecordedSurface("2.0.0", data))

    def test_a_release_that_is_replaced(self, tmp_path: Path, data: Path) -> None:
        record_release(packages.write(tmp_path / "x", TWO, "1.0.0"), data=data)
        assert recorded_versions(data) == ("1.0.0", "2.0.0")
        same(RecordedSurface("1.0.0", data), RecordedSurface("2.0.0", data))

    def test_a_nightly(self, tmp_path: Path, data: Path) -> None:
        nightly = packages.write(tmp_path / "n", TWO, "2.0.1.dev4+g123")
        assert record_release(nightly, data=data)["version"] == "2.0.1.dev4+g123"
        assert recorded_versions(data)[-1] == "2.0.1.dev4+g123"

    def test_a_source_without_a_version(self, tmp_path: Path) -> None:
        source = packages.write(tmp_path / "n", ONE)
        for path in (source / "vllm-9.0.0.dist-info").iterdir():
            path.unlink()
        with pytest.raises(UsageError, match="does not say which version it is"):
            record_release(source, data=tmp_path / "data")
        made = record_release(source, data=tmp_path / "data", version="3.0")
        assert made["version"] == "3.0"

    def test_nothing_is_written_before_the_end(self, tmp_path: Path) -> None:
        recorder = Recorder(tmp_path / "data")
        recorder.add(packages.write(tmp_path / "one", ONE))
        assert not (tmp_path / "data").exists()


class TestDamage:
    def test_no_records(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="There are no recorded releases in"):
            RecordedSurface("1.0.0", tmp_path)

    def test_an_index_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "releases.json").write_text("[]")
        with pytest.raises(UsageError, match="is damaged"):
            RecordedSurface("1.0.0", tmp_path)

    def test_another_format(self, tmp_path: Path) -> None:
        (tmp_path / "releases.json").write_text('{"format": 99, "releases": []}')
        with pytest.raises(UsageError, match="has format 99"):
            RecordedSurface("1.0.0", tmp_path)

    def test_a_damaged_part(self, data: Path) -> None:
        (data / "surfaces" / "vllm.config.xz").write_bytes(b"nothing")
        store.cache_clear()
        with pytest.raises(UsageError, match=r"vllm\.config\.xz is damaged"):
            RecordedSurface("1.0.0", data).resolve("vllm.config.cache.CacheConfig")


class TestPackaged:
    """The records that come with the package."""

    def test_every_release_from_0_10_2_to_0_33_0(self) -> None:
        wanted = [
            "0.10.2",
            "0.11.0",
            "0.11.1",
            "0.11.2",
            "0.12.0",
            "0.13.0",
            "0.14.0",
            "0.14.1",
            "0.15.0",
            "0.15.1",
            "0.16.0",
            "0.17.0",
            "0.17.1",
            "0.18.0",
            "0.18.1",
            "0.19.0",
            "0.19.1",
            "0.20.0",
            "0.20.1",
            "0.20.2",
            "0.21.0",
            "0.22.0",
            "0.22.1",
            "0.23.0",
            "0.24.0",
            "0.25.0",
            "0.25.1",
            "0.26.0",
            "0.27.0",
            "0.27.1",
            "0.28.0",
            "0.29.0",
            "0.30.0",
            "0.31.0",
            "0.32.0",
            "0.33.0",
        ]
        assert list(recorded_versions())[: len(wanted)] == wanted

    def test_they_are_small(self) -> None:
        sizes = [p.stat().st_size for p in DATA.rglob("*") if p.is_file()]
        assert sum(sizes) < 3 << 20
        assert max(sizes) < 1 << 20

    def test_the_engine_is_known_by_its_bytes(self) -> None:
        known: dict[str, int] = {}
        for line in store().text(DIGESTS).splitlines():
            module, _, ranges = line.split("\t")
            assert not known.get(module, 0) & mask_of(ranges), module
            known[module] = known.get(module, 0) | mask_of(ranges)
        for number, version in enumerate(recorded_versions()):
            modules = {m for m in RecordedSurface(version).modules() if in_digests(m)}
            assert modules == {m for m, mask in known.items() if mask >> number & 1}, version

    def test_they_come_from_published_files(self) -> None:
        for version in recorded_versions():
            surface = RecordedSurface(version)
            assert surface.origin.startswith(f"record of vllm-{version}")
            assert len(surface.sha256) == 64

    @pytest.mark.parametrize(
        ("said", "meant"),
        [
            ("0.16.0", "0.16.0"),
            ("0.16", "0.16.0"),
            ("0.16.0+cpu", "0.16.0"),
            ("0.16.1.dev3", None),
            ("nightly", None),
        ],
    )
    def test_versions_are_compared_as_versions(self, said: str, meant: str | None) -> None:
        assert closest_record(said) == meant

    def test_open_surface_takes_a_version(self) -> None:
        assert open_surface("v0.16.0").version == "0.16.0"
        with pytest.raises(UsageError, match=r"recorded are 0\.10\.2 to"):
            open_surface("0.16.5")

    def test_until(self) -> None:
        assert [s.version for s in recorded_until("0.11.3.dev1")][-1] == "0.11.2"
        assert [s.version for s in recorded_until("0.11.1")][-1] == "0.11.1"
        assert len(recorded_until()) == len(recorded_versions())

    def test_all_that_downstreams_use_is_recorded_in_full(self) -> None:
        for version in VERSIONS:
            for site in contract(version).sites:
                for newer in ("0.16.0", "0.33.0"):
                    surface = RecordedSurface(newer)
                    names = site.symbol.partition("(")[0].split(".")
                    while names and not surface.has_module(".".join(names)):
                        names.pop()
                    assert in_full(".".join(names)), site.symbol

    def test_one_question_reads_few_parts(self) -> None:
        store.cache_clear()
        surface = RecordedSurface("0.17.0")
        surface.signature("vllm.v1.request.Request")
        assert len(surface._store._texts) < 5 < len(list(surface._store.groups()))

    def test_memory_stays_low(self) -> None:
        # Not ru_maxrss: a child's would count the parent that it was forked from.
        program = (
            "from vllm_compat.analysis.surface.recorded import recorded_until\n"
            "for s in recorded_until():\n"
            "    s.find('nothing'); s.resolve('vllm.config.VllmConfig')\n"
            "print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')))"
        )
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert int(ran.stdout) < 200 * 1024


@pytest.mark.parametrize(
    ("module", "full", "names"),
    [
        ("vllm", True, True),
        ("vllm.v1.core.sched.scheduler", True, True),
        ("vllm.config.cache", True, True),
        ("vllm.distributed.kv_transfer.kv_connector.v1.base", True, True),
        ("vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector", False, True),
        ("vllm.model_executor.models.interfaces", True, True),
        ("vllm.model_executor.models.llama", False, True),
        ("vllm.third_party.pynvml", False, False),
    ],
)
def test_what_is_recorded_how(module: str, full: bool, names: bool) -> None:
    assert in_full(module) is full
    assert in_names(module) is names


@pytest.mark.parametrize(
    ("module", "group"),
    [
        ("vllm", "vllm"),
        ("vllm.envs", "vllm"),
        ("vllm.config.cache", "vllm.config"),
        ("vllm.v1.request", "vllm.v1"),
        ("vllm.v1.core.sched.scheduler", "vllm.v1.core"),
        ("vllm.v1.sample.sampler", "vllm.v1.deeper"),
        ("vllm.v1.worker", "vllm.v1"),
        ("vllm.v1.worker.gpu_worker", "vllm.v1.worker"),
        ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu"),
        ("vllm.v1.worker.gpu.sample.states", "vllm.v1.worker.gpu.deeper"),
        ("vllm.v1.attention.backends.abstract", "vllm.v1.attention"),
    ],
)
def test_groups(module: str, group: str) -> None:
    assert group_of(module) == group


def test_records_open_fast_enough_for_the_whole_matrix() -> None:
    start = time.process_time()
    for surface in recorded_until():
        surface.signature("vllm.v1.request.Request")
    assert time.process_time() - start < 2
