#!/usr/bin/env python3
"""Open the nightly issue, or comment on the one that is open: file_issue.py TEXT.md [--dry-run].

Uses GitHub's command line, gh. Without TEXT.md (nothing new was found) nothing is done. --dry-run
prints the commands that would be given, and asks GitHub nothing.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]


def main(arguments: list[str]) -> int:
    """Open or update; return gh's exit status."""
    from lab.nightly import LABEL, TITLE

    dry = "--dry-run" in arguments
    names = [argument for argument in arguments if argument != "--dry-run"]
    if len(names) != 1:
        print("file_issue: give one file with the issue's text", file=sys.stderr)
        return 2
    text = Path(names[0])
    if not text.exists():
        print("Nothing new: no issue is needed.")
        return 0
    find = ["gh", "issue", "list", "--label", LABEL, "--state", "open", "--json", "number"]
    create = ["gh", "issue", "create", "--title", TITLE, "--label", LABEL, "--body-file", str(text)]
    comment = ["gh", "issue", "comment", "NUMBER", "--body-file", str(text)]
    if dry:
        print(f"$ {shlex.join(find)}\n# none open:\n$ {shlex.join(create)}\n# else:")
        print(f"$ {shlex.join(comment)}\n\n{text.read_text(encoding='utf-8')}")
        return 0
    asked = subprocess.run(find, stdout=subprocess.PIPE, text=True, check=True)
    numbers = [str(found["number"]) for found in json.loads(asked.stdout)]
    if numbers:
        return subprocess.call([numbers[0] if part == "NUMBER" else part for part in comment])
    label = ["gh", "label", "create", LABEL, "--force", "--description", "found by the nightly job"]
    subprocess.run(label, check=True)
    return subprocess.call(create)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
