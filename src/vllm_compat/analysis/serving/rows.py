"""What a server offers as rows that JSON can hold, and back: one row a fact, alike in many releases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm_compat.analysis.serving.model import Offered, RequestModel, Route
from vllm_compat.analysis.serving.models import ModelOffer

Row = list[Any]

_KEYS = ("speculative_config", "kv_transfer_config")


def rows_of(offered: Offered, models: Iterable[ModelOffer] = ()) -> Iterator[Row]:
    """Yield the rows of an offer and of the model classes beside it.

    Lines are left out of files: they move with every release, and no answer needs them.
    """
    for name in offered.flags:
        yield ["flag", name]
    for owner, fields in offered.keys.items():
        yield from (["key", owner, name] for name in fields)
    for name in offered.methods:
        yield ["method", name]
    for name in offered.connectors:
        yield ["connector", name]
    for name, model in offered.requests.items():
        yield ["request", name, model.extra_allowed]
        yield from (["field", name, each] for each in model.fields)
    for name, fields in offered.responses.items():
        yield from (["response", name, each] for each in fields)
    for path, route in offered.routes.items():
        known = None if route.fields is None else sorted(route.fields)
        yield ["route", path, route.answers, known, _file(route.where), route.switch]
    for name, flags in offered.refuses.items():
        yield ["refuses", name, list(flags)]
    for each in models:
        if each.known:
            yield ["model", each.architecture, each.interface, each.ids, each.last, _file(each.where)]


def offered_from(rows: Iterable[Row]) -> Offered:
    """Put an offer together again from its rows."""
    sets: dict[str, set[str]] = {"flag": set(), "method": set(), "connector": set()}
    owned: dict[str, dict[str, set[str]]] = {
        "key": {o: set() for o in _KEYS},
        "field": {},
        "response": {},
    }
    extra: dict[str, bool] = {}
    routes: dict[str, Route] = {}
    refuses: dict[str, tuple[str, ...]] = {}
    for kind, name, *rest in rows:
        if kind in sets:
            sets[kind].add(name)
        elif kind in owned:
            owned[kind].setdefault(name, set()).add(rest[0])
        elif kind == "request":
            extra[name] = rest[0]
        elif kind == "route":
            answers, known, where, switch = rest
            routes[name] = Route(answers, None if known is None else frozenset(known), where, switch)
        elif kind == "refuses":
            refuses[name] = tuple(rest[0])
    return Offered(
        flags=frozenset(sets["flag"]),
        keys=_frozen(owned["key"]),
        methods=frozenset(sets["method"]),
        connectors=frozenset(sets["connector"]),
        requests={
            name: RequestModel(frozenset(owned["field"].get(name, ())), allowed)
            for name, allowed in extra.items()
        },
        responses=_frozen(owned["response"]),
        routes=routes,
        refuses=refuses,
    )


def models_from(rows: Iterable[Row]) -> dict[str, ModelOffer]:
    """Return what the model classes of a release offer, by architecture."""
    return {name: ModelOffer(name, True, *rest) for kind, name, *rest in rows if kind == "model"}


def _frozen(owned: dict[str, set[str]]) -> dict[str, frozenset[str]]:
    return {name: frozenset(fields) for name, fields in owned.items()}


def _file(where: str) -> str:
    """Return the file of ``file:line``."""
    file, _, line = where.rpartition(":")
    return file if line.isdigit() else where
