"""What the servers of recorded vLLM releases offer, as recorded in ``vllm_compat/data/serving.xz``.

The file is JSON: the ``releases`` in order, and ``rows``, each a string of releases (ranges of their
numbers) and a row of :mod:`vllm_compat.analysis.serving.rows`. ``python3 -m lab record`` writes it.
"""

from __future__ import annotations

import json
import lzma
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm_compat.analysis.serving.model import Offered
from vllm_compat.analysis.serving.models import ModelOffer
from vllm_compat.analysis.serving.rows import Row, models_from, offered_from
from vllm_compat.analysis.surface.recorded import DATA, mask_of
from vllm_compat.errors import UsageError

FILE = "serving.xz"
FORMAT = 1


def served_releases(data: Path = DATA) -> tuple[str, ...]:
    """Return the releases of which is recorded what their server offers, in order."""
    return tuple(_read(data)["releases"])


def rows_of_release(version: str, data: Path = DATA) -> list[Row] | None:
    """Return the rows of a release; None where it is not recorded."""
    record = _read(data)
    if version not in record["releases"]:
        return None
    number = record["releases"].index(version)
    return [row for releases, *row in record["rows"] if mask_of(releases) >> number & 1]


@lru_cache(maxsize=64)
def recorded_offer(version: str, data: Path = DATA) -> Offered | None:
    """Return what the server of a recorded release offers; None where it is not recorded."""
    rows = rows_of_release(version, data)
    return None if rows is None else offered_from(rows)


@lru_cache(maxsize=64)
def recorded_models(version: str, data: Path = DATA) -> dict[str, ModelOffer] | None:
    """Return what the model classes of a recorded release offer; None where it is not recorded."""
    rows = rows_of_release(version, data)
    return None if rows is None else models_from(rows)


@lru_cache(maxsize=8)
def _read(data: Path) -> dict[str, Any]:
    return read_record(data / FILE, FORMAT) or {"releases": [], "rows": []}


def read_record(path: Path, wanted: int) -> dict[str, Any] | None:
    """Return what a packed JSON record holds; None where there is none.

    Raises :class:`~vllm_compat.errors.UsageError` where it is damaged, or of another format.
    """
    try:
        record: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
        found = record["format"]
    except FileNotFoundError:
        return None
    except (OSError, lzma.LZMAError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"The record {path} is damaged: {error}.") from error
    if found != wanted:
        raise UsageError(
            f"The record {path} has format {found}; this vllm_compat reads format {wanted}."
        )
    return record
