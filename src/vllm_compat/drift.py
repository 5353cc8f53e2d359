"""contract × surface → findings. Pure: neither vLLM nor the downstream is imported."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from vllm_compat.contract import CallSite, Contract, SiteKind, Use
from vllm_compat.surface.model import (
    Parameter,
    ParameterKind,
    Signature,
    Surface,
    Symbol,
    SymbolKind,
)
from vllm_compat.surface.syntax import uncollected


class FindingKind(str, Enum):
    """What does not fit."""

    MODULE_MISSING = "module missing"
    NAME_MOVED = "name moved"
    NAME_MISSING = "name missing"
    ATTRIBUTE_MISSING = "attribute missing"
    PARAMETER_REMOVED = "parameter removed"
    PARAMETER_REQUIRED = "parameter required"
    PARAMETER_RENAMED = "parameter renamed"
    PARAMETER_REORDERED = "parameter reordered"
    RETURN_SHAPE = "return shape"
    ARGUMENT_TYPE = "argument type"
    BEHAVIOUR = "behaviour"
    NAME_TAKEN = "name taken"


@dataclass(frozen=True)
class Finding:
    """One drift: a call site that does not fit, or a behaviour that differs.

    ``symbol`` is vLLM's dotted name as the downstream knows it (the module's for a missing module),
    ``name`` the parameter, attribute or imported name concerned, ``seen`` the signature or
    statement that was read, ``detail`` one sentence for people, ``moved_to`` the new dotted name of
    a moved one, ``renamed_to`` the new name of a renamed parameter. ``fatal`` says that the call
    site is sure to fail or to give wrong data; otherwise it depends on the run. ``home`` is the
    release that the downstream fits, where only comparison with it shows the finding.
    """

    kind: FindingKind
    symbol: str
    name: str | None = None
    sites: tuple[CallSite, ...] = ()
    seen: str | None = None
    detail: str = ""
    moved_to: str | None = None
    renamed_to: str | None = None
    fatal: bool = True
    home: str | None = None

    @property
    def key(self) -> tuple[str, str, str | None]:
        """What makes two findings the same on different releases."""
        return (self.kind.value, self.symbol, self.name)


# A model step in two calls: the first may hand back None, and must then be completed by the second.
_STEP = ("execute_model", "sample_tokens")

_POSITIONAL = (ParameterKind.POSITIONAL_ONLY, ParameterKind.POSITIONAL_OR_KEYWORD)
_SCALARS = frozenset(f"builtins.{name}" for name in ("bool", "bytes", "float", "int", "str"))
_LIST_LIKE = frozenset({"list", "List", "tuple", "Tuple", "Sequence"})


def render(signature: Signature) -> str:
    """Return a signature as people write it, annotations left out but for the result's."""
    parts: list[str] = []
    starred = positional_only = False
    for parameter in signature.parameters:
        if parameter.kind is ParameterKind.POSITIONAL_ONLY:
            positional_only = True
        elif positional_only:
            parts.append("/")
            positional_only = False
        if parameter.kind is ParameterKind.VAR_POSITIONAL:
            starred = True
        if parameter.kind is ParameterKind.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        prefix = {ParameterKind.VAR_POSITIONAL: "*", ParameterKind.VAR_KEYWORD: "**"}
        text = prefix.get(parameter.kind, "") + parameter.name
        parts.append(f"{text}={parameter.default}" if parameter.default is not None else text)
    if positional_only:
        parts.append("/")
    returns = f" -> {signature.returns}" if signature.returns else ""
    return f"({', '.join(parts)}){returns}"


def find_drifts(
    contract: Contract, surface: Surface, home: Surface | None = None
) -> tuple[Finding, ...]:
    """Return every call site of the contract that does not fit the surface.

    ``home`` is the surface of a release that the downstream was written for, where one is known:
    compared with it, positional arguments that now land elsewhere, renamed parameters, and changed
    defaults that the downstream relies on are seen as well. Findings come in the order in which
    their first call site stands in the source, each once with all its sites.
    """
    with uncollected():
        return _Finder(contract, surface, home).run()


