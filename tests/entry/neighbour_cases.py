"""The neighbours that need nothing but the standard library and the fakes."""

from __future__ import annotations

import zipapp
from pathlib import Path

from tests.entry.neighbours import Neighbour

OPTIONS = "Python's options and variables"
STARTED = "ways to start a program"
SITE = "somebody's sitecustomize"
PATHS = "packages found in other ways"
WRAPPERS = "wrappers over the same methods"
PLUGINS = "other plugins of vLLM"

SAID = "NEIGHBOUR"
SAY = f"import sys; print('{SAID}', file=sys.stderr, flush=True)\n"


def option(*words: str, **more: object) -> Neighbour:
    name = " ".join(words)
    return Neighbour(name=name, kind=OPTIONS, outer=("{python}", *words), **more)  # type: ignore[arg-type]


def variable(name: str, value: str, **more: object) -> Neighbour:
    said = f"{name}={value}"
    return Neighbour(name=said, kind=OPTIONS, environ={name: value}, **more)  # type: ignore[arg-type]


def zipped(folder: Path) -> None:
    """Pack the program and its helper into one file."""
    inside = folder / "inside"
    inside.mkdir()
    (inside / "__main__.py").write_text((folder / "program.py").read_text())
    (inside / "probe.py").write_text((folder / "probe.py").read_text())
    zipapp.create_archive(inside, folder / "app.pyz")


def as_folder(folder: Path) -> None:
    """Make a package with a `__main__`."""
    (folder / "package").mkdir()
    (folder / "package/__init__.py").write_text("")
    (folder / "package/__main__.py").write_text((folder / "program.py").read_text())


def behind_a_finder(folder: Path) -> None:
    """Move vLLM and the downstream to where only a finder of an editable installation looks."""
    (folder / "sources").mkdir()
    for name in ("vllm", "speculators"):
        (folder / name).rename(folder / "sources" / name)


FINDER = """
import importlib.machinery, importlib.util, sys
from pathlib import Path
SOURCES = Path("{folder}/sources")

class EditableFinder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in ("vllm", "speculators"):
            return None
        place = SOURCES / name
        return importlib.util.spec_from_file_location(
            name, place / "__init__.py", submodule_search_locations=[str(place)])

sys.meta_path.append(EditableFinder)
"""


def site_of(name: str, source: str, **more: object) -> Neighbour:
    """Return a case with somebody's `sitecustomize` on `PYTHONPATH`, behind ours."""
    return Neighbour(name=name, kind=SITE, files={"sitecustomize.py": source}, **more)  # type: ignore[arg-type]


def pth(name: str, source: str, **more: object) -> Neighbour:
    """Return a case whose environment runs a line at the start of each interpreter."""
    return Neighbour(
        name=name,
        kind=PATHS,
        own_environment=True,
        files={
            "{packages}/aaa_neighbour.pth": "import aaa_neighbour\n",
            "{packages}/aaa_neighbour.py": source,
        },
        **more,  # type: ignore[arg-type]
    )


def wrapper(name: str, source: str, *, after: bool = True) -> Neighbour:
    """Return the case of a wrapper of the program's own, put on before or after `apply()`."""
    text = (
        f"from vllm.v1.core.sched.scheduler import Scheduler\nimport functools, wrapt\n{source}\n{SAY}"
    )
    if after:
        return Neighbour(
            name=f"{name}, after ours",
            kind=WRAPPERS,
            seen=SAID,
            programs=("script", "apply"),
            after=text,
        )
    return Neighbour(
        name=f"{name}, before ours",
        kind=WRAPPERS,
        seen=SAID,
        programs=("apply",),
        before=text,
        # What takes any argument does not confirm the plan, which was read from source.
        refused="does not fit this process" if source is BOUND else "",
    )


PLAIN = """
def _over(theirs):
    def schedule(self, *args, **kwargs):
        return theirs(self, *args, **kwargs)
    return schedule
Scheduler.schedule = _over(Scheduler.schedule)
"""
NAMED = PLAIN.replace("    def schedule", "    @functools.wraps(theirs)\n    def schedule")
WRAPT = """
@wrapt.decorator
def _watch(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)
Scheduler.schedule = _watch(Scheduler.schedule)
"""
WRAPT_IN_PLACE = """
wrapt.wrap_function_wrapper("vllm.v1.core.sched.scheduler", "Scheduler.schedule",
                            lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
"""
TWICE = PLAIN + "Scheduler.schedule = _over(Scheduler.schedule)\n"
BOUND = """
import speculators.data_generation.vllm_hidden_states_generator as generator
def _around(theirs):
    return lambda *args, **kwargs: theirs(*args, **kwargs)
generator.get_kv_cache_config_from_groups = _around(generator.get_kv_cache_config_from_groups)
"""
BOUND_NAMED = BOUND.replace("return lambda", "return functools.wraps(theirs)(lambda").replace(
    "s)\ngen", "s))\ngen"
)


