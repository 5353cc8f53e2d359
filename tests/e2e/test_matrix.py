"""The releases at which the plan changes, through the matrix tool, as far as CI's time goes.

The whole matrix is one command away (``python3 -m lab matrix --all``); its records are committed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.matrix import SPECULATORS, Matrix, Options, known_releases
from lab.matrix_report import release_of

from lab import environments
from vllm_compat.analysis import recipes

Run = Callable[..., list[dict[str, Any]]]

# (vLLM, speculators, models, ranks); the oldest, the newest, and where the plan changes. 0.16.0 has a
# module of its own. Neighbours share an environment.
CELLS = [
    ("0.11.0", "0.3.0", "llama", 1),
    ("0.12.0", "0.3.0", "llama", 1),
    ("0.12.0", "0.4.0.1", "llama", 2),
    ("0.11.1", "0.3.0", "llama", 1),  # its sources over the kernels of 0.12.0
    ("0.17.0", "0.3.0", "llama", 1),
    ("0.17.0", "0.4.0.1", "llama", 1),
    ("0.29.0", "0.3.0", "llama", 1),
    ("0.29.0", "0.4.0.1", "llama", 1),
    ("0.32.0", "0.4.0", "kimi_k25", 1),
    ("0.33.0", "0.3.0", "llama", 1),
    ("0.33.0", "0.4.0.1", "llama", 1),
]


def environment_of(vllm: str) -> str:
    """Return the folder of the environment that a release runs in."""
    row = recipes.unusable(vllm)
    return f"vllm-{(row and row.kernels) or vllm}"


BEYOND = {
    ("0.12.0", "0.3.0"),
    ("0.11.1", "0.3.0"),
    ("0.17.0", "0.3.0"),
    ("0.17.0", "0.4.0.1"),
    ("0.29.0", "0.4.0.1"),
}
"""Left to the weekly run: the plan that changes there changes again at the ones that stay."""


@pytest.fixture(scope="module")
def last_uses(request: pytest.FixtureRequest) -> dict[str, int]:
    """Return the number of the last cell in each environment, of those that run this time."""
    mine = (item for item in request.session.items if item.path == Path(__file__))
    numbers = sorted(item.callspec.params["number"] for item in mine if hasattr(item, "callspec"))
    return {environment_of(CELLS[number][0]): number for number in numbers}


@pytest.fixture(scope="module", autouse=True)
def found() -> set[str]:
    """Return the environments that were there before; all others go after their last use."""
    return {path.name for path in environments.default_root().glob("vllm-*")}


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
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number,
            id="-".join(map(str, cell)),
            marks=[pytest.mark.beyond] if cell[:2] in BEYOND else [],
        )
        for number, cell in enumerate(CELLS)
    ],
)
def test_a_pair_is_right(run: Run, number: int, found: set[str], last_uses: dict[str, int]) -> None:
    vllm, speculators, model, ranks = CELLS[number]
    name = environment_of(vllm)
    remove = last_uses[name] == number and name not in found
    (record,) = run(vllm, speculators, model, ranks, remove=remove)
    if remove and "CI" in os.environ:
        environments.prune_cache()
    assert record["outcome"] == "right", "\n".join([str(record["error"]), *record["log"]])
    assert release_of(record) == vllm
    assert len(record["workers"]) == ranks
    assert record["overlay"] is (name != f"vllm-{vllm}")
    assert len(record["scenarios"]) == 9


def test_ci_covers_the_oldest_the_newest_and_each_change_of_the_plan() -> None:
    from tests.analysis.test_plan_matrix import plan

    # Of releases whose sources run nowhere here there can be no cell.
    rows = {release: recipes.unusable(release) for release in known_releases()}
    releases = [release for release, row in rows.items() if row is None or row.kernels]
    wanted = {(releases[0], "0.3.0"), (releases[-1], "0.3.0"), (releases[-1], "0.4.0.1")}
    for version in SPECULATORS:
        before = None
        for release in releases:
            made = plan(version, release)
            if before and not made.unmet and made.adapters != before and version != "0.4.0":
                wanted.add((release, version))
            before = made.adapters if not made.unmet else None
    assert wanted <= {cell[:2] for cell in CELLS}
    ends = {releases[0], releases[-1]}
    assert not ends & {vllm for vllm, _ in BEYOND}, "the oldest and the newest are never left out"
    assert {cell[:2] for cell in CELLS} > BEYOND
