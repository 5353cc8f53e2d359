"""Calls × signatures → why a call does not bind, or binds to other parameters than its author meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_compat.analysis.contract import CallSite
from vllm_compat.analysis.drift.model import FindingKind
from vllm_compat.analysis.drift.words import akin, last, word
from vllm_compat.analysis.surface.model import Parameter, ParameterKind, Signature

_POSITIONAL = (ParameterKind.POSITIONAL_ONLY, ParameterKind.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Problem:
    """One reason why a call does not bind to a signature as its author meant it."""

    kind: FindingKind
    name: str | None
    detail: str
    renamed_to: str | None = None
    fatal: bool = True
    home: bool = False


def positional(signature: Signature) -> list[Parameter]:
    return [p for p in signature.parameters if p.kind in _POSITIONAL]


def at(signature: Signature, index: int) -> Parameter | None:
    plain = positional(signature)
    return plain[index] if index < len(plain) else None


def unfilled(site: CallSite, signature: Signature) -> Iterator[Parameter]:
    """Iterate over the required parameters that a call does not give."""
    plain = positional(signature)
    filled = {p.name for p in plain[: len(site.positional)]} | {name for name, _ in site.keywords}
    for parameter in signature.parameters:
        if parameter.required and parameter.name not in filled:
            yield parameter


def bind(site: CallSite, signature: Signature, before: Signature | None = None) -> tuple[Problem, ...]:
    """Return why a call does not bind to a signature, or binds to other parameters than meant.

    ``before`` is the signature that the call was written for, where it is known.
    """
    lacking = [] if site.star else list(unfilled(site, signature))
    problems = [
        *_unknown_keywords(site, signature, before, lacking),
        *_too_many(site, signature, before),
        *_given_twice(site, signature),
        *_misplaced(site, signature, before),
    ]
    told = {p.renamed_to for p in problems} | {p.name for p in problems}
    name = last(site.symbol)
    problems += [
        Problem(
            FindingKind.PARAMETER_REQUIRED,
            parameter.name,
            f"{name} requires {parameter.name} here, and the downstream does not give it.",
        )
        for parameter in lacking
        if parameter.name not in told
    ]
    if before is not None:
        problems += _defaults(site, signature, before)
    return tuple(problems)


def _unknown_keywords(
    site: CallSite, signature: Signature, before: Signature | None, lacking: Sequence[Parameter]
) -> Iterator[Problem]:
    """Iterate over the keywords that a call gives and that are not taken."""
    name = last(site.symbol)
    for keyword, _ in site.keywords:
        if signature.accepts(keyword):
            continue
        parameter = signature.get(keyword)
        if parameter is not None and parameter.kind is ParameterKind.POSITIONAL_ONLY:
            yield Problem(
                FindingKind.PARAMETER_REORDERED,
                keyword,
                f"{name} takes {keyword} by position only here.",
            )
            continue
        new = _renamed(keyword, site, signature, before, lacking)
        if new is not None:
            yield Problem(
                FindingKind.PARAMETER_RENAMED,
                keyword,
                f"{name} takes no {keyword} here; {new.name} stands in its place.",
                renamed_to=new.name,
            )
        else:
            yield Problem(FindingKind.PARAMETER_REMOVED, keyword, f"{name} takes no {keyword} here.")


def _too_many(site: CallSite, signature: Signature, before: Signature | None) -> Iterator[Problem]:
    """Iterate over the positional arguments for which there is no parameter."""
    if any(p.kind is ParameterKind.VAR_POSITIONAL for p in signature.parameters):
        return
    name, places = last(site.symbol), len(positional(signature))
    by_keyword = [p.name for p in signature.parameters if p.kind is ParameterKind.KEYWORD_ONLY]
    old = positional(before) if before is not None else []
    for index, text in enumerate(site.positional[places:], start=places):
        meant = old[index].name if index < len(old) else word(text)
        if meant in by_keyword:
            yield Problem(
                FindingKind.PARAMETER_REORDERED,
                meant,
                f"{name} takes {meant} by keyword only here.",
            )
        else:
            yield Problem(
                FindingKind.PARAMETER_REMOVED,
                meant or f"[{index}]",
                f"{name} takes {places} positional arguments here, and the downstream "
                f"gives {len(site.positional)}.",
            )


def _given_twice(site: CallSite, signature: Signature) -> Iterator[Problem]:
    """Iterate over the parameters that a call gives by position and by keyword."""
    name = last(site.symbol)
    keywords = {keyword for keyword, _ in site.keywords}
    for index, parameter in enumerate(positional(signature)[: len(site.positional)]):
        if parameter.name in keywords:
            yield Problem(
                FindingKind.PARAMETER_REORDERED,
                parameter.name,
                f"{name} takes {parameter.name} as argument {index + 1} here, and the "
                "downstream gives it by keyword as well.",
            )


def _renamed(
    keyword: str,
    site: CallSite,
    signature: Signature,
    before: Signature | None,
    lacking: Sequence[Parameter],
) -> Parameter | None:
    """Return the one parameter that can only be a vanished one's new name."""
    if before is not None:
        return _in_the_place_of(keyword, site, signature, before)
    # Without the old signature: one keyword is unknown, one parameter is unfilled, and their
    # names are akin.
    unknown = [name for name, _ in site.keywords if not signature.accepts(name)]
    if len(unknown) != 1 or len(lacking) != 1:
        return None
    return lacking[0] if akin(keyword, lacking[0].name) else None


