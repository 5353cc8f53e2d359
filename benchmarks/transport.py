#!/usr/bin/env python3
"""The way out of the worker alone, against a memcpy of the same bytes: no vLLM, no device.

usage: transport.py [--requests 8] [--tokens 2048] [--width 1024] [--layers 4] [--rounds 15] [--out FILE]
A worker process holds captured rows; the driver asks for them and does what the downstream does
(`h.clone().cpu()`). One thread each. `shared` is vllm_compat's way, `pickled` is a reply that holds the
tensors. Rounds alternate; the medians of the ratios to a memcpy in the same round are told.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import time
from pathlib import Path
from typing import Any


def worker(pipe: Any, options: argparse.Namespace) -> None:
    """Answer with the rows, in the way that is asked for."""
    import torch

    from vllm_compat.capture.rows import RowStore, Span
    from vllm_compat.capture.transfer import SharedRowStore

    torch.set_num_threads(1)
    rows = options.requests * options.tokens
    captured = [torch.randn(rows, options.width).to(torch.bfloat16) for _ in range(options.layers)]
    spans = [Span(str(i), 0, options.tokens) for i in range(options.requests)]
    shared = SharedRowStore(options.layers, torch.device("cpu"))
    plain = RowStore(options.layers)
    while (ask := pipe.recv()) != "end":
        if ask == "shared":
            shared.clear()
            shared.expect({s.request_id: s.count for s in spans})
            shared.add(spans, captured)
            pipe.send_bytes(pickle.dumps(shared.shared(range(options.layers))))
        else:
            plain.add(spans, captured)
            reply = plain.collect(lambda parts: torch.cat(list(parts)))
            pipe.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("requests", 8), ("tokens", 2048), ("width", 1024), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=worker, args=(theirs, options))
    process.start()
    size = options.requests * options.tokens * options.width * options.layers * 2
    source, target = torch.randn(size // 4), torch.zeros(size // 4)

    def memcpy() -> None:
        target.copy_(source)

    def ask(how: str) -> None:
        pipe.send(how)
        states = pickle.loads(pipe.recv_bytes())
        for layers in states.values():
            [h.clone().cpu() for h in layers]

    ways = {"memcpy": memcpy, "shared": lambda: ask("shared"), "pickled": lambda: ask("pickled")}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds + 2):
        for way, run in ways.items():
            begin = time.perf_counter()
            run()
            if number >= 2:
                seconds[way].append(time.perf_counter() - begin)
    pipe.send("end")
    process.join()
    pairs = {
        way: [one / base for one, base in zip(times, seconds["memcpy"], strict=True)]
        for way, times in seconds.items()
    }
    record = {
        "kind": "transport",
        "bytes": size,
        "rounds": options.rounds,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "of_memcpy": {way: round(statistics.median(ratios), 2) for way, ratios in pairs.items()},
        "median_seconds": {way: round(statistics.median(s), 5) for way, s in seconds.items()},
    }
    print(json.dumps(record, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