def wrappers() -> list[Neighbour]:
    found: list[Neighbour] = []
    for name, source in (
        ("a plain function", PLAIN),
        ("a function with functools.wraps", NAMED),
        ("a decorator of wrapt's", WRAPT),
        ("wrapt in place", WRAPT_IN_PLACE),
        ("two plain functions", TWICE),
        ("a function over a name that the downstream has bound", BOUND),
        ("functools.wraps over a name that the downstream has bound", BOUND_NAMED),
    ):
        found += [wrapper(name, source), wrapper(name, source, after=False)]
    return found


PLUGIN_BODY = {
    "that does nothing": "def load():\n    " + SAY,
    "that raises": "def load():\n    raise RuntimeError('theirs')\n",
    "that wraps what we wrap": (
        "def load():\n"
        "    from speculators.data_generation.custom_worker import HiddenStatesWorkerExtension as E\n"
        "    theirs = E._get_captured_states\n"
        "    E._get_captured_states = lambda self: theirs(self)\n    " + SAY
    ),
    "that forks": (
        "def load():\n    import os\n    pid = os.fork()\n    if not pid:\n        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n    " + SAY
    ),
}


def plugin(name: str, place: str) -> Neighbour:
    return Neighbour(
        name=f"one {name}, {place} ours",
        kind=PLUGINS,
        files={
            "their_plugin.py": PLUGIN_BODY[name],
            f"{place}_plugin-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {place}_plugin\n"
            "Version: 1.0\n",
            f"{place}_plugin-1.0.dist-info/entry_points.txt": "[vllm.general_plugins]\n"
            "theirs = their_plugin:load\n",
        },
        seen=SAID,
        # vLLM does not guard the call of a plugin: this one ends each worker, with and without us.
        refused="RuntimeError: theirs" if name == "that raises" else "",
    )


EMPTIES = "import os; os.environ.pop('PYTHONPATH', None)\n" + SAY

