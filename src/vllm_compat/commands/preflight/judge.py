"""Say before anything loads what a run on a model will meet: no weights, no GPU, seconds.

Most of it is read from files: the configuration, the index of the weights, the tokenizer's
configuration. What vLLM would choose (attention backend, methods of linear layers and experts) and how
large one rank is, is asked from the installed vLLM itself, in a process of its own
(:mod:`vllm_compat.commands.preflight.stand_in`); that costs one import of vLLM and a second or two.

Figures: weights of one rank and bytes of the KV cache per token are those of vLLM's own modules. The
KV cache is what stock takes, a fifth of ``gpu_memory_utilization`` of what is free when the weights are
there. The activations of a prefill and the memory of CUDA itself are estimates, with their formulas in
:func:`activation_bytes` and :data:`CONTEXT`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from vllm_compat.analysis.layer_ids import config_path, layers_of, read_config
from vllm_compat.analysis.misread import architectures_of, before_loading
from vllm_compat.analysis.remote_code import remote_code_of, sentence
from vllm_compat.analysis.streams import refusal
from vllm_compat.commands.run_options import RunTerms
from vllm_compat.errors import UsageError, VllmCompatError

SCHEMA_VERSION = 1
GIB = 2**30

CACHE_FRACTION = 0.2
"""The share of ``free memory × gpu_memory_utilization`` that stock gives the KV cache
(``CACHE_MEMORY_FRACTION`` in ``vllm_hidden_states_generator.py``, 0.3.0 to 0.4.0.1)."""

CONTEXT = (0.7, 0.9)
"""GiB that CUDA's context, cuBLAS and Triton take on a rank, and NCCL besides where there are several.
An estimate; the record of a run on one H200 is in ``records/gpu``."""

LEAST_TOKENS = 8192
"""Tokens of a step, at least (``MIN_MAX_BATCHED_TOKENS`` of stock)."""

READ_SECONDS = 0.4
ASK_SECONDS = 300.0

_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class Options(RunTerms):
    """What the run will be given, in stock's own terms, and the device that it will have.

    ``capability`` and ``device_memory`` (bytes) describe a device that need not be here; None asks
    about the machine's own. ``devices`` is the tensor parallel size. ``samples`` or, in the server flow,
    ``tokens`` will be saved.
    """

    capability: tuple[int, int] | None = None
    device_memory: int | None = None
    samples: int | None = None
    tokens: int | None = None
    output_dir: Path | None = None
    read_speed: float | None = None
    downstream: str = "speculators"


@dataclass(frozen=True)
class Item:
    """One question and its answer: ``ok``, ``note``, ``fail`` or ``unknown``."""

    question: str
    state: str
    answer: str


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    weights: int
    kv_cache: int
    activations: int
    context: int
    device: int

    @property
    def total(self) -> int:
        """All of it at the height of a prefill."""
        return self.weights + self.kv_cache + self.activations + self.context


@dataclass(frozen=True)
class Report:
    """The answers, what vLLM said, and the memory of one rank where both are known."""

    options: Options
    items: tuple[Item, ...]
    asked: Mapping[str, Any] = field(default_factory=dict)
    memory: Memory | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def exit_status(self) -> int:
        """0 where nothing speaks against the run, 1 where something does, 3 where it is unknown."""
        states = {item.state for item in self.items}
        return 1 if "fail" in states else 3 if "unknown" in states else 0


def preflight(options: Options, *, ask: bool = True) -> Report:
    """Return what a run will meet; ``ask`` off leaves out what costs an import of vLLM.

    Raises:
        UsageError: The model has no configuration that can be read, or an option makes no sense.
    """
    begin = time.perf_counter()
    if options.tokens is not None:
        raise UsageError("--tokens goes with --server: give --samples, of --max-model-len tokens each.")
    config = read_config(options.model)
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert text is not None
    names = remote_code_of(options.model)
    if ask and names and options.remote_code:
        print(f"vllm-compat: {sentence(options.model, names)}", file=sys.stderr, flush=True)
    process = _Asking(options) if ask else None
    folder = config_path(options.model).parent
    items: list[Item] = []
    try:
        items += _layers(options)
        items += _pair(options)
        items += _remote_code(options, names)
        items.append(_tokenizer(folder, options.remote_code))
        items += _output(options, text)
        bytes_on_disk = weight_bytes_on_disk(folder)
        speed = options.read_speed or measured_speed(folder)
        own = time.perf_counter() - begin
        asked = process.answer() if process else {}
    finally:
        if process:
            process.close()
    if ask:
        items[0:0] = _architecture(config, asked, options.devices)
        items += _choices(asked, options, latent=bool(text.get("kv_lora_rank")))
    memory = _memory(asked, options, text)
    if memory:
        items.append(_fits(memory, asked, options))
    items.append(_loading(bytes_on_disk, asked, options, speed))
    items += hazards(asked, options, _downstream_version(options.downstream))
    seconds = {"own": round(own, 2), "vllm": round(time.perf_counter() - begin - own, 2)}
    return Report(options, tuple(items), asked, memory, seconds)


class _Asking:
    """The process that asks vLLM."""

    def __init__(self, options: Options) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="vllm-compat-preflight-")
        here = Path(self.folder.name)
        self.result = here / "result.json"
        self.log = here / "log"
        model = options.model
        if Path(model).is_file():
            model = str(Path(model).parent)
        request = {
            "model": model,
            "capability": options.capability,
            "devices": options.devices,
            "memory": options.device_memory or 80 * GIB,
            "max_model_len": options.max_model_len,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "remote_code": options.remote_code,
            "max_num_batched_tokens": max(LEAST_TOKENS, options.max_model_len),
        }
        (here / "request.json").write_text(json.dumps(request))
        environ = {**os.environ, "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
        # Found as this process has found it, installed or not.
        source = str(Path(__file__).resolve().parents[3])
        environ["PYTHONPATH"] = os.pathsep.join(
            part for part in (source, os.environ.get("PYTHONPATH", "")) if part
        )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "vllm_compat.commands.preflight.stand_in",
                    here / "request.json",
                    self.result,
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environ,
            )

    def answer(self) -> dict[str, Any]:
        """Wait for it and return what it said; an error is in it, never raised."""
        try:
            self.process.wait(ASK_SECONDS)
        except subprocess.TimeoutExpired:
            return {"stage": "importing vLLM", "error": f"no answer after {ASK_SECONDS:.0f} s"}
        try:
            found: dict[str, Any] = json.loads(self.result.read_text())
        except (OSError, ValueError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
            return {"stage": "importing vLLM", "error": lines[-1] if lines else "it ended in silence"}
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()


def _architecture(config: Mapping[str, Any], asked: Mapping[str, Any], devices: int = 1) -> list[Item]:
    name = (config.get("architectures") or ["unknown"])[0]
    error = " ".join(str(asked.get("error", "")).split())[:400]
    version = f"vLLM {asked['vllm']}" if asked.get("vllm") else "vLLM"
    question = "architecture"
    if asked.get("weight_bytes"):
        how = "its own selection code"
        if asked.get("standing_in"):
            how += ", with a stand-in for the device"
        return [Item(question, "ok", f"{name} is known to {version}, and can be built; asked was {how}")]
    if asked.get("stage") == "importing vLLM":
        return [Item(question, "unknown", f"vLLM could not be asked: {error}")]
    refused = _is_refusal(error, str(asked.get("raised_in", "")))
    state = "fail" if refused or not asked.get("standing_in") else "unknown"
    said = "cannot load it" if state == "fail" else "did not answer"
    told = f"{name}: {version} {said} ({asked.get('stage')}): {error}"
    if state == "fail" and "divisible" in error and (ranks := ranks_of_whole_blocks(config, devices)):
        told = f"{told.rstrip('.')}. By its widths, {ranks} tensor-parallel rank"
        told += f"{'' if ranks == 1 else 's'} would have whole blocks: take --devices {ranks}"
    return [Item(question, state, told)]


def ranks_of_whole_blocks(config: Mapping[str, Any], devices: int) -> int:
    """Return the most ranks below ``devices`` that get whole quantisation blocks each, 0 if unknown.

    Looked at are the widths of the experts and of the dense layers, in blocks of ``weight_block_size``:
    vLLM refuses a rank's part that ends within a block (``fp8_utils.validate_fp8_block_shape``).
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    quantised = text.get("quantization_config") or config.get("quantization_config")
    block = quantised.get("weight_block_size") if isinstance(quantised, dict) else None
    if not isinstance(block, list) or not block or not all(type(b) is int and b > 0 for b in block):
        return 0
    names = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    widths = [text[name] for name in names if type(text.get(name)) is int and text[name] > 0]
    fitting = [
        ranks
        for ranks in range(1, devices)
        if devices % ranks == 0 and all(width % (ranks * b) == 0 for width in widths for b in block)
    ]
    return max(fitting, default=0) if widths else 0


