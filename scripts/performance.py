"""The page docs/performance.md, made from the records of `vllm-compat bench` and its companions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Records = Callable[[str], Iterator[tuple[str, dict[str, Any]]]]

REPORT = "bench report"
MEANING = {
    "plain": "`LLM.generate`, one token",
    "stock": "stock speculators as it is",
    "rpc": "vllm_compat, pickled replies",
    "auto": "vllm_compat",
    "auxiliary": "vllm_compat, auxiliary states",
    "public": "vllm_compat, second engine",
}


def page(records: Records) -> str:
    """Return the page."""
    from vllm_compat.capture.slabs import LIMIT, SLAB
    from vllm_compat.features.save_backlog import BOUND, STALL

    gib = 2**30
    parts = [
        "# Performance",
        "",
        "Generated from `records/` by `scripts/render_records.py`; do not edit. Ratios are of plain"
        " prefill of the same batch on the same machine in the same run, medians of the calls. Measure"
        " your own with `vllm-compat bench` (`--shape 8b` for the table below, `--model` for a model,"
        " `--save DIR` for saving, `--plot FILE.svg` for a picture).",
        "",
        "![seconds a call, by phase](performance.svg)",
        "",
        "## Extraction",
        "",
    ]
    benches = list(records("bench"))
    for path, record in benches:
        if not _of_kimi(record):
            parts += _bench(path, record)
    parts += [
        "",
        "Where the time goes: *forward* is the model's steps, *reply* the answer that carries the rows,"
        " *messages* the other calls to the workers, *rest* requests, copies and checks in the driver."
        " Stock pickles device tensors into its reply and copies them once more; vllm_compat copies each"
        " layer's rows to page-locked shared memory on a stream of its own while the next layers run,"
        " the reply says where they are, and the downstream's `clone()` takes them over where they lie.",
        "",
        "## Kimi-K2.5 at its true widths",
        "",
        "`vllm-compat bench --shape kimi-k2.5 --layers 12`: INT4 experts (Marlin), weights drawn by"
        " vLLM's dummy loader, on one card, which holds 12 of the 61 layers. The whole model on eight"
        " cards has not been timed by it.",
    ]
    for path, record in benches:
        if _of_kimi(record):
            parts += _bench(path, record)
    parts += [
        "",
        "What bounds it is the experts: next to nothing of a call is reply, messages or scheduling.",
        *_reports(list(records(REPORT))),
        "",
        "## Saving",
        "",
        "Stock's script saves each sample with `torch.save` from four threads while the next batch runs."
        " Beside it: the same saving without extraction, and `cp -r` of the same files in the same"
        " folder. What is slowest bounds a run.",
        "",
        "| device | where | tokens/s with saving | of plain | GB/s extracted and saved"
        " | GB/s saved alone | GB/s cp |",
        "|---|---|---|---|---|---|---|",
    ]
    for _, record in benches:
        for saved in record["modes"].get("auto", {}).get("saving", []):
            base = record["modes"]["plain"]["batches"][saved["batch"]]["tokens_per_second"]
            speeds = saved["gb_per_second"]
            parts.append(
                f"| {_device(record)} | {saved['filesystem']} | {saved['tokens_per_second']:,.0f} |"
                f" {saved['tokens_per_second'] / base:.2f} | {speeds['extraction and saving']:.2f} |"
                f" {speeds['saving alone']:.2f} | {speeds['cp']:.2f} |"
            )
    parts += [
        "",
        "Stock's queue of saves has no bound. With vllm_compat the next `generate()` waits while more"
        f" than {BOUND / gib:g} GiB of tensors (an eighth of the memory where that is less) lie in work"
        " that was submitted to thread pools and has not ended. Results that a caller keeps do not"
        f" count; if nothing ends for {STALL:.0f} s, extraction goes on and says so.",
        "",
    ]
    for path, record in records("save backlog"):
        parts += _backlog(path, record)
    parts += [
        "",
        "## Memory",
        "",
        "- Results are views of anonymous shared memory (memfd) that nobody else writes to as long as"
        " any tensor over them lives; each tensor has a storage of exactly its own rows.",
        f"- At most {LIMIT / gib:g} GiB of them (a quarter of the memory where that is less) are handed"
        " over; above that rows are copied into the caller's own memory, as stock does. So there is"
        " never more shared memory than that limit and twice the largest batch, rounded up to slabs of"
        f" {SLAB / 2**20:g} MiB.",
        "- A process that forks while it holds results leaves those slabs to the child; nobody writes to"
        " them again, and the next batch gets new ones, which costs time.",
        "- In two ways a result differs from stock's: its storage cannot grow in place (`resize_`), and"
        " a few rows kept of a batch keep a slab from being let go, though not from being used again.",
        "- The size of `/dev/shm` does not matter, and nothing is left there or anywhere else, however"
        " the processes end.",
        "- Where driver and worker cannot share memory, rows go through replies, and the record of the"
        " run says why (`transfer`); where memory cannot be page-locked, copies are slower, and it says"
        " so too.",
        "",
        "## The same bits",
        "",
        "Digests of every row of every layer in nine scenarios (13 and 40 prompts, 70/5/30 tokens,"
        " chunked prefill twice, shared prefixes, duplicates, one token, long prompts), through shared"
        " memory and through replies; then ten thousand requests in a row.",
        "",
        "| device | vLLM | speculators | runner | ranks | scenarios with the same bits |"
        " requests in a row | driver, MiB | worker, MiB | shared, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for _, record in records("transfers"):
        parts += _transfers(record)
    parts += [
        "",
        "Memory is told after a tenth of the requests and at the end.",
        "",
        "## The transport alone, on a CPU",
        "",
    ]
    for path, record in records("transport"):
        ways = record["of_memcpy"]
        parts.append(
            f"{record['bytes'] / 2**20:.0f} MiB from a worker process to tensors that the driver owns"
            f" (`benchmarks/transport.py`, {record['cores']} cores, one thread each): shared memory"
            f" takes {ways['shared']:.2f} times a memcpy of the same bytes, a pickled reply"
            f" {ways['pickled']:.1f} times. Record: [{path}](../{path})."
        )
    proofs = list(records("proof cost"))
    if proofs:
        parts += ["", "## Proofs", ""]
    for path, record in proofs:
        parts += _proofs(path, record)
    checks = list(records("check speed"))
    if checks:
        parts += ["", "## check", ""]
    for path, record in checks:
        parts += _check(path, record)
    return "\n".join([*parts, ""])


def _reports(reports: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return what owners of cards have sent: `vllm-compat bench --report`."""
    parts = [
        "",
        "## What owners of cards have reported",
        "",
        "Have you a card that is not in these tables, of compute capability 12.0 above all? Run"
        " `vllm-compat preflight MODEL --json > preflight.json`, then `vllm-compat bench --model MODEL"
        " --report report.json --preflight preflight.json`, with the same `--tensor-parallel-size`, and"
        " attach `report.json` to an issue. It has versions, device, plan, ratios, the guards' verdict"
        " and what preflight had predicted; no paths, prompts, host or user names. Read it first: it is"
        " short. `scripts/take_report.py` holds it against its schema and takes it into the records.",
        "",
    ]
    if not reports:
        return [*parts, "There is no report yet."]
    parts += [
        "| device | vLLM, speculators | model | prompts x tokens | mode | of plain | guards |"
        " backend: predicted, in force | GiB a rank: predicted, held by PyTorch | record |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for path, report in reports:
        for batch in report["batches"]:
            for mode, found in batch["modes"].items():
                if mode != "plain":
                    parts.append(_reported(path, report, batch, mode, found))
        parts += [_reported_failure(path, report, mode) for mode in report["failed"]]
    return parts


def _reported_device(report: dict[str, Any]) -> list[str]:
    machine, versions, model = report["machine"], report["versions"], report["model"]
    capability = machine.get("compute_capability")
    driver = machine.get("driver")
    device = f"{report['tensor_parallel_size']} × {machine['device']}"
    device += f" ({capability}, driver {driver})" if capability else ""
    name = model["architecture"] or "?"
    return [device, f"{versions['vllm']}, {versions['speculators']}", f"{name}, {model['weights']}"]


def _reported(
    path: str, report: dict[str, Any], batch: dict[str, Any], mode: str, found: dict[str, Any]
) -> str:
    measured, predicted = report["measured"] or {}, report["predicted"] or {}
    backends = [", ".join(side.get("attention", [])) or "–" for side in (predicted, measured)]
    memory = predicted.get("memory")
    sizes = [
        f"{memory['total'] / 2**30:.1f}" if memory else "–",
        f"{max(measured['peak_bytes']) / 2**30:.1f}" if any(measured.get("peak_bytes", ())) else "–",
    ]
    columns = [
        *_reported_device(report),
        f"{batch['prompts']}x{batch['tokens']}",
        MEANING[mode],
        "–" if found["of_plain"] is None else f"**{found['of_plain']:.2f}**",
        found["guards"],
        " / ".join(backends),
        " / ".join(sizes),
        f"[{path.rpartition('-')[2].removesuffix('.json')}](../{path})",
    ]
    return "| " + " | ".join(columns) + " |"


def _reported_failure(path: str, report: dict[str, Any], mode: str) -> str:
    link = f"[{path.rpartition('-')[2].removesuffix('.json')}](../{path})"
    columns = [*_reported_device(report), "", MEANING[mode], "failed", "", "", "", link]
    return "| " + " | ".join(columns) + " |"


def _proofs(path: str, record: dict[str, Any]) -> list[str]:
    shape, versions = record["shape"], record["versions"]
    parts = [
        "`python -m lab.proof_cost`: the time in the proofs' own code and hooks, as a share of a batch"
        " without them (processor seconds of a worker's main thread; one prompt and one step a batch,"
        f" {record['layers_captured']} layers captured of {shape['layers']} of width"
        f" {shape['hidden_size']}, bfloat16, vLLM {versions['vllm']}, {record['cores']} cores). A run's"
        f" first batch is watched, and of {record['run_batches']} those that a power of two or a"
        f" multiple of 64 falls on. Setting the proofs up takes {1000 * record['set_up_seconds']:.1f} ms"
        " once."
        f" Record: [{path}](../{path}).",
        "",
        "| tokens | a batch, ms | first batch | a watched batch | one that is not |"
        f" {record['run_batches']} batches |",
        "|---|---|---|---|---|---|",
    ]
    for size, found in record["sizes"].items():
        shares = [found[key] for key in ("first_batch", "watched_batch", "other_batch", "run")]
        told = " | ".join(f"{share:.2%}" for share in shares)
        parts.append(f"| {size} | {1000 * found['batch_seconds']:.0f} | {told} |")
    return [*parts, ""]


def _check(path: str, record: dict[str, Any]) -> list[str]:
    figures = record["figures"]

    def told(key: str, form: str = ".2f") -> str:
        return format(figures[key], form) if key in figures else ""

    rows = [
        ("no bytecode at all", "bare"),
        ("no bytecode of packages", "cold"),
        ("again", "again"),
        ("again, `--no-cache`", "again, without the cache"),
    ]
    return [
        "`benchmarks/check.py`: fresh processes, `check` of one pair beside `import vllm`"
        f" ({record['vllm']}, Python {record['python']}, {record['cores']} cores, load"
        f" {record['load']}), and `--all` of"
        f" {record['downstreams']} speculators on every recorded release. Peak memory"
        f" {told('pair: peak memory', '.0f')} MiB, with `--all` {told('all: peak memory', '.0f')} MiB."
        f" Record: [{path}](../{path}).",
        "",
        "| | one pair, s | `import vllm`, s | times faster | `--all`, s |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {told(f'pair: {key}')} | {told(f'import: {key}')} |"
            f" {told(f'times: {key}', '.0f')} | {told(f'all: {key}')} |"
            for name, key in rows
        ),
        "",
    ]