class _Finder:
    def __init__(self, contract: Contract, surface: Surface, home: Surface | None) -> None:
        self.contract = contract
        self.surface = surface
        self.home = home
        self.found: dict[tuple[object, ...], Finding] = {}
        self.moved: dict[str, str] = {}
        self.missing_cache: dict[str, str | None] = {}
        self.optional_imports = {
            s.symbol for s in contract.sites if s.kind is SiteKind.IMPORT and s.optional
        } - {s.symbol for s in contract.sites if s.kind is SiteKind.IMPORT and not s.optional}
        # What a function asks for before it uses it, and what the downstream adds itself.
        self.asked = {(s.symbol, s.within) for s in contract.sites if s.optional}
        self.stored = {s.symbol for s in contract.sites if s.store}
        self.subclassed = {s.symbol for s in contract.sites if s.kind is SiteKind.SUBCLASS}

    def run(self) -> tuple[Finding, ...]:
        sites = [s for s in self.contract.sites if not s.optional and not self.superseded(s)]
        for site in sites:
            if site.kind is SiteKind.HOOK:
                self.hook(site)
            elif site.store:
                self.patched(site)
            else:
                self.look(site)
        return tuple(self.found.values())

    def look(self, site: CallSite) -> None:
        missing = self.missing(site.symbol)
        if missing is not None:
            if any(self.missing(other) is None for other in site.any_of):
                return
            self.lacks(site, missing)
            missing = self.missing(site.symbol)  # a moved name is looked at in its new place
        if missing is None:
            self.reach(site)
            if site.kind is SiteKind.CALL:
                self.call(site)

    def superseded(self, site: CallSite) -> bool:
        """Whether the downstream's own tests keep it from reaching a site on this surface."""
        if any(self.missing(name) is not None for name in site.needs):
            return True
        return bool(site.unless) and all(self.missing(name) is None for name in site.unless)

    def patched(self, site: CallSite) -> None:
        """A name that the downstream replaces, and that was there where it was written."""
        if self.home is None or self.home.resolve(site.symbol) is None:
            return
        if self.missing(site.symbol) is None:
            return
        owner, _, name = site.symbol.rpartition(".")
        self.add(
            Finding(
                FindingKind.ATTRIBUTE_MISSING,
                owner,
                name,
                (site,),
                None,
                f"{_last(owner)} has no {name} here, so that replacing it changes nothing.",
                fatal=False,
            )
        )

    def add(self, finding: Finding) -> None:
        key = (*finding.key, finding.seen, finding.detail, finding.fatal)
        known = self.found.get(key)
        if known is None:
            self.found[key] = finding
        else:
            sites = known.sites + tuple(s for s in finding.sites if s not in known.sites)
            self.found[key] = replace(known, sites=sites)

    # Names.

    def here(self, symbol: str) -> str:
        """Return a symbol's path on this surface, moved names followed."""
        for old in sorted(self.moved, key=len, reverse=True):
            if symbol == old or symbol.startswith((old + ".", old + "()", old + "[]")):
                return self.moved[old] + symbol[len(old) :]
        return symbol

    def missing(self, symbol: str) -> str | None:
        """Return the shortest prefix of a symbol that is not there, or None."""
        path = self.here(symbol)
        if path not in self.missing_cache:
            self.missing_cache[path] = self._missing(path)
        answer = self.missing_cache[path]
        return None if answer is None else symbol[: len(symbol) - (len(path) - len(answer))] or symbol

    def _missing(self, path: str) -> str | None:
        if self.surface.resolve(path) is not None:
            return None
        for prefix in prefixes(path):
            if self.surface.resolve(prefix) is None:
                return prefix
        return path

    def lacks(self, site: CallSite, missing: str) -> None:
        if any(missing == name or name.startswith(missing + ".") for name in self.optional_imports):
            return
        if (missing, site.within) in self.asked or missing in self.stored:
            return
        parent, _, name = self.here(missing).rpartition(".")
        owner = self.surface.resolve(parent) if parent else None
        if owner is None or owner.kind is SymbolKind.MODULE:
            self.absent(site, missing)
            return
        if {name, re.split(r"\W", _last(parent), maxsplit=1)[0]} & set(self.contract.written):
            return  # the downstream gives objects this attribute, or puts its own object there
        returned = _returned_type(self.surface, parent)
        if returned is not None:
            call = missing.rpartition(".")[0].removesuffix("()")
            self.add(
                Finding(
                    FindingKind.RETURN_SHAPE,
                    call,
                    None,
                    (*self._calls_before(site, call), site),
                    returned,
                    f"{_last(call)} hands back {returned} here, and the downstream uses the "
                    f"result's {name}, which that has not.",
                )
            )
            return
        derived = self.derived(parent, owner, name)
        if derived is None:
            return
        also = f" (a {_last(derived)}, which it may be, has)" if derived else ""
        self.add(
            Finding(
                FindingKind.ATTRIBUTE_MISSING,
                missing.rpartition(".")[0],
                name,
                (site,),
                None,
                f"{_last(owner.path)} has no {name} here{also}.",
                fatal=not derived,
            )
        )

    def derived(self, parent: str, owner: Symbol, name: str) -> str | None:
        """Return a subclass that has a name which a value's annotated class has not.

        An annotation may promise less than there is. Empty where no subclass has it, or where the
        class is named itself; None where it can't be known: the downstream's own subclasses may, or one
        with a base from outside vLLM.
        """
        named = owner.kind is SymbolKind.CLASS and owner.path == parent
        if named or owner.kind is SymbolKind.MODULE:
            return ""
        path = owner.path
        if owner.kind is not SymbolKind.CLASS:
            types = self.surface.value_types(parent)
            if types is None or len(types - {"None"}) != 1:
                return "" if owner.path == parent else None
            path = next(iter(types - {"None"}))
        if any(
            path in self.surface.ancestors(known.path)
            for symbol in self.subclassed
            if (known := self.surface.resolve(self.here(symbol))) is not None
        ):
            return None
        for other in self.surface.deriving(path):
            found = self.surface.resolve(other)
            if found is not None and name in found.members:
                return other
            if found is not None and found.open_ended:
                return None
        return ""

    def _calls_before(self, site: CallSite, call: str) -> tuple[CallSite, ...]:
        """Return the call whose result a site uses."""
        attribute = site.symbol[len(call) + 2 :].lstrip(".").split(".")[0]
        return tuple(s for s in self.contract.calls(call) if Use("attribute", attribute) in s.uses)

    def absent(self, site: CallSite, missing: str) -> None:
        """A module, or a module's name, is not there."""
        imported = self.imported(site, missing)
        parent, _, name = imported.rpartition(".")
        new = self.find_moved(imported)
        if new is not None:
            self.moved[imported] = new
        whole = self.is_module_import(imported)
        if whole:
            new = self.moved_module(imported)
            if new is not None:
                self.moved[imported] = new
        if whole or any(not self.surface.has_module(p) for p in prefixes(parent)):
            module = imported if whole else parent
            where = ""
            if new:
                what = "What is used of it" if whole else name
                where = f" {what} is in {new if whole else new.rpartition('.')[0]} here."
            self.add(
                Finding(
                    FindingKind.MODULE_MISSING,
                    module,
                    None if whole else name,
                    (site,),
                    None,
                    f"There is no module {module} here.{where}",
                    new,
                )
            )
        elif new is not None:
            self.add(
                Finding(
                    FindingKind.NAME_MOVED,
                    imported,
                    None,
                    (site,),
                    None,
                    f"{name} is in {new.rpartition('.')[0]} here.",
                    new,
                )
            )
        else:
            self.add(
                Finding(
                    FindingKind.NAME_MISSING,
                    imported,
                    None,
                    (site,),
                    None,
                    f"{parent} has no {name} here, and no other module of vLLM defines one that fits.",
                )
            )

    def imported(self, site: CallSite, missing: str) -> str:
        """Return the imported name that a missing prefix belongs to."""
        names = [
            s.symbol
            for s in self.contract.sites
            if s.kind is SiteKind.IMPORT
            and (site.symbol + ".").startswith((s.symbol + ".", s.symbol + "()"))
            and len(s.symbol) >= len(missing)
        ]
        return max(names, key=len) if names else missing

    def is_module_import(self, symbol: str) -> bool:
        """Whether the downstream uses an imported name as a module."""
        if self.home is not None:
            known = self.home.resolve(symbol)
            if known is not None:
                return known.kind is SymbolKind.MODULE
        return any(s.is_module and s.symbol == symbol for s in self.contract.sites)

    def moved_module(self, symbol: str) -> str | None:
        """Return the one module that defines all that the downstream uses of a missing module."""
        start = len(symbol) + 1
        used = {
            re.split(r"\W", s.symbol[start:], maxsplit=1)[0]
            for s in self.contract.sites
            if s.symbol.startswith(symbol + ".")
        }
        places = [
            {path.rpartition(".")[0] for path in self.surface.find(name)} - {symbol} for name in used
        ]
        common = set.intersection(*places) if places else set()
        shared = {module: shared_prefix(symbol, module) for module in common}
        best = [module for module, n in shared.items() if n == max(shared.values())]
        return best[0] if len(best) == 1 else None

    def find_moved(self, symbol: str) -> str | None:
        """Return the one other place that defines a name which fits the downstream's use of it."""
        name = _last(symbol)
        before = self.home.resolve(symbol) if self.home is not None else None
        fitting = []
        for path in self.surface.find(name):
            if path == symbol:
                continue
            there = self.surface.resolve(path)
            if there is None or (before is not None and there.kind is not before.kind):
                continue
            if self.fits(symbol, path):
                fitting.append(path)
        if len(fitting) > 1:
            # The nearest of several: a module is usually split, or moves within its package.
            shared = [shared_prefix(symbol, path) for path in fitting]
            best = max(shared)
            fitting = [p for p, n in zip(fitting, shared, strict=True) if n == best]
        return fitting[0] if len(fitting) == 1 else None

    def fits(self, symbol: str, path: str) -> bool:
        """Whether a definition elsewhere can be what the downstream means by a name."""
        there = self.surface.resolve(path)
        if there is None:
            return False
        calls = self.contract.calls(symbol)
        for site in self.contract.sites:
            inside = site.symbol[len(symbol) :]
            if (
                site.symbol.startswith(symbol + ".")
                and "()" not in inside
                and "[]" not in inside
                and self.surface.resolve(path + inside) is None
            ):
                return False
        if not calls:
            return True
        signature = there.signature
        if signature is None:
            return there.kind is not SymbolKind.ATTRIBUTE
        # Called in much the same way: a namesake is told from a moved one whose signature drifted.
        for call in calls:
            given = [k for k, _ in call.keywords]
            known = sum(signature.accepts(k) for k in given)
            unknown = len(given) - known
            lacking = [] if call.star else list(unfilled(call, signature))
            if unknown > known or len(lacking) > len(given) + len(call.positional):
                return False
        return True

    # Values.

    def reach(self, site: CallSite) -> None:
        """Note that only some of the classes that an owner may be have the name."""
        symbol = self.surface.resolve(self.here(site.symbol))
        if symbol is None or not symbol.lacking:
            return
        owner, _, name = site.symbol.rpartition(".")
        lacking = " and ".join(symbol.lacking)
        self.add(
            Finding(
                FindingKind.ATTRIBUTE_MISSING,
                owner,
                name,
                (site,),
                None,
                f"{owner} may be {lacking} here, which has no {name}.",
                fatal=False,
            )
        )

    def hook(self, site: CallSite) -> None:
        owner, _, name = site.symbol.rpartition(".")
        symbol = self.surface.resolve(owner)
        if symbol is not None and name in symbol.members:
            self.add(
                Finding(
                    FindingKind.NAME_TAKEN,
                    owner,
                    name,
                    (site,),
                    None,
                    f"vLLM's worker has an attribute {name} of its own here, and vLLM refuses a "
                    "worker extension that defines it too.",
                )
            )

    # Calls.

    def call(self, site: CallSite) -> None:
        path = self.here(site.symbol)
        symbol = self.surface.resolve(path)
        if symbol is None or symbol.signature is None:
            return
        signature = symbol.signature
        before = None
        if self.home is not None:
            old = self.home.resolve(site.symbol)
            before = old.signature if old is not None else None
        bound = site
        if site.unbound and symbol.plain_method and site.positional:
            owner = self.surface.resolve(path.rpartition(".")[0])
            if owner is not None and owner.kind is SymbolKind.CLASS:
                bound = replace(site, positional=site.positional[1:])
        others = [s.signature for o in site.any_of if (s := self.surface.resolve(self.here(o)))]
        certain = not any(s is None or not bind(bound, s) for s in others)
        certain = certain and not self.avoided(site, signature)
        for problem in bind(bound, signature, before):
            self.add(
                Finding(
                    problem.kind,
                    site.symbol,
                    problem.name,
                    (site,),
                    render(signature),
                    self.told(problem),
                    renamed_to=problem.renamed_to,
                    fatal=problem.fatal and certain,
                    home=self.home.version if self.home is not None and problem.home else None,
                )
            )
        self.result(site, signature)

    def avoided(self, site: CallSite, signature: Signature) -> bool:
        """Whether the other arm of an ``if`` makes the same call in a way that fits."""
        opposite = {"then": "else", "else": "then"}
        others = {f"{line}:{opposite[arm]}" for line, _, arm in (a.partition(":") for a in site.arms)}
        return any(
            other.within == site.within
            and others.intersection(other.arms)
            and not bind(other, signature)
            for other in (self.contract.calls(site.symbol) if others else ())
        )

    def told(self, problem: Problem) -> str:
        """Return a problem's sentence, with the release that a behaviour is compared with."""
        if problem.kind is not FindingKind.BEHAVIOUR or self.home is None:
            return problem.detail
        return f"{problem.detail} on {self.home.version}."

    def result(self, site: CallSite, signature: Signature) -> None:
        """Compare what comes back with what the downstream does with it."""
        self.unwrapped(site, signature)
        self.container(site, signature)
        self.step(site, signature)
        for use in site.uses:
            if use.how == "argument":
                self.handed_on(site, signature, use)

    def unwrapped(self, site: CallSite, signature: Signature) -> None:
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
                    f"With {given[0]} given, {_last(site.symbol)} hands back the bare result here, "
                    "and the downstream takes [0] of it.",
                )
            )

    def container(self, site: CallSite, signature: Signature) -> None:
        """A list that is used like a mapping."""
        names = union(signature.returns)
        if not names or not all(_last(n) in _LIST_LIKE for n in names):
            return
        for use in site.uses:
            if use.how == "subscript" and _is_string(use.detail):
                self.add(
                    Finding(
                        FindingKind.RETURN_SHAPE,
                        site.symbol,
                        None,
                        (site,),
                        render(signature),
                        f"{_last(site.symbol)} hands back {signature.returns} here, and the "
                        f"downstream takes [{use.detail}] of it.",
                    )
                )

    def step(self, site: CallSite, signature: Signature) -> None:
        """A model step that is begun and never completed."""
        owner, _, name = site.symbol.rpartition(".")
        if name != _STEP[0] or "None" not in union(signature.returns):
            return
        second = f"{owner}.{_STEP[1]}"
        if self.surface.resolve(self.here(second)) is None:
            return
        if not any(_last(s.symbol) == _STEP[1] for s in self.contract.sites):
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

    def handed_on(self, site: CallSite, signature: Signature, use: Use) -> None:
        """A result that is passed on to a parameter of another type."""
        match = re.fullmatch(r"(vllm\..*)\[(\w+)\]", use.detail)
        if match is None:
            return
        other = self.surface.signature(self.here(match.group(1)))
        if other is None:
            return
        position = match.group(2)
        parameter = _at(other, int(position)) if position.isdigit() else other.get(position)
        if parameter is None:
            return
        returned = self.surface.result_types(self.here(site.symbol))
        taken = self.surface.parameter_types(self.here(match.group(1)), parameter.name)
        if returned is None or not taken:
            return
        # A future comes only where the call asks for one.
        returned = frozenset(t for t in returned if _last(t) != "Future")
        # Of types from outside vLLM it can't be said what else they are: a generator is an iterable.
        told = {t for t in returned if t == "None" or t.startswith("vllm.")}
        if all(t in _SCALARS or t == "None" or t.startswith("vllm.") for t in taken):
            told |= returned & _SCALARS
        surplus = {t for t in told if not self.surface.ancestors(t) & taken}
        fitting = returned - surplus
        if surplus and not fitting - {"None"}:
            names = " or ".join(sorted(map(_last, surplus)))
            self.add(
                Finding(
                    FindingKind.ARGUMENT_TYPE,
                    match.group(1),
                    parameter.name,
                    (site, *self._at_line(match.group(1), site)),
                    render(other),
                    f"{_last(match.group(1))} takes {parameter.annotation} as {parameter.name} "
                    f"here, and the downstream hands it {_last(site.symbol)}'s result, which may "
                    f"be {names}.",
                    fatal=not fitting,
                )
            )

    def _at_line(self, symbol: str, site: CallSite) -> tuple[CallSite, ...]:
        return tuple(s for s in self.contract.calls(symbol) if s.within == site.within)


