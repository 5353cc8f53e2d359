"""The command line: one function per subcommand, no logic.

Exit status: 0 done, 1 incompatible or failed, 2 usage error, 3 unknown; ``run`` has its program's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

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


_RUN_OPTIONS = ("--capture", "--transfer", "--without", "--record", "--log", "--status-file", "--every")
"""The options of ``run`` that a value follows."""


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
        if word in _RUN_OPTIONS and rest:
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
    # With its name given, argparse formats no help text to find it out.
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog=parser.prog)
    for name, (summary, set_up) in COMMANDS.items():
        sentence = f"{summary[0].upper()}{summary[1:]}."
        command = commands.add_parser(name, help=summary, description=sentence)
        if name == chosen:
            set_up(command)
    return parser


def _set_up_run(parser: argparse.ArgumentParser) -> None:
    from vllm_compat.analysis.environment import CAPTURES

    parser.usage = (
        "vllm-compat run [--log FILE] [--status-file FILE] [--record FILE] [--every S] [--leave-folder]"
        " [--capture C] [--transfer T] [--no-canary] [--without ADAPTER]"
        " (SCRIPT | -m MODULE) [ARGS ...]"
    )
    parser.description = (
        "Run a program that has never heard of vllm_compat in a supervised child: same arguments,"
        " same exit status, signals handed on. Its samples are saved whole and in order; torn and"
        " missing ones in its --output-dir are made again."
    )
    parser.add_argument("-m", dest="module", action="store_true", help="what follows is a module")
    parser.add_argument(
        "--capture",
        default="auto",
        choices=CAPTURES,
        help="how hidden states are captured (auto: forward hooks, else auxiliary states)",
    )
    parser.add_argument(
        "--canary",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="repeat prompts of the first batch and compare their rows before going on",
    )
    parser.add_argument(
        "--transfer",
        default="auto",
        choices=["auto", "rpc"],
        help="how rows leave the worker (auto: shared memory; rpc: pickled replies, as stock)",
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="ADAPTER", help="leave an adapter out"
    )
    parser.add_argument("--record", metavar="FILE", help="write what happened to this JSON file")
    parser.add_argument(
        "--log", metavar="FILE", help="append the program's output to this file, and show a status line"
    )
    parser.add_argument(
        "--status-file", metavar="FILE", help="keep the state of the run in this JSON file"
    )
    parser.add_argument(
        "--every", type=float, default=30.0, metavar="S", help="seconds between two plain status lines"
    )
    parser.add_argument(
        "--leave-folder",
        action="store_true",
        help="do not look for torn and missing samples in the program's --output-dir",
    )
    parser.set_defaults(command=_run)


def _set_up_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what `run --status-file FILE` keeps")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--follow", type=float, metavar="S", help="again every S seconds, until the run has ended"
    )
    parser.set_defaults(command=_status)


def _set_up_check(parser: argparse.ArgumentParser) -> None:
    from vllm_compat.commands.check import add_check_arguments, run_check

    add_check_arguments(parser)
    parser.set_defaults(command=run_check)


def _set_up_diff(parser: argparse.ArgumentParser) -> None:
    from vllm_compat.commands.check import add_diff_arguments, run_diff

    add_diff_arguments(parser)
    parser.set_defaults(command=run_diff)


def _set_up_preflight(parser: argparse.ArgumentParser) -> None:
    _add_run_arguments(parser)
    parser.add_argument(
        "--device-capability", metavar="X.Y", help="ask about a device that need not be here: 12.0"
    )
    parser.add_argument("--device-memory", metavar="SIZE", help="memory of one device: 96GiB")
    parser.add_argument("--samples", type=int, metavar="N", help="how many samples will be saved")
    parser.add_argument("--output-dir", metavar="DIR", help="where they will be saved")
    parser.add_argument(
        "--read-speed", metavar="SIZE", help="of the disk with the weights, a second: 3GiB (measured)"
    )
    parser.add_argument("--static", action="store_true", help="leave out what has to be asked from vLLM")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(command=_preflight)


def _set_up_rehearse(parser: argparse.ArgumentParser) -> None:
    _add_run_arguments(parser)
    parser.add_argument(
        "--without", action="append", default=[], metavar="ADAPTER", help="leave an adapter out"
    )
    parser.add_argument("--capture", default="auto", help="how hidden states are captured")
    parser.add_argument(
        "--dequantised", action="store_true", help="rehearse without the quantised kernels"
    )
    parser.add_argument("--log", metavar="FILE", help="append the run's output to this file")
    parser.add_argument("--keep", metavar="DIR", help="keep the small model and the records here")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(command=_rehearse)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model and the options of stock's offline script, under its names."""
    _add_model_arguments(parser)
    parser.add_argument(
        "--tensor-parallel-size", "--tp-size", "--devices", dest="devices", type=int, default=1,
        metavar="N",
    )  # fmt: skip
    parser.add_argument(
        "--max-model-len", "--max-seq-len", "--seq-length", dest="length", type=int, default=2048,
        metavar="N",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=8, metavar="N")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8, metavar="F")


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a model's folder, its config.json, or a cached hub id")
    parser.add_argument(
        "--layer-ids", nargs="+", type=int, metavar="K", help="in-process ids (stock's own choice)"
    )


