"""What is asked of a vLLM server, and what one offers: records only, fit to be stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from vllm_compat.analysis.contract import CallSite


class AskKind(str, Enum):
    """What is asked for.

    ``flag``: a flag of ``vllm serve``. ``key``: a key of the JSON given with the flag ``owner``.
    ``method``: the speculative method. ``connector``: a connector that the factory must know.
    ``field``: a field sent in the request model ``owner``. ``read``: a field read from one of the
    response models ``owner`` (separated by ``|``). ``route``: an HTTP route. ``answer``: a field that
    the answer of the route ``owner`` must have.
    """

    FLAG = "flag"
    KEY = "key"
    METHOD = "method"
    CONNECTOR = "connector"
    FIELD = "field"
    READ = "read"
    ROUTE = "route"
    ANSWER = "answer"


@dataclass(frozen=True)
class Ask:
    """One thing that the downstream asks of the server, and where its source does."""

    kind: AskKind
    name: str
    site: CallSite
    owner: str = ""


@dataclass(frozen=True)
class RequestModel:
    """A request model: its fields, and whether others are taken without a word."""

    fields: frozenset[str]
    extra_allowed: bool


@dataclass(frozen=True)
class Route:
    """An HTTP route; ``answers`` is the source of its response model, empty where it names none.

    ``fields`` are that model's, None where they could not be read. ``switch`` is the flag without which
    the server has no such route, ``where`` the file and line that define it.
    """

    answers: str
    fields: frozenset[str] | None
    where: str
    switch: str = ""


@dataclass(frozen=True)
class Offered:
    """What ``vllm serve`` of one vLLM offers.

    ``flags`` are names with underscores, without dashes and without ``no_``. ``keys`` are the fields of
    the configuration behind a flag that takes JSON. ``refuses`` maps a connector to the flags without
    which the server does not start with it.
    """

    flags: frozenset[str] = frozenset()
    keys: Mapping[str, frozenset[str]] = field(default_factory=dict)
    methods: frozenset[str] = frozenset()
    connectors: frozenset[str] = frozenset()
    requests: Mapping[str, RequestModel] = field(default_factory=dict)
    responses: Mapping[str, frozenset[str]] = field(default_factory=dict)
    routes: Mapping[str, Route] = field(default_factory=dict)
    refuses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