STDLIB = [
    option("-P"),
    option("-B"),
    option("-O"),
    option("-OO"),
    option("-u"),
    option("-s"),
    option("-b"),
    option("-X", "dev"),
    option("-X", "utf8"),
    option("-X", "frozen_modules=off"),
    option("-X", "importtime"),
    option("-W", "error"),
    option("-I", refused="start the launcher without them", programs=("script",), own_environment=True),
    option("-E", refused="start the launcher without them", programs=("script",), own_environment=True),
    option("-S", refused="start the launcher without them", programs=("script",)),
    variable("PYTHONSAFEPATH", "1"),
    variable("PYTHONWARNINGS", "error"),
    variable("PYTHONOPTIMIZE", "2"),
    variable("PYTHONDEVMODE", "1"),
    variable("PYTHONNOUSERSITE", "1"),
    variable("PYTHONHASHSEED", "0"),
    variable("PYTHONUNBUFFERED", "1"),
    variable("PYTHONMALLOC", "debug"),
    variable("PYTHONASYNCIODEBUG", "1"),
    variable("PYTHONPYCACHEPREFIX", "{folder}/pyc"),
    variable("PYTHONSTARTUP", "{folder}/probe.py"),
    variable("PYTHONIOENCODING", "ascii"),
    variable("LC_ALL", "C"),
    variable("LANG", ""),
    variable("HOME", "/nonexistent"),
    variable("TMPDIR", "{folder}"),
    variable("VLLM_PLUGINS", "vllm_compat"),
    variable("VLLM_PLUGINS", "", programs=("script", "child")),
    variable("VLLM_PLUGINS", "lora_filesystem_resolver", programs=("script", "child")),
    variable("VLLM_PLUGINS", "lora", programs=("apply",), refused="set VLLM_PLUGINS="),
    Neighbour(name="python -m", kind=STARTED, inner=("-m",), program="program",
              programs=("script", "apply")),
    Neighbour(
        name="a package with __main__",
        kind=STARTED,
        inner=("-m",),
        prepare=as_folder,
        program="package",
        programs=("script", "apply"),
    ),
    Neighbour(
        name="a folder with __main__.py",
        kind=STARTED,
        prepare=as_folder,
        program="package",
        programs=("script", "apply"),
    ),
    Neighbour(
        name="a zipapp", kind=STARTED, prepare=zipped, program="app.pyz", programs=("script", "apply")
    ),
    Neighbour(name="cProfile", kind=STARTED, inner=("-m", "cProfile", "-o", "{folder}/profile")),
    Neighbour(name="pdb", kind=STARTED, inner=("-m", "pdb", "-c", "continue", "-c", "quit"),
              methods=("fork",)),  # without us too, nothing can be spawned under it
    Neighbour(name="trace", kind=STARTED, inner=("-m", "trace", "--count", "-C", "{folder}/counts")),
    Neighbour(
        name="timeout and nice", kind=STARTED, outer=("timeout", "80", "nice", "-n", "1", "{python}")
    ),
    Neighbour(name="nohup", kind=STARTED, outer=("nohup", "{python}")),
    Neighbour(name="a login shell", kind=STARTED, outer=("bash", "-lc", '"$0" "$@"', "{python}")),
    Neighbour(name="env -u", kind=STARTED, outer=("env", "-u", "HOME", "{python}")),
    Neighbour(name="setsid", kind=STARTED, outer=("setsid", "-w", "{python}")),
    site_of("that prints", SAY, seen=SAID),
    site_of("that imports vLLM", "import vllm.config, vllm.v1.request\n" + SAY, seen=SAID),
    site_of(
        "that imports the downstream",
        "import speculators.data_generation.vllm_hidden_states_generator\n" + SAY,
        seen=SAID,
    ),
    site_of("that raises", "raise ValueError('theirs')\n"),
    site_of("that calls apply()", "import vllm_compat; vllm_compat.apply()\n" + SAY, seen=SAID),
    site_of("that empties PYTHONPATH", EMPTIES, seen=SAID, own_environment=True),
    site_of(
        "that puts itself in front again",
        "import os\nfirst = os.path.dirname(__file__)\n"
        "rest = [p for p in os.environ.get('PYTHONPATH', '').split(os.pathsep) if p != first]\n"
        "os.environ['PYTHONPATH'] = os.pathsep.join([first, *rest])\n" + SAY,
        seen=SAID,
    ),
    site_of("that starts a thread", "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(3,), daemon=True).start()\n" + SAY, seen=SAID),
    site_of(
        "that forks",
        "import os\npid = os.fork()\nif not pid:\n    os._exit(0)\nos.waitpid(pid, 0)\n" + SAY,
        seen=SAID,
    ),
    site_of(
        "that wraps imports",
        "import builtins\n_theirs = builtins.__import__\n"
        "builtins.__import__ = lambda *a, **k: _theirs(*a, **k)\n" + SAY,
        seen=SAID,
    ),
    site_of(
        "that puts a finder in front",
        "import sys\nclass First:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        "        return None\nsys.meta_path.insert(0, First)\n" + SAY,
        seen=SAID,
    ),
    site_of(
        "that finds modules before others",
        "import sys\nfrom importlib.machinery import PathFinder\nclass First:\n    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        return PathFinder.find_spec(name, path, target)\n"
        "sys.meta_path.insert(0, First)\n" + SAY,
        seen=SAID,
    ),
    site_of(
        "that imports lazily",
        "import importlib.util, sys\nfrom importlib.machinery import PathFinder\nclass Lazy:\n"
        "    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        "        if not name.startswith('vllm.v1.core'):\n            return None\n"
        "        spec = PathFinder.find_spec(name, path, target)\n"
        "        if spec and spec.loader and not spec.submodule_search_locations:\n"
        "            spec.loader = importlib.util.LazyLoader(spec.loader)\n        return spec\n"
        "sys.meta_path.insert(0, Lazy)\n" + SAY,
        seen=SAID,
    ),
    site_of(
        "that changes the start method",
        "import multiprocessing\nmultiprocessing.set_start_method('forkserver', force=True)\n" + SAY,
        seen=SAID,
    ),
    site_of(
        "that traces every call",
        "import sys, threading\ndef watch(frame, event, arg):\n    return None\n"
        "sys.settrace(watch); threading.settrace(watch)\nsys.setprofile(watch)\n" + SAY,
        seen=SAID,
    ),
    site_of("that turns warnings into errors", "import warnings; warnings.simplefilter('error')\n" + SAY,
            seen=SAID),
    Neighbour(name="standard error closed", kind=STARTED,
              outer=("bash", "-c", '"$0" "$@" 2>&-', "{python}")),
    Neighbour(name="standard input closed", kind=STARTED,
              outer=("bash", "-c", '"$0" "$@" <&-', "{python}")),
    site_of("that sets a low recursion limit", "import sys; sys.setrecursionlimit(220)\n" + SAY,
            seen=SAID),
    site_of("that changes the folder", "import os; os.makedirs('{folder}/else', exist_ok=True); "
            "os.chdir('{folder}/else')\n" + SAY, seen=SAID, programs=("apply",)),
    Neighbour(
        name="in front of ours, that hands on to nobody",
        kind=SITE,
        files={"front/sitecustomize.py": SAY, "start.py": "import os, sys\n"
               "os.environ['PYTHONPATH'] = '{folder}/front' + os.pathsep + os.environ['PYTHONPATH']\n"
               "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"},
        inner=("start.py",),
        programs=("script",),
        refused="has built a generator; where the program starts another one",
    ),
    Neighbour(
        name="a usercustomize",
        kind=SITE,
        own_environment=True,
        files={"usercustomize.py": "import vllm.config\n" + SAY},
        seen=SAID,
    ),
    pth("a .pth that prints", SAY, seen=SAID),
    pth("a .pth that imports vLLM",
        "import sys; sys.path.insert(0, '{folder}'); import vllm.config\n" + SAY,
        seen=SAID),
    pth("a .pth that empties PYTHONPATH", EMPTIES, seen=SAID),
    pth("a .pth that raises", "raise ValueError('theirs')\n"),
    pth("a finder of an editable installation", FINDER, prepare=behind_a_finder),
    *wrappers(),
    *(plugin(name, place) for name in PLUGIN_BODY for place in ("aaa", "zzz")),
]  # fmt: skip
