"""The command line: one function per subcommand, no logic.

Exit status: 0 done, 1 incompatible or failed, 2 usage error, 3 unknown; ``run`` has its program's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import vllm_compat
from vllm_compat.errors import UsageError, VllmCompatError

Command = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """A parser that says in one sentence what is wrong with a line, and which option was meant."""

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the options that a line gives.

        Raises:
            UsageError: The line cannot be understood.
        """
        self._refuse_unknown(words)
        return self.parse_args(words)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print, below its usage, before it ends the process."""
        command = self.prog.removeprefix("vllm-compat").removeprefix("python3 -m lab").strip()
        where = f"{command}: " if command else ""
        raise UsageError(f"{where}{message} (`{self.prog} --help` shows what there is).")

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Find an option that is none before argparse stumbles over what then seems to be missing."""
        parser: argparse.ArgumentParser = self
        position = 0
        while position < len(words):
            word, position = words[position], position + 1
            name, equals, _ = word.partition("=")
            action = parser._option_string_actions.get(name)
            if word == "--":
                return
            if action is not None:
                wanted = action.nargs != 0 and not equals
                if wanted and position < len(words) and not words[position].startswith("-"):
                    position += 1
            elif name.startswith("--"):
                known = [option for option in parser._option_string_actions if option.startswith("--")]
                if not (parser.allow_abbrev and any(option.startswith(name) for option in known)):
                    raise UsageError(_no_option(name, known, parser.prog))
            elif not word.startswith("-"):
                if any(action.nargs == argparse.REMAINDER for action in parser._actions):
                    return  # what follows is the program's
                parser = _subparser(parser, word)


def _subparser(parser: argparse.ArgumentParser, word: str) -> argparse.ArgumentParser:
    """Return the parser of the command that a word names; the same one where it names none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and word in action.choices:
            found: argparse.ArgumentParser = action.choices[word]
            return found
    return parser


def _no_option(name: str, known: Sequence[str], program: str) -> str:
    """Say that there is no such option, and which was meant or where they are shown."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]}?" if close else f"`{program} --help` shows those that there are."
    return f"`{program}` has no option {name}: {meant}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    if chosen in MOVED:
        print(
            f"vllm-compat: `{chosen}` is a maintainers' command: run `python3 -m lab {chosen}` from a"
            " checkout of vllm_compat.",
            file=sys.stderr,
        )
        return 2
    if chosen is not None and chosen not in COMMANDS:
        print(f"vllm-compat: {_no_command(chosen)}", file=sys.stderr)
        return 2
    parser = _parser(chosen)
    try:
        options = parser.read(arguments)
        if not hasattr(options, "command"):
            parser.print_help()
            return 0
        command: Command = options.command
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


def _no_command(word: str) -> str:
    """Say that there is no such command, and which was meant or which there are."""
    import difflib

    close = difflib.get_close_matches(word, COMMANDS, n=1)
    meant = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(COMMANDS)}."
    return f"There is no command {word!r}: {meant}"


def _parser(chosen: str | None = None) -> Parser:
    """Return the parser; only the chosen command's options are set up, and its modules imported."""
    parser = Parser(
        prog="vllm-compat",
        usage="vllm-compat [-h] [--version] COMMAND ...",
        description="Run stock speculators on the vLLM that is installed, and say before anything"
        " loads whether that will work.",
        epilog=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=vllm_compat.__version__)
    # The epilog lists the commands, in groups, which argparse has not. With its name given, argparse
    # formats no help text to find it out.
    commands = parser.add_subparsers(metavar="COMMAND", prog=parser.prog, help=argparse.SUPPRESS)
    for name, (summary, set_up) in COMMANDS.items():
        # An abbreviated option of ours must not be looked for among the words of `run`'s program.
        command = commands.add_parser(name, description=f"{summary}.", allow_abbrev=name != "run")
        if name == chosen:
            set_up(command)
    return parser


def _overview() -> str:
    """Return the commands in their groups."""
    width = max(map(len, COMMANDS))
    groups = (
        "\n".join([f"{title}:", *(f"  {name:{width}}  {COMMANDS[name][0]}" for name in names)])
        for title, names in GROUPS.items()
    )
    return "\n\n".join([*groups, "vllm-compat COMMAND --help shows the options of a command."])


