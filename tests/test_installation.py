"""A wheel, an sdist and README's own line, each installed where nothing else is."""

from __future__ import annotations

import email
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from lab.environments import find_uv

from vllm_compat import __version__

if TYPE_CHECKING:
    from conftest import MakeSite, Site

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "vllm_compat"
FAKE = ROOT / "tests" / "fakes" / "speculators_0_3" / "speculators"

PROGRAM = """
import sys
import vllm_compat
if not vllm_compat.status().in_force:
    vllm_compat.apply()
from speculators.data_generation import vllm_hidden_states_generator
print(vllm_compat.status().in_force, vllm_compat.__file__, *sys.argv[1:])
"""


def call(command: Sequence[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command that finds nothing of this checkout."""
    outer = ("PYTHON", "VLLM_", "VIRTUAL_ENV")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    return subprocess.run(
        command,
        cwd=folder,
        env={**clean, "VLLM_COMPAT_CACHE": "off", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def uv() -> list[str]:
    return find_uv()


@pytest.fixture(scope="module")
def built(uv: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build both from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    command = [*uv, "build", "--python", sys.executable, "--sdist", "--wheel", "--out-dir", str(out)]
    done = call([*command, str(ROOT)], out)
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def readmes_line() -> list[str]:
    """Return what README installs the project from: the words behind `pip install`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\$ pip install (\..*)$", text, flags=re.MULTILINE)
    return shlex.split(line, comments=True)


@pytest.fixture(scope="module", params=["wheel", "sdist", "README"])
def bare(
    request: pytest.FixtureRequest,
    uv: list[str],
    built: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Return the scripts' folder of an environment with nothing but the project, once in each way."""
    venv = tmp_path_factory.mktemp(request.param) / "venv"
    python = str(venv / "bin" / "python")
    what = readmes_line() if request.param == "README" else [str(built[request.param])]
    for command in (
        ["venv", "--python", sys.executable, str(venv)],
        ["pip", "install", "--python", python, *what],
    ):
        done = call([*uv, *command], ROOT if request.param == "README" else venv.parent)
        assert done.returncode == 0, done.stderr
    return venv / "bin"


@pytest.fixture
def pair(make_site: MakeSite, tmp_path: Path) -> Site:
    """FAKES of vLLM and speculators, without the metadata of vllm_compat."""
    site = make_site(tmp_path)
    shutil.rmtree(site.folder / f"vllm_compat-{__version__}.dist-info")
    return site


def packaged() -> set[str]:
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(PACKAGE.parent).as_posix() for path in files}


def test_the_wheel_holds_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in wheel.namelist() if name.endswith("dist-info/METADATA"))
        described = email.message_from_bytes(wheel.read(metadata))
    assert names == packaged()
    assert {"vllm_compat/py.typed", "vllm_compat/data/releases.json"} <= names
    assert any(name.startswith("vllm_compat/data/surfaces/") for name in names)
    assert not any(name.startswith(("lab/", "tests/", "src/")) for name in names)
    assert described["Version"] == __version__
    assert described["License-Expression"] == "Apache-2.0"
    assert {"License-File", "Description-Content-Type"} <= set(described)


def test_the_sdist_holds_what_its_tests_need(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers()}
    assert {f"src/{name}" for name in packaged()} <= names
    assert {
        "lab/environments.py",
        "tests/conftest.py",
        "scripts/test.py",
        "CHANGELOG.md",
        "LICENSE",
    } <= names
    assert not {name for name in names if "__pycache__" in name or name.startswith(".git/")}


def test_an_environment_with_nothing_else_has_the_commands(bare: Path, tmp_path: Path) -> None:
    help_ = call([str(bare / "vllm-compat"), "--help"], tmp_path)
    assert help_.returncode == 0, help_.stderr
    assert "before a run" in help_.stdout
    module = call([str(bare / "python"), "-m", "vllm_compat", "--help"], tmp_path)
    assert module.stdout.splitlines()[1:] == help_.stdout.splitlines()[1:]
    missing = call([str(bare / "vllm-compat"), "check"], tmp_path)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("vllm-compat: speculators is not installed: install it, ")


def test_the_recorded_releases_are_installed_too(bare: Path, tmp_path: Path) -> None:
    options = ["--downstream", str(FAKE), "--vllm", "0.16.0", "--format", "json"]
    done = call([str(bare / "vllm-compat"), "check", *options], tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["vllm_compat"] == __version__
    (judged,) = report["pairs"]
    assert judged["vllm"]["version"] == "0.16.0"
    assert judged["verdict"] == "usable with vllm_compat"


def test_check_apply_and_run_see_an_installed_pair(bare: Path, pair: Site) -> None:
    program = pair.folder.parent / "program.py"
    program.write_text(PROGRAM)
    python, path = str(bare / "python"), {"PYTHONPATH": str(pair.folder)}
    check = call([str(bare / "vllm-compat"), "check"], program.parent, **path)
    assert check.returncode == 0, check.stdout + check.stderr
    inside = str(bare.parent / "lib")
    for command in ([python], [python, "-m", "vllm_compat", "run", "--no-canary"]):
        done = call([*command, str(program), "--epochs", "1"], program.parent, **path)
        assert done.returncode == 0, done.stderr
        in_force, where, *arguments = done.stdout.split()
        assert (in_force, arguments) == ("True", ["--epochs", "1"])
        assert where.startswith(inside), "not the checkout's"
