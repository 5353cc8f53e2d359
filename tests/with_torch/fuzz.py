"""What is thrown at whatever reads something from outside, and what may come of it.

Each target takes bytes, text or values that a strategy makes. It may return, or raise an error of ours
that is one sentence for people; any other error is a traceback, and a fault. Used by ``test_fuzz.py``
with few examples, and by ``scripts/campaign_fuzz.py`` with many, which keeps a record.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from hypothesis import strategies as st

from vllm_compat.analysis.layer_ids import layers_of
from vllm_compat.analysis.plan import loads
from vllm_compat.analysis.remote_code import remote_code_of
from vllm_compat.checks import batch
from vllm_compat.commands.preflight import judge
from vllm_compat.commands.rehearse.rehearse import shrink
from vllm_compat.commands.run import records, watch
from vllm_compat.commands.run.folder import numbers_to_leave_out, output_folder, start_index
from vllm_compat.commands.run.launch import Outcome, verdict
from vllm_compat.commands.verify import verify_directory
from vllm_compat.errors import UsageError, VllmCompatError
from vllm_compat.features import resume_samples
from vllm_compat.runtime import env, numbering, origin

BAD = (b"", b"\0" * 100, b"PK\x03\x04", b"PK\x05\x06" + b"\0" * 18, b"[" * 50000, b"\xff\xfe{}")

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def like(known: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return objects that look like a known one, with wrong values here and there."""
    usual = st.fixed_dictionaries({name: st.just(value) | values for name, value in known.items()})
    fewer = st.fixed_dictionaries({}, optional={name: st.just(v) | values for name, v in known.items()})
    return usual | fewer | values