def _is_refusal(error: str, raised_in: str) -> bool:
    """Whether an error says that vLLM does not serve the model, not that the stand-in fell short.

    ``raised_in`` is the module that has raised it. What vLLM raises itself about values (shapes that do
    not divide, a scheme that it does not know) does not depend on a device that is not there; what torch
    or a library raises may, and so may an assertion.
    """
    if "NVIDIA driver" in error:
        return False
    words = ("not supported", "unsupported", "is not a valid", "ValidationError", "larger than")
    by_vllm = raised_in.partition(".")[0] == "vllm"
    about_values = error.partition(":")[0] in ("ValueError", "NotImplementedError")
    return (by_vllm and about_values) or any(word in error for word in words)


def _layers(options: Options) -> list[Item]:
    try:
        found = layers_of(options.model, options.layer_ids)
    except UsageError as error:
        return [Item("layers", "fail", str(error))]
    mapping = ", ".join(f"{entry.layer_id} (vLLM's {entry.vllm_id})" for entry in found.entries)
    chosen = "stock's own choice" if found.selection == "auto" else "given"
    items = [Item("layers", "ok", f"{mapping} of {found.layers}; {chosen}")]
    return items + [Item("layers", "note", note) for note in found.notes]


def _pair(options: Options) -> list[Item]:
    """Say whether the installed downstream and vLLM go together at all."""
    from vllm_compat.entry.apply import plan_installed

    try:
        plan = plan_installed(downstream=options.downstream)
        plan.refuse()
    except VllmCompatError as error:
        first = str(error).partition("\n")[0]
        return [Item("adapters", "unknown" if isinstance(error, UsageError) else "fail", first)]
    pair = f"{plan.downstream} {plan.downstream_version} on vLLM {plan.vllm}"
    words = f"{pair}: {len(plan.steps)} needed, nothing unmet (plan {plan.digest})"
    return [Item("adapters", "ok", words), *_stream(options, plan.vllm)]


