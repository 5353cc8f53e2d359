"""Open the door to vllm_compat in each Python process of a launched run.

`vllm-compat run` puts this folder, and nothing else, in front of `PYTHONPATH`, so that `site`
imports this file at the start of each interpreter, before the program and all that it imports.
It comes first to the `sitecustomize` that would have been imported without it (of a cluster's
module system, a tracer, a distribution), then to vllm_compat.

Other interpreters inherit the path too: of other versions and of environments in which
vllm_compat is not installed. For them this file must parse on old Pythons, from 3.6 on (so there
is no `from __future__ import annotations`), and do nothing. The two names of variables are those
of `vllm_compat.runtime.env`, written out here because most processes never need to import it.
"""

import os
import sys


def hand_on() -> None:
    """Import the `sitecustomize` further down `sys.path` as if this one did not exist.

    It takes this module's place in `sys.modules`, and what it raises goes to `site`, which
    treats it as ever. Only the path behind this folder is searched: what stands in front has
    had its turn and may itself have handed on to us.
    """
    from importlib.machinery import PathFinder

    here = os.path.dirname(__file__)
    behind = sys.path[sys.path.index(here) + 1 :] if here in sys.path else []
    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    if spec.loader is not None:
        spec.loader.exec_module(module)


def stay_in_front() -> None:
    """Let children come here first, whatever he who was handed on to has made of `PYTHONPATH`.

    Tracers put their own folder back in front of it, and hand on to nobody (OpenTelemetry's, seen in
    0.66b2).
    """
    here = os.path.dirname(__file__)
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if "VLLM_COMPAT" in os.environ and entries[0] != here:
        rest = [entry for entry in entries if entry != here]
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *(rest if any(rest) else ())])


def is_helper() -> bool:
    """Tell whether this process never loads vLLM, so that it should not pay for the patches.

    A helper that is not recognised here works as well; it only starts some milliseconds later.
    """
    original = getattr(sys, "orig_argv", [])  # since Python 3.10
    # `sys.argv` is ["-c" or "-m" or the script, *arguments]; in `sys.orig_argv` the code, the
    # module or the script stands in the place of its first item.
    program = original[-len(sys.argv)] if sys.argv and len(original) >= len(sys.argv) else ""
    return (
        "resource_tracker import main" in program  # of multiprocessing, and of multiprocess
        or program.endswith("_inductor/compile_worker/__main__.py")
        or os.path.basename(program) in ("pip", "pip3", "-mpip")
    )


def enter() -> None:
    """Pass through the door, where the environment says that there is one."""
    is_program = "VLLM_COMPAT_MAIN" in os.environ
    if not is_program and ("VLLM_COMPAT_PLAN" not in os.environ or is_helper()):
        return
    try:
        from vllm_compat.entry.enter import enter as pass_through

        if pass_through():
            from vllm_compat import plugin

            plugin.load()
    except Exception as error:
        if not is_program:
            return  # another environment's interpreter, in which vLLM cannot run either
        try:
            sys.stderr.write(
                f"vllm-compat: The launched program cannot use vllm_compat ({type(error).__name__}"
                f": {error}): install it into the environment of {sys.executable}, or add to "
                "PYTHONPATH the folders that hold it, wrapt and packaging.\n"
            )
            sys.stderr.flush()
        finally:
            os._exit(1)  # SystemExit raised here would become a "Fatal Python error"


try:
    hand_on()
finally:
    stay_in_front()
    enter()