def _set_up_run(parser: argparse.ArgumentParser) -> None:
    from vllm_compat.analysis.environment import CAPTURES, ENGINES, MAX_LOSS

    parser.usage = "vllm-compat run [OPTIONS] (SCRIPT | -m MODULE) [ARGS ...]"
    parser.description = (
        "Run a program that knows nothing of vllm_compat, unmodified, in a supervised child process:"
        " same arguments, same exit status, signals passed on. Samples are saved whole and in order;"
        " torn and missing ones in the program's --output-dir are made again. Stock's launcher of a vLLM"
        " server is judged before anything loads, gets the flags that it needs, and takes the place of"
        " this process. Options of run stand before the program, the program's own behind it."
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="run a module, as `python -m` does"
    )
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
        help="run prompts of the first batch again, alone and mixed, and stop unless their rows agree",
    )
    parser.add_argument(
        "--transfer",
        default="auto",
        choices=["auto", "rpc"],
        help="how rows leave the worker (auto: shared memory; rpc: pickled replies, as stock)",
    )
    parser.add_argument(
        "--engine",
        default="auto",
        choices=ENGINES,
        help="what serves the generator (stock: the engine that it builds, fitted by adapters; public:"
        " one on vLLM's public interface alone; alone: that with one prompt a step;"
        " auto: stock, and public where no adapter helps stock)",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NAME",
        help="leave this adapter or feature out",
    )
    _add_remote_code(parser)
    parser.add_argument(
        "--max-loss",
        type=float,
        default=MAX_LOSS,
        metavar="SHARE",
        help="stop before loading if more than this share of the conversations, of their turns or of"
        f" their answers is lost on the way to token ids (default: {MAX_LOSS})",
    )
    _add_launch_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="of stock's launcher of a vLLM server: judge its command, print it, and start nothing",
    )
    # As torchrun does: all from the first word that is no option of ours on is the program's.
    parser.add_argument(
        "argv", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the program, and its arguments"
    )
    parser.set_defaults(command=_run)


def _add_remote_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-remote-code",
        dest="remote_code",
        action="store_false",
        help="run no code that a model brings (auto_map); what needs it is refused",
    )


