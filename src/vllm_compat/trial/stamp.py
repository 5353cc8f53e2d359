"""By which vllm_compat a record was made, and when: by that one can tell whether it still holds."""

from __future__ import annotations

import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vllm_compat._version import __version__


def made_by() -> dict[str, Any]:
    """Return ``version``, ``commit`` and ``date`` (today, UTC) for a record.

    The commit is that of the checkout which this package stands in, with a ``+`` where files of it
    differ from the commit; None where it was installed from elsewhere, or git does not answer.
    """
    return {
        "version": __version__,
        "commit": _commit(Path(__file__).resolve().parents[3]),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _commit(checkout: Path) -> str | None:
    if not (checkout / ".git").exists():
        return None
    commit = _git(checkout, "rev-parse", "--short=12", "HEAD")
    changed = _git(checkout, "status", "--porcelain", "--untracked-files=no", "--", "src", "lab")
    return f"{commit}+" if commit and changed else commit or None


def _git(checkout: Path, *words: str) -> str:
    """Return what git says; nothing where it is not there or refuses."""
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *words], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
