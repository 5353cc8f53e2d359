"""Where a plan was read from, so that a child in another environment does not take it for its own.

A child inherits its parent's environment variables, the plan among them, also where it runs in another
virtual environment or with another `PYTHONPATH`, and so with another vLLM. Only the standard library.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # `typing` would cost more than all the rest of this module
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_FILES = ("__init__.py", "_version.py", "version.py")


def describe(packages: Iterable[str]) -> str:
    """Return, as JSON, where this interpreter finds these top-level packages; none is imported."""
    import json

    found = {name: _where(name) for name in packages}
    return json.dumps({"context": _context(), "packages": found}, separators=(",", ":"))


def difference(text: str) -> str:
    """Return in words what this interpreter finds elsewhere than :func:`describe` has told, or nothing.

    In the same virtual environment with the same `PYTHONPATH` a package is the same, wherever it seems
    to be found so early in a process: what stands beside the program comes first only later. There only
    files that have changed since make a difference.
    """
    import json

    try:
        told = json.loads(text)
        same_context = told["context"] == _context()
        packages = {
            name: there and dict(there, folder=there["folder"])
            for name, there in told["packages"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "where the published plan was read from cannot be made out"
    for name, there in packages.items():
        here = _where(name)
        if here is None or there is None or here == there:
            continue
        if here["folder"] == there["folder"]:
            return f"{name} in {here['folder']} has changed since the plan was made"
        if not same_context:
            return f"{name} is that of {here['folder']}, and the plan is for {there['folder']}"
    return ""


def _context() -> list[str]:
    return [sys.prefix, os.environ.get("PYTHONPATH", "")]


def _where(name: str) -> dict[str, Any] | None:
    from importlib.util import find_spec

    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        return None
    folder = os.path.realpath(places[0])
    stamps = []
    for file in _FILES:
        try:
            found = os.stat(os.path.join(folder, file))
        except OSError:
            continue
        stamps.append([file, found.st_size, found.st_mtime_ns])
    return {"folder": folder, "stamps": stamps}
