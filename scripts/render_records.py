#!/usr/bin/env python3
"""Write what is made from the records and the adapters' headers: pages in docs/, and data/known.json.

usage: render_records.py [--check]      (--check: exit 1 where a page is not up to date)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "scripts")]
RECORDS = ROOT / "records"


def main(arguments: list[str]) -> int:
    """Render the pages; return 1 where ``--check`` finds an old one."""
    import history
    import known_runs
    import performance
    import reliability
    import start_page
    from lab.matrix import known_releases
    from lab.matrix_report import read_records

    from vllm_compat.commands.register import as_markdown

    pages = {
        ROOT / "docs" / "compatibility.md": compatibility(),
        ROOT / "docs" / "adapters.md": as_markdown() + "\n",
        ROOT / "docs" / "families.md": families(),
        ROOT / "docs" / "history.md": history.page(next(records("history"))[1]),
        ROOT / "docs" / "performance.md": performance.page(records),
        ROOT / "docs" / "reliability.md": reliability.page(records),
        ROOT / "docs" / "start.md": start_page.page(read_records(RECORDS / "matrix"), known_releases()),
        ROOT / "src" / "vllm_compat" / "data" / "known.json": known_runs.known(RECORDS),
    }
    old = [page for page, text in pages.items() if not page.exists() or page.read_text() != text]
    if "--check" in arguments:
        for page in old:
            print(f"{page.relative_to(ROOT)} is out of date: run scripts/render_records.py")
        return 1 if old else 0
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    return 0


def records(kind: str, folder: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over (file name, record) of one kind."""
    for path in sorted((RECORDS / folder).rglob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("kind") == kind:
            yield path.relative_to(ROOT).as_posix(), record


def compatibility() -> str:
    """Return the page of what has been run."""
    parts = [
        "# What has been run",
        "",
        "Generated from `records/` by `scripts/render_records.py`; do not edit.",
        "",
        "Each entry is a run of stock speculators in real vLLM processes, with every row of every layer"
        " compared with transformers in float32 on the same weights. There are nine scenarios: 13 and 40"
        " prompts, 70/5/30 tokens, chunked prefill twice, shared prefixes, duplicates, one token, long"
        " prompts.",
        "",
        "How to read the figures: they are the largest relative deviation of a row (*worst*). About"
        " 1e-06 is what float32 costs, about 1e-02 is what bfloat16 costs, about 1 has nothing to do"
        " with the right row. In models with experts a router may choose differently in bfloat16: there"
        " the median counts, and the layers before the first router (*before routing*).",
        "",
        "`vllm-compat check` answers for every recorded release; this page says what was seen.",
        "",
    ]
    parts += every_release()
    parts += ["", "## CPU, float32, one by one", ""]
    cpu = [c for _, record in records("suite", "cpu") for c in record["cells"]]
    parts += table([c for c in cpu if c["outcome"] == "right"], gpu=False)
    for path, record in records("gpu suite"):
        gpus = f"{record['gpus']} × {record['device']}"
        parts += ["", f"## GPU: {gpus}, bfloat16", ""]
        parts.append(
            f"Driver {record['driver']}, compute capability {record['compute_capability']};"
            f" record [{path}](../{path})."
        )
        parts += ["", *table([c for c in record["cells"] if c["outcome"] == "right"], gpu=True)]
    parts += ["", "## Without one adapter", ""]
    parts += ["| where | speculators | vLLM | switched off | what happens |", "|---|---|---|---|---|"]
    for where, record in [
        *(("CPU", r) for _, r in records("suite", "cpu")),
        *((f"{r['gpus']} GPU", r) for _, r in records("gpu suite")),
    ]:
        for cell in record["cells"]:
            off = cell.get("plan", {}).get("switched_off", [])
            if off:
                words = " ".join(str(cell.get("error")).split())[:140].replace("|", "\\|")
                plan = cell["plan"]
                parts.append(
                    f"| {where} | {plan['downstream_version']} | {plan['vllm']} | `{', '.join(off)}` |"
                    f" {words} |"
                )
    for path, record in records("gpu finding"):
        parts += ["", "## A finding", "", record["finding"], "", f"Record: [{path}](../{path})."]
    for path, record in (*records("killed worker"), *records("killed driver")):
        parts += [
            "",
            f"## A {record['kind'].removeprefix('killed ')} killed in mid-run",
            "",
            f"{record['gpus']} × {record['device']}, tensor parallel {record['ranks']}, vLLM"
            f" {record['vllm']}: the run ended {record['seconds_to_the_end']} s after the kill with exit"
            f" status {record['exit_status']}; processes left {len(record['processes_left'])}, files in"
            f" /dev/shm left {len(record['shared_memory_left'])}, processes that hold shared rows left"
            f" {record['processes_with_slabs_left']}, GPU memory left"
            f" {', '.join(record['gpu_memory_left'])}. Its last line:",
            "",
            f"    {record['verdict']}",
            "",
            f"Record: [{path}](../{path}).",
        ]
    for path, record in records("preflight on a GPU", "gpu"):
        parts += preflighted(path, record)
    return "\n".join([*parts, ""])


def preflighted(path: str, record: dict[str, Any]) -> list[str]:
    """Return what preflight had predicted of runs, beside what they then had in force and took."""
    parts = [
        "",
        "## Preflight held against runs",
        "",
        f"{record['device']}, vLLM {record['vllm']}, speculators {record['speculators']}, random weights"
        " of published layer shapes; `scripts/gpu/preflight_record.py`. Predicted before the run, from"
        " the configuration alone.",
        "",
        "| model | backend predicted, in force | method of experts predicted, in force |"
        " memory predicted | measured | deviation |",
        "|---|---|---|---|---|---|",
    ]
    for case in record["cases"].values():
        asked, compared = case["predicted"]["asked"], case["compared"]
        name = f"{case['config']['architectures'][0]}, {case['config']['num_hidden_layers']} layers"
        predicted = ", ".join(asked["attention"])
        methods = ", ".join(asked["moe_methods"]) or "–"
        if not compared.get("measured_bytes"):
            cause = case["seen"]["error"].partition(":")[2].strip()
            parts.append(f"| {name} | {predicted}, not run | {methods}, not run ({cause}) | | | |")
            continue
        worker = case["seen"]["workers"][0]
        names = [method.split(": ") for method in worker["quant_methods"]]
        experts = sorted({method for module, method in names if "Expert" in module or "MoE" in module})
        parts.append(
            f"| {name} | {predicted}, {', '.join(worker['attention'])} |"
            f" {methods}, {', '.join(experts) or '–'} | {compared['predicted_bytes'] / 2**30:.1f} GiB |"
            f" {compared['measured_bytes'] / 2**30:.1f} GiB"
            f" ({compared['share_of_card']:.0%} of the card) |"
            f" {compared['deviation']:+.1%} |"
        )
    return [*parts, "", f"Record: [{path}](../{path})."]


def families() -> str:
    """Return the page of model families: what each is there for, and how far its rows were off."""
    from lab.decoder_layers import TABLE

    from lab import drafted, layers_page
    from vllm_compat.analysis.misread import as_markdown
    from vllm_compat.trial.families import FAMILIES

    runs: dict[tuple[str, ...], dict[str, str]] = {}
    notes: list[str] = []
    for _, record in records("families", "families"):
        for cell in record["families"]:
            runner = ", auxiliary" if cell["capture"] == "auxiliary" else ""
            version = cell["versions"].get("vllm", "")
            column = (record["where"] + runner, version, str(cell["ranks"]))
            runs.setdefault(column, {})[cell["model"]] = family_entry(cell, record["where"], notes)
    columns = sorted(runs)
    parts = [
        "# Model families",
        "",
        "Generated from `records/families/` by `scripts/render_records.py`; do not edit.",
        "",
        "Does capture read the right thing for models that are not like Llama? Each family is a tiny"
        " model with random weights, made so that what tells it from Llama shows in every row. Stock"
        " speculators 0.4.0.1 ran on it through vllm_compat in real vLLM processes, and every row was"
        " compared with transformers in float32 on the same weights.",
        "",
        "Entries are the largest relative deviation of a row: about 1e-06 is what float32 costs, about"
        " 1e-02 is what bfloat16 costs. With *(m)* it is the largest median, since a router over"
        " experts may choose differently in bfloat16.",
        "",
        "| family | there for | " + " | ".join(f"{w}, vLLM {v}, TP {r}" for w, v, r in columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for name, family in FAMILIES.items():
        entries = [runs[column].get(name, "") for column in columns]
        parts.append(f"| {name} | {family.why} | " + " | ".join(entries) + " |")
    for name in sorted({n for run in runs.values() for n in run} - set(FAMILIES)):
        entries = [runs[column].get(name, "") for column in columns]
        parts.append(f"| {name} | | " + " | ".join(entries) + " |")
    if notes:
        parts += ["", "## What vLLM does not run there", ""]
        parts += [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    parts += ["", *as_markdown()]
    lost = [(r["where"], cell) for _, r in records("families", "families") for cell in r["failed"]]
    if lost:
        parts += ["", "## Without an adapter", "", "Before it was there, or with it switched off.", ""]
        parts += ["| where | vLLM | family | without | what happens |", "|---|---|---|---|---|"]
    for where, cell in lost:
        words = str(cell["error"]).splitlines()[0][:160].replace("|", "\\|")
        off = f"`{', '.join(cell['without'])}`" if cell["without"] else "(an earlier vllm_compat)"
        version = cell["versions"].get("vllm", "")
        parts.append(f"| {where} | {version} | {cell['model']} | {off} | {words} |")
    parts += faults_section()
    parts += ["", *drafted.as_markdown(record for _, record in records("families", "families"))]
    parts += ["", *layers_page.as_markdown(json.loads(TABLE.read_text(encoding="utf-8")))]
    return "\n".join([*parts, ""])


def faults_section() -> list[str]:
    """Return what `lab.faults` gave, one table a record."""
    parts = ["", "## Faults put in on purpose"]
    for path, record in records("faults", "families"):
        under = "`apply()` and the canary" if record["canary"] else "`apply()` alone"
        where = f"{record['model']}, vLLM {record['versions']['vllm']}, TP {record['ranks']}"
        parts += [
            "",
            f"`lab.faults` on {where}, under {under}: {record['clean_runs']} clean runs raised nothing;"
            f" preempted requests ({record['preempted_requests']}) came out right; each fault was"
            f" stopped with these words ([record](../{path})):",
            "",
            "| fault | what stopped it |",
            "|---|---|",
        ]
        for name, words in record["faults"].items():
            said = str(words).removeprefix("Worker failed with error '").partition("', please check")[0]
            parts.append(f"| {name} | {said[:200]} |")
    return parts


def family_entry(cell: dict[str, Any], where: str, notes: list[str]) -> str:
    """Return one entry of the families' table; what vLLM alone fails on becomes a note."""
    if cell["outcome"] == "right":
        routed = "bfloat16" in where and cell["worst"] > 0.08
        return f"{cell['median']:.1e} (m)" if routed else f"{cell['worst']:.1e}"
    plain = cell.get("plain") or {}
    where = f"vLLM {cell['versions'].get('vllm', '')}, {where}"
    words = " ".join(str(cell["error"]).split())[:200]
    if plain and plain["outcome"] != "right":
        alone = " ".join(plain["error"].split())[:200]
        notes.append(f"{cell['model']}, {where}: `vllm.LLM` alone fails too: {alone}")
        return f"vLLM alone fails ({len(notes)})"
    notes.append(f"{cell['model']}, {where}: {words}")
    return f"refused or failed ({len(notes)})"


def every_release() -> list[str]:
    """Return the table of the matrix: each vLLM release with each speculators release."""
    from lab.matrix import known_releases
    from lab.matrix_report import Outcome, read_records, release_of, summary_table

    cells = read_records(RECORDS / "matrix")
    parts = [
        "## Every release",
        "",
        "On CPU builds of vLLM, in float32. An entry is *model × ranks: worst deviation*.",
        "",
        "- *overlay*: this release has no CPU build that loads, so its Python sources ran over the"
        " kernels of another release. That shows its Python side only.",
        "- *refused in words*: `apply()` says before anything loads that this pair cannot work.",
        "- *vLLM alone fails too*: so does `vllm.LLM` without speculators and vllm_compat, on that model"
        " ([below](#what-a-cpu-build-cannot-run-by-itself)).",
        "",
        *summary_table(cells, known_releases(), "not run yet"),
    ]
    if any("not run yet" in row for row in parts):
        parts += ["", "*Not run yet*: `python3 -m lab matrix RELEASE` runs it."]
    fails = [c for c in cells if c["outcome"] == Outcome.VLLM]
    if fails:
        parts += ["", "### What a CPU build cannot run by itself", ""]
        parts += ["| vLLM | model | ranks | vLLM alone says | |", "|---|---|---|---|---|"]
        for cell in fails:
            words = [cell["plain"]["error"], *_causes(cell["plain"].get("log", []))]
            said = [" ".join(str(w).split())[:160].replace("|", "\\|") for w in words[:2]]
            said += [""] * (2 - len(said))
            parts.append(
                f"| {release_of(cell)} | {cell['model']} | {cell['ranks']} | {said[0]} | {said[1]} |"
            )
    parts += ablated([c for c in cells if c["without"]], cells)
    shares = sorted(c["start"]["share"] for c in cells if "start" in c and not c["without"])
    if shares:
        parts += [
            "",
            f"Plan, patches and plugin took {shares[0]:.1%} to {shares[-1]:.1%} of a run's start"
            f" (imports, engine, workers), in the median {shares[len(shares) // 2]:.1%}.",
        ]
    return parts


def ablated(off: list[dict[str, Any]], cells: list[dict[str, Any]]) -> list[str]:
    """Return what runs without adapters showed: a table a pair, and one without the shim."""
    from lab.matrix import ELSEWHERE

    if not off:
        return []
    parts = [
        "",
        "### Adapters needed, by ablation",
        "",
        "On the oldest release, the newest, and those at which the plan changes: each adapter of a"
        " plan switched off in turn, everything else the same, on Llama or on the model given. The run"
        " then fails, in these words, or gives wrong rows; the same cell with all adapters is right."
        f" {', '.join(f'`{name}`' for name in sorted(ELSEWHERE) if not name.startswith('engine.'))} are"
        " for the pipeline's other steps,"
        " which a cell does not take; what fails without them stands in adapters.md. *Without any*"
        " leaves only"
        " the adapters for a machine without a GPU in force, so that it fails as stock does.",
        "",
    ]
    for pair in sorted(dict.fromkeys(map(_pair, off)), key=lambda p: p[0]):
        own = [r for r in off if _pair(r) == pair]
        parts += [f"speculators {pair[0]}, vLLM {pair[1]}:", ""]
        parts += ["| without | model | what happens |", "|---|---|---|"]
        for record in sorted(own, key=lambda r: (len(r["without"]) > 1, r["without"])):
            name = f"`{record['without'][0]}`" if len(record["without"]) == 1 else "*without any*"
            parts.append(f"| {name} | {record['model']} | {_what_happens(record)} |")
        whole = next((r for r in cells if r.get("not_shown") and _pair(r) == pair), None)
        if whole and (unshown := set(whole["not_shown"]) - ELSEWHERE):
            parts += ["", f"Shown by no cell of this release: {', '.join(sorted(unshown))}."]
        parts.append("")
    return parts[:-1]


def _pair(record: dict[str, Any]) -> tuple[str, str]:
    from lab.matrix_report import release_of

    return record["versions"]["speculators"], release_of(record)


def _what_happens(record: dict[str, Any]) -> str:
    """Return what a run without adapters came to, in a cell of a table."""
    if record["outcome"] == "right":
        return "**right: not needed**"
    if record.get("worst"):
        return f"no error, but wrong rows: {record['worst']:.1e}"
    error = " ".join(str(record.get("error")).split())
    return error[:140].replace("|", "\\|").replace("<", "\\<")


def _causes(log: list[str]) -> list[str]:
    """Return the errors that a log names, the most telling first."""
    general = ("Engine core initialization failed", "WorkerProc initialization failed", "See root")
    found = [row for row in log if "Error: " in row and not any(word in row for word in general)]
    return [row[row.index("Error: ") + 7 :] for row in found]


def table(cells: list[dict[str, Any]], *, gpu: bool) -> list[str]:
    """Return the rows of right cells."""
    more = " runner | attention | started by |" if gpu else ""
    lines = [
        f"| vLLM | speculators | model | ranks | capture |{more} worst | median | before routing |",
        "|---|---|---|---|---|" + ("---|---|---|" if gpu else "") + "---|---|---|",
    ]
    for cell in cells:
        worker = cell["workers"][0]
        scenarios = cell["scenarios"].values()
        median = max(s["median"] for s in scenarios)
        before = [s["worst_before_routing"] for s in scenarios if "worst_before_routing" in s]
        columns = [
            cell["versions"]["vllm"] + (" (overlay)" if cell.get("overlay") else ""),
            cell["versions"]["speculators"],
            cell["model"],
            str(len(cell["workers"])),
            worker["capture"],
        ]
        if gpu:
            runner = "V2" if ".gpu.model_runner" in worker["runner"] else "V1"
            quant = " INT4 Marlin" if "Marlin" in str(worker["quant_methods"]) else ""
            columns += [runner, ", ".join(worker["attention"]) + quant, worker["start_method"]]
        columns += [
            f"{cell['worst']:.1e}",
            f"{median:.1e}",
            f"{max(before):.1e}" if before else "",
        ]
        lines.append("| " + " | ".join(columns) + " |")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
