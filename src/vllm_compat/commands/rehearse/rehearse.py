"""Rehearse a run on a model of the same kind that is small enough to be made on the spot.

The model's own configuration is shrunk (:func:`shrink`): architecture, attention kind, head sizes, rope,
quantisation scheme, nesting and tokenizer stay; layers, experts and widths become few and small. The
weights are drawn at random. Then stock's generator runs through the shim with the user's options, in
the real processes on the real device (:mod:`vllm_compat.commands.rehearse.program`, under the
launcher), and every
row is compared with transformers in float32. What would fail after twenty minutes of loading fails here
after one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_compat.analysis.layer_ids import auto_selected, config_path, number_of_layers, read_config
from vllm_compat.analysis.remote_code import remote_code_of, sentence
from vllm_compat.commands.run_options import RunTerms
from vllm_compat.errors import UsageError

LAYERS = 4
"""Layers of a small model, if not more are asked for."""

HIDDEN, INNER, EXPERT_INNER = 256, 512, 128
LIMIT_SECONDS = 900.0

NOT_MADE = "not made"

_PROCESSOR = re.compile(r"preprocessor_config|(?:image|video|feature|auto) ?processor", re.IGNORECASE)
_TOKENIZER = re.compile(r"tokenizer|special token", re.IGNORECASE)
_NAMES = re.compile(r"no module or parameter named|weights were not initialized from checkpoint")
"""How vLLM says that a checkpoint has other names than its model; a small one has transformers'."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_LARGEST_FILE = 64 * 2**20


@dataclass(frozen=True)
class Small:
    """A small model's configuration, and how it differs from the model's own.

    ``layer_ids`` are the user's, mapped: ids within the model to ids within the small one, ids outside
    to ids outside. ``changes`` are the fields that were changed, each as ``field: before → after``.
    """

    config: Mapping[str, Any]
    layer_ids: tuple[int, ...]
    mapped: tuple[tuple[int, int], ...]
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Options(RunTerms):
    """What the run will be given, in stock's own terms."""

    without: tuple[str, ...] = ()
    capture: str = "auto"
    dequantised: bool = False
    keep: Path | None = None


@dataclass(frozen=True)
class Report:
    """How a rehearsal ended: ``right``, ``wrong``, ``unknown`` or ``not made``.

    ``unknown`` had nothing to compare with. ``not made`` lacked something of its own, which says nothing
    of the run: no space for its folder, a small model that cannot be made, a file that stood in and does
    not do.

    ``folder`` is where its output, its records and the small model are kept: after a failure, and
    where the user has named one.
    """

    outcome: str
    words: tuple[str, ...]
    seconds: float
    record: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def exit_status(self) -> int:
        """0 only where the data came out right; 3 where nothing is known of the run."""
        return {"right": 0, "unknown": 3, NOT_MADE: 3}.get(self.outcome, 1)


def map_layer_ids(ids: Sequence[int], count: int, small: int) -> tuple[int, ...]:
    """Return ids of a model of ``count`` layers as ids of one with ``small`` layers.

    Order and distinctness are kept, the last layer stays the last, and an id that does not exist
    becomes one that does not exist either.
    """
    inside = sorted({k for k in ids if 0 <= k < count})
    places: dict[int, int] = {}
    for rank, k in enumerate(inside):
        wanted = round(k / max(count - 1, 1) * (small - 1))
        least = rank if rank == 0 else places[inside[rank - 1]] + 1
        most = small - (len(inside) - rank)
        places[k] = min(max(wanted, least), most)
    return tuple(places.get(k, k if k < 0 else small + (k - count)) for k in ids)


def shrink(
    config: Mapping[str, Any],
    layer_ids: Sequence[int] | None,
    *,
    ranks: int = 1,
    vocabulary: int | None = None,
    model: str = "the model",
) -> Small:
    """Return a small configuration of the same kind.

    Args:
        config: The model's own.
        layer_ids: The user's; stock's own choice if None.
        ranks: The tensor parallel size; heads and experts are divided by it.
        vocabulary: The number of tokens, where it may be changed.
        model: What messages call the model.

    Raises:
        UsageError: The configuration does not tell what is needed.
    """
    count = number_of_layers(config, model)
    ids = tuple(layer_ids) if layer_ids is not None else auto_selected(count)
    layers = max(LAYERS, len({k for k in ids if 0 <= k < count}))
    layers = min(layers, count)
    nested = isinstance(config.get("text_config"), dict)
    text = dict(config["text_config"] if nested else config)
    try:
        small = _shrink_text(text, layers=layers, ranks=ranks, vocabulary=vocabulary)
    except (KeyError, TypeError, ValueError, OverflowError, ArithmeticError) as error:
        raise UsageError(
            f"The configuration of {model} cannot be made smaller: one of its sizes is missing or no"
            f" number ({type(error).__name__}: {error})."
        ) from error
    changes = [_change(k, text.get(k), v) for k, v in small.items() if text.get(k) != v and _plain(v)]
    whole = dict(small)
    if nested:
        whole = {**config, "text_config": small}
        if isinstance(config.get("vision_config"), dict):
            whole["vision_config"] = _shrink_vision(config["vision_config"], small, ranks)
    mapped = map_layer_ids(ids, count, layers)
    return Small(whole, mapped, tuple(zip(ids, mapped, strict=True)), tuple(changes))


