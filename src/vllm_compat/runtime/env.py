"""The doors through which a process learns that it belongs to a run of vllm_compat.

Every process of a run must hold the same patches, and most of them are started by somebody
else: vLLM starts its engine core and its workers, `multiprocessing` its own helpers. All that
reaches them is the environment. This module is the only one that knows the variables:

- `VLLM_COMPAT`, set by the launcher to `1`: this process belongs to a launched run.
- `VLLM_COMPAT_MAIN`, set by the launcher: a JSON object, the keyword arguments for `apply()`. The
  program's own process, which is the first to see it, takes it out of the environment.
- `VLLM_COMPAT_RECORD`, set by the launcher: the file into which the program's own process writes
  a record of the run.
- `VLLM_COMPAT_STATUS`, set by the launcher: the folder in which each process of the run keeps a file
  on what it is doing (`vllm_compat.runtime.heartbeat`).
- `VLLM_COMPAT_RESUME`, set by the launcher: a JSON object, what the run finds in its output folder
  (`vllm_compat.features.resume_samples`).
- `VLLM_COMPAT_PLAN`, set by `apply()`: the plan, as text. Children install its patches.
- `VLLM_COMPAT_ORIGIN`, set with it: where the packages lie that it was read from
  (`vllm_compat.runtime.origin`). A child that finds others makes a plan of its own.

There are two doors. The launcher's `sitecustomize` (see `bootstrap/`) calls `enter()` in each
interpreter that the run starts, before the program or anything that it imports. Without the
launcher, vLLM calls `vllm_compat.plugin.load()` through its `vllm.general_plugins` entry point,
unless `VLLM_PLUGINS` shuts it out. Both doors stay shut in a process that finds none of these
variables.

The standard library is all this module needs, and little of it is imported at the top, because
it runs at the start of every process.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # `typing` would cost more than all the rest of this module
if TYPE_CHECKING:
    from collections.abc import Mapping

VLLM_COMPAT = "VLLM_COMPAT"
VLLM_COMPAT_MAIN = "VLLM_COMPAT_MAIN"
VLLM_COMPAT_RECORD = "VLLM_COMPAT_RECORD"
VLLM_COMPAT_STATUS = "VLLM_COMPAT_STATUS"
VLLM_COMPAT_RESUME = "VLLM_COMPAT_RESUME"
VLLM_COMPAT_PLAN = "VLLM_COMPAT_PLAN"
VLLM_COMPAT_ORIGIN = "VLLM_COMPAT_ORIGIN"

PLUGIN_NAME = "vllm_compat"
"""Name of our entry point in the group `vllm.general_plugins`."""

LONGEST_PLAN = 128 * 1024 - len(VLLM_COMPAT_PLAN) - 2
"""Longest plan in bytes: Linux starts no process with a longer variable (MAX_ARG_STRLEN)."""


def bootstrap_directory() -> str:
    """Return the absolute path of the folder that holds the bootstrap's `sitecustomize.py`."""
    return os.path.join(
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "entry", "bootstrap"
    )


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a launched program: `environ` with the bootstrap door opened.

    The bootstrap stands first on `PYTHONPATH`, in front of what was there. What belongs to an
    enclosing run (plan, record, status) is left out: a launched program makes its own plan.
    """
    bootstrap = bootstrap_directory()
    rest = environ.get("PYTHONPATH", "")
    entries = [entry for entry in rest.split(os.pathsep) if entry != bootstrap] if rest else []
    child = dict(environ)
    for name in (
        VLLM_COMPAT_MAIN,
        VLLM_COMPAT_PLAN,
        VLLM_COMPAT_ORIGIN,
        VLLM_COMPAT_RECORD,
        VLLM_COMPAT_STATUS,
        VLLM_COMPAT_RESUME,
    ):
        child.pop(name, None)
    child["PYTHONPATH"] = os.pathsep.join([bootstrap, *entries])
    child[VLLM_COMPAT] = "1"
    return child


def bootstrap_is_open(environ: Mapping[str, str]) -> bool:
    """Tell whether a Python process started with `environ` would come through the bootstrap."""
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    return VLLM_COMPAT in environ and bootstrap_directory() in entries


def plan_from_environment(environ: Mapping[str, str]) -> str | None:
    """Return the plan that a parent process has published, or None where there is none."""
    return environ.get(VLLM_COMPAT_PLAN) or None


def status_directory() -> str | None:
    """Return the folder in which processes say what they are doing, or None without the launcher."""
    return os.environ.get(VLLM_COMPAT_STATUS) or None


def resume_notes() -> str | None:
    """Return what the launcher has found in the run's output folder, as text, or None."""
    return os.environ.get(VLLM_COMPAT_RESUME) or None


