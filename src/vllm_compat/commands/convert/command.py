"""The command ``vllm-compat convert``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vllm_compat.commands.convert import Flow, Options, UnknownError, convert, render
from vllm_compat.commands.verify.text import Progress

DESCRIPTION = (
    "Turn extracted hidden states of the in-process flow (speculators 0.3 and 0.4: data_<i>.pt) into the"
    " server flow's (0.5 to 0.9: a data set, and hidden_states/hs_<i>.safetensors), or back. Tensors"
    " stay as they are, bit for bit; layer ids are renumbered (in-process k is vLLM's k+1) and printed."
    " Nothing is overwritten; an interrupted conversion goes on when the same line is run again."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = DESCRIPTION
    parser.add_argument("source", metavar="FROM", type=Path, help="the folder with the extracted data")
    parser.add_argument("target", metavar="TO", type=Path, help="a new folder for the converted data")
    parser.add_argument(
        "--to",
        choices=[flow.value for flow in Flow],
        help="the flow to convert to (default: the other one)",
    )
    parser.add_argument(
        "--layers", nargs="+", type=int, metavar="K",
        help="the ids of the files' entries, in their order and in FROM's numbering"
        " (default: as data_config.json says, or the files where they were converted before)",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="MODEL",
        help="the model that the data are of: a folder, its config.json, or a cached hub id; it tells"
        " which layer is the last (default: the one that data_config.json names)",
    )  # fmt: skip
    parser.add_argument(
        "--num-layers",
        type=int,
        metavar="N",
        help="how many layers the model has, where its configuration is not at hand",
    )
    parser.add_argument(
        "--dataset", type=Path, metavar="DIR",
        help="the prepared data set with the loss masks, for hs_<i>.safetensors that lie elsewhere",
    )  # fmt: skip
    parser.add_argument(
        "--speculators",
        metavar="VERSION",
        help="the speculators that will train (default: 0.9.0 to the server flow, else 0.4.0.1)",
    )
    parser.add_argument(
        "--renumber",
        action="store_true",
        help="convert although samples are missing, and number them anew from 0",
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="how many samples are converted at a time")
    parser.add_argument("--dry-run", action="store_true", help="look at everything and write nothing")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(options: argparse.Namespace) -> int:
    """Convert, and say what was done; status 3 where the layers are not to be found out."""
    chosen = Options(
        source=options.source,
        target=options.target,
        to=Flow(options.to) if options.to else None,
        speculators=options.speculators,
        layers=tuple(options.layers) if options.layers else None,
        model=options.model,
        num_layers=options.num_layers,
        dataset=options.dataset,
        renumber=options.renumber,
        jobs=options.jobs,
        dry_run=options.dry_run,
    )
    progress = None if options.quiet else Progress(sys.stderr, "convert")
    try:
        print(render(convert(chosen, progress)), end="")
    except UnknownError as error:
        print(f"vllm-compat: {error}", file=sys.stderr)
        return 3
    return 0
