"""Calls that do not fit a vLLM's signatures, and results that are not what they were."""

from __future__ import annotations

import re
from dataclasses import replace

from vllm_compat.analysis.contract import CallSite, Use
from vllm_compat.analysis.drift.annotated import union
from vllm_compat.analysis.drift.binding import Problem, at, bind
from vllm_compat.analysis.drift.model import Finding, FindingKind, Findings
from vllm_compat.analysis.drift.places import Places
from vllm_compat.analysis.drift.words import is_string, last, render
from vllm_compat.analysis.surface.model import Signature, Symbol, SymbolKind

# A model step in two calls: the first may hand back None, and must then be completed by the second.
_STEP = ("execute_model", "sample_tokens")

_SCALARS = frozenset(f"builtins.{name}" for name in ("bool", "bytes", "float", "int", "str"))
_LIST_LIKE = frozenset({"list", "List", "tuple", "Tuple", "Sequence"})


class CallChecks:
    """Compare calls, and what is done with their results, with the signatures that there are."""

    def __init__(self, places: Places, findings: Findings) -> None:
        self.places = places
        self.contract = places.contract
        self.surface = places.surface
        self.home = places.home
        self.add = findings.add

    def call(self, site: CallSite) -> None:
        """Note why a call does not fit, and what is wrong with its result."""
        path = self.places.here(site.symbol)
        symbol = self.surface.resolve(path)
        if symbol is None or symbol.signature is None:
            return
        signature = symbol.signature
        bound = self._bound(site, path, symbol)
        certain = self._is_all_there_is(bound) and not self._avoided(site, signature)
        for problem in bind(bound, signature, self._signature_at_home(site.symbol)):
            self.add(
                Finding(
                    problem.kind,
                    site.symbol,
                    problem.name,
                    (site,),
                    render(signature),
                    self._told(problem),
                    renamed_to=problem.renamed_to,
                    fatal=problem.fatal and certain,
                    home=self.home.version if self.home is not None and problem.home else None,
                )
            )
        self._result(site, signature)

    def _bound(self, site: CallSite, path: str, symbol: Symbol) -> CallSite:
        """Return a method's call on its class as one on the instance that it is given."""
        if site.unbound and symbol.plain_method and site.positional:
            owner = self.surface.resolve(path.rpartition(".")[0])
            if owner is not None and owner.kind is SymbolKind.CLASS:
                return replace(site, positional=site.positional[1:])
        return site

    def _signature_at_home(self, symbol: str) -> Signature | None:
        old = self.home.resolve(symbol) if self.home is not None else None
        return old.signature if old is not None else None

    def _is_all_there_is(self, site: CallSite) -> bool:
        """Whether a call fits nothing else that its callee may be."""
        others = (self.surface.resolve(self.places.here(other)) for other in site.any_of)
        signatures = [other.signature for other in others if other is not None]
        return all(signature is not None and bind(site, signature) for signature in signatures)

    def _avoided(self, site: CallSite, signature: Signature) -> bool:
        """Whether the other arm of an ``if`` makes the same call in a way that fits."""
        opposite = {"then": "else", "else": "then"}
        others = {f"{line}:{opposite[arm]}" for line, _, arm in (a.partition(":") for a in site.arms)}
        return any(
            other.within == site.within
            and others.intersection(other.arms)
            and not bind(other, signature)
            for other in (self.contract.calls(site.symbol) if others else ())
        )

    def _told(self, problem: Problem) -> str:
        """Return a problem's sentence, with the release that a behaviour is compared with."""
        if problem.kind is not FindingKind.BEHAVIOUR or self.home is None:
            return problem.detail
        return f"{problem.detail} on {self.home.version}."

    def _result(self, site: CallSite, signature: Signature) -> None:
        """Compare what comes back with what the downstream does with it."""
        self._unwrapped(site, signature)
        self._container(site, signature)
        self._step(site, signature)
        for use in site.uses:
            if use.how == "argument":
                self._handed_on(site, signature, use)

    def _unwrapped(self, site: CallSite, signature: Signature) -> None:
        """A list of one result that is a bare result here."""
        given = [n for n in signature.unwraps if (site.keyword(n) or "None") != "None"]
        indexed = any(use == Use("subscript", "0") for use in site.uses)
        if given and indexed:
            self.add(
                Finding(
                    FindingKind.RETURN_SHAPE,
                    site.symbol,
                    given[0],
                    (site,),
                    render(signature),
                    f"With {given[0]} given, {last(site.symbol)} hands back the bare result here, "
                    "and the downstream takes [0] of it.",
                )
            )

    def _container(self, site: CallSite, signature: Signature) -> None:
        """A list that is used like a mapping."""
        names = union(signature.returns)
        if not names or not all(last(n) in _LIST_LIKE for n in names):
            return
        for use in site.uses:
            if use.how == "subscript" and is_string(use.detail):
                self.add(
                    Finding(
                        FindingKind.RETURN_SHAPE,
                        site.symbol,
                        None,
                        (site,),
                        render(signature),
                        f"{last(site.symbol)} hands back {signature.returns} here, and the "
                        f"downstream takes [{use.detail}] of it.",
                    )
                )

    def _step(self, site: CallSite, signature: Signature) -> None:
        """A model step that is begun and never completed."""
        owner, _, name = site.symbol.rpartition(".")
        if name != _STEP[0] or "None" not in union(signature.returns):
            return
        second = f"{owner}.{_STEP[1]}"
        if self.surface.resolve(self.places.here(second)) is None:
            return
        if not any(last(s.symbol) == _STEP[1] for s in self.contract.sites):
            self.add(
                Finding(
                    FindingKind.RETURN_SHAPE,
                    site.symbol,
                    _STEP[1],
                    (site,),
                    render(signature),
                    f"{name} may hand back None here, and the step must then be completed by "
                    f"{_STEP[1]}, which the downstream never calls.",
                )
            )

    def _handed_on(self, site: CallSite, signature: Signature, use: Use) -> None:
        """A result that is passed on to a parameter of another type."""
        match = re.fullmatch(r"(vllm\..*)\[(\w+)\]", use.detail)
        if match is None:
            return
        callee, position = match.groups()
        other = self.surface.signature(self.places.here(callee))
        if other is None:
            return
        parameter = at(other, int(position)) if position.isdigit() else other.get(position)
        if parameter is None:
            return
        returned = self.surface.result_types(self.places.here(site.symbol))
        taken = self.surface.parameter_types(self.places.here(callee), parameter.name)
        if returned is None or not taken:
            return
        # A future comes only where the call asks for one.
        returned = frozenset(t for t in returned if last(t) != "Future")
        surplus = self._surplus(returned, taken)
        fitting = returned - surplus
        if surplus and not fitting - {"None"}:
            names = " or ".join(sorted(map(last, surplus)))
            self.add(
                Finding(
                    FindingKind.ARGUMENT_TYPE,
                    callee,
                    parameter.name,
                    (site, *self._at_line(callee, site)),
                    render(other),
                    f"{last(callee)} takes {parameter.annotation} as {parameter.name} "
                    f"here, and the downstream hands it {last(site.symbol)}'s result, which may "
                    f"be {names}.",
                    fatal=not fitting,
                )
            )

    def _surplus(self, returned: frozenset[str], taken: frozenset[str]) -> set[str]:
        """Return the types that may come back and are surely not taken.

        Of types from outside vLLM it can't be said what else they are: a generator is an iterable.
        """
        told = set(filter(_is_told, returned))
        if all(_is_told(t) or t in _SCALARS for t in taken):
            told |= returned & _SCALARS
        return {t for t in told if not self.surface.ancestors(t) & taken}

    def _at_line(self, symbol: str, site: CallSite) -> tuple[CallSite, ...]:
        return tuple(s for s in self.contract.calls(symbol) if s.within == site.within)


def _is_told(path: str) -> bool:
    """Whether all that a type is can be said: vLLM's own, and None."""
    return path == "None" or path.startswith("vllm.")