def _change(name: str, before: object, after: object) -> str:
    """Say how a field differs; one that the configuration leaves out has its class's default."""
    return f"{name}: {'not given' if before is None else before} → {after}"


def _plain(value: object) -> bool:
    return isinstance(value, int | float | str)


def _shrink_text(
    text: Mapping[str, Any], *, layers: int, ranks: int, vocabulary: int | None
) -> dict[str, Any]:
    count = number_of_layers(text)
    small = dict(text)
    key = next(k for k in ("num_hidden_layers", "n_layer", "n_layers") if text.get(k))
    small[key] = layers
    for name, value in text.items():
        if isinstance(value, list) and len(value) == count:
            small[name] = value[:layers]  # one entry a layer: kinds of attention, windows
    small.update(_small_attention(text, ranks))
    small.update(_small_feed_forward(text, ranks))
    if text.get("num_nextn_predict_layers"):
        small["num_nextn_predict_layers"] = 0
    if vocabulary is not None:
        small["vocab_size"] = vocabulary
    return small


def _small_attention(text: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """Return few heads of the same kind, and a hidden size that goes with them."""
    heads = int(text.get("num_attention_heads", 0))
    if text.get("kv_lora_rank"):
        # Multi-head latent attention: the ranks and head sizes that kernels are written for stay.
        few = _multiple(4, ranks)
        small = {"num_attention_heads": few, "num_key_value_heads": few, "hidden_size": HIDDEN}
        if text.get("q_lora_rank"):
            small["q_lora_rank"] = min(128, int(text["q_lora_rank"]))
        return small
    if not heads:
        return {}
    kv_heads = int(text.get("num_key_value_heads") or heads)
    fewer = ranks if ranks > 1 else min(2, kv_heads)
    few = fewer * min(4, max(1, heads // kv_heads))
    hidden = HIDDEN
    if not text.get("head_dim"):  # the head size is the quotient, and has to stay
        hidden = int(text["hidden_size"]) // heads * few
    return {"num_key_value_heads": fewer, "num_attention_heads": few, "hidden_size": hidden}


def _small_feed_forward(text: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """Return few and narrow experts, and narrow dense layers."""
    small: dict[str, int] = {}
    given = [name for name in _EXPERTS if text.get(name)]
    for name in given:
        small[name] = max(_multiple(8, ranks), 2 * int(text.get("n_group") or 1))
    for chosen in ("num_experts_per_tok", "experts_per_token"):
        if given and text.get(chosen):
            small[chosen] = min(int(text[chosen]), 2 * int(text.get("topk_group") or 1), 4)
    if text.get("moe_intermediate_size"):
        small["moe_intermediate_size"] = EXPERT_INNER * ranks
    if text.get("intermediate_size"):
        only_experts = given and not text.get("moe_intermediate_size")
        small["intermediate_size"] = (EXPERT_INNER if only_experts else INNER) * ranks
    if text.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1
    return small


def _shrink_vision(vision: Mapping[str, Any], text: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return a small vision configuration; in a run for hidden states no image comes."""
    small = dict(vision)
    heads = _multiple(4, ranks)
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 32 * heads, "intermediate_size": 64 * heads,
        "num_attention_heads": heads, "mm_hidden_size": 32 * heads,
    }  # fmt: skip
    for name, value in sizes.items():
        for spelling in (name, f"vt_{name}"):
            if spelling in vision:
                small[spelling] = value
    for axis in ("height", "width"):
        for spelling in (f"init_pos_emb_{axis}", f"pos_emb_{axis}"):
            if spelling in vision:
                small[spelling] = 8
    if "text_hidden_size" in vision:
        small["text_hidden_size"] = text["hidden_size"]
    if "depth" in vision:
        small["depth"] = 2
    return small


def _multiple(least: int, of: int) -> int:
    """Return the smallest multiple of ``of`` that is at least ``least``."""
    return -(-least // of) * of


def own_files(model: str) -> list[Path]:
    """Return the files beside a model's configuration that a small model needs too: not the weights."""
    folder = config_path(model).parent
    found = []
    left = ("config.json", "quantization_config.json")
    for path in sorted(folder.iterdir()):
        weights = path.name.endswith(_WEIGHTS) or path.name in left
        if path.is_file() and not weights and path.stat().st_size <= _LARGEST_FILE:
            found.append(path)
    return found


def has_tokenizer(files: Sequence[Path]) -> bool:
    """Whether a tokenizer's own data are among the files, not only its configuration."""
    names = {path.name for path in files}
    data = {"tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "spiece.model"}
    return bool(names & data)


def rehearse(options: Options, *, log: Path | None = None) -> Report:
    """Rehearse a run and return how it ended.

    Raises:
        UsageError: The model has no configuration that can be read.
    """
    begin = time.perf_counter()
    config = read_config(options.model)
    files = own_files(options.model)
    own_tokenizer = has_tokenizer(files)
    small = shrink(
        config,
        options.layer_ids,
        ranks=options.devices,
        vocabulary=None if own_tokenizer else _lab_vocabulary(),
        model=options.model,
    )
    work: Path | None = options.keep
    keeps = bool(options.keep)
    try:
        work = work or Path(tempfile.mkdtemp(prefix="vllm-compat-rehearsal-"))
        found, verdict, tail = _in_folder(work, options, files, small, own_tokenizer, log)
        took = time.perf_counter() - begin
        report = _report(options, small, found, verdict, tail, own_tokenizer, took)
        keeps = keeps or report.outcome in ("wrong", NOT_MADE)
    except OSError as error:
        report = _no_room(work, error, time.perf_counter() - begin)
    finally:
        if work is not None and not keeps:
            shutil.rmtree(work, ignore_errors=True)
    return replace(report, folder=work) if keeps else report


def _no_room(work: Path | None, error: OSError, seconds: float) -> Report:
    """Return the report of a rehearsal whose folder could not be made or filled."""
    where = work or "a temporary folder"
    words = (
        f"The rehearsal's own files could not be written in {where}: {error.strerror or error}."
        " --keep DIR names another folder.",
    )
    return Report(NOT_MADE, words, seconds)


def _in_folder(
    work: Path,
    options: Options,
    files: Sequence[Path],
    small: Small,
    own_tokenizer: bool,
    log: Path | None,
) -> tuple[dict[str, Any], str, Sequence[str]]:
    """Make the small model in a folder and run it; return its record, verdict and last lines."""
    folder = work / "model"
    folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(small.config, indent=1))
    out, record, output = work / "rehearsal.json", work / "run.json", log or work / "output.txt"
    request = {
        "model": str(folder),
        "reference": str(work / "reference"),
        "layer_ids": list(small.layer_ids),
        "devices": options.devices,
        "max_model_len": options.max_model_len,
        "batch_size": options.batch_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "own_tokenizer": own_tokenizer,
        "dequantised": options.dequantised,
    }
    (work / "request.json").write_text(json.dumps(request))
    command = [sys.executable, "-m", "vllm_compat", "run", "--record", str(record)]
    command += ["--log", str(output), "--capture", options.capture]
    if not options.remote_code:
        command.append("--no-remote-code")
    elif names := remote_code_of(options.model):
        print(f"vllm-compat: {sentence(options.model, names)}", file=sys.stderr, flush=True)
    for adapter in options.without:
        command += ["--without", adapter]
    command += ["-m", "vllm_compat.commands.rehearse.program", str(work / "request.json"), str(out)]
    environ = {**os.environ, "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
    try:
        done = subprocess.run(
            command, env=environ, stderr=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS
        )
        verdict = _last_line(done.stderr)
    except subprocess.TimeoutExpired:
        verdict = f"the rehearsal had not ended after {LIMIT_SECONDS:.0f} s"
    found = _read(out)
    tail = _tail(output) if not found or found.get("outcome") in ("failed", NOT_MADE) else []
    found["run"] = _read(record)
    return found, verdict, tail


def _report(
    options: Options,
    small: Small,
    found: dict[str, Any],
    verdict: str,
    tail: Sequence[str],
    own_tokenizer: bool,
    seconds: float,
) -> Report:
    name = (small.config.get("architectures") or ["?"])[0]
    words = [f"{name}, shrunk: {', '.join(small.changes)}."]
    if small.mapped:
        pairs = ", ".join(f"{mine} → {its}" for mine, its in small.mapped)
        words.append(f"Layer ids of the model → of the small one: {pairs}.")
    if not own_tokenizer:
        words.append(
            "There are no tokenizer data beside the configuration, so a small tokenizer of the same kind"
            " stood in, with a small vocabulary."
        )
    words += found.get("notes", [])
    outcomes = {"right": "right", "not compared": "unknown", NOT_MADE: NOT_MADE}
    outcome = outcomes.get(str(found.get("outcome")), "wrong")
    if outcome == NOT_MADE:
        words += _why_not_made(found, tail)
    elif outcome == "wrong" and (stood_in := _stand_in_at_fault(options, found, own_tokenizer)):
        outcome = NOT_MADE
        words += [f"{stood_in}: {str(found['error']).rstrip('.')}."]
    elif outcome == "wrong":
        words += _why_wrong(options, small, found, verdict, tail)
    if found.get("in_force"):
        words.append(_in_force(found["in_force"]))
    if found.get("compared"):
        words.append(found["compared"])
    return Report(outcome, tuple(words), seconds, found)


def _why_not_made(found: Mapping[str, Any], tail: Sequence[str]) -> Iterator[str]:
    """Say what the rehearsal lacked; its last lines where it was ended before it could say."""
    made = "The small model could not be made"
    if found.get("in_force"):
        made = "The small model ran, and its reference could not be computed"
    error = found.get("error")
    yield f"{made}: {str(error).rstrip('.')}." if error else f"{made}: the process was ended."
    if not error:
        yield from tail


def _stand_in_at_fault(options: Options, found: Mapping[str, Any], own_tokenizer: bool) -> str:
    """Return which of the rehearsal's own parts an engine that did not start has stumbled over.

    Nothing where it is the run's own: the engine stood, or the model's own file is there and was used.
    """
    error = str(found.get("error", ""))
    if found.get("in_force"):
        return ""
    folder = config_path(options.model).parent
    if _PROCESSOR.search(error) and not (folder / "preprocessor_config.json").exists():
        return (
            "vLLM wants a processor, and there is no preprocessor_config.json beside the configuration"
        )
    if _TOKENIZER.search(error) and not own_tokenizer:
        return "vLLM does not take the tokenizer that stood in; put the model's own beside config.json"
    if _NAMES.search(error):
        return "vLLM does not take the small model's weights, which have transformers' names"
    return ""


def _why_wrong(
    options: Options, small: Small, found: Mapping[str, Any], verdict: str, tail: Sequence[str]
) -> Iterator[str]:
    """Say why a rehearsal failed, and what may help."""
    error = found.get("error")
    yield f"The run fails: {error}" if error else "The run fails."
    if "First cause: rank" in verdict or not error:
        yield verdict  # a worker's own error, or all that is known
    scheme = _scheme(small.config)
    if scheme and not options.dequantised and not found.get("in_force"):
        yield f"If this build has no kernels for {scheme}, --dequantised rehearses all the rest."
    if not error:
        yield from tail
    for mine, its in small.mapped:
        if mine != its and its >= _layers_of(small):
            yield f"(Layer id {its} is {mine} of the model.)"


def _in_force(force: Mapping[str, Any]) -> str:
    # A vision tower names its backend by the enumeration's own name.
    attention = [name for name in force["attention"] if name != "AttentionBackendEnum"]
    return (
        f"In force: attention {', '.join(attention) or 'unknown'};"
        f" {', '.join(force['quant_methods'])}; runner {force['runner'].rpartition('.')[2]};"
        f" capture {force['capture']}."
    )


def _scheme(config: Mapping[str, Any]) -> str:
    """Return the name of a configuration's quantisation scheme; nothing where it has none."""
    for part in (config, config.get("text_config") or {}):
        if part.get("quantization_config"):
            return str(part["quantization_config"].get("quant_method"))
    return ""


def _layers_of(small: Small) -> int:
    return number_of_layers(small.config)


def _lab_vocabulary() -> int:
    from vllm_compat.trial.models import VOCABULARY

    return VOCABULARY


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].removeprefix("vllm-compat: ") if lines else "it ended in silence"


def _tail(path: Path, lines: int = 8) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def render(report: Report, form: str = "text") -> str:
    """Return the report as ``text`` for people or ``json`` for programs."""
    if form == "json":
        return json.dumps(
            {
                "schema_version": 1,
                "kind": "rehearsal",
                "outcome": report.outcome,
                "words": list(report.words),
                "seconds": round(report.seconds, 1),
                "record": dict(report.record),
                "folder": str(report.folder) if report.folder else None,
                "exit_status": report.exit_status,
            },
            indent=1,
        )
    said = {
        "right": "The rehearsal came out right",
        "wrong": "THE REHEARSAL FAILED",
        "unknown": "The rehearsal ran, but nothing says that its data are right",
        NOT_MADE: "The rehearsal could not be made, and nothing is said of the run",
    }
    kept = f"; its output, records and small model are in {report.folder}" if report.folder else ""
    last = f"{said[report.outcome]}, after {report.seconds:.0f} s{kept}."
    return "\n".join([*report.words, last])


__all__ = ["Options", "Report", "Small", "UsageError", "map_layer_ids", "rehearse", "render", "shrink"]