def _add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the launcher itself is told: where it writes, and how it treats the program."""
    parser.add_argument("--record", metavar="FILE", help="write a record of the run to this JSON file")
    parser.add_argument(
        "--log",
        metavar="FILE",
        help="append the program's output to this file, and show a status line instead",
    )
    parser.add_argument(
        "--status-file",
        metavar="FILE",
        help="keep the state of the run in this JSON file, for `vllm-compat status`",
    )
    parser.add_argument(
        "--every",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds between two status lines where there is no terminal (default: 30)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds that background processes of the program get to end after it by themselves"
        " (default: 10)",
    )
    parser.add_argument(
        "--leave-folder",
        action="store_true",
        help="do not look for torn and missing samples in the program's --output-dir",
    )
    parser.add_argument(
        "--leave-out",
        action="append",
        default=[],
        metavar="NUMBERS",
        help="leave samples of stock's script out: the numbers of their data_<i>.pt, as 17,42, or a file"
        " that holds them; the others keep their numbers",
    )


def _set_up_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the file that was given to `run --status-file`")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--follow", type=float, metavar="S", help="show it again every S seconds until the run has ended"
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
    parser.description = (
        "Say what a run will use and need (backend, memory, disk), without a GPU and without weights."
        " Exit status: 0 nothing speaks against the run, 1 something does, 2 usage error, 3 not"
        " everything could be told."
    )
    _add_run_arguments(parser)
    parser.add_argument(
        "--device-capability", metavar="X.Y", help="GPU compute capability to simulate, e.g. 12.0"
    )
    parser.add_argument("--device-memory", metavar="SIZE", help="memory of one GPU, e.g. 96GiB")
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="how many samples will be saved, for the disk space that they take",
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="with --server, how many tokens will be saved in all"
    )
    parser.add_argument("--output-dir", metavar="DIR", help="the folder that they will be saved in")
    _add_server(parser)
    parser.add_argument(
        "--read-speed",
        metavar="SIZE",
        help="how much of the weights the disk reads per second, e.g. 3GiB (default: measured)",
    )
    parser.add_argument(
        "--static",
        action="store_true",
        help="only read files; do not start vLLM to ask what it would choose",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(command=_preflight)


def _set_up_rehearse(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a small model of the same kind, with random weights, for about a minute, and compare its"
        " rows with a reference. Exit status: 0 every row is right, 1 the run fails or rows are wrong, 2"
        " usage error, 3 nothing is known of the run: there is nothing to compare with, or the rehearsal"
        " lacks something of its own (a tool, space for its folder, a small model that cannot be made)."
    )
    _add_run_arguments(parser)
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NAME",
        help="leave this adapter or feature out",
    )
    parser.add_argument(
        "--capture", default="auto", help="how hidden states are captured (default: auto)"
    )
    parser.add_argument(
        "--dequantised",
        action="store_true",
        help="use unquantised weights, where this build lacks the quantised kernels",
    )
    parser.add_argument("--log", metavar="FILE", help="append the rehearsal's output to this file")
    parser.add_argument(
        "--keep",
        metavar="DIR",
        help="keep output, records and small model in this folder (without it they are kept only after a"
        " failure, in a temporary folder that is named)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(command=_rehearse)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model and the options of stock's offline script, under its names."""
    _add_model_arguments(parser)
    parser.add_argument(
        "--tensor-parallel-size", "--tp-size", "--devices", dest="devices", type=int, default=1,
        metavar="N", help="how many GPUs one copy of the model is spread over (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--max-model-len", "--max-seq-len", "--seq-length", dest="length", type=int, default=2048,
        metavar="N", help="tokens of the longest sample, by any of three names (default: 2048)",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="samples in one batch (default: 8)"
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.8,
        metavar="F",
        help="share of a GPU's memory that vLLM may use (default: 0.8)",
    )
    _add_remote_code(parser)


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="a model's folder, its config.json, or the hub id of a cached model"
    )
    parser.add_argument(
        "--layer-ids",
        nargs="+",
        type=int,
        metavar="K",
        help="speculators' ids of the layers to extract (default: stock's own choice)",
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server",
        action="store_true",
        help="for the server flow (speculators 0.5 and later): --layer-ids are in the server's"
        " numbering, as its launcher's --target-layer-ids",
    )


def _set_up_layers(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser)
    _add_server(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(command=_layers)


def _set_up_verify(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Find wrong samples in a folder of hidden states, and repair those that can be repaired safely."
        " Needs torch (of any build, no GPU), and safetensors for hs_<i>.safetensors; neither vLLM nor"
        " speculators. Exit status: 0 nothing is wrong, or all was repaired; 1 something is wrong or"
        " suspected to be, and `Extract these again` names it; 2 the folder cannot be read."
    )
    parser.add_argument("folder", metavar="DIR", help="a folder of data_<i>.pt or hs_<i>.safetensors")
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="the --batch-size that all extraction runs had, if it is known",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="how many files are read at a time (default: two a core)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument(
        "--repair", action="store_true", help="apply safe repairs (originals go to --backup)"
    )
    parser.add_argument("--backup", metavar="DIR", help="the folder that --repair keeps originals in")
    parser.add_argument("--dry-run", action="store_true", help="only say what --repair would do")
    parser.set_defaults(command=_verify)


def _set_up_convert(parser: argparse.ArgumentParser) -> None:
    from vllm_compat.commands.convert.command import add_arguments, run

    add_arguments(parser)
    parser.set_defaults(command=run)


def _set_up_adapters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        default="text",
        choices=["text", "markdown", "json"],
        help="the form of the list (default: text)",
    )
    parser.set_defaults(command=_adapters)


def _set_up_bench(parser: argparse.ArgumentParser) -> None:
    from vllm_compat.commands.bench import add_arguments, run

    add_arguments(parser)
    parser.set_defaults(command=run)