def _stream(options: Options, vllm: str) -> list[Item]:
    """Say where this model has no one residual stream, or one that is not read, on CUDA."""
    config = read_config(options.model)
    sentence = refusal(config, options.model) or before_loading(
        architectures_of(config), options.devices, vllm, "cuda"
    )
    return [Item("residual stream", "fail", sentence)] if sentence else []


def _downstream_version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _remote_code(options: Options, names: tuple[str, ...]) -> list[Item]:
    """Say which code of its own the model brings, and whether it is run."""
    if not names:
        return []
    if options.remote_code:
        return [Item("remote code", "note", sentence(options.model, names))]
    left = "--no-remote-code: none of it was run, and a run with that option refuses what needs it"
    return [Item("remote code", "note", f"the model brings {', '.join(names)}; {left}")]


def _tokenizer(folder: Path, trusted: bool = True) -> Item:
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Item("tokenizer", "note", f"there is no {path.name} beside the configuration to judge")
    remote = (config.get("auto_map") or {}).get("AutoTokenizer")
    if not remote:
        return Item("tokenizer", "ok", "needs no remote code")
    name = remote if isinstance(remote, str) else next((part for part in remote if part), "?")
    code = folder / f"{name.rpartition('--')[2].partition('.')[0]}.py"
    if not trusted:
        return Item("tokenizer", "fail", f"is remote code ({name}), which --no-remote-code refuses")
    here = "" if code.exists() else f"; {code.name} is not there yet"
    return Item(
        "tokenizer",
        "ok" if not here else "note",
        f"is remote code ({name}); the run trusts it for this model, as stock trusts the model's"
        f" configuration (adapter tokenizer.trust_remote_code){here}",
    )


