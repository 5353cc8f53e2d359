"""The command line: one function per subcommand, no logic.

Exit status: 0 done, 1 incompatible or failed, 2 usage error, 3 unknown; ``run`` has its program's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence

import vllm_compat
from vllm_compat.errors import UsageError, VllmCompatError

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(next((word for word in arguments if not word.startswith("-")), None))
    try:
        options, rest = _split(parser, arguments)
    except VllmCompatError as error:
        print(f"vllm-compat: {error}", file=sys.stderr)
        return 2
    if not hasattr(options, "command"):
        parser.print_help()
        return 0
    if rest is not None:
        options.argv = rest
    command: Command = options.command
    try:
        return command(options)
    except UsageError as error:
        print(f"vllm-compat: {error}", file=sys.stderr)
        return 2
    except VllmCompatError as error:
        print(f"vllm-compat: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _split(
    parser: argparse.ArgumentParser, arguments: list[str]
) -> tuple[argparse.Namespace, list[str] | None]:
    """Parse, leaving everything behind ``run``'s program to that program."""
    if arguments[:1] != ["run"]:
        return parser.parse_args(arguments), None
    own = ["run"]
    rest = arguments[1:]
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        own.append(word)
        if word == "-m":
            break
        if word in ("--capture", "--without", "--record") and rest:
            own.append(rest.pop(0))
    options = parser.parse_args(own)
    if not rest:
        parser.error("run needs a script, or -m and a module")
    return options, rest


def _parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Return the parser; only the chosen command's options are set up, and its modules imported."""
    parser = argparse.ArgumentParser(
        prog="vllm-compat",
        description="Run stock speculators on the vLLM that is installed, and say before anything"
        " loads whether that will work.",
    )
    parser.add_argument("--version", action="version", version=vllm_compat.__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (summary, set_up) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        if name == chosen:
            set_up(command)
    return parser


def _set_up_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "vllm-compat run [--capture C] [--without ADAPTER] [--record FILE] (SCRIPT | -m MODULE)"
        " [ARGS ...]"
    )
    parser.description = (
        "Run a program that has never heard of vllm_compat in a supervised child: same arguments,"
        " same exit status, signals handed on."
    )
    parser.add_argument("-m", dest="module", action="store_true", help="what follows is a module")
    parser.add_argument(
        "--capture",
        default="auto",
        choices=["auto", "hooks", "stock"],
        help="how hidden states are captured (auto: forward hooks)",
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="ADAPTER", help="leave an adapter out"
    )
    parser.add_argument("--record", metavar="FILE", help="write what happened to this JSON file")
    parser.set_defaults(command=_run)


def _set_up_check(parser: argparse.ArgumentParser) -> None:
    from vllm_compat.check import add_check_arguments, run_check

    add_check_arguments(parser)
    parser.set_defaults(command=run_check)


def _set_up_diff(parser: argparse.ArgumentParser) -> None:
    from vllm_compat.check import add_diff_arguments, run_diff

    add_diff_arguments(parser)
    parser.set_defaults(command=run_diff)


def _set_up_record(parser: argparse.ArgumentParser) -> None:
    from vllm_compat.record import add_record_arguments, run_record

    add_record_arguments(parser)
    parser.set_defaults(command=run_record)


def _set_up_layers(parser: argparse.ArgumentParser) -> None:
    from vllm_compat.layers import add_layers_arguments, run_layers

    add_layers_arguments(parser)
    parser.set_defaults(command=run_layers)


def _set_up_verify(parser: argparse.ArgumentParser) -> None:
    from vllm_compat.verify import add_verify_arguments, run_verify

    add_verify_arguments(parser)
    parser.set_defaults(command=run_verify)


def _set_up_adapters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", default="text", choices=["text", "markdown", "json"])
    parser.set_defaults(command=_adapters)


def _set_up_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="kimi_k25", choices=["llama", "deepseek_v3", "kimi_k25"])
    parser.add_argument("--folder", metavar="DIR", help="keep the model and the record here")
    parser.set_defaults(command=_demo)


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "check": ("say what will work, before anything loads", _set_up_check),
    "run": ("run an unmodified program with vllm_compat in force", _set_up_run),
    "layers": ("show a model's layer ids in every numbering", _set_up_layers),
    "verify": ("check a folder of extracted hidden states", _set_up_verify),
    "adapters": ("list the adapters and what each is good for", _set_up_adapters),
    "diff": ("show what changed between two vLLM releases", _set_up_diff),
    "record": ("record the surface of a vLLM release or nightly", _set_up_record),
    "demo": ("extract hidden states of a tiny model, and judge them", _set_up_demo),
}


def _run(options: argparse.Namespace) -> int:
    from pathlib import Path

    from vllm_compat.launch import LaunchOptions, run

    apply = {"capture": options.capture, "without": options.without}
    record = Path(options.record) if options.record else None
    return run(
        options.argv, module=options.module, options=LaunchOptions(record=record, apply=apply)
    )


def _adapters(options: argparse.Namespace) -> int:
    from vllm_compat.register import as_markdown, as_records, as_text

    if options.format == "json":
        print(json.dumps(as_records(), indent=1))
    else:
        print(as_markdown() if options.format == "markdown" else as_text())
    return 0


def _demo(options: argparse.Namespace) -> int:
    from vllm_compat.lab.demo import run_demo

    return run_demo(options.model, options.folder)