def _in_the_place_of(
    keyword: str, site: CallSite, signature: Signature, before: Signature
) -> Parameter | None:
    """Return the one new parameter that is like a vanished one, or stands where it stood."""
    old = before.get(keyword)
    if old is None:
        return None
    known = {p.name for p in before.parameters} | {name for name, _ in site.keywords}
    candidates = [p for p in signature.parameters if p.name not in known and _alike(p, old)]
    position = before.parameters.index(old)
    there = [p for p in candidates if signature.parameters.index(p) == position]
    if old.annotation is None:
        candidates = there
    else:
        candidates = [p for p in candidates if p.required == old.required or p in there]
    if len(candidates) > 1:
        candidates = there
    return candidates[0] if len(candidates) == 1 else None


def _alike(one: Parameter, other: Parameter) -> bool:
    return one.annotation == other.annotation and one.kind is other.kind


def _misplaced(site: CallSite, signature: Signature, before: Signature | None) -> Iterator[Problem]:
    """Iterate over positional arguments that land on another parameter than the one meant."""
    plain = positional(signature)
    name = last(site.symbol)
    if before is not None:
        yield from _displaced(site, plain, before, signature)
        return
    names = [p.name for p in plain]
    words = [word(text) for text in site.positional]
    for index, given in enumerate(words[: len(plain)]):
        if given in names and names[index] != given and names[index] in words:
            yield Problem(
                FindingKind.PARAMETER_REORDERED,
                given,
                f"{name} takes {names[index]} as argument {index + 1} here, and the downstream "
                f"gives {given}.",
            )


def _displaced(
    site: CallSite, plain: Sequence[Parameter], before: Signature, signature: Signature
) -> Iterator[Problem]:
    """Iterate over positional arguments whose place another parameter has taken."""
    places = zip(site.positional, plain, positional(before), strict=False)
    for number, (_, now, was) in enumerate(places, start=1):
        if was.name == now.name:
            continue
        if signature.get(was.name) is not None or before.get(now.name) is not None:
            kind = FindingKind.PARAMETER_REORDERED
        elif was.annotation != now.annotation:
            kind = FindingKind.PARAMETER_REMOVED
        else:
            continue
        yield Problem(
            kind,
            was.name,
            f"{last(site.symbol)} takes {now.name} as argument {number} here, where {was.name} stood.",
            home=True,
        )


def _defaults(site: CallSite, signature: Signature, before: Signature) -> Iterator[Problem]:
    """Iterate over the defaults that a call relies on and that have changed."""
    if site.star:
        return
    given = {p.name for p in positional(signature)[: len(site.positional)]}
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
                f"{last(site.symbol)}'s {parameter.name}, which the downstream leaves to its default, "
                f"is {parameter.default} here and was {old.default}",
                fatal=False,
                home=True,
            )