# Binding.


@dataclass(frozen=True)
class Problem:
    """One reason why a call does not bind to a signature as its author meant it."""

    kind: FindingKind
    name: str | None
    detail: str
    renamed_to: str | None = None
    fatal: bool = True
    home: bool = False


def _positional(signature: Signature) -> list[Parameter]:
    return [p for p in signature.parameters if p.kind in _POSITIONAL]


def _at(signature: Signature, index: int) -> Parameter | None:
    plain = _positional(signature)
    return plain[index] if index < len(plain) else None


def unfilled(site: CallSite, signature: Signature) -> Iterator[Parameter]:
    """Iterate over the required parameters that a call does not give."""
    plain = _positional(signature)
    filled = {p.name for p in plain[: len(site.positional)]} | {name for name, _ in site.keywords}
    for parameter in signature.parameters:
        if parameter.required and parameter.name not in filled:
            yield parameter


def bind(site: CallSite, signature: Signature, before: Signature | None = None) -> tuple[Problem, ...]:
    """Return why a call does not bind to a signature, or binds to other parameters than meant.

    ``before`` is the signature that the call was written for, where it is known.
    """
    problems: list[Problem] = []
    plain = _positional(signature)
    var_positional = any(p.kind is ParameterKind.VAR_POSITIONAL for p in signature.parameters)
    name = _last(site.symbol)
    lacking = [] if site.star else list(unfilled(site, signature))
    renamed: set[str] = set()
    for keyword, _ in site.keywords:
        if signature.accepts(keyword):
            continue
        parameter = signature.get(keyword)
        if parameter is not None and parameter.kind is ParameterKind.POSITIONAL_ONLY:
            problems.append(
                Problem(
                    FindingKind.PARAMETER_REORDERED,
                    keyword,
                    f"{name} takes {keyword} by position only here.",
                )
            )
            continue
        new = _renamed(keyword, site, signature, before, lacking)
        if new is not None:
            renamed.add(new.name)
            problems.append(
                Problem(
                    FindingKind.PARAMETER_RENAMED,
                    keyword,
                    f"{name} takes no {keyword} here; {new.name} stands in its place.",
                    renamed_to=new.name,
                )
            )
        else:
            problems.append(
                Problem(FindingKind.PARAMETER_REMOVED, keyword, f"{name} takes no {keyword} here.")
            )
    extra = site.positional[len(plain) :]
    if extra and not var_positional:
        only = [p.name for p in signature.parameters if p.kind is ParameterKind.KEYWORD_ONLY]
        old = _positional(before) if before is not None else []
        for index, text in enumerate(extra, start=len(plain)):
            meant = old[index].name if index < len(old) else _word(text)
            if meant in only:
                problems.append(
                    Problem(
                        FindingKind.PARAMETER_REORDERED,
                        meant,
                        f"{name} takes {meant} by keyword only here.",
                    )
                )
            else:
                problems.append(
                    Problem(
                        FindingKind.PARAMETER_REMOVED,
                        meant or f"[{index}]",
                        f"{name} takes {len(plain)} positional arguments here, and the downstream "
                        f"gives {len(site.positional)}.",
                    )
                )
    keywords = {keyword for keyword, _ in site.keywords}
    for index, parameter in enumerate(plain[: len(site.positional)]):
        if parameter.name in keywords:
            problems.append(
                Problem(
                    FindingKind.PARAMETER_REORDERED,
                    parameter.name,
                    f"{name} takes {parameter.name} as argument {index + 1} here, and the "
                    "downstream gives it by keyword as well.",
                )
            )
    problems += _misplaced(site, signature, before)
    told = renamed | {p.name for p in problems}
    for parameter in lacking:
        if parameter.name not in told:
            problems.append(
                Problem(
                    FindingKind.PARAMETER_REQUIRED,
                    parameter.name,
                    f"{name} requires {parameter.name} here, and the downstream does not give it.",
                )
            )
    if before is not None:
        problems += _defaults(site, signature, before)
    return tuple(problems)