def _set_up_layers(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(command=_layers)


def _set_up_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="a folder of data_<i>.pt or safetensors")
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="the one that all runs had, where it is known"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="reading threads")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--repair", action="store_true", help="do what is certain to be right")
    parser.add_argument("--backup", metavar="DIR", help="where repair keeps every original")
    parser.add_argument("--dry-run", action="store_true", help="only say what repair would do")
    parser.set_defaults(command=_verify)


def _set_up_convert(parser: argparse.ArgumentParser) -> None:
    from vllm_compat.commands.convert.command import add_arguments, run

    add_arguments(parser)
    parser.set_defaults(command=run)


def _set_up_adapters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", default="text", choices=["text", "markdown", "json"])
    parser.set_defaults(command=_adapters)


def _set_up_bench(parser: argparse.ArgumentParser) -> None:
    from vllm_compat.commands.bench import add_arguments, run

    add_arguments(parser)
    parser.set_defaults(command=run)


def _set_up_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="kimi_k25", choices=["llama", "deepseek_v3", "kimi_k25"])
    parser.add_argument("--folder", metavar="DIR", help="keep the model and the record here")
    parser.add_argument(
        "--pipeline",
        action="store_true",
        help="all four steps on the tiny Kimi, from conversations to a trained draft",
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="ADAPTER", help="with --pipeline: see it fail"
    )
    parser.set_defaults(command=_demo)


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "check": ("say what will work, before anything loads", _set_up_check),
    "run": ("run an unmodified program with vllm_compat in force", _set_up_run),
    "rehearse": ("run a small model of the same kind first, and judge its rows", _set_up_rehearse),
    "preflight": ("say what a run will meet, without weights or a GPU", _set_up_preflight),
    "status": ("say what a run is doing", _set_up_status),
    "layers": ("show a model's layer ids in every numbering", _set_up_layers),
    "verify": ("check a folder of extracted hidden states", _set_up_verify),
    "convert": ("turn one flow's extracted data into the other's", _set_up_convert),
    "adapters": ("list the adapters and what each is good for", _set_up_adapters),
    "diff": ("show what changed between two vLLM releases", _set_up_diff),
    "bench": ("measure extraction against plain vLLM prefill", _set_up_bench),
    "demo": ("extract hidden states of a tiny model, and judge them", _set_up_demo),
}