def _output(options: Options, text: Mapping[str, Any]) -> list[Item]:
    """Say how much the samples take on the disk."""
    try:
        found = layers_of(options.model, options.layer_ids)
    except UsageError:
        return []
    if not found.bytes_per_token:
        return []
    each = f"{found.bytes_per_token:,} bytes a token"
    if options.samples is None:
        return [Item("disk", "note", f"{each}; give --samples to compare with what is free")]
    needed = options.samples * options.max_model_len * found.bytes_per_token
    folder = options.output_dir or Path(".")
    while not folder.exists():
        folder = folder.absolute().parent
    free = shutil.disk_usage(folder).free
    words = (
        f"up to {size_words(needed)} for {options.samples:,} samples of {options.max_model_len} tokens"
        f" ({each}); {size_words(free)} free at {folder}"
    )
    return [Item("disk", "ok" if needed < free else "fail", words)]


def _choices(asked: Mapping[str, Any], options: Options, *, latent: bool) -> list[Item]:
    """Say which backend and which methods vLLM chooses; ``latent``: the model has latent attention."""
    if not asked.get("weight_bytes"):
        return []
    items = [*_attention(asked, options), *_methods(asked), *_assumptions(asked)]
    disabled = os.environ.get("VLLM_MLA_DISABLE", "0") not in ("", "0")
    if disabled and latent and not asked.get("use_mla", True):
        items.append(Item("attention", "note", "VLLM_MLA_DISABLE is set, so that MLA is not used"))
    return items


def _attention(asked: Mapping[str, Any], options: Options) -> Iterator[Item]:
    """Yield the backends of attention, and those that could not be asked."""
    where = asked.get("device") or asked.get("platform") or "this device"
    capability = options.capability or asked.get("capability")
    if capability:
        where = f"{where}, capability {capability[0]}.{capability[1]}"
    backends = ", ".join(f"{name} ({n} layers)" for name, n in asked["attention"].items())
    yield Item("attention", "ok", f"{backends or 'none'} on {where}")
    for name, reasons in asked.get("rejected", {}).items():
        if any("ImportError" in reason for reason in reasons):
            words = f"{name} could not be asked: a package that it needs is not installed here"
            yield Item("attention", "note", words)


def _methods(asked: Mapping[str, Any]) -> Iterator[Item]:
    """Yield the methods of experts and of linear layers."""
    experts = asked["moe_methods"]
    if experts:
        yield Item("experts", "ok", ", ".join(experts))
    linear = sorted({name.partition(": ")[2] for name in asked["methods"]} - set(experts))
    scheme = f"{asked['quantization']}: " if asked.get("quantization") else ""
    words = ", ".join(name for name in linear if "Embedding" not in name)
    yield Item("linear layers", "ok", scheme + words)


def _assumptions(asked: Mapping[str, Any]) -> Iterator[Item]:
    """Yield what was taken for granted of a device that is not here."""
    if not asked.get("standing_in"):
        return
    missing = sorted({name for name in asked["assumed"] if not name.startswith("cutlass")})
    predicates = sorted({name for name in asked["assumed"] if name.startswith("cutlass")})
    words = "vLLM's CUDA platform was asked with a stand-in for the device"
    if missing:
        words += f"; taken as present, as CUDA wheels have them: {', '.join(missing)}"
    if predicates:
        words += f"; compiled answers assumed: {', '.join(predicates)}"
    yield Item("how", "note", words)


def activation_bytes(
    text: Mapping[str, Any], *, tokens: int, ranks: int, layers: int, sequences: int
) -> int:
    """Return an estimate of what a prefill step of ``tokens`` tokens holds at its height, on one rank.

    The residual stream and four copies around a layer; the widest block of a layer, dense or with
    ``num_experts_per_tok`` experts a token; queries, keys, values and the output of attention; the rows
    captured for ``layers`` layers; float32 logits of ``sequences`` last rows, twice.
    """
    hidden = int(text.get("hidden_size", 0))
    heads = int(text.get("num_attention_heads", 1))
    width = int(text.get("head_dim") or 0) or hidden // max(heads, 1)
    if text.get("kv_lora_rank"):
        width = int(text.get("qk_nope_head_dim", 0)) + int(text.get("qk_rope_head_dim", 0))
    dense = 3 * int(text.get("intermediate_size", 0)) / ranks
    chosen = int(text.get("num_experts_per_tok") or text.get("experts_per_token") or 0)
    inner = int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 0)
    experts = chosen * (hidden + 3 * inner / ranks)
    attention = 4 * heads * width / ranks
    per_token = 5 * hidden + max(dense, experts, attention) + layers * hidden
    logits = 2 * 4 * sequences * int(text.get("vocab_size", 0))
    return int(2 * tokens * per_token + logits)


