"""Names and signatures as they are written, and how near two names are."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vllm_compat.analysis.surface.model import ParameterKind, Signature


def render(signature: Signature) -> str:
    """Return a signature as people write it, annotations left out but for the result's."""
    parts: list[str] = []
    starred = positional_only = False
    for parameter in signature.parameters:
        if parameter.kind is ParameterKind.POSITIONAL_ONLY:
            positional_only = True
        elif positional_only:
            parts.append("/")
            positional_only = False
        if parameter.kind is ParameterKind.VAR_POSITIONAL:
            starred = True
        if parameter.kind is ParameterKind.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        prefix = {ParameterKind.VAR_POSITIONAL: "*", ParameterKind.VAR_KEYWORD: "**"}
        text = prefix.get(parameter.kind, "") + parameter.name
        parts.append(f"{text}={parameter.default}" if parameter.default is not None else text)
    if positional_only:
        parts.append("/")
    returns = f" -> {signature.returns}" if signature.returns else ""
    return f"({', '.join(parts)}){returns}"


def prefixes(path: str) -> Iterator[str]:
    """Iterate over the prefixes of a dotted path, shortest first, ``()`` and ``[]`` apart."""
    for match in re.finditer(r"\.|\(\)|\[\]", path):
        start = match.start()
        if start and path[start - 1] not in ")]":
            yield path[:start]
        if match.group() != ".":
            yield path[: match.end()]
    yield path


def last(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def word(text: str) -> str:
    """Return the name that an argument's source ends in: ``self.x.block_size`` → ``block_size``."""
    match = re.fullmatch(r"[\w.]*?(\w+)", text)
    return match.group(1) if match and not match.group(1).isdigit() else ""


def akin(one: str, other: str) -> bool:
    """Whether two names can be one before and after a renaming."""
    from difflib import SequenceMatcher

    return bool(set(one.split("_")) & set(other.split("_"))) or (
        SequenceMatcher(None, one, other).ratio() > 0.6
    )


def shared_prefix(one: str, other: str) -> int:
    """Return how many leading parts two dotted names have in common."""
    count = 0
    for left, right in zip(one.split("."), other.split("."), strict=False):
        if left != right:
            break
        count += 1
    return count


def is_string(source: str) -> bool:
    return source[:1] in "'\"" or source[:2] in ("f'", 'f"')
