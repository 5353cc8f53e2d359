"""The releases at which the plan changes, through the matrix tool, as far as CI's time goes.

The whole matrix is one command away (``vllm-compat matrix --all``); its records are committed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.lab.matrix import SPECULATORS, Matrix, Options, known_releases, release_of

Run = Callable[..., list[dict[str, Any]]]

# (vLLM, speculators, models, ranks); the oldest, the newest, and where the plan changes. 0.16.0 has a
# module of its own. Neighbours share an environment.
CELLS = [
    ("0.11.0", "0.3.0", "llama", 1),
    ("0.11.1", "0.3.0", "llama", 1),
    ("0.12.0", "0.3.0", "llama", 2),
    ("0.12.0", "0.4.0.1", "llama", 1),
    ("0.17.0", "0.3.0", "llama", 1),
    ("0.17.0", "0.4.0.1", "kimi_k25", 1),
    ("0.29.0", "0.3.0", "llama", 1),
    ("0.29.0", "0.4.0.1", "llama", 2),
    ("0.32.0", "0.4.0", "kimi_k25", 1),
    ("0.33.0", "0.3.0", "llama", 1),
    ("0.33.0", "0.4.0.1", "llama", 1),
]
LAST_USES = {cell[0]: i for i, cell in enumerate(CELLS)} | {"0.32.0": -1, "0.33.0": -1}


@pytest.fixture
def run(tmp_path: Path, capsys_disabled: Callable[[str], None]) -> Run:
    """Return ``run(vllm, speculators, model, ranks, **options)``: the records of these cells."""

    def cells(
        vllm: str, speculators: str, model: str, ranks: int, **options: Any
    ) -> list[dict[str, Any]]:
        wanted = Options(
            (vllm,),
            Path(os.environ.get("VLLM_COMPAT_RECORDS") or tmp_path) / "matrix",
            speculators=(speculators,),
            models=(model,),
            ranks=(ranks,),
            again=True,
            limit=500,
            **options,
        )
        return Matrix(wanted, capsys_disabled).run()

    return cells


@pytest.mark.e2e
@pytest.mark.parametrize("number", range(len(CELLS)), ids=["-".join(map(str, c)) for c in CELLS])
def test_a_pair_is_right(run: Run, number: int) -> None:
    vllm, speculators, model, ranks = CELLS[number]
    # A CI machine has no room for seven environments; a laptop keeps them.
    remove = "CI" in os.environ and LAST_USES[vllm] == number
    (record,) = run(vllm, speculators, model, ranks, remove=remove)
    assert record["outcome"] == "right", "\n".join([str(record["error"]), *record["log"]])
    assert release_of(record) == vllm
    assert len(record["workers"]) == ranks
    assert record["overlay"] is (vllm == "0.33.0")
    assert len(record["scenarios"]) == 9


def test_ci_covers_the_oldest_the_newest_and_each_change_of_the_plan() -> None:
    from tests.test_plan_matrix import plan

    wanted = {(known_releases()[0], "0.3.0"), (known_releases()[-1], "0.3.0")}
    wanted.add((known_releases()[-1], "0.4.0.1"))
    for version in SPECULATORS:
        before = None
        for release in known_releases():
            made = plan(version, release)
            if before and not made.unmet and made.adapters != before and version != "0.4.0":
                wanted.add((release, version))
            before = made.adapters if not made.unmet else None
    assert wanted <= {cell[:2] for cell in CELLS}