def _memory(asked: Mapping[str, Any], options: Options, text: Mapping[str, Any]) -> Memory | None:
    device = options.device_memory or asked.get("device_memory")
    if not device or not asked.get("weight_bytes"):
        return None
    context = CONTEXT[0] + (CONTEXT[1] if options.devices > 1 else 0)
    weights, context_bytes = int(asked["weight_bytes"]), int(context * GIB)
    free = max(0, device - weights - context_bytes)
    kv_cache = int(free * options.gpu_memory_utilization * CACHE_FRACTION)
    if per_block := asked["kv_bytes_per_token"] * asked["block_size"]:
        kv_cache = int(kv_cache // per_block * per_block)
    count = len(options.layer_ids or (0, 0, 0, 0))
    step = max(LEAST_TOKENS, options.max_model_len)
    tokens = min(step, options.batch_size * options.max_model_len)
    activations = activation_bytes(
        text, tokens=tokens, ranks=options.devices, layers=count, sequences=32
    )
    return Memory(weights, kv_cache, activations, context_bytes, device)


def _fits(memory: Memory, asked: Mapping[str, Any], options: Options) -> Item:
    room = int(memory.kv_cache / asked["kv_bytes_per_token"]) if asked["kv_bytes_per_token"] else 0
    words = (
        f"one rank: weights {size_words(memory.weights)} + KV cache {size_words(memory.kv_cache)} +"
        f" activations about {size_words(memory.activations)} + CUDA about"
        f" {size_words(memory.context)} = {size_words(memory.total)} of {size_words(memory.device)};"
        f" the KV cache holds {room:,} tokens"
    )
    if memory.total > memory.device:
        short = "the weights alone do not fit" if memory.weights > memory.device else "they do not fit"
        return Item("memory", "fail", f"{words}: {short}; take more devices (--devices)")
    if room < options.max_model_len:
        return Item("memory", "fail", f"{words}: fewer than one prompt of {options.max_model_len}")
    return Item("memory", "ok", words)


def _loading(
    on_disk: int | None, asked: Mapping[str, Any], options: Options, speed: float | None
) -> Item:
    size = on_disk
    if size is None and asked.get("weight_bytes"):
        size = int(asked["weight_bytes"]) * options.devices
    if size is None:
        return Item("loading", "note", "the size of the weights is not known")
    if speed is None:
        return Item(
            "loading", "note", f"{size_words(size)} of weights; give --read-speed to know how long"
        )
    seconds = size / speed
    words = f"{size_words(size)} at {size_words(int(speed))}/s: about {_duration(seconds)}"
    limit = asked.get("timeouts", {}).get("VLLM_ENGINE_READY_TIMEOUT_S")
    if limit:
        words += (
            f"; stock's executor waits without a limit, `vllm serve` for {_duration(limit)}"
            " (VLLM_ENGINE_READY_TIMEOUT_S)"
        )
    return Item("loading", "note" if limit and seconds > limit else "ok", words)


def hazards(asked: Mapping[str, Any], options: Options, downstream: str) -> list[Item]:
    """Return what is publicly known to go wrong with what vLLM chooses, with its source."""
    text = resources.files("vllm_compat").joinpath("data/hazards.json").read_text(encoding="utf-8")
    capability = options.capability or tuple(asked.get("capability") or ())
    found = []
    for hazard in json.loads(text):
        low, high = tuple(hazard["capability"][:2]), tuple(hazard["capability"][2:])
        if not capability or not low <= tuple(capability) <= high:
            continue
        if not any(hazard["method"] in method for method in asked.get("methods", {})):
            continue
        if hazard.get("downstream") and not downstream.startswith(hazard["downstream"]):
            continue
        found.append(Item("hazard", "note", f"{hazard['text']} ({hazard['source']})"))
    return found


def weight_bytes_on_disk(folder: Path) -> int | None:
    """Return the size of a model's weights, from its index or its files' headers; None if unknown."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            total = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
            return int(total)
        except (OSError, ValueError, KeyError, TypeError):
            pass
    files = sorted(folder.glob("*.safetensors"))
    return sum(_tensors(path) for path in files) if files else None


def _tensors(path: Path) -> int:
    """Return the bytes of the tensors in a safetensors file, from its header."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        return max(
            (int(item["data_offsets"][1]) for name, item in header.items() if name != "__metadata__"),
            default=0,
        )
    except (OSError, ValueError, struct.error, KeyError, TypeError):
        return path.stat().st_size


