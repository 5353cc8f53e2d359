"""The environment that a pair is judged in, this interpreter's or another's."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

from vllm_compat.analysis import environment as analysis_environment
from vllm_compat.analysis.environment import Environment, read_environment
from vllm_compat.analysis.planner import roles_of
from vllm_compat.analysis.surface.files import why
from vllm_compat.analysis.surface.model import Surface
from vllm_compat.commands.checking.downstream import Source
from vllm_compat.errors import UsageError

_ASK = """
import dataclasses, importlib.util as u, json, sys
sys.path[:] = [p for p in sys.path if p]
spec = u.spec_from_file_location("vllm_compat_environment", sys.argv[1])
module = sys.modules[spec.name] = u.module_from_spec(spec)
spec.loader.exec_module(module)
found = dataclasses.asdict(module.read_environment(sys.argv[2], sys.argv[3]))
transformers = u.find_spec("transformers")
print(json.dumps([found, transformers and transformers.origin]))
"""


def environment_of(
    source: Source,
    surface: Surface,
    installed: bool,
    python: str | None,
    device: str | None,
) -> Environment:
    """Read what decides besides source, as ``apply()`` reads it.

    For a vLLM that is not installed only the device is known, if it is given or the build has a
    name for it.
    """
    transformers: str | None = None
    if not installed:
        named = read_environment(surface.version, surface.distribution, root=_NOWHERE).device
        environment = Environment("", (), named)
    elif python is None:
        environment = read_environment(surface.version, surface.distribution)
        spec = importlib.util.find_spec("transformers")
        transformers = spec.origin if spec else None
    else:
        environment, transformers = _ask(python, surface)
    if transformers and roles_of(source.contract).generator:
        features = source.features(Path(transformers).parent)
        environment = dataclasses.replace(environment, features=features)
    return dataclasses.replace(environment, device=device) if device else environment


_NOWHERE = Path("/nonexistent")  # no device files, so that only the build's own name is looked at


def _ask(python: str, surface: Surface) -> tuple[Environment, str | None]:
    """Read the environment of another interpreter, and where its transformers lies."""
    import json
    import subprocess

    try:
        answer = subprocess.run(
            [python, "-c", _ASK, analysis_environment.__file__, surface.version, surface.distribution],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        found, transformers = json.loads(answer.stdout)
        found["versions"] = tuple(tuple(pair) for pair in found["versions"])
        found["features"] = ()
        return Environment(**found), transformers
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"The interpreter {python} does not answer: {why(error)}.") from error
