"""The neighbours that are tools of others, from PyPI."""

from __future__ import annotations

from tests.entry.neighbours import Neighbour

TRACERS = "tracers, profilers and debuggers"
NOTEBOOKS = "notebooks"
INSTALLERS = "environments of others"
QUIET = {f"OTEL_{what}_EXPORTER": "none" for what in ("TRACES", "METRICS", "LOGS")}

NOTEBOOK = """
import sys, nbformat
from nbclient import NotebookClient
book = nbformat.v4.new_notebook()
book.cells = [nbformat.v4.new_code_cell(open(sys.argv[1]).read())]
NotebookClient(book, timeout=60, kernel_name="python3").execute()
for output in book.cells[0].outputs:
    print(output.get("text", ""), end="")
"""


def tool(name: str, module: str, *, kind: str = TRACERS, **more: object) -> Neighbour:
    return Neighbour(name=name, kind=kind, tool=module, **more)  # type: ignore[arg-type]


TOOLS = [
    tool(
        "opentelemetry-instrument around the launcher",
        "opentelemetry.instrumentation",
        outer=("{bin}/opentelemetry-instrument", "{python}"),
        environ=QUIET,
    ),
    tool(
        "opentelemetry-instrument as the program",
        "opentelemetry.instrumentation",
        inner=("{bin}/opentelemetry-instrument", "{python}"),
        environ=QUIET,
        programs=("script", "child"),
        refused="has built a generator; where the program starts another one",
    ),
    tool("ddtrace-run around the launcher", "ddtrace", outer=("{bin}/ddtrace-run", "{python}")),
    tool(
        "ddtrace-run as the program",
        "ddtrace",
        inner=("{bin}/ddtrace-run", "{python}"),
        programs=("script", "child"),
    ),
    tool("coverage around the launcher", "coverage", outer=("{python}", "-m", "coverage", "run")),
    tool("coverage as the program", "coverage", inner=("-m", "coverage", "run"), programs=("script",)),
    tool(
        "coverage of all processes",
        "coverage",
        own_environment=True,
        environ={"COVERAGE_PROCESS_START": "{folder}/coverage.ini"},
        files={
            "coverage.ini": "[run]\nparallel = True\nconcurrency = multiprocessing,thread\n",
            "{packages}/coverage_start.pth": "import coverage; coverage.process_startup()\n",
        },
    ),
    tool(
        "debugpy around the launcher",
        "debugpy",
        outer=("{python}", "-Xfrozen_modules=off", "-m", "debugpy", "--listen", "0"),
    ),
    tool(
        "debugpy as the program",
        "debugpy",
        outer=("{python}", "-Xfrozen_modules=off"),
        inner=("-m", "debugpy", "--listen", "0"),
        programs=("script", "child"),
    ),
    tool("pytest as the program", "pytest", inner=("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"),
         files={"test_it.py": "import runpy\ndef test_it():\n"
                "    runpy.run_path('program.py', run_name='__main__')\n"},
         program="test_it.py", programs=("script",)),
    tool("IPython", "IPython", kind=NOTEBOOKS, inner=("-m", "IPython", "--no-banner", "--quick")),
    tool(
        "a notebook's kernel",
        "nbclient",
        kind=NOTEBOOKS,
        inner=("notebook.py",),
        files={"notebook.py": NOTEBOOK},
        programs=("script", "apply"),
    ),
    tool(
        "uv run",
        "uv",
        kind=INSTALLERS,
        outer=("{bin}/uv", "run", "--offline", "--no-project", "--python", "{python}", "python"),
    ),
    tool(
        "uv run as the program",
        "uv",
        kind=INSTALLERS,
        inner=("{bin}/uv", "run", "--offline", "--no-project", "--python", "{python}", "python"),
        programs=("script",),
        refused="is no Python program",
    ),
]  # fmt: skip