def texts(known: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Return files of JSON: objects like a known one, some of them torn, and bytes that are none."""
    whole = like(known).map(lambda value: json.dumps(value).encode())
    torn = st.tuples(whole, st.integers(0, 200)).map(lambda pair: pair[0][: pair[1]])
    return whole | torn | st.binary(max_size=40) | st.sampled_from(BAD)


class Evil:
    """Writes a file when it is unpickled by somebody who does not look."""

    marker = ""

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.marker}",))


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        yield Path(name)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
    "text_config": {"num_hidden_layers": 4, "hidden_size": 64},
    "quantization_config": {"quant_method": "fp8"},
    "auto_map": {"AutoConfig": "own.Own"},
}


def configuration(content: bytes) -> None:
    with folder() as path:
        (path / "config.json").write_bytes(content)
        remote_code_of(path)
        for read in (lambda: layers_of(str(path), None), lambda: layers_of(str(path), (1, 2))):
            with contextlib.suppress(UsageError):
                read()
        judge.preflight(judge.Options(model=str(path), read_speed=1e9), ask=False)


def shrunken(config: Any) -> None:
    shrink(config if isinstance(config, dict) else {}, None)


def layer_ids(ids: list[int]) -> None:
    with folder() as path:
        (path / "config.json").write_text(json.dumps({**CONFIG, "text_config": {}} | {"auto_map": {}}))
        layers_of(str(path), ids)


token = st.integers() | st.floats() | st.text(max_size=2) | st.none() | st.booleans()
row = (
    st.lists(st.integers(0, 999), max_size=6)
    | st.lists(token, max_size=4)
    | st.lists(st.integers(-5, 2**40), max_size=4).map(numpy.array)
    | st.lists(st.integers(-5, 2**40), max_size=4).map(torch.tensor)
    | scalars
    | st.lists(st.integers(0, 9), max_size=3).map(lambda ids: [numpy.int64(n) for n in ids])
    | st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2)
)


def prompts(given: Any) -> None:
    batch.check_prompts(given, 1000)


def sample(seed: int, rows: int, layers: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    states = [torch.randn(rows, 8, generator=generator) for _ in range(layers)]
    file = io.BytesIO()
    ids = torch.arange(rows)
    torch.save({"input_ids": ids, "hidden_states": states, "loss_mask": torch.ones(rows)}, file)
    return file.getvalue()


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def odd_samples() -> list[bytes]:
    tiny = [torch.zeros(1) for _ in range(2000)]
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("data_0/data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    return [
        *BAD,
        saved([1, 2]),
        saved({"input_ids": 3, "hidden_states": "x", "loss_mask": None}),
        saved({"input_ids": torch.arange(4), "hidden_states": tiny, "loss_mask": torch.ones(4)}),
        saved({"input_ids": torch.zeros(2, 2), "hidden_states": [torch.zeros(3, 8)]}),
        saved({"input_ids": torch.arange(2), "hidden_states": [torch.zeros(2, 8).to_sparse()]}),
        saved({"hidden_states": [torch.full((3, 8), float("nan"))], "input_ids": torch.arange(3)}),
        pickle.dumps({"input_ids": [1]}),
        pickle.dumps(numpy.zeros(3)),
        zipped.getvalue(),
        b"EVIL",
    ]


whole_sample = st.builds(sample, st.integers(0, 3), st.integers(0, 4), st.integers(0, 3))
torn_sample = st.tuples(whole_sample, st.integers(0, 3000)).map(lambda pair: pair[0][: pair[1]])
flipped = st.tuples(whole_sample, st.integers(0, 3000), st.binary(min_size=1, max_size=4)).map(
    lambda three: three[0][: three[1]] + three[2] + three[0][three[1] + len(three[2]) :]
)
files = st.lists(
    whole_sample | torn_sample | flipped | st.sampled_from(odd_samples()), min_size=1, max_size=3
)


def samples(contents: list[bytes]) -> None:
    with folder() as path:
        Evil.marker = str(path / "executed")
        for number, content in enumerate(contents):
            content = pickle.dumps({"input_ids": Evil()}) if content == b"EVIL" else content
            (path / f"data_{number}.pt").write_bytes(content)
        names = set(os.listdir(path))
        verify_directory(path, jobs=1)
        assert set(os.listdir(path)) == names, "a file that was only read has done something"
        found = resume_samples.prepare(path)
        assert found is not None
        kept = resume_samples._Kept(path, found.next)
        for number in found.kept:
            if result := kept._read(number, list(range(3)), 2):
                assert result["input_ids"].tolist() == [0, 1, 2]
                assert [tuple(h.shape) for h in result["hidden_states"]] == [(3, 8)] * 2
        resume_samples.put_back(path)
        assert {name for name in os.listdir(path) if not name.startswith(".")} == names, "lost"


def plan(content: bytes) -> None:
    loads(content.decode(errors="replace"))


RECORD = {
    "kind": "run", "summary": "a", "samples": 3, "tokens": 4, "calls": 1, "saved": 3, "from_files": 0,
    "left_out": [1], "bad_sample": 5, "failed": False, "failure": None, "adapters": {"a": "b"},
    "plan": "1", "extracted": "x", "opened": 1.0, "written": 2.0, "started": True,
}  # fmt: skip


def record(contents: tuple[bytes, bytes]) -> None:
    with folder() as path:
        (path / "record.json").write_bytes(contents[0])
        (path / "12.record").write_bytes(contents[1])
        found = records.read_record(path / "record.json", path, ())
        verdict(Outcome(returncode=1, seconds=1.0, record=found))


SAID = {
    "pid": 12, "started": 3, "entered": 1.0, "changed": 2.0, "phase": "extracting", "role": "program",
    "samples": 3, "samples_to_do": 9, "tokens_per_second": 3.0, "calls": 2, "extracting_seconds": 1.0,
    "call_since": 1.0, "shards": 1, "of": 3, "loading_seconds": 1.0, "error": "x", "error_at": 1.0,
}  # fmt: skip


def heartbeats(contents: list[bytes]) -> None:
    with folder() as path:
        for number, content in enumerate(contents):
            (path / f"{number + 10}.json").write_bytes(content)
        seen = watch.Watch(path, stream=io.StringIO(), every=0.0, status_file=path / "status")
        seen.look(10)
        seen.end("failed", "verdict", 1)
        watch.first_error(watch.read_processes(path))


STATUS = {
    "kind": "status", "state": "running", "updated": 1.0, "started": 0.0, "pid": 1, "line": "x",
    "command": ["a"], "model": "m", "stall": None,
}  # fmt: skip


def status(content: bytes) -> None:
    with folder() as path:
        (path / "status").write_bytes(content)
        watch.render(watch.read_status(path / "status"), time.time())


def environment(text: str) -> None:
    text = text.replace("\0", "").encode("utf-8", "ignore").decode()
    with mock.patch.dict(os.environ, {env.VLLM_COMPAT_RESUME: text, env.VLLM_COMPAT_ORIGIN: text}):
        numbering.told()
        origin.difference(text)
        env.allow_list_shuts_us_out({"VLLM_PLUGINS": text, "PYTHONPATH": text})
        env.child_environment({"PYTHONPATH": text, env.VLLM_COMPAT_PLAN: text})


def words(given: list[str]) -> None:
    output_folder(given or ["x"])
    start_index(given)
    numbers_to_leave_out(given)


def left_out(content: bytes) -> None:
    with folder() as path:
        (path / numbering.LIST).write_bytes(content)
        resume_samples.prepare(path)


NOTES = {"folder": "/x", "next": 3, "kept": True, "left_out": [1, 2]}
ORIGIN = {"context": ["a", ""], "packages": {"json": {"folder": "x", "stamps": []}}}
word = st.text(max_size=6) | st.sampled_from(
    ["--output-dir", "x.py", "17,4", "--start-idx=-3", "\ud800"]
)
WHOLE_PLAN = {
    "schema": 1, "downstream": "speculators", "downstream_version": "0.4.0", "vllm": "0.16.0",
    "roles": {"package": "speculators"}, "guarded": [], "switched_off": [], "steps": [],
    "environment": {"python": "3.11", "versions": [["a", "1"]], "device": "cpu", "features": []},
}  # fmt: skip
ids = st.lists(st.integers() | st.integers(-2, 8), max_size=4)

TARGETS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None]]] = {
    "a model's configuration": (texts(CONFIG), configuration),
    "a configuration to shrink": (like(CONFIG), shrunken),
    "layer ids": (ids, layer_ids),
    "prompts": (st.lists(row, max_size=3) | row, prompts),
    "files of samples": (files, samples),
    "plans": (texts(WHOLE_PLAN), plan),
    "records of a run": (st.tuples(texts(RECORD), texts(RECORD)), record),
    "what processes say": (st.lists(texts(SAID), max_size=3), heartbeats),
    "status files": (texts(STATUS), status),
    "environment variables": (
        st.text(max_size=30) | (like(NOTES) | like(ORIGIN)).map(json.dumps),
        environment,
    ),
    "words of the command line": (st.lists(word, max_size=5), words),
    "lists of what is left out": (texts({"left_out": [1, 2]}), left_out),
}


def judge_one(target: Callable[[Any], None], value: Any) -> str:
    """Return ``taken`` or ``refused in words``; raise where it is neither."""
    try:
        target(value)
    except VllmCompatError as error:
        said = str(error)
        assert said.strip(), "an error without words"
        assert not re.search(r"Traceback|\n\s+File ", said), said
        return "refused in words"
    return "taken"
