"""Nothing grows too long or too tangled; what is so already is listed, and the list only shrinks.

``python3 scripts/lengths.py --write`` makes the lists anew, after a split, a move or a rename.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))
import lengths  # noqa: E402


def test_nothing_is_too_long_but_what_is_listed() -> None:
    long = lengths.too_long()
    new = {name: lines for name, lines in long.items() if name not in lengths.exceptions()}
    assert not new, f"over {lengths.FUNCTION} lines a function or {lengths.CLASS} a class: split it"


def test_no_exception_is_listed_that_is_not_needed() -> None:
    unneeded = set(lengths.exceptions()) - set(lengths.too_long())
    assert not unneeded, "no longer too long, or gone: run scripts/lengths.py --write"
    assert all(reason.strip() for reason in lengths.exceptions().values())


def test_ruff_lets_only_such_files_off_that_are_too_tangled() -> None:
    listed = [line.split('"')[1] for line in lengths.ignored() if line.endswith('= ["C901"]')]
    unneeded = set(listed) - set(lengths.too_tangled())
    assert not unneeded, "no longer too tangled, or gone: run scripts/lengths.py --write"


def test_a_function_and_a_class_are_measured_from_first_to_last_line(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    body = "        pass\n" * 70
    path.write_text(
        f"class A:\n    def f(self):\n{body}\n"
        "    async def g(self):\n        '''Not\n        counted.'''\n        pass\n"
    )
    assert list(lengths.lengths(path, "long.py")) == [
        ("long.py:A", 77, 400),
        ("long.py:A.f", 71, 70),
        ("long.py:A.g", 2, 70),
    ]


@pytest.mark.parametrize("branches", [15, 16])
def test_ruff_counts_a_functions_branches(branches: int, tmp_path: Path) -> None:
    path = tmp_path / "tangled.py"
    path.write_text("def f(x):\n" + "    if x:\n        pass\n" * (branches - 1))
    command = [sys.executable, "-m", "ruff", "check", "--select", "C901", "--no-cache"]
    command += ["--config", str(ROOT / "pyproject.toml"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert ("C901" in done.stdout) is (branches == 16), done.stdout + done.stderr
