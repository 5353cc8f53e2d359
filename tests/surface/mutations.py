"""Synthetic nightlies: a surface with one thing changed, and an oracle for what that breaks.

The oracle asks ``inspect`` whether a call binds, and where each argument lands; it shares no code
with :mod:`vllm_compat.drift`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vllm_compat.contract import CallSite, Contract, SiteKind
from vllm_compat.surface import Parameter, ParameterKind, Signature, Surface, Symbol

_KINDS = {
    ParameterKind.POSITIONAL_ONLY: inspect.Parameter.POSITIONAL_ONLY,
    ParameterKind.POSITIONAL_OR_KEYWORD: inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ParameterKind.VAR_POSITIONAL: inspect.Parameter.VAR_POSITIONAL,
    ParameterKind.KEYWORD_ONLY: inspect.Parameter.KEYWORD_ONLY,
    ParameterKind.VAR_KEYWORD: inspect.Parameter.VAR_KEYWORD,
}


def below(path: str, top: str) -> bool:
    """Whether a path is a name or something of it."""
    return path == top or path.startswith((f"{top}.", f"{top}()", f"{top}[]"))


class Mutated(Surface):
    """Another surface, with names hidden, moved, or given another signature."""

    def __init__(
        self,
        base: Surface,
        *,
        hidden: tuple[str, ...] = (),
        moved: tuple[tuple[str, str], ...] = (),
        signatures: tuple[tuple[str, Signature], ...] = (),
        members: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.base = base
        self.version = base.version + ".dev1"
        self.distribution = base.distribution
        self.origin = "a mutation of " + base.origin
        self.hidden = hidden
        self.moved = moved
        self.signatures = dict(signatures)
        self.members = members

    def has_module(self, name: str) -> bool:
        return not any(below(name, top) for top in self.hidden) and self.base.has_module(name)

    def modules(self) -> Iterator[str]:
        return (m for m in self.base.modules() if self.has_module(m))

    def find(self, name: str) -> tuple[str, ...]:
        found = [p for p in self.base.find(name) if not any(below(p, top) for top in self.hidden)]
        found += [new for _, new in self.moved if new.rsplit(".", 1)[-1] == name]
        return tuple(sorted(found))

    def resolve(self, path: str) -> Symbol | None:
        for old, new in self.moved:
            if below(path, new):
                return self.base.resolve(old + path[len(new) :])
        if any(below(path, top) for top in self.hidden):
            return None
        symbol = self.base.resolve(path)
        if symbol is None:
            return None
        if symbol.path in self.signatures:
            return replace(symbol, signature=self.signatures[symbol.path])
        extra = {name: symbol.kind for owner, name in self.members if owner == symbol.path}
        return replace(symbol, members={**symbol.members, **extra}) if extra else symbol

    def result_types(self, path: str) -> frozenset[str] | None:
        return self.base.result_types(path)

    def value_types(self, path: str) -> frozenset[str] | None:
        return self.base.value_types(path)

    def parameter_types(self, path: str, name: str) -> frozenset[str] | None:
        return self.base.parameter_types(path, name)

    def ancestors(self, path: str) -> frozenset[str]:
        return self.base.ancestors(path)


@dataclass(frozen=True)
class Outcome:
    """What a mutation does to a contract: how many call sites fail, or only behave otherwise."""

    broken: bool
    changed: bool = False


def as_inspect(signature: Signature) -> inspect.Signature:
    """Return the signature as ``inspect`` has it."""
    return inspect.Signature(
        [
            inspect.Parameter(
                p.name,
                _KINDS[p.kind],
                default=inspect.Parameter.empty if p.default is None else p.default,
            )
            for p in signature.parameters
        ]
    )


def landing(site: CallSite, signature: Signature) -> dict[str, str] | None:
    """Return which argument lands on which parameter; None where the call does not bind."""
    try:
        bound = as_inspect(signature).bind(
            *(f"[{i}]" for i in range(len(site.positional))), **{k: k for k, _ in site.keywords}
        )
    except TypeError:
        return None
    return {str(value): name for name, value in bound.arguments.items()}


def outcome(sites: tuple[CallSite, ...], old: Signature, new: Signature) -> Outcome:
    """Say what a change of signature does to calls that were written for the old one."""
    broken = changed = False
    names = {p.name for p in old.parameters}
    later = {p.name for p in new.parameters}
    for site in sites:
        before, after = landing(site, old), landing(site, new)
        assert before is not None, site
        if after is None:
            broken = True
            continue
        for value, name in before.items():
            other = after.get(value)
            # A new name in the same place is a renaming; an old one is another parameter.
            if other != name and (name in later or other in names):
                broken = True
        for parameter in old.parameters:
            now = new.get(parameter.name)
            if (
                parameter.name not in before.values()
                and now is not None
                and None not in (parameter.default, now.default)
                and parameter.default != now.default
            ):
                changed = True
    return Outcome(broken, changed)


def calls_of(contract: Contract, symbol: str) -> tuple[CallSite, ...]:
    """Return the calls of a symbol that the contract does not itself cope with."""
    return tuple(s for s in contract.calls(symbol) if not s.optional)


def called(contract: Contract, surface: Surface) -> list[str]:
    """Return the symbols that a contract calls, and whose signature is known."""
    found = {
        s.symbol for s in contract.sites if s.kind is SiteKind.CALL and not s.optional and not s.star
    }
    return sorted(s for s in found if surface.signature(s) is not None)


def valid(parameters: list[Parameter]) -> Signature | None:
    """Return a signature of these parameters, or None where Python would refuse it."""
    signature = Signature(tuple(parameters))
    try:
        as_inspect(signature)
    except ValueError:
        return None
    return signature