def _set_up_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="kimi_k25",
        choices=["llama", "deepseek_v3", "kimi_k25"],
        help="which tiny model, with random weights (default: kimi_k25)",
    )
    parser.add_argument("--folder", metavar="DIR", help="keep the model and the record in this folder")
    parser.add_argument(
        "--pipeline",
        action="store_true",
        help="run all four steps on a tiny Kimi-K2.5, from conversations to a trained draft",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="ADAPTER",
        help="with --pipeline: leave this adapter out, and see what fails",
    )
    parser.set_defaults(command=_demo)


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "check": ("Say whether speculators runs on a vLLM, and what would make it run", _set_up_check),
    "preflight": (
        "Say what a run will use and need (backend, memory, disk), without a GPU",
        _set_up_preflight,
    ),
    "rehearse": (
        "Run a small model of the same kind for a minute, and check its rows",
        _set_up_rehearse,
    ),
    "layers": ("Show which layer each id means, in speculators' and vLLM's numbering", _set_up_layers),
    "run": ("Run your program, unchanged, with vllm_compat in force", _set_up_run),
    "status": ("Show what a run is doing", _set_up_status),
    "verify": ("Find wrong samples in a folder of hidden states, and repair them", _set_up_verify),
    "convert": (
        "Turn data of speculators 0.3/0.4 into those of 0.5 and later, or back",
        _set_up_convert,
    ),
    "adapters": ("List the adapters: what each changes, why, and when it can go", _set_up_adapters),
    "diff": ("Show what changed between two vLLMs for what speculators uses", _set_up_diff),
    "bench": ("Measure how fast extraction is, against plain vLLM prefill", _set_up_bench),
    "demo": ("Extract hidden states of a tiny model, and check them", _set_up_demo),
}

GROUPS = {
    "before a run": ("check", "preflight", "rehearse", "layers"),
    "the run": ("run", "status"),
    "after it": ("verify", "convert"),
    "about vllm_compat and vLLM": ("adapters", "diff", "bench", "demo"),
}

MOVED = ("matrix", "nightly", "record")
"""Commands of an earlier release that are `python3 -m lab`'s now."""


def _run(options: argparse.Namespace) -> int:
    from pathlib import Path

    from vllm_compat.commands.run.folder import numbers_to_leave_out
    from vllm_compat.commands.run.launch import run
    from vllm_compat.commands.run.options import LaunchOptions

    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    if not argv:
        raise UsageError("run needs a script, or -m and a module, to run.")

    def path(given: str | None) -> Path | None:
        return Path(given) if given else None

    chosen = LaunchOptions(
        record=path(options.record),
        log=path(options.log),
        status_file=path(options.status_file),
        every=options.every,
        leave_folder=options.leave_folder,
        leave_out=numbers_to_leave_out(options.leave_out),
        grace_seconds=options.grace,
        dry_run=options.dry_run,
        apply={
            "capture": options.capture,
            "transfer": options.transfer,
            "without": [*options.without, *([] if options.remote_code else ["remote_code"])],
            "canary": options.canary,
            "max_loss": options.max_loss,
            "engine": options.engine,
        },
    )
    return run(argv, module=options.module, options=chosen)


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
        "remote_code": options.remote_code,
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
    from vllm_compat.commands.preflight.server import preflight_server

    capability, memory = options.device_capability, options.device_memory
    terms = Options(
        **_run_terms(options),
        capability=parse_capability(capability) if capability else None,
        device_memory=parse_size(memory) if memory else None,
        samples=options.samples,
        tokens=options.tokens,
        output_dir=Path(options.output_dir) if options.output_dir else None,
        read_speed=parse_size(options.read_speed) if options.read_speed else None,
    )
    if options.server:
        report = preflight_server(terms)
    else:
        report = preflight(terms, ask=not options.static)
    print(render(report, "json" if options.json else "text"))
    return report.exit_status


def _rehearse(options: argparse.Namespace) -> int:
    from pathlib import Path

    from vllm_compat.analysis.installed import require_installed
    from vllm_compat.commands.rehearse.rehearse import Options, rehearse, render

    require_installed("nothing was rehearsed")
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
    from vllm_compat.commands import register

    if options.format == "json":
        found = {"adapters": register.as_records(), "features": register.features_as_records()}
        print(json.dumps(found, indent=1))
    else:
        print(register.as_markdown() if options.format == "markdown" else register.as_text())
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
    from vllm_compat.analysis.serving.layers import render_server, server_layers_of

    if options.server:
        found = server_layers_of(options.model, options.layer_ids)
        print(render_server(found, "json" if options.json else "text"))
        return 0
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
