"""The file of what has been run, made from the records: src/vllm_compat/data/known.json.

A cell counts if it was right with every adapter that its plan needs. Cells of one pair on one device
with one model runner make one row. Layer classes are those that the table of decoder layers
(records/decoder_layers) has for a tiny model's architecture in that release. Days are those of the
records' stamps; what is older than the stamps has its day in records/undated.json, by git's history.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = (
    "downstream", "vllm", "kind", "device", "capability", "runner", "kernels", "models", "layers",
    "ranks", "dtypes", "python", "torch", "transformers", "last",
)  # fmt: skip
_KEY = COLUMNS[:7]
_SEVERAL = ("model", "layer", "ranks", "dtype")

Cell = dict[str, Any]


def known(records: Path) -> str:
    """Return the file's text for a folder of records."""
    from packaging.version import Version

    days = _undated(records)
    table = json.loads((records / "decoder_layers" / "table.json").read_text(encoding="utf-8"))["rows"]
    rows: dict[tuple[str, ...], list[Cell]] = {}
    for path in sorted(records.rglob("*.json")):
        name = path.relative_to(records).as_posix()
        record = json.loads(path.read_text(encoding="utf-8"))
        for cell in cells_of(record):
            day = (record.get("vllm_compat") or {}).get("date") or days[name]
            layer = layer_of(architecture_of(cell["model"]), cell["vllm"], table)
            cell |= {"last": day, "layer": layer}
            rows.setdefault(tuple(cell[column] for column in _KEY), []).append(cell)
    ordered = sorted(rows.items(), key=lambda item: (Version(item[0][1]), item[0]))
    runs = [_row(key, found) for key, found in ordered]
    layers = sorted({layer for row in runs for layer in row[COLUMNS.index("layers")]})
    text = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in runs)
    classes = ",\n  ".join(
        f"{json.dumps(layer)}: {json.dumps(_architectures(layer, table), separators=(',', ':'))}"
        for layer in layers
    )
    return (
        f'{{\n "columns": {json.dumps(COLUMNS)},\n "runs": [\n  {text}\n ],\n "layers": {{\n'
        f"  {classes}\n }}\n}}\n"
    )


def _row(key: tuple[str, ...], cells: Sequence[Cell]) -> list[Any]:
    """Return one row: what varies between its cells is listed, versions are the latest cell's."""
    latest = max(cells, key=lambda cell: cell["last"])
    several = [sorted({cell[one] for cell in cells if cell[one]}) for one in _SEVERAL]
    return [*key, *several, *(latest[column] for column in COLUMNS[-4:])]


def cells_of(record: Mapping[str, Any]) -> Iterator[Cell]:
    """Iterate over a record's right cells, each in one shape whatever kind of record it stands in."""
    kind = record.get("kind")
    if kind == "matrix cell":
        if record["outcome"] == "right" and not record["without"]:
            kernels = record["kernels"] if record["overlay"] else ""
            yield _cell(record, record["workers"][0], record["ranks"], record["dtype"], kernels)
    elif kind == "suite":
        yield from _of_suite(record, dtype="float32")
    elif kind == "gpu suite":
        where = {"capability": record["compute_capability"], "device": record["device"], "kind": "cuda"}
        yield from (cell | where for cell in _of_suite(record, dtype="bfloat16"))
    elif kind == "families":
        for found in record["families"]:
            if found["outcome"] == "right" and not found["without"]:
                yield _of_family(found, record["where"])


def _of_suite(record: Mapping[str, Any], dtype: str) -> Iterator[Cell]:
    for cell in record["cells"]:
        if cell["outcome"] == "right" and not cell.get("plan", {}).get("switched_off"):
            yield _cell(cell, cell["workers"][0], len(cell["workers"]), dtype, "")


def _of_family(found: Mapping[str, Any], where: str) -> Cell:
    device, _, dtype = where.partition(", ")
    on_gpu = device != "CPU"
    if on_gpu and "H200" not in device:
        raise SystemExit(f"known_runs: the compute capability of {device} is not known here")
    worker = {"runner": found["runner"], "device": device.partition("× ")[2] if on_gpu else "x86_64"}
    cell = _cell(found, worker, found["ranks"], dtype, "")
    return cell | ({"kind": "cuda", "capability": "9.0"} if on_gpu else {})


def _cell(
    found: Mapping[str, Any], worker: Mapping[str, Any], ranks: int, dtype: str, kernels: str
) -> Cell:
    versions = found["versions"]
    return {
        "downstream": versions["speculators"], "vllm": versions["vllm"].partition("+")[0],
        "kind": "cpu", "device": worker.get("device", "x86_64"), "capability": "",
        "runner": runner_of(worker["runner"]), "kernels": kernels, "model": found["model"],
        "ranks": ranks, "dtype": dtype, "python": found.get("python", ""), "torch": versions["torch"],
        "transformers": versions["transformers"],
    }  # fmt: skip


def runner_of(path: str) -> str:
    """Return a model runner's name for people: ``V1``, ``V2``, or ``V2 without Triton`` on a CPU."""
    if "standalone_model_runner" in path:
        return "V2 without Triton"
    return "V2" if ".worker.gpu.model_runner" in path or ".worker.cpu.model_runner" in path else "V1"


def architecture_of(model: str) -> str:
    """Return the architecture that a tiny model's configuration names."""
    from vllm_compat.trial.families import DRAFTED, FAMILIES
    from vllm_compat.trial.models import ARCHITECTURES

    if model in ARCHITECTURES:
        return ARCHITECTURES[model]
    family = FAMILIES.get(model) or DRAFTED[model]
    return family.published or family.model


def layer_of(architecture: str, release: str, table: Sequence[Mapping[str, Any]]) -> str:
    """Return the class of an architecture's decoder layers in a release; empty where none is known."""
    from packaging.version import Version

    for row in table:
        first, last = map(Version, row["releases"])
        if architecture in row["architectures"] and first <= Version(release) <= last:
            return str(row["layer"])
    return ""


def _architectures(layer: str, table: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({name for row in table if row["layer"] == layer for name in row["architectures"]})


def _undated(records: Path) -> dict[str, str]:
    """Return the day of each record that has no stamp, by its place below the records."""
    found = json.loads((records / "undated.json").read_text(encoding="utf-8"))["days"]
    return {name: day for day, names in found.items() for name in names}
