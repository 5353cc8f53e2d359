"""What an owner of a card can attach to an issue: a bench's record without what is private.

Every field is taken by name and held against ``schemas/bench_report.schema.json``. A text that does not
have the form of its field is left out, so that no path, prompt, host or user name gets into the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from vllm_compat.errors import UsageError

SCHEMA_VERSION = 1
KIND = "bench report"
UNGUARDED = ("plain", "stock")
"""Modes without the library's guards."""

UNKNOWN = "unknown"


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a report."""
    text = resources.files("vllm_compat").joinpath("schemas/bench_report.schema.json")
    found: dict[str, Any] = json.loads(text.read_text(encoding="utf-8"))
    return found


def read_json(option: str, path: Path, kind: str, otherwise: str) -> dict[str, Any]:
    """Return a record of a kind that an option names; ``otherwise`` says what another file is not.

    Raises:
        UsageError: It cannot be read, is no JSON, or is of another kind.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}.") from None
    except ValueError:
        raise UsageError(f"{option} {path} is no JSON file.") from None
    if not isinstance(found, dict) or found.get("kind") != kind:
        raise UsageError(f"{option} {path} {otherwise}.")
    return found


def read_preflight(path: Path, ranks: int | None = None) -> dict[str, Any]:
    """Return what ``vllm-compat preflight --json`` has written.

    Args:
        path: The file.
        ranks: How many ranks the bench has; None where that is not known yet.

    Raises:
        UsageError: It is no such file, or was asked about another number of ranks.
    """
    found = read_json(
        "--preflight", path, "preflight", "was not written by `vllm-compat preflight --json`"
    )
    options = found.get("options")
    asked = options.get("devices") if isinstance(options, dict) else None
    if ranks is not None and asked != ranks:
        raise UsageError(
            f"--preflight {path} was asked about {asked} ranks, and the bench has {ranks}: ask it with"
            " the same --tensor-parallel-size."
        )
    return found


def report_of(record: Mapping[str, Any], preflight: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the report of a bench's record, and of what preflight had said before it.

    Raises:
        UsageError: Nothing was measured, or a record lacks what every one of this vllm_compat has.
    """
    try:
        return _report_of(record, preflight)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"No report can be made of this record: a field is missing or not as bench and preflight"
            f" write it ({type(error).__name__}: {error})."
        ) from error


def _report_of(record: Mapping[str, Any], preflight: Mapping[str, Any] | None) -> dict[str, Any]:
    forms = schema()["$defs"]
    ranks = record["tensor_parallel_size"]
    batches = [_batch(record, name) for name in batches_of(record)]
    if not batches:
        raise UsageError("There is nothing to report: no mode has measured anything.")
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "vllm_compat": {key: record["vllm_compat"][key] for key in ("version", "commit", "date")},
        "versions": {
            key: _text(record.get(key), forms["version"])
            for key in ("vllm", "speculators", "torch", "python")
        },
        "machine": _machine(record, forms),
        "model": {
            "weights": _text(record["model"], forms["weights"], "the user's own"),
            "architecture": _text(record.get("architecture"), forms["class"], None),
        },
        "tensor_parallel_size": ranks,
        "calls": record["calls"],
        "backend": _text(record.get("backend"), forms["class"], None),
        "plan": _plan(record, forms),
        "batches": batches,
        "failed": [name for name, mode in record["modes"].items() if "failed" in mode],
        "measured": _measured(record, forms),
        "predicted": _predicted(preflight, forms) if preflight else None,
    }


def _text(value: object, form: Mapping[str, Any], otherwise: str | None = UNKNOWN) -> str | None:
    """Return a text that has the form of its field, else what stands in for it."""
    fits = isinstance(value, str) and re.search(form["pattern"], value) and "\n" not in value
    return str(value) if fits else otherwise


def _texts(values: Iterable[object], form: Mapping[str, Any]) -> list[str]:
    found = (_text(value, form, None) for value in values)
    return list(dict.fromkeys(text for text in found if text is not None))


def batches_of(record: Mapping[str, Any]) -> list[str]:
    """Return the batches of a bench's record, as ``prompts x tokens``, in their order."""
    modes = record["modes"].values()
    return list(dict.fromkeys(name for mode in modes for name in mode.get("batches", {})))


def _machine(record: Mapping[str, Any], forms: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": _text(record.get("device"), forms["device"]),
        "cores": record["cores"],
    }
    if record.get("driver"):
        found["driver"] = _text(record["driver"], forms["version"])
    for key in ("compute_capability", "memory_mib", "gpus"):
        if key in record:
            found[key] = record[key]
    return found


def _batch(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the speeds of one batch by mode; a batch that a guard refused has none."""
    prompts, tokens = map(int, name.split("x"))
    entries = {mode: found.get("batches", {}).get(name) for mode, found in record["modes"].items()}
    base = (entries.get("plain") or {}).get("tokens_per_second")
    modes = {}
    for mode, entry in entries.items():
        if entry is None:
            continue
        speed = entry.get("tokens_per_second")
        guards = "refused" if speed is None else "passed"
        modes[mode] = {
            "tokens_per_second": speed,
            "of_plain": round(speed / base, 4) if speed and base else None,
            "guards": "not in force" if mode in UNGUARDED else guards,
        }
    return {"prompts": prompts, "tokens": tokens, "modes": modes}


def _served(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mode that says how the library served: the default one, if it was measured."""
    names = [name for name in ("auto", "public", "auxiliary", "rpc") if name in record["modes"]]
    found = (record["modes"][name] for name in names)
    return next((mode for mode in found if "failed" not in mode), {})


def _plan(record: Mapping[str, Any], forms: Mapping[str, Any]) -> dict[str, Any] | None:
    plan = _served(record).get("plan")
    if not plan:
        return None
    lists = {key: _texts(plan[key], forms["name"]) for key in ("adapters", "features", "switched_off")}
    return {**lists, "engine": plan["engine"]}


def _methods(named: Iterable[str]) -> set[str]:
    """Return the classes of ``module: method``."""
    return {name.partition(": ")[2] for name in named}


def _measured(record: Mapping[str, Any], forms: Mapping[str, Any]) -> dict[str, Any] | None:
    mode = _served(record)
    if "worker" not in mode:
        return None
    return {
        "attention": _texts(sorted(mode["worker"]["attention"]), forms["class"]),
        "methods": _texts(sorted(_methods(mode["worker"]["quant_methods"])), forms["class"]),
        "runner": mode["runner"] if mode.get("runner") in ("V1", "V2") else UNKNOWN,
        "peak_bytes": [rank["device"] for rank in mode.get("worker_peak_bytes", [])],
    }


def _predicted(preflight: Mapping[str, Any], forms: Mapping[str, Any]) -> dict[str, Any]:
    asked = preflight.get("asked") or {}
    memory = preflight.get("memory")
    parts = ("weights", "kv_cache", "activations", "context", "device", "total")
    return {
        "exit_status": preflight["exit_status"],
        "attention": _texts(sorted(asked.get("attention", {})), forms["class"]),
        "methods": _texts(sorted(_methods(asked.get("methods", ()))), forms["class"]),
        "memory": {part: memory[part] for part in parts} if memory else None,
    }
