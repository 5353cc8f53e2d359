"""What our messages advise exists: each option, argument and command that any of them names."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_compat
from vllm_compat import cli

SOURCE = Path(vllm_compat.__file__).parent
STOCK = "--assistant-pattern --data-path --target-layer-ids --on-missing"
SERVER_FLOW = "--validate-outputs --fail-on-error --include-last-layer --request-timeout --concurrency"
VLLM = (
    "--no-enable-chunked-prefill --no-enable-prefix-caching --max-num-batched-tokens --enable-scale-out"
)
OTHERS = {*STOCK.split(), *SERVER_FLOW.split(), *VLLM.split(), "--no-deps"}
"""Options that messages name and that are stock's scripts', its server flow's, vLLM's or pip's."""


def texts() -> Iterator[tuple[str, str]]:
    """Give each text that may be shown (no docstring), with its place."""
    for path in sorted(SOURCE.rglob("*.py")):
        if "trial" in path.parts:  # programs and models with options of their own
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            place = f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
                yield place, "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                yield place, node.value


def options_of_commands() -> set[str]:
    found = set()
    for name in cli.COMMANDS:
        parser = cli._parser(name)
        (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        found |= {option for a in commands.choices[name]._actions for option in a.option_strings}
    return found | {"--version"}


SENTENCES = [(place, text) for place, text in texts() if " " in text.strip()]


def test_every_option_that_a_message_names_exists() -> None:
    known = options_of_commands() | OTHERS
    unknown = {
        (option, place)
        for place, text in SENTENCES
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)
        if option not in known
    }
    named = {option for _, text in SENTENCES for option in re.findall(r"--[a-z][a-z0-9-]+", text)}
    assert len(named) > 5, "the search has found the messages"
    assert unknown == set()
    assert not OTHERS - named, "no message names these any more"


def test_every_command_that_a_message_names_exists() -> None:
    named = {
        (word, place) for place, text in SENTENCES for word in re.findall(r"`vllm-compat ([a-z]+)", text)
    }
    assert named
    assert {(word, place) for word, place in named if word not in cli.COMMANDS} == set()


@pytest.mark.parametrize("function", ["apply", "revert", "check", "verify", "preflight", "diff"])
def test_every_argument_that_a_message_gives_to_a_public_function_exists(function: str) -> None:
    parameters = inspect.signature(getattr(vllm_compat, function)).parameters
    for place, text in SENTENCES:
        for given in re.findall(rf"(?<!\w){function}\((\w+)=", text):
            assert given in parameters, f"{place}: {function}({given}=…)"
