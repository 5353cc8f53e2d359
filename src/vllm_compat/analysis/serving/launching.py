"""Judge the command that a launcher would run, before anything loads: what to add, what to refuse.

Pure: what the command is, what the server offers and what the model's class does are handed in. Flags
are added only where the server takes them and nothing is lost by them but speed; what a user has given
is never changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_compat.analysis.server_flow import HAZARDS, release_of
from vllm_compat.analysis.serving.comparing import find_across, flag_name

if TYPE_CHECKING:
    from packaging.version import Version

    from vllm_compat.analysis.serving.model import Ask, Offered
    from vllm_compat.analysis.serving.models import ModelOffer

_CHUNKS = "--no-enable-chunked-prefill"
_PREFIXES = "--no-enable-prefix-caching"
_RENDER = "/v1/chat/completions/render"
_FACTORS = {"k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}


@dataclass(frozen=True)
class ServeCommand:
    """A ``vllm serve`` command: its words from the model on, the layer ids that it asks for.

    ``layer_ids`` are in the server's numbering, empty where they are not known.
    """

    words: tuple[str, ...]
    layer_ids: tuple[int, ...] = ()

    def given(self, name: str) -> str | None:
        """Return what is given for a field: its value, ``no`` or ``yes`` for a flag; None if nothing."""
        found = None
        for at, word in enumerate(self.words):
            if not word.startswith("--") or flag_name(word) != name:
                continue
            _, equals, value = word.partition("=")
            if word.replace("_", "-").startswith("--no-"):
                found = "no"
            elif equals:
                found = value
            else:
                after = self.words[at + 1 : at + 2]
                found = after[0] if after and not after[0].startswith("--") else "yes"
        return found

    def number(self, name: str) -> int | None:
        """Return the number that is given for a field, as ``2048`` or ``2k``; None if none is."""
        text = self.given(name) or ""
        factor = _FACTORS.get(text[-1:], 1)
        digits = text[:-1] if factor > 1 else text
        return int(digits) * factor if digits.isdigit() else None


@dataclass(frozen=True)
class Served:
    """What a command is judged against.

    ``version`` is the server's vLLM, ``client`` the release of the speculators that will ask it, empty
    where it is not known. ``hybrid``: an architecture has Mamba or linear attention beside attention.
    ``layers`` is the number of the model's layers, where it is known.
    """

    offered: Offered
    version: str
    client: str = ""
    models: tuple[ModelOffer, ...] = ()
    hybrid: str = ""
    layers: int | None = None


@dataclass
class Judgement:
    """What came of it, each a sentence: flags to ``add`` with their reason, ``notes``, ``refused``."""

    add: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def command_from_output(printed: str) -> ServeCommand | None:
    """Return the command that a launcher's ``--dry-run`` printed; None where there is none in it.

    The words are printed with a blank between them and without quotes: JSON is taken whole.
    """
    line = next((each for each in reversed(printed.splitlines()) if " serve " in each), None)
    if line is None:
        return None
    rest, words = line.partition(" serve ")[2].strip(), list[str]()
    ids: tuple[int, ...] = ()
    while rest:
        if rest.startswith("{"):
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except ValueError:
                return None
            ids = ids or _ids_in(value)
        else:
            end = (rest + " ").index(" ")
        words.append(rest[:end])
        rest = rest[end:].lstrip(" ")
    return ServeCommand(tuple(words), ids)


def command_from_arguments(arguments: Sequence[str]) -> ServeCommand:
    """Return the command as a launcher's own arguments say it: its words, and the ids if any."""
    own = list(arguments)
    if "--" in own:
        own.remove("--")
    ids: list[int] = []
    if "--target-layer-ids" in own:
        for word in own[own.index("--target-layer-ids") + 1 :]:
            if not word.lstrip("-").isdigit():
                break
            ids.append(int(word))
    return ServeCommand(tuple(own), tuple(ids))


def _ids_in(value: Any) -> tuple[int, ...]:
    for name in ("draft_model_config", "hf_config", "eagle_aux_hidden_state_layer_ids"):
        value = value.get(name) if isinstance(value, dict) else None
    return tuple(value) if isinstance(value, list) and all(type(i) is int for i in value) else ()


def judge_command(command: ServeCommand, asks: Iterable[Ask], served: Served) -> Judgement:
    """Judge a command before it runs."""
    judged = Judgement()
    release = release_of(served.version)
    for finding in find_across(asks, served.offered, command.words):
        if finding.fatal:
            judged.refused.append(f"{finding.detail} {_remedy(finding.symbol)}".strip())
    if judged.refused:
        return judged
    _chunks(command, served, release, judged)
    _prefixes(command, release, judged)
    _render(command, served, judged)
    _model(command, served, release, judged)
    _lengths(command, served, judged)
    if (command.number("pipeline_parallel_size") or 1) > 1:
        judged.refused.append(
            "Hidden states cannot be extracted with pipeline parallelism: use tensor parallelism or one"
            " rank."
        )
    if release is None:
        judged.notes.append(
            "This vLLM does not say its release: what is known by release (wrong rows with chunked"
            " prefill or prefix caching, hybrids) was not looked at."
        )
    dtype = command.given("kv_cache_dtype")
    if dtype not in (None, "auto", "bfloat16", "float16"):
        judged.refused.append(
            f"The server keeps hidden states in the KV cache and ends with --kv-cache-dtype {dtype}:"
            " give auto, bfloat16 or float16."
        )
    if command.given("config") is not None:
        judged.notes.append("Flags in the --config file were not looked at.")
    return judged


