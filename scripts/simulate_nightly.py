#!/usr/bin/env python3
"""Make a simulated nightly out of a release's sources: simulate_nightly.py SOURCE OUT MUTATION.

SOURCE is a wheel, an sdist or a folder that holds vLLM; OUT becomes a folder with its Python sources,
one thing changed, under a later development version. MUTATION is

  moved     vllm.v1.request is vllm.v1.core.request now, and vLLM itself imports it from there
  renamed   Request's parameter arrival_time is called arrived_at now
  extended  Request takes one more parameter, with a default
  gone      RequestStatus has no FINISHED_ABORTED any more, which the downstream uses
  broken    vllm.v1.request raises when it is imported, so that vLLM alone fails
  lacking   vllm.v1.request asks for an operator that no compiled code has, as over older kernels

Nothing repairs the first two and `gone`, and `check` has to say so; the third does no harm. The last two
show only in a run: the nightly job says that they are vLLM's fault, and the environment's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

VERSION = "0.99.0.dev{number}"


def moved(vllm: Path) -> None:
    """Move a module that the downstream imports, and every import of it."""
    (vllm / "v1" / "request.py").rename(vllm / "v1" / "core" / "request.py")
    for path in vllm.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        new = re.sub(r"\bvllm\.v1\.request\b", "vllm.v1.core.request", text)
        if new != text:
            path.write_text(new, encoding="utf-8")


def renamed(vllm: Path) -> None:
    """Rename a parameter that the downstream gives by name."""
    path = vllm / "v1" / "request.py"
    text = path.read_text(encoding="utf-8")
    new = re.sub(r"\barrival_time\b(?!\()", "arrived_at", text)
    # The attribute keeps its name, which the scheduler reads.
    new = new.replace("self.arrived_at", "self.arrival_time")
    path.write_text(new, encoding="utf-8")


def extended(vllm: Path) -> None:
    """Give a class that the downstream makes one more parameter, which nobody gives."""
    path = vllm / "v1" / "request.py"
    text = path.read_text(encoding="utf-8")
    head, found, rest = text.partition("    def __init__(\n        self,\n        request_id: str,")
    parameters, end, body = rest.partition("    ) -> None:\n")
    if not (found and end):
        raise SystemExit("simulate_nightly: Request.__init__ does not look as expected")
    added = "        simulated: bool = False,\n"
    path.write_text(head + found + parameters + added + end + body, encoding="utf-8")


def gone(vllm: Path) -> None:
    """Take away a member that the downstream uses, wherever vLLM itself uses it."""
    for path in vllm.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "FINISHED_ABORTED" in text:
            path.write_text(text.replace("FINISHED_ABORTED", "FINISHED_CANCELLED"), encoding="utf-8")


def broken(vllm: Path) -> None:
    """Let a module that every engine needs raise."""
    _append(vllm, 'raise RuntimeError("simulated: vLLM fails by itself")\n')


def lacking(vllm: Path) -> None:
    """Ask for an operator that no compiled code has."""
    _append(vllm, "import torch\n\ntorch.ops._C.simulated_operator\n")


def _append(vllm: Path, code: str) -> None:
    path = vllm / "v1" / "request.py"
    path.write_text(f"{path.read_text(encoding='utf-8')}\n\n{code}", encoding="utf-8")


MUTATIONS: dict[str, Callable[[Path], None]] = {
    "moved": moved,
    "renamed": renamed,
    "extended": extended,
    "gone": gone,
    "broken": broken,
    "lacking": lacking,
}


def main(arguments: list[str]) -> int:
    """Write the mutated sources."""
    from vllm_compat.analysis.surface.files import package_at

    if len(arguments) != 3 or arguments[2] not in MUTATIONS:
        print(__doc__, file=sys.stderr)
        return 2
    source, out, name = Path(arguments[0]), Path(arguments[1]), arguments[2]
    package = package_at(source, "vllm")
    inside = package.folder
    for path in package.tree.files(inside):
        if path.endswith((".py", ".json")):
            target = out / "vllm" / (path[len(inside) :].lstrip("/") if inside else path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(package.tree.read(path) or b"")
    MUTATIONS[name](out / "vllm")
    version = VERSION.format(number=list(MUTATIONS).index(name) + 1)
    info = out / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (out / "vllm" / "_version.py").write_text(
        f"__version__ = version = {version!r}\n__version_tuple__ = version_tuple = (0, 99, 0)\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