def origin_of_plan(environ: Mapping[str, str]) -> str | None:
    """Return where the published plan was read from, as text, or None where that is not told."""
    return environ.get(VLLM_COMPAT_ORIGIN) or None


def publish_plan(text: str, origin: str = "") -> None:
    """Hand the plan, and where it was read from, to every process that this one starts from now on.

    Raises:
        PatchError: the plan is longer than the system lets one environment variable be.
    """
    size = len(os.fsencode(text))
    if size > LONGEST_PLAN:
        from vllm_compat.errors import PatchError

        raise PatchError(
            f"The plan takes {size:,} bytes, but only {LONGEST_PLAN:,} can be handed to vLLM's "
            "processes through the environment, so nothing was patched; please report this."
        )
    os.environ[VLLM_COMPAT_PLAN] = text
    os.environ[VLLM_COMPAT_ORIGIN] = origin


def withdraw_plan() -> None:
    """Shut the door that `publish_plan` opened, for processes that start from now on."""
    os.environ.pop(VLLM_COMPAT_PLAN, None)
    os.environ.pop(VLLM_COMPAT_ORIGIN, None)


def allow_list_shuts_us_out(environ: Mapping[str, str]) -> str | None:
    """Return a sentence on how `VLLM_PLUGINS` keeps our plugin out, or None where it does not.

    vLLM splits the variable at its commas and compares the parts with the entry points' names
    as they are (`vllm.envs`, `vllm.plugins.load_plugins_by_group`, 0.16.0): blanks count, and an
    empty variable allows no plugin at all. The sentence names the list and what to set instead.
    Under the launcher nothing shuts us out: the bootstrap needs no plugin.
    """
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN_NAME in allowed.split(",") or bootstrap_is_open(environ):
        return None
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    if PLUGIN_NAME in names:
        cause = f"has blanks around {PLUGIN_NAME}, which vLLM takes for a part of the name"
    elif names:
        cause = f"does not name {PLUGIN_NAME}"
    else:
        cause = "is set but empty, which allows no plugin at all"
    cure = ",".join([*(name for name in names if name != PLUGIN_NAME), PLUGIN_NAME])
    return (
        f'VLLM_PLUGINS="{allowed}" {cause}, so vLLM\'s engine and worker processes would run '
        f'without vllm_compat: set VLLM_PLUGINS="{cure}", or unset it.'
    )


def write_record(record: Mapping[str, object], *, of_child: bool = False) -> bool:
    """Write `record` as JSON to the file that the launcher reads when the program has ended.

    With `of_child` it is that of a process which the program has started, and gets a file of its own
    beside what the processes say of themselves; the launcher sums over all. The file is replaced as a
    whole, so that the launcher never sees half of it. Returns False, and does nothing, in a process that
    runs without the launcher.
    """
    path = os.environ.get(VLLM_COMPAT_RECORD)
    if of_child:
        folder = status_directory()
        path = os.path.join(folder, f"{os.getpid()}.record") if folder else None
    if not path:
        return False
    import json

    unfinished = f"{path}.{os.getpid()}"
    with open(unfinished, "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(unfinished, path)
    return True


def record_exists() -> bool:
    """Tell whether `apply()` has already written a record of its own."""
    path = os.environ.get(VLLM_COMPAT_RECORD)
    return path is not None and os.path.exists(path)