def _renamed(
    keyword: str,
    site: CallSite,
    signature: Signature,
    before: Signature | None,
    lacking: Sequence[Parameter],
) -> Parameter | None:
    """Return the one parameter that can only be a vanished one's new name."""
    given = {name for name, _ in site.keywords}
    unknown = [name for name, _ in site.keywords if not signature.accepts(name)]
    if before is None:
        # Without the old signature: one keyword is unknown, one parameter is unfilled, and their
        # names are akin.
        if len(unknown) != 1 or len(lacking) != 1:
            return None
        return lacking[0] if _akin(keyword, lacking[0].name) else None
    old = before.get(keyword)
    if old is None:
        return None
    known = {p.name for p in before.parameters}
    appeared = [p for p in signature.parameters if p.name not in known and p.name not in given]
    position = [p.name for p in before.parameters].index(keyword)
    places = {p.name: i for i, p in enumerate(signature.parameters)}
    candidates = [
        p
        for p in appeared
        if p.annotation == old.annotation
        and p.kind is old.kind
        and (old.annotation is not None or places[p.name] == position)
        and (p.required == old.required or places[p.name] == position)
    ]
    if len(candidates) > 1:
        candidates = [p for p in candidates if places[p.name] == position]
    return candidates[0] if len(candidates) == 1 else None


