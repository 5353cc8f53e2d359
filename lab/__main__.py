"""The maintainers' commands, from a checkout: ``python3 -m lab COMMAND``.

Exit status: 0 done, 1 something is wrong, 2 usage error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence

ITS_OWN = ("vllm_compat", "wrapt", "packaging")
"""What `pip install -e .` brings, without which nothing here runs."""


def not_installed(missing: ModuleNotFoundError) -> str:
    """Return the sentence for a Python that this checkout is not installed for."""
    return (
        f"lab: {sys.executable} has no {missing.name}: install this checkout for it first, with"
        f" `{sys.executable} -m pip install -e .` in its folder."
    )


try:
    from vllm_compat.cli import Parser
    from vllm_compat.errors import UsageError, VllmCompatError
except ModuleNotFoundError as missing:
    print(not_installed(missing), file=sys.stderr)
    sys.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        options = parser_for(arguments).read(arguments)
        if not hasattr(options, "command"):
            parser_for(arguments).print_help()
            return 0
        done: int = options.command(options)
        return done
    except UsageError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except VllmCompatError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as missing:
        if missing.name not in ITS_OWN:
            raise
        print(not_installed(missing), file=sys.stderr)
        return 2


def parser_for(arguments: Sequence[str]) -> Parser:
    """Return the parser; only the chosen command's options are set up, and its modules imported."""
    parser = Parser(
        prog="python3 -m lab",
        usage="python3 -m lab [-h] COMMAND ...",
        description="For maintainers, from a checkout of vllm_compat: run stock speculators on real vLLM"
        " releases, and keep the recorded releases up to date. Users need none of this.",
        epilog="python3 -m lab COMMAND --help shows the options of a command.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog=parser.prog)
    for name, (summary, set_up) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary}.")
        if name in arguments:
            set_up(command)
    return parser


def _set_up_record(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python3 -m lab record [--version V] (SOURCE ... | --published [V ...])"
    parser.add_argument("source", nargs="*", help="a wheel, an sdist or a folder that holds vLLM")
    parser.add_argument("--version", metavar="V", help="record the source as this version")
    parser.add_argument(
        "--published",
        nargs="*",
        metavar="V",
        help="releases to take from the package index; all that have no record yet if none is named",
    )
    parser.set_defaults(command=_record)


def _record(options: argparse.Namespace) -> int:
    from lab.record import record_published, record_release

    if bool(options.source) == (options.published is not None):
        raise UsageError("record needs either sources (a wheel, an sdist, a folder) or --published.")
    lines: Iterable[dict[str, object]]
    if options.published is not None:
        lines = record_published(options.published or None)
    else:
        lines = (record_release(source, version=options.version) for source in options.source)
    return _told(lines)


def _told(lines: Iterable[object]) -> int:
    """Print what has been recorded, a line each as it comes."""
    for line in lines:
        print(json.dumps(line), flush=True)
    return 0


def _set_up_serving(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="+", help="a wheel, an sdist or a folder that holds vLLM")
    parser.set_defaults(command=_serving)


def _serving(options: argparse.Namespace) -> int:
    from lab.serving import record_serving

    return _told(record_serving(options.source))


def _set_up_downstreams(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="+", help="a wheel or an sdist of speculators")
    parser.set_defaults(command=_downstreams)


def _downstreams(options: argparse.Namespace) -> int:
    from lab.serving import record_downstreams

    return _told(record_downstreams(options.source))


def _set_up_matrix(parser: argparse.ArgumentParser) -> None:
    from lab.matrix import add_arguments, run_matrix

    add_arguments(parser)
    parser.set_defaults(command=run_matrix)


def _set_up_nightly(parser: argparse.ArgumentParser) -> None:
    from lab.nightly import add_arguments, run_nightly

    add_arguments(parser)
    parser.set_defaults(command=run_nightly)


def _set_up_adopt(parser: argparse.ArgumentParser) -> None:
    from lab.adopt import add_arguments, run_adopt

    add_arguments(parser)
    parser.set_defaults(command=run_adopt)


def _set_up_layers(parser: argparse.ArgumentParser) -> None:
    from lab.decoder_layers import add_arguments, run_layers

    add_arguments(parser)
    parser.set_defaults(command=run_layers)


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "record": ("Record what a vLLM release or nightly offers, so that check knows it", _set_up_record),
    "serving": ("Record what the server of a vLLM release offers, and nothing else", _set_up_serving),
    "downstreams": (
        "Record what a release of speculators asks of vLLM, so that check knows it",
        _set_up_downstreams,
    ),
    "matrix": ("Run stock speculators on real vLLM releases, and keep one record a run", _set_up_matrix),
    "adopt": (
        "Take a vLLM release on board: fetch, record, check, run, render, or say what stands in the way",
        _set_up_adopt,
    ),
    "nightly": ("Check and run a vLLM that is not released yet, and say what is new", _set_up_nightly),
    "layers": (
        "Read what the decoder layers of a vLLM release hand on, from its source",
        _set_up_layers,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
