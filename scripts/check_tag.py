#!/usr/bin/env python3
"""Refuse a release whose tag is not the version of what it tags: check_tag.py vVERSION."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str]) -> int:
    """Return 0 where tag, version and changelog agree."""
    if len(arguments) != 1:
        print("check_tag: give the tag, v and a version", file=sys.stderr)
        return 2
    trouble = disagreement(arguments[0], version(), (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if trouble:
        print(f"check_tag: {trouble}", file=sys.stderr)
    return 1 if trouble else 0


def version() -> str:
    """Return the version in the source, which is not imported."""
    text = (ROOT / "src" / "vllm_compat" / "_version.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, flags=re.MULTILINE)
    return str(found)


def disagreement(tag: str, version: str, changelog: str) -> str:
    """Say what does not agree, in a sentence; nothing where all do."""
    if tag != f"v{version}":
        return f"the tag {tag} is not v{version}, the version in src/vllm_compat/_version.py"
    if not (sections := dated(changelog)):
        return "CHANGELOG.md has no section with a version and a date"
    if sections[0][0] != version:
        return f"the newest section of CHANGELOG.md is {sections[0][0]}, the version is {version}"
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)^## \[", changelog, flags=re.MULTILINE | re.DOTALL)
    if unreleased and unreleased[1].strip():
        return f"CHANGELOG.md has lines under Unreleased: move them into the section of {version}"
    return ""


def dated(changelog: str) -> list[tuple[str, str]]:
    """Return version and date of each section, the newest first as they stand."""
    return re.findall(r"^## \[(\d\S*)\] - (\d{4}-\d\d-\d\d)$", changelog, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