def _misplaced(site: CallSite, signature: Signature, before: Signature | None) -> Iterator[Problem]:
    """Iterate over positional arguments that land on another parameter than the one meant."""
    plain = _positional(signature)
    name = _last(site.symbol)
    if before is not None:
        old = _positional(before)
        for index in range(min(len(site.positional), len(plain), len(old))):
            was, now = old[index], plain[index]
            if was.name == now.name:
                continue
            if signature.get(was.name) is not None or before.get(now.name) is not None:
                yield Problem(
                    FindingKind.PARAMETER_REORDERED,
                    was.name,
                    f"{name} takes {now.name} as argument {index + 1} here, where {was.name} stood.",
                    home=True,
                )
            elif was.annotation != now.annotation:
                yield Problem(
                    FindingKind.PARAMETER_REMOVED,
                    was.name,
                    f"{name} takes {now.name} as argument {index + 1} here, where {was.name} stood.",
                    home=True,
                )
        return
    names = [p.name for p in plain]
    words = [_word(text) for text in site.positional]
    for index, word in enumerate(words[: len(plain)]):
        if word in names and names[index] != word and names[index] in words:
            yield Problem(
                FindingKind.PARAMETER_REORDERED,
                word,
                f"{name} takes {names[index]} as argument {index + 1} here, and the downstream "
                f"gives {word}.",
            )