def _device(record: dict[str, Any]) -> str:
    if record.get("device") == "cpu":
        return f"CPU run, {record['cores']} cores"
    ranks = record.get("tensor_parallel_size", record.get("gpus", 1))
    return f"{ranks} × {record['device']}"


def _of_kimi(record: dict[str, Any]) -> bool:
    return "Kimi-K2.5" in str(record["model"])


def _bench(path: str, record: dict[str, Any]) -> list[str]:
    from vllm_compat.commands.bench import batches_of, parts_of, shares_of, speed

    layers = next(len(m["layer_ids"]) for m in record["modes"].values() if "layer_ids" in m)
    driver = f", driver {record['driver']}" if record.get("driver") else ""
    how = f"eager, {record['backend']}" if record.get("backend") else "eager"
    parts = [
        "",
        f"**{_device(record)}**{driver}, vLLM {record['vllm']}, speculators {record['speculators']},"
        f" torch {record['torch']}; {record['model']}, bfloat16, {how}, {layers} layers captured,"
        f" medians of {record['calls']} calls. Record: [{path}](../{path}).",
        "",
        "| prompts x tokens | what | of plain | tokens/s | share of time |",
        "|---|---|---|---|---|",
    ]
    for batch in batches_of(record):
        base = speed(record, "plain", batch)
        for mode in record["modes"]:
            found = speed(record, mode, batch)
            if found is None or not base:
                continue
            shares = ", ".join(f"{k} {v:.0%}" for k, v in shares_of(record, mode, batch).items())
            parts.append(
                f"| {batch} | {MEANING[mode]} | **{found / base:.2f}** | {found:,.0f} | {shares} |"
            )
    if spent := {batch: parts_of(record, batch) for batch in batches_of(record)}:
        told = (
            f"{batch}: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
            for batch, shares in spent.items()
            if shares
        )
        if said := "; ".join(told):
            parts += ["", f"What takes the time in the decoder layers: {said}."]
    return parts


