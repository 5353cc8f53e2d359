#!/usr/bin/env python3
"""Write docs/api.md from the docstrings of the public names, ``vllm_compat.__all__``.

usage: render_api.py [--check]      (--check: exit 1 where the page is not up to date)
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
sys.path[:0] = [str(ROOT / "src")]

RETURNED = {
    "apply": "Status",
    "revert": "Status",
    "status": "Status",
    "check": "CheckReport",
    "diff": "Difference",
    "preflight": "PreflightReport",
    "verify": "VerifyReport",
}
"""The public functions in the page's order, and the public name of what each returns."""

SECTIONS = ("Args", "Returns", "Raises", "Example")

INTRODUCTION = """\
# Public functions

<!-- Written by scripts/render_api.py from the docstrings; change those. -->

`import vllm_compat` costs next to nothing: each name is imported when it is first asked for. These
names are kept stable; anything else may change without notice. Every function is typed, and raises
nothing but [vllm_compat's errors](#errors) for what a caller can do wrong. Sizes are in bytes, times in
seconds. Layer ids are speculators' in-process ones: *k* is the residual stream after layer *k*.
"""


def main(arguments: list[str]) -> int:
    """Write the page; with ``--check`` return 1 where it is an old one."""
    text = page()
    if "--check" not in arguments:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
    if not fresh:
        print("docs/api.md is not up to date: run scripts/render_api.py.", file=sys.stderr)
    return 0 if fresh else 1


def page() -> str:
    """Return the page."""
    import vllm_compat

    parts = [INTRODUCTION]
    parts += (function(name, getattr(vllm_compat, name)) for name in RETURNED)
    parts.append("## Results\n")
    parts += (result(name, getattr(vllm_compat, name)) for name in dict.fromkeys(RETURNED.values()))
    parts.append(errors(vllm_compat.errors))
    return "\n".join(parts)


def sections(documented: Any) -> dict[str, str]:
    """Return a docstring in parts: what comes first under ``""``, then each section by its title."""
    text = inspect.getdoc(documented) or ""
    pieces = re.split(rf"^({'|'.join(SECTIONS)}):\n", text, flags=re.MULTILINE)
    titles = ["", *pieces[1::2]]
    bodies = [pieces[0], *pieces[2::2]]
    return {title: inspect.cleandoc(f"\n{body}") for title, body in zip(titles, bodies, strict=True)}


def entries(section: str) -> dict[str, str]:
    """Return the entries ``name: text`` of a section; a text goes on in indented lines."""
    found = re.findall(r"^(\w+): (.*(?:\n +.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def function(name: str, documented: Any) -> str:
    """Return the part of one function."""
    parts = sections(documented)
    lines = [
        f"## {name}",
        "",
        "```python",
        *signature(name, documented),
        "```",
        "",
        prose(parts[""]),
        "",
    ]
    for title, heading in (("Args", "Arguments"), ("Raises", "Raises")):
        if listed := entries(parts.get(title, "")):
            lines += [f"{heading}:", ""]
            lines += [f"- `{entry}`: {prose(text)}" for entry, text in listed.items()]
            lines.append("")
        if title == "Args":  # what comes back stands between what goes in and what goes wrong
            kind = RETURNED[name]
            lines += [f"Returns a [{kind}](#{kind.lower()}): {prose(parts['Returns'])}", ""]
    return "\n".join([*lines, *example(parts), ""])


def signature(name: str, documented: Any) -> Iterator[str]:
    """Yield the lines of a signature, one parameter a line."""
    declared = inspect.signature(documented)
    if not declared.parameters:
        yield f"{name}() -> {RETURNED[name]}"
        return
    yield f"{name}("
    starred = False
    for parameter in declared.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "    *,"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        yield f"    {parameter.name}: {parameter.annotation}{default},"
    yield f") -> {RETURNED[name]}"


def result(name: str, documented: Any) -> str:
    """Return the part of one result: what it is, its fields and its properties."""
    lines = [f"### {name}", "", prose(inspect.getdoc(documented) or ""), ""]
    lines += [f"- `{field.name}: {field.type}`" for field in dataclasses.fields(documented)]
    for attribute, value in vars(documented).items():
        if isinstance(value, property) and value.fget is not None:
            kind = value.fget.__annotations__["return"]
            lines.append(f"- `{attribute}: {kind}` – {prose(inspect.getdoc(value) or '')}")
    return "\n".join([*lines, ""])


def errors(module: Any) -> str:
    """Return the part on errors."""
    parts = sections(module)
    lines = ["## errors", "", prose(parts[""]), ""]
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, Exception):
            lines.append(f"- `vllm_compat.errors.{name}`: {prose(inspect.getdoc(value) or '')}")
    return "\n".join([*lines, "", *example(parts), ""])


def example(parts: dict[str, str]) -> list[str]:
    """Return a section's example as a block of code."""
    code = [re.sub(r"^(>>>|\.\.\.) ?", "", line) for line in parts["Example"].splitlines()]
    return ["```python", *code, "```"]


def prose(text: str) -> str:
    """Return reStructuredText's inline code as Markdown's."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