def measured_speed(folder: Path) -> float | None:
    """Read of the largest weight file for a moment, past the page cache; return bytes a second."""
    files = [path for path in folder.glob("*.safetensors") if path.stat().st_size > 64 * 2**20]
    if not files:
        return None
    largest = max(files, key=lambda path: path.stat().st_size)
    size, block = largest.stat().st_size, 8 * 2**20
    with largest.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(size // 2)
        begin, read = time.perf_counter(), 0
        while time.perf_counter() - begin < READ_SECONDS:
            got = len(file.read(block))
            if not got:
                break
            read += got
        return read / max(time.perf_counter() - begin, 1e-6) if read else None


def parse_size(text: str) -> int:
    """Return the bytes of ``96GiB``, ``80 G``, ``1000000``.

    Raises:
        UsageError: It is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?(?:/s)?\s*", text, re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise UsageError(f"{text!r} is no size: write 96GiB or a number of bytes.")
    return int(float(match[1]) * _SIZES[match[2].upper()])


def parse_capability(text: str) -> tuple[int, int]:
    """Return ``(12, 0)`` of ``12.0``.

    Raises:
        UsageError: It is none.
    """
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if not match:
        raise UsageError(f"{text!r} is no compute capability: write 9.0 or 12.0.")
    return int(match[1]), int(match[2])


def render(report: Report, form: str = "text") -> str:
    """Return the report as ``text`` for people or ``json`` for programs."""
    if form == "json":
        options = {**asdict(report.options), "output_dir": str(report.options.output_dir or "")}
        record = {
            "schema_version": SCHEMA_VERSION,
            "kind": "preflight",
            "options": options,
            "items": [asdict(item) for item in report.items],
            "memory": asdict(report.memory) | {"total": report.memory.total} if report.memory else None,
            "asked": dict(report.asked),
            "seconds": dict(report.seconds),
            "exit_status": report.exit_status,
        }
        return json.dumps(record, indent=1)
    marks = {"ok": "ok  ", "note": "note", "fail": "FAIL", "unknown": "??  "}
    width = max(len(item.question) for item in report.items)
    lines = [f"{marks[i.state]}  {i.question:{width}}  {i.answer}" for i in report.items]
    said = {0: "nothing speaks against it", 1: "the run will fail", 3: "not everything could be told"}
    took = f"{report.seconds['own']} s, and {report.seconds['vllm']} s for vLLM"
    summary = f"{report.options.model}: {said[report.exit_status]} ({took})."
    return "\n".join([*lines, summary, _next_step(report)])


def _next_step(report: Report) -> str:
    """Say what to do with the answers, in one sentence."""
    small = f"`vllm-compat rehearse {shlex.quote(report.options.model)}` with the same options"
    if report.exit_status == 0:
        return f"Next: {small} runs a small model of the same kind, in about a minute."
    if report.exit_status == 1:
        return "Next: change what the lines with FAIL name, and ask again; no weights have to be loaded."
    if any("not installed in" in item.answer for item in report.items if item.state == "unknown"):
        return "Next: ask again in the environment that has vLLM and speculators."
    return f"Next: read the lines with ??; {small} tries what they leave open, in about a minute."


def size_words(size: int) -> str:
    """Return a number of bytes for people."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1024:.1f} KiB"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