def _remedy(symbol: str) -> str:
    if "extract_hidden_states" not in symbol:
        return ""
    return _sentence(next(h.remedy for h in HAZARDS if h.key == "method.missing"))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _within(release: Version | None, key: str) -> bool:
    """Whether a dated hazard is known of a release."""
    from packaging.specifiers import SpecifierSet

    (row,) = (h for h in HAZARDS if h.key == key)
    return release is not None and SpecifierSet(row.vllm).contains(release, prereleases=True)


def _switch_off(command: ServeCommand, judged: Judgement, flag: str, why: str) -> None:
    """Add a ``--no-`` flag, or refuse where its feature is asked for."""
    given = command.given(flag_name(flag))
    if given is None:
        judged.add[flag] = why
    elif given.lower() not in ("no", "false"):
        judged.refused.append(f"{why} The command switches it on: give {flag} instead.")


def _chunks(command: ServeCommand, served: Served, release: Version | None, judged: Judgement) -> None:
    refused = any(_CHUNKS in flags for flags in served.offered.refuses.values())
    if refused:
        why = "This vLLM does not start with chunked prefill."
    elif _within(release, "chunked-prefill.rows"):
        why = "With chunked prefill this vLLM writes zero or stale rows of prompts that are split."
    elif _within(release, "chunked-prefill.assert"):
        why = "With chunked prefill this vLLM ends at the first prompt that is split."
    else:
        return
    _switch_off(command, judged, _CHUNKS, why)


def _prefixes(command: ServeCommand, release: Version | None, judged: Judgement) -> None:
    if _within(release, "prefix-caching.rows"):
        why = "With prefix caching this vLLM writes rows of other requests."
        _switch_off(command, judged, _PREFIXES, why)


def _render(command: ServeCommand, served: Served, judged: Judgement) -> None:
    """Add the flag behind which the render route stands, unless the client never asks for it."""
    from packaging.version import Version

    route, client = served.offered.routes.get(_RENDER), release_of(served.client)
    if route is None or not route.switch or (client is not None and client < Version("0.8")):
        return
    if command.given(flag_name(route.switch)) is None:
        judged.add[route.switch] = f"Only with it this vLLM answers {_RENDER}, which prepare-data asks."


def _model(command: ServeCommand, served: Served, release: Version | None, judged: Judgement) -> None:
    ids, layers = command.layer_ids, served.layers
    if ids and layers is not None and max(ids) > layers:
        judged.refused.append(
            f"Layer id {max(ids)} is not there: in the server's numbering ids go up to {layers}, the"
            " state after the last layer."
        )
    for offer in served.models:
        spared = offer.interface and offer.ids and ids and layers is not None and layers not in ids
        if offer.lacks and not spared:
            judged.refused.append(
                f"{offer.sentence} Serve it with a vLLM that does (`vllm-compat check --model` asks any"
                " vLLM), or extract in process with speculators 0.4.0.1."
            )
    if served.hybrid:
        for key, says in (
            ("hybrid.refused", "refuses hybrid models at its start"),
            ("hybrid.nan", "writes NaN for hybrid models"),
            ("hybrid.zero", "writes zeros for hybrid models"),
        ):
            if _within(release, key):
                judged.refused.append(f"This vLLM {says} ({served.hybrid} is one): use 0.25 or later.")
    if list(ids) != sorted(ids):
        judged.notes.append(
            f"Columns will stand in ascending order of the ids, {', '.join(map(str, sorted(ids)))}:"
            " give the trainer the ids in that order."
        )


def _lengths(command: ServeCommand, served: Served, judged: Judgement) -> None:
    longest, batched = command.number("max_model_len"), command.number("max_num_batched_tokens")
    if longest is None:
        judged.notes.append(
            "Each request asks for one token more than its prompt: without --max-model-len the longest"
            " prompt is one token shorter than the model's own limit."
        )
        return
    judged.notes.append(
        f"Prompts may have at most {longest - 1} tokens (--max-model-len {longest}, and each request"
        f" asks for one more): give prepare-data a --seq-length of at most {longest - 1}, or longer"
        " samples are skipped."
    )
    off = _CHUNKS in judged.add or command.given("enable_chunked_prefill") in ("no", "false")
    if off and batched is not None and batched < longest:
        judged.refused.append(
            f"Without chunked prefill the server does not start with --max-num-batched-tokens {batched}"
            f" below --max-model-len {longest}: give at least {longest}."
        )
