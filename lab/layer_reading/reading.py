"""Ways through a model's forward → the cases of what its layer hands on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lab.layer_reading.following import REDUCES, Dead, Fork, Read, TooMuch
from lab.layer_reading.model import Case, Handed, Kind, Place
from lab.layer_reading.run import Run
from lab.layer_reading.sources import SourceOf, Sources, text_of
from lab.layer_reading.values import (
    NONE,
    Constant,
    Slot,
    Sum,
    Tuple,
    Value,
    deps_of,
    in_words,
    products_in,
    slots_in,
)

_WAYS = 200


_STREAMS = re.compile(
    r"hc_\w+|\w*hyper_?connection\w*|mhc\w*|altup\w*|num_residual_streams$|n_streams$", re.IGNORECASE
)
_EARLIER = re.compile(r"(?P<name>attn_res\w*|block_residual\w*)")


def read_layer(
    layer: Place,
    model: Place,
    layers: str,
    source_of: SourceOf | Sources,
    *,
    others: Iterable[Place] = (),
) -> Handed:
    """Return what a decoder layer hands on in a model.

    ``layers`` is the model's attribute that holds the list; ``others`` the other classes in the same
    list (a hybrid model's), whose first norms read what this one hands on, too. ``source_of`` gives the
    source of a module by its name: from a tree, or by ``inspect.getsource`` in a live process.
    """
    sources = source_of if isinstance(source_of, Sources) else Sources(source_of)
    ways = list(_ways(sources, model, layers, layer))
    ways = [way for way in ways if not way[0].stage] or ways
    ways = [way for way in ways if not _does_nothing(way[0])] or ways
    cases = [_case(sources, run, layer, model, failed) for run, failed in ways]
    called = any(run.handed for run, _ in ways)
    keeps = any(_keeps(run, case) for (run, _), case in zip(ways, cases, strict=False))
    handed = Handed(layer, model, _merged(cases), called, keeps)
    for other in others:
        there = read_layer(other, model, layers, sources)
        if {c.stream for c in there.cases} != {c.stream for c in handed.cases}:
            odd = ", ".join(sorted({c.stream or "nothing" for c in there.cases}))
            here = ", ".join(sorted({c.stream or "nothing" for c in handed.cases}))
            reason = f"{other.name} in the same list reads {odd}, this one {here}"
            return Handed(layer, model, (Case(Kind.UNKNOWN, reason=reason),), called, keeps)
    return handed


def _ways(sources: Sources, model: Place, layers: str, layer: Place) -> Iterator[tuple[Run, str]]:
    pending: list[dict[str, bool]] = [{}]
    count = 0
    while pending:
        decisions = pending.pop()
        run = Run(sources, model, layers, layer, decisions)
        failed = ""
        try:
            run.go()
        except Fork as fork:
            count += 1
            if count > _WAYS or fork.test in decisions:
                yield run, "there are too many ways through its source"
                return
            pending += [{**decisions, fork.test: False}, {**decisions, fork.test: True}]
            continue
        except Dead:
            continue
        except TooMuch as error:
            failed = str(error)
        except RecursionError:
            failed = "its source nests too deeply"
        yield run, failed


def _case(sources: Sources, run: Run, layer: Place, model: Place, failed: str) -> Case:
    when = tuple(
        text if value else f"not ({text})" for text, value in run.decisions.items() if text in run.used
    )
    if streams := _several(sources, layer, model, _STREAMS):
        return Case(Kind.SEVERAL, "", when, reason=streams, returned=_returned(run))
    case = replace(_read_case(run, when, failed), returned=_returned(run))
    if case.proven and case.kind != Kind.PARTIAL and (left_out := _leaves_out(sources, layer)):
        return replace(case, kind=Kind.UNKNOWN, reason=left_out)
    if not case.proven and (streams := _several(sources, layer, model, _EARLIER)):
        return replace(case, kind=Kind.SEVERAL, stream="", reason=streams)
    return case


def _leaves_out(sources: Sources, layer: Place) -> str:
    """Return why a layer may hand on a partial sum though no norm is seen to reduce it."""
    lineage = sources.mro(layer)
    if any(REDUCES.search(sources.text(place)) for place in lineage):
        return ""
    for place in lineage:
        for node in ast.walk(sources.cls(place) or ast.Module([], [])):
            if (
                isinstance(node, ast.keyword)
                and node.arg == "reduce_results"
                and text_of(node.value) == "False"
            ):
                where = f"{place.module}:{node.lineno}"
                return f"reduce_results=False at {where}, and nothing is seen to reduce"
    return ""


def _returned(run: Run) -> tuple[str, ...]:
    if not run.handed:
        return ()
    value = run.handed[-1]
    if not isinstance(value, Tuple):
        return ("tensor",) if slots_in(value) or len(_terms(value)) > 1 else ("?",)
    names = []
    for item in value.items:
        if isinstance(item, Constant):
            names.append("None" if item.value is None else "?")
        else:
            names.append("tuple" if isinstance(item, Tuple) else "tensor")
    return tuple(names)


def _terms(value: Value) -> frozenset[object]:
    return frozenset(value.terms) if isinstance(value, Sum) else frozenset()


def _read_case(run: Run, when: tuple[str, ...], failed: str) -> Case:
    if failed:
        return Case(Kind.UNKNOWN, "", when, reason=failed)
    if not run.handed:
        inner = _case_uncalled(run)
        return Case(Kind.UNKNOWN, "", when, reason=inner)
    last = run.turn
    entry = next((r for r in run.reads if _turns(r.value) == {1} and last > 1), None)
    if entry and "?" in in_words(entry.value) and not products_in(entry.value):
        entry = None  # it reads behind a block: norms stand behind the blocks here
    final = next((r for r in run.reads if _turns(r.value) == {last}), None)
    if entry is None and final is None:
        touched = next((r for r in run.reads if deps_of(r.value)), None)
        reason = "no norm is seen to read what it hands on"
        if touched is not None:
            reason = f"the norm at {touched.where} reads something made from it that is not followed"
        return Case(Kind.UNKNOWN, "", when, reason=reason)
    if entry is None:  # norms stand behind the blocks: what the next layer's first block reads
        entry = next((r for r in run.blocks if _turns(r.value) == {1} and last > 1), None)
    said = {in_words(read.value) for read in (entry, final) if read is not None}
    places = (entry.where if entry else "", final.where if final else "")
    if len(said) > 1:
        plain = {text.replace("reduce(", "").replace(")", "") for text in said}
        if len(plain) == 1:  # one of the norms reduces under another condition's name
            stream = next(text for text in said if "reduce(" in text)
            return Case(Kind.PARTIAL, stream, when, *places)
        return Case(
            Kind.UNKNOWN,
            "",
            when,
            *places,
            reason=f"the next layer's norm reads {_read_as(entry)}, the final norm {_read_as(final)}",
        )
    (stream,) = said
    return Case(_kind(stream, run.handed[-1]), stream, when, *places, reason="")


def _read_as(read: Read | None) -> str:
    return in_words(read.value) if read else "?"


def _turns(value: Sum) -> set[int]:
    return {slot.turn for slot in slots_in(value)}


def _case_uncalled(run: Run) -> str:
    names = " and ".join(dict.fromkeys(run.methods))
    if names:
        return f"the model calls its {names}, not its forward: no hook fires"
    return "the model is not seen to call it"


def _kind(stream: str, handed: Value) -> Kind:
    if "?" in stream:
        return Kind.UNKNOWN
    if "reduce(" in stream:
        return Kind.PARTIAL
    if stream == "the output":
        return Kind.STREAM
    if stream == "1st":
        return Kind.FIRST
    return Kind.SUM if stream == "1st + 2nd" else Kind.OTHER


def _several(sources: Sources, layer: Place, model: Place, names: re.Pattern[str]) -> str:
    for place in (layer, *sources.mro(layer)[1:3], model):
        node = sources.cls(place)
        for inner in ast.walk(node) if node else []:
            name = None
            if isinstance(inner, ast.Attribute):
                name = inner.attr
            elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name):
                name = inner.func.id
            if name and names.match(name):
                line = getattr(inner, "lineno", 0)
                return f"{name} at {place.module}:{line}"
    return ""


def _does_nothing(run: Run) -> bool:
    """Whether a layer hands on what it received, as a pruned model's layer without any block does."""
    if len(run.handed) < 2:
        return False
    value = run.handed[1]
    items = value.items if isinstance(value, Tuple) else (value,)
    return all(
        item == NONE or (isinstance(item, Sum) and all(isinstance(term, Slot) for term, _ in item.terms))
        for item in items
    )


def _keeps(run: Run, case: Case) -> bool:
    """Whether the stream that the second turn hands on visibly contains the first turn's."""
    if len(run.handed) < 2 or not case.proven:
        return False
    value = run.handed[1]
    items = value.items if isinstance(value, Tuple) else (value,)
    return any(slot.turn == 1 for item in items for slot in slots_in(item))


def _merged(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Put cases that read alike together, and leave out conditions that do not matter."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.kind, case.stream, case.reason, case.returned), []).append(case)
    if len(groups) == 1:
        return (replace(cases[0], when=()),)
    merged = []
    for group in groups.values():
        shared = set(group[0].when).intersection(*(case.when for case in group))
        merged.append(replace(group[0], when=tuple(text for text in group[0].when if text in shared)))
    return tuple(merged)