def _backlog(path: str, record: dict[str, Any]) -> list[str]:
    def gb(size: float) -> str:
        return f"{size / 1e9:.2f}"

    lines = [
        f"{_device(record)}, saves slowed to {gb(record['disk_bytes_per_second'])} GB/s,"
        f" {record['bounded']['batches']} batches of {gb(record['bounded']['batch_bytes'])} GB. Record:"
        f" [{path}](../{path}).",
        "",
        "| | most GB waiting | most GB shared | driver's own GB | seconds of extraction | with all"
        " saves |",
        "|---|---|---|---|---|---|",
    ]
    titles = {"bounded": "with the bound", "unbounded": "without `save_backlog`"}
    for name, title in titles.items():
        run = record[name]
        lines.append(
            f"| {title} | {gb(run['most_waiting'])} | {gb(run['most_shared_memory'])} |"
            f" {gb(run['most_driver_memory'])} | {run['seconds_of_extraction']} |"
            f" {run['seconds_with_saves']} |"
        )
    return lines


def _transfers(record: dict[str, Any]) -> list[str]:
    lines = []
    cells = record["cells"]
    for cell in cells:
        if cell["transfer"] != "auto":
            continue
        same = [
            other["digests"]
            for other in cells
            if other["transfer"] == "rpc"
            and all(other[key] == cell[key] for key in ("speculators", "runner", "ranks"))
        ]
        equal = sum(cell["digests"][name] == same[0].get(name) for name in cell["digests"])
        columns = [
            _device({**record, "tensor_parallel_size": cell["ranks"]}),
            record["vllm"],
            cell["speculators"],
            cell["runner"],
            str(cell["ranks"]),
            f"{equal} of {len(cell['digests'])}",
        ]
        if run := cell.get("endurance"):
            early, late = run["after_a_tenth"], run["at_the_end"]
            columns.append(f"{run['requests']:,}")
            for process, key in ((0, "resident"), (1, "resident"), (1, "shared")):
                columns.append(f"{early[process][key] / 1024:.1f} → {late[process][key] / 1024:.1f}")
        else:
            columns += ["", "", "", ""]
        lines.append("| " + " | ".join(columns) + " |")
    return lines