def _run(options: argparse.Namespace) -> int:
    from pathlib import Path

    from vllm_compat.commands.run.launch import LaunchOptions, run

    def path(given: str | None) -> Path | None:
        return Path(given) if given else None

    chosen = LaunchOptions(
        record=path(options.record),
        log=path(options.log),
        status_file=path(options.status_file),
        every=options.every,
        leave_folder=options.leave_folder,
        apply={
            "capture": options.capture,
            "transfer": options.transfer,
            "without": options.without,
            "canary": options.canary,
        },
    )
    return run(options.argv, module=options.module, options=chosen)


def _status(options: argparse.Namespace) -> int:
    import time
    from pathlib import Path

    from vllm_compat.commands.run.watch import follow, read_status, render

    path = Path(options.file)
    if options.follow is not None:
        return follow(path, options.follow)
    record = read_status(path)
    text, status = render(record, time.time())
    print(json.dumps(record, indent=1) if options.json else text)
    return status


def _run_terms(options: argparse.Namespace) -> dict[str, Any]:
    """Return what `_add_run_arguments` has asked for, as `vllm_compat.commands.run_options.RunTerms`
    names it."""
    return {
        "model": options.model,
        "layer_ids": tuple(options.layer_ids) if options.layer_ids else None,
        "devices": options.devices,
        "max_model_len": options.length,
        "batch_size": options.batch_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
    }


def _preflight(options: argparse.Namespace) -> int:
    from pathlib import Path

    from vllm_compat.commands.preflight.judge import (
        Options,
        parse_capability,
        parse_size,
        preflight,
        render,
    )

    capability, memory = options.device_capability, options.device_memory
    report = preflight(
        Options(
            **_run_terms(options),
            capability=parse_capability(capability) if capability else None,
            device_memory=parse_size(memory) if memory else None,
            samples=options.samples,
            output_dir=Path(options.output_dir) if options.output_dir else None,
            read_speed=parse_size(options.read_speed) if options.read_speed else None,
        ),
        ask=not options.static,
    )
    print(render(report, "json" if options.json else "text"))
    return report.exit_status


def _rehearse(options: argparse.Namespace) -> int:
    from pathlib import Path

    from vllm_compat.commands.rehearse.rehearse import Options, rehearse, render

    report = rehearse(
        Options(
            **_run_terms(options),
            without=tuple(options.without),
            capture=options.capture,
            dequantised=options.dequantised,
            keep=Path(options.keep) if options.keep else None,
        ),
        log=Path(options.log) if options.log else None,
    )
    print(render(report, "json" if options.json else "text"))
    return report.exit_status


def _adapters(options: argparse.Namespace) -> int:
    from vllm_compat.commands.register import as_markdown, as_records, as_text

    if options.format == "json":
        print(json.dumps(as_records(), indent=1))
    else:
        print(as_markdown() if options.format == "markdown" else as_text())
    return 0


def _demo(options: argparse.Namespace) -> int:
    from vllm_compat.commands.demo import run_demo, run_pipeline_demo

    if options.pipeline:
        if options.model != "kimi_k25":
            raise UsageError("--pipeline runs on kimi_k25; leave --model out.")
        return run_pipeline_demo(options.folder, options.without)
    if options.without:
        raise UsageError("--without goes with --pipeline.")
    return run_demo(options.model, options.folder)


def _layers(options: argparse.Namespace) -> int:
    from vllm_compat.analysis.layer_ids import layers_of, render

    print(render(layers_of(options.model, options.layer_ids), "json" if options.json else "text"))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from vllm_compat.commands.verify import (
        Progress,
        render,
        render_repair,
        repair,
        verify_directory,
    )

    form = "json" if options.json else "text"
    report = verify_directory(
        options.folder,
        batch_size=options.batch_size,
        jobs=options.jobs,
        progress=None if options.quiet else Progress(sys.stderr),
    )
    if not options.repair:
        print(render(report, form))
        return report.exit_status
    done = repair(report, backup=options.backup, dry_run=options.dry_run)
    print(render_repair(done, form) if done.actions else render(report, form))
    return done.exit_status if done.actions else report.exit_status