def _defaults(site: CallSite, signature: Signature, before: Signature) -> Iterator[Problem]:
    """Iterate over the defaults that a call relies on and that have changed."""
    if site.star:
        return
    given = {p.name for p in _positional(signature)[: len(site.positional)]}
    given |= {name for name, _ in site.keywords}
    for parameter in signature.parameters:
        old = before.get(parameter.name)
        if (
            old is not None
            and parameter.name not in given
            and old.default is not None
            and parameter.default is not None
            and old.default != parameter.default
        ):
            yield Problem(
                FindingKind.BEHAVIOUR,
                parameter.name,
                f"{_last(site.symbol)}'s {parameter.name}, which the downstream leaves to its default, "
                f"is {parameter.default} here and was {old.default}",
                fatal=False,
                home=True,
            )


# Words.


def prefixes(path: str) -> Iterator[str]:
    """Iterate over the prefixes of a dotted path, shortest first, ``()`` and ``[]`` apart."""
    for match in re.finditer(r"\.|\(\)|\[\]", path):
        start = match.start()
        if start and path[start - 1] not in ")]":
            yield path[:start]
        if match.group() != ".":
            yield path[: match.end()]
    yield path


def _last(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def _word(text: str) -> str:
    """Return the name that an argument's source ends in: ``self.x.block_size`` → ``block_size``."""
    match = re.fullmatch(r"[\w.]*?(\w+)", text)
    return match.group(1) if match and not match.group(1).isdigit() else ""


def _akin(one: str, other: str) -> bool:
    """Whether two names can be one before and after a renaming."""
    from difflib import SequenceMatcher

    return bool(set(one.split("_")) & set(other.split("_"))) or (
        SequenceMatcher(None, one, other).ratio() > 0.6
    )


def shared_prefix(one: str, other: str) -> int:
    """Return how many leading parts two dotted names have in common."""
    count = 0
    for left, right in zip(one.split("."), other.split("."), strict=False):
        if left != right:
            break
        count += 1
    return count


def _is_string(source: str) -> bool:
    return source[:1] in "'\"" or source[:2] in ("f'", 'f"')


@lru_cache(maxsize=4096)
def union(annotation: str | None) -> frozenset[str]:
    """Return the names of the types that an annotation allows, generics without their arguments.

    Empty where it can't be said.
    """
    if not annotation:
        return frozenset()
    try:
        node = ast.parse(annotation, mode="eval").body
    except SyntaxError:
        return frozenset()
    names: set[str] = set()
    return frozenset(names) if _collect(node, names) else frozenset()


def _collect(node: ast.expr, names: set[str]) -> bool:
    if isinstance(node, ast.Constant):
        if node.value is None:
            names.add("None")
            return True
        if isinstance(node.value, str):
            inner = union(node.value)
            names |= inner
            return bool(inner)
        return False
    if isinstance(node, ast.BinOp):
        return _collect(node.left, names) and _collect(node.right, names)
    if isinstance(node, ast.Subscript):
        name = _last(ast.unparse(node.value))
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Optional":
            names.add("None")
        if name in ("Optional", "Union"):
            return all(_collect(part, names) for part in parts)
        if name == "Annotated":
            return _collect(parts[0], names)
        names.add(ast.unparse(node.value))
        return True
    if isinstance(node, (ast.Name, ast.Attribute)):
        names.add(ast.unparse(node))
        return True
    return False


def _returned_type(surface: Surface, parent: str) -> str | None:
    """Return the builtin type that a path ending in a call is annotated to give, or None."""
    if not parent.endswith("()"):
        return None
    signature = surface.signature(parent.removesuffix("()"))
    names = union(signature.returns) if signature is not None else frozenset()
    plain = names - {"None"}
    if len(plain) == 1 and hasattr(builtins, next(iter(plain)).lower()) and signature is not None:
        return signature.returns
    return None
