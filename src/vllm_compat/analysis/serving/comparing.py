"""asks × offer → findings, in the words of :mod:`vllm_compat.analysis.drift`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm_compat.analysis.drift.model import Finding, FindingKind, Findings
from vllm_compat.analysis.serving.model import Ask, AskKind, Offered

SETTLED = {
    "method.missing",
    "chunked-prefill.refused",
    "render.answer",
    "render.scale-out",
    "render.truncation",
}
"""Keys of the hazards that reading both sides settles, one way or the other."""

_CONFIGURATIONS = {
    "speculative_config": "vllm.config.speculative.SpeculativeConfig",
    "kv_transfer_config": "vllm.config.kv_transfer.KVTransferConfig",
}
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory"
_METHODS = "vllm.config.speculative.SpeculativeMethod"
_SILENT = {
    "truncation_side": " Prompts are cut on the side of the tokenizer's choice, which may be the left;"
    " render on a vLLM that has the field, or give a length that no conversation exceeds.",
}


def flag_name(flag: str) -> str:
    """Return the field behind a flag: ``--no-enable-x=1`` is ``enable_x``."""
    name = flag.partition("=")[0].lstrip("-").replace("-", "_")
    return name.removeprefix("no_")


def find_across(asks: Iterable[Ask], offered: Offered, given: Iterable[str] = ()) -> tuple[Finding, ...]:
    """Return what a downstream asks of the server and does not get.

    ``given`` are flags that the server is started with besides the launcher's own. ``fatal`` findings
    are sure to fail; others depend on the run: on flags that are given by hand, or on the data.
    """
    asks = tuple(asks)
    started = {a.name.partition("=")[0].replace("_", "-") for a in asks if a.kind is AskKind.FLAG} | {
        flag.partition("=")[0].replace("_", "-") for flag in given
    }
    findings = Findings()
    for ask in asks:
        for finding in _findings(ask, offered, started):
            findings.add(finding)
    return findings.all()


def _findings(ask: Ask, offered: Offered, started: set[str]) -> Iterator[Finding]:
    if ask.kind is AskKind.FLAG:
        yield from _flag(ask, offered)
    elif ask.kind is AskKind.KEY:
        yield from _key(ask, offered)
    elif ask.kind is AskKind.METHOD and ask.name not in offered.methods:
        yield _missing(ask, f"{_METHODS}.{ask.name}", f"`vllm serve` knows no method {ask.name}")
    elif ask.kind is AskKind.CONNECTOR:
        yield from _connector(ask, offered, started)
    elif ask.kind is AskKind.FIELD:
        yield from _field(ask, offered)
    elif ask.kind is AskKind.READ:
        yield from _read(ask, offered)
    elif ask.kind is AskKind.ROUTE:
        yield from _route(ask, offered, started)
    elif ask.kind is AskKind.ANSWER:
        yield from _answer(ask, offered)


def _missing(ask: Ask, symbol: str, says: str) -> Finding:
    return Finding(
        FindingKind.NAME_MISSING,
        symbol,
        sites=(ask.site,),
        detail=f"{says}: the server ends at its start.",
    )


def _flag(ask: Ask, offered: Offered) -> Iterator[Finding]:
    if flag_name(ask.name) not in offered.flags:
        yield Finding(
            FindingKind.PARAMETER_REMOVED,
            "vllm.engine.arg_utils.EngineArgs",
            ask.name,
            (ask.site,),
            detail=f"`vllm serve` has no flag {ask.name}: the server ends at its start.",
        )


def _key(ask: Ask, offered: Offered) -> Iterator[Finding]:
    if ask.name not in offered.keys.get(ask.owner, frozenset()):
        yield Finding(
            FindingKind.PARAMETER_REMOVED,
            _CONFIGURATIONS[ask.owner],
            ask.name,
            (ask.site,),
            detail=f"The JSON of --{ask.owner} has no key {ask.name}: the server ends at its start.",
        )


def _connector(ask: Ask, offered: Offered, started: set[str]) -> Iterator[Finding]:
    if ask.name not in offered.connectors:
        yield _missing(ask, f"{_FACTORY}.{ask.name}", f"vLLM registers no connector {ask.name}")
        return
    for flag in offered.refuses.get(ask.name, ()):
        if flag not in started:
            yield Finding(
                FindingKind.PARAMETER_REQUIRED,
                "vllm.config.vllm.VllmConfig",
                flag,
                (ask.site,),
                detail=f"The server refuses to start with {ask.name} unless {flag} is given, which the"
                " launcher does not give: put it after the launcher's `--`.",
                fatal=False,
            )


def _field(ask: Ask, offered: Offered) -> Iterator[Finding]:
    model = offered.requests.get(ask.owner)
    if model is None or ask.name in model.fields:
        return
    says = f"{ask.owner} has no field {ask.name}"
    if model.extra_allowed:
        detail = f"{says} and takes no notice of it, without an error.{_SILENT.get(ask.name, '')}"
    else:
        detail = f"{says} and refuses requests that have it."
    yield Finding(
        FindingKind.BEHAVIOUR if model.extra_allowed else FindingKind.PARAMETER_REMOVED,
        f"vllm.entrypoints.openai.{ask.owner}",
        ask.name,
        (ask.site,),
        detail=detail,
        fatal=not model.extra_allowed,
    )


def _read(ask: Ask, offered: Offered) -> Iterator[Finding]:
    known = [offered.responses[n] for n in ask.owner.split("|") if n in offered.responses]
    if known and not any(ask.name in fields for fields in known):
        yield Finding(
            FindingKind.ATTRIBUTE_MISSING,
            "vllm.entrypoints.openai.CompletionResponse",
            ask.name,
            (ask.site,),
            detail=f"The server's answer has no {ask.name}, which the client reads.",
        )


def _route(ask: Ask, offered: Offered, started: set[str]) -> Iterator[Finding]:
    route = offered.routes.get(ask.name)
    if route is None:
        yield Finding(
            FindingKind.NAME_MISSING,
            ask.name,
            sites=(ask.site,),
            detail=f"The server has no route {ask.name}: every request to it fails.",
        )
    elif route.switch and route.switch not in started:
        yield Finding(
            FindingKind.PARAMETER_REQUIRED,
            ask.name,
            route.switch,
            (ask.site,),
            seen=route.where,
            detail=f"The server answers {ask.name} only with {route.switch}, which the launcher does not"
            " give: put it after the launcher's `--`.",
            fatal=False,
        )


def _answer(ask: Ask, offered: Offered) -> Iterator[Finding]:
    route = offered.routes.get(ask.owner)
    if route is None or not route.answers:
        return
    simple = route.answers.isidentifier() and route.answers not in ("list", "dict")
    if simple and (route.fields is None or ask.name in route.fields):
        return
    yield Finding(
        FindingKind.RETURN_SHAPE,
        ask.owner,
        ask.name,
        (ask.site,),
        seen=f"response_model={route.answers}, {route.where}",
        detail=f"The server answers {ask.owner} with {route.answers}, which has no {ask.name}.",
    )
