"""What servers offer and downstreams ask, recorded: read back it is what was there."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from lab.record import record_release
from lab.serving import record_downstreams, record_serving
from tests.analysis.serving.stand_ins import stand_in_vllm
from tests.analysis.serving.test_models import BEFORE, modules_of
from tests.downstreams import wheel

from vllm_compat.analysis.recorded_downstreams import recorded_downstream, recorded_names
from vllm_compat.analysis.serving.asked import read_clients
from vllm_compat.analysis.serving.model import Offered
from vllm_compat.analysis.serving.models import read_model
from vllm_compat.analysis.serving.offered import read_offered
from vllm_compat.analysis.serving.recorded import (
    FILE,
    recorded_models,
    recorded_offer,
    served_releases,
)
from vllm_compat.analysis.surface.files import package_at
from vllm_compat.analysis.surface.recorded import DATA, recorded_versions
from vllm_compat.errors import UsageError


def made(folder: Path, version: str, **traits: object) -> Path:
    """Write a STAND-IN of vLLM's server side, with models and metadata."""
    modules_of(stand_in_vllm(folder, **traits), BEFORE)  # type: ignore[arg-type]
    told = folder / f"vllm-{version}.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


def without_lines(offered: Offered) -> Offered:
    routes = {
        path: dataclasses.replace(route, where=route.where.rpartition(":")[0])
        for path, route in offered.routes.items()
    }
    return dataclasses.replace(offered, routes=routes)


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [
        made(tmp_path / "one", "1.0.0", extracts=False, side=False, answer="list"),
        made(tmp_path / "two", "2.0.0", refuses_chunks=True, scale_out=True, extra="forbid"),
    ]


def test_what_is_read_back_is_what_was_there(tmp_path: Path, two: list[Path]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    record_serving(two, data=data)
    assert served_releases(data) == ("1.0.0", "2.0.0")
    for version, folder in zip(("1.0.0", "2.0.0"), two, strict=True):
        read = read_offered(package_at(folder, "vllm"))
        assert recorded_offer(version, data) == without_lines(read)
        models = recorded_models(version, data)
        assert models is not None
        tiny = read_model(modules_of(folder, BEFORE), "TinyForCausalLM")
        found = dataclasses.replace(tiny, where=tiny.where.rpartition(":")[0])
        assert models["TinyForCausalLM"] == found
    assert recorded_offer("3.0.0", data) is None
    assert recorded_models("3.0.0", data) is None


def test_the_order_does_not_matter_and_a_release_is_replaced(tmp_path: Path, two: list[Path]) -> None:
    one, other = tmp_path / "a", tmp_path / "b"
    one.mkdir()
    other.mkdir()
    record_serving(two, data=one)
    for folder in (two[1], two[0], two[1]):
        record_serving([folder], data=other)
    assert (one / FILE).read_bytes() == (other / FILE).read_bytes()
    shutil.rmtree(two[0])
    record_serving([made(two[0], "1.0.0")], data=other)
    again = recorded_offer("1.0.0", other)
    assert again is not None
    assert "extract_hidden_states" in again.methods
    assert again.routes["/v1/chat/completions/render"].answers == "Generated"


def test_a_release_is_recorded_with_its_surface(tmp_path: Path, two: list[Path]) -> None:
    record_release(two[1], data=tmp_path / "data")
    assert served_releases(tmp_path / "data") == ("2.0.0",)


def test_a_damaged_record_is_one_sentence(tmp_path: Path, two: list[Path]) -> None:
    record_serving(two[:1], data=tmp_path)
    (tmp_path / FILE).write_bytes(b"damaged")
    other = tmp_path / "elsewhere"
    other.mkdir()
    shutil.copy(tmp_path / FILE, other)
    with pytest.raises(UsageError, match=r"serving\.xz is damaged: .*\.$"):
        served_releases(other)


def test_a_downstream_that_says_no_release_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "__init__.py").touch()
    with pytest.raises(UsageError, match="no wheel or sdist whose metadata says its release"):
        record_downstreams([tmp_path], data=tmp_path)


# What the package holds.


def test_every_recorded_release_has_its_server_recorded() -> None:
    assert served_releases() == recorded_versions()


def test_the_records_are_small() -> None:
    assert sum((DATA / name).stat().st_size for name in (FILE, "downstreams.xz")) < 60_000


@pytest.mark.parametrize("version", ["0.4.0.1", "0.5.0", "0.7.0.2", "0.9.0"])
def test_a_recorded_downstream_is_its_wheel(tmp_path: Path, version: str) -> None:
    (line,) = record_downstreams([wheel(version)], data=tmp_path)
    name = f"speculators=={version}"
    again, known = recorded_downstream(name, tmp_path), recorded_downstream(name)
    assert known == again
    assert known is not None
    assert known.asks == read_clients(package_at(wheel(version)))
    assert (known.file, known.sha256) == (line["file"], line["sha256"])
    assert recorded_names(tmp_path) == (name,)


def test_what_is_not_recorded_is_not_there() -> None:
    assert recorded_downstream("speculators==0.2.0") is None
    assert recorded_downstream("other==0.9.0") is None
    assert recorded_downstream("speculators") is None
    assert recorded_downstream(None) is None
