"""Phrases that several formats share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from vllm_compat.analysis.contract import CallSite
from vllm_compat.analysis.drift import Finding, FindingKind
from vllm_compat.analysis.server_flow import HAZARDS, Hazard, in_server_flow
from vllm_compat.commands.report.model import Judged, Pair, Report, Standing, Verdict, spans

MARKS = {
    Verdict.USABLE: "✓",
    Verdict.WITH_SHIM: "✓",
    Verdict.UNKNOWN: "?",
    Verdict.INCOMPATIBLE: "✗",
}

STANDINGS = {
    Standing.GUARDED: "no adapter; a guard looks at each value",
    Standing.POSSIBLE: "no adapter; it depends on the run",
    Standing.UNMET: "no adapter repairs it",
}


def count(number: int, noun: str) -> str:
    """Return ``1 finding``, ``2 findings``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def repair(judged: Judged) -> str:
    """Say which adapters repair a finding, or plainly that none does."""
    if judged.standing is Standing.POSSIBLE and judged.dating.fits_nowhere:
        return "no adapter; it fits no release, so the downstream may see to it itself"
    return ", ".join(map(labelled, judged.adapters)) or STANDINGS[judged.standing]


def labelled(adapter: str) -> str:
    """Return an adapter's name, with a label where it follows from the surface by itself."""
    from vllm_compat.adapters import by_name

    return f"{adapter} (derived)" if by_name(adapter).derived else adapter


def defaults_title(changed: Sequence[Judged]) -> str:
    """Return the title of the defaults that have changed."""
    verb = "has" if len(changed) == 1 else "have"
    return (
        f"{count(len(changed), 'default')} that the downstream relies on {verb} changed since"
        f" {changed[0].finding.home}, the last release that fits: vLLM chooses otherwise there, and"
        " nothing stops"
    )


def changed_default(judged: Judged) -> str:
    """Return what a changed default is now, what it was, and since when."""
    finding = judged.finding
    return f"{finding.detail} Since {dated(judged)}. {sites(finding)}"


def dated(judged: Judged) -> str:
    """Say since when a finding is there; empty where no record tells."""
    dating = judged.dating
    if dating.since is None:
        return ""
    if dating.fitted_last is not None:
        return f"{dating.since} ({dating.fitted_last} fits)"
    if dating.fits_from is not None:
        return f"too old here: {dating.fits_from} is the first release that fits"
    return f"{dating.since}; no recorded release fits"


def changes(judged: Judged) -> tuple[str, ...]:
    """Return what changed upstream, as the adapters' headers say."""
    from vllm_compat.adapters import by_name

    return tuple(by_name(name).changed for name in judged.adapters)


def hazards_title(pair: Pair) -> str:
    """Return the title of a pair's hazards: how many there are, and of which harm."""
    return f"{count(len(pair.hazards), 'hazard')} known of the server flow: {harms(pair)}"


def harms(pair: Pair) -> str:
    """Count a pair's hazards by their harm: ``1 wrong data, 6 failure``."""
    found = [hazard.harm.value for hazard in pair.hazards]
    return ", ".join(f"{found.count(harm)} {harm}" for harm in dict.fromkeys(found))


def hazard(found: Hazard) -> str:
    """Return a hazard and its remedy in one line."""
    return f"{found.harm.value}: {found.sentence} By hand: {found.remedy}."


def environment(pair: Pair) -> str:
    """Describe the environment in one line."""
    parts = [f"device {pair.environment.device}"]
    if pair.environment_known:
        parts.insert(0, f"Python {pair.environment.python}")
        parts += [f"{name} {version}" for name, version in pair.environment.versions]
    return ", ".join(parts)


def knowledge(pair: Pair) -> str:
    """Say whether a pair is known, inferred or unknown, and why."""
    return f"{pair.knowledge.brief}. {pair.knowledge.sentence}"


def adapters_title(pair: Pair) -> str:
    """Return the title of a pair's adapters: they are in force only where nothing stays unmet."""
    number = count(len(pair.plan.steps) if pair.plan else 0, "adapter")
    if pair.verdict is Verdict.INCOMPATIBLE:
        return f"{number} needed as well; none is applied as long as a finding cannot be repaired"
    return f"{number} that `vllm-compat run` and `apply()` put in force, and why"


def next_steps(pair: Pair) -> str:
    """Return what to do with a pair that can be used; empty where there is nothing to be done."""
    if pair.verdict is Verdict.UNKNOWN and in_server_flow(pair.contract):
        return (
            "Next: put `vllm-compat run` in front of the launcher's command (`vllm-compat run"
            " launch_vllm.py MODEL …`, at first with --dry-run behind `run`): it refuses what is sure to"
            " fail or to write wrong data, and adds flags that this vLLM needs; then look at the files"
            " with `vllm-compat verify FOLDER`."
        )
    if pair.verdict is not Verdict.WITH_SHIM or pair.plan is None:
        return ""
    return (
        "Next: put `vllm-compat run` in front of your extraction's command, without `python`; then look"
        " at what it wrote with `vllm-compat verify FOLDER`."
    )


def heading(finding: Finding) -> str:
    """Return a finding's kind and object, ``parameter removed: Request(eos_token_id)``."""
    owner, _, last = finding.symbol.rpartition(".")
    outer = owner.rpartition(".")[2]
    if outer[:1].isupper():
        last = f"{outer}.{last}"  # a method, named with its class
    name = finding.name
    if finding.kind is FindingKind.MODULE_MISSING:
        about = f"{finding.symbol}, for {name}" if name else finding.symbol
    elif finding.kind in (FindingKind.NAME_MOVED, FindingKind.NAME_MISSING):
        about = finding.symbol
    elif finding.kind in (FindingKind.ATTRIBUTE_MISSING, FindingKind.NAME_TAKEN):
        about = f"{last}.{name}"
    else:
        about = f"{last}({name or '…'})"
    return f"{finding.kind.value}: {about}"


def abridged(finding: Finding, width: int) -> str:
    """Return the signature that was seen, cut to a width around what the finding is about.

    Parameters that must be given, and the one concerned, are kept before others.
    """
    seen = finding.seen or ""
    match = re.fullmatch(r"\((.*)\)( -> .*)?", seen, re.DOTALL)
    if len(seen) <= width or match is None:
        return seen
    parts = _split(match.group(1))
    returns = match.group(2) or ""
    names = [re.match(r"\**(\w*)", part).group(1) for part in parts]  # type: ignore[union-attr]
    wanted = {finding.name, finding.renamed_to}
    order = sorted(
        range(len(parts)),
        key=lambda i: (names[i] not in wanted, "=" in parts[i] or parts[i][:1] == "*", i),
    )
    kept: set[int] = set()
    for index in order:
        tried = _joined(parts, kept | {index}, returns)
        if kept and len(tried) > width:
            break
        kept.add(index)
    return _joined(parts, kept, returns)


def _joined(parts: list[str], kept: set[int], returns: str) -> str:
    shown: list[str] = []
    for index, part in enumerate(parts):
        if index in kept:
            shown.append(part)
        elif shown[-1:] != ["…"]:
            shown.append("…")
    return f"({', '.join(shown)}){returns}"


def _split(text: str) -> list[str]:
    """Split at the commas that stand outside of brackets and strings."""
    parts: list[str] = []
    start = depth = 0
    quote = ""
    for index, sign in enumerate(text):
        if quote:
            if sign == quote and text[index - 1] != "\\":
                quote = ""
        elif sign in "'\"":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign == "," and not depth:
            parts.append(text[start:index].strip())
            start = index + 1
    parts.append(text[start:].strip())
    return parts


def cell(pair: Pair) -> str:
    """Return what a matrix shows of a pair: its verdict and a number, and whether it is known."""
    judged, word = judgement(pair), pair.knowledge.word.value
    return judged if judged == word else f"{judged}, {word}"


def judgement(pair: Pair) -> str:
    """Return a pair's verdict and a number."""
    if pair.verdict is Verdict.WITH_SHIM and pair.plan:
        return count(len(pair.plan.steps), "adapter")
    if pair.verdict is Verdict.INCOMPATIBLE:
        unmet = len(pair.standing(Standing.UNMET))
        return f"{count(unmet, 'finding')} unmet" if unmet else "not served"
    if pair.hazards:
        return f"not served: {harms(pair)}"
    return str(pair.verdict.value)


def obstacles(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return, for every downstream, what stands in the way and on which releases."""
    found: dict[str, dict[str, list[str]]] = {}
    hazards: dict[str, dict[Hazard, list[str]]] = {}
    for pair in report.pairs:
        if pair.verdict not in (Verdict.INCOMPATIBLE, Verdict.UNKNOWN):
            continue
        open_findings = pair.standing(Standing.UNMET, Standing.POSSIBLE)
        reasons = [f"{j.finding.detail} ({sites(j.finding)})" for j in open_findings]
        if not reasons and not pair.hazards:
            reasons = [pair.reason]
        by_reason = found.setdefault(pair.downstream, {})
        for reason in reasons:
            by_reason.setdefault(reason, []).append(pair.surface.version)
        by_hazard = hazards.setdefault(pair.downstream, {})
        for known in pair.hazards:
            by_hazard.setdefault(known, []).append(pair.surface.version)
    for downstream, by_hazard in hazards.items():
        for known in sorted(by_hazard, key=HAZARDS.index):  # the worst first, as of a single pair
            found[downstream][hazard(known)] = by_hazard[known]
    return [
        (
            downstream,
            [(reason, spans(versions, report.releases)) for reason, versions in by_reason.items()],
        )
        for downstream, by_reason in found.items()
    ]


def uses(report: Report) -> list[tuple[str, dict[str, str]]]:
    """Return, for every adapter in force, the releases with it by downstream."""
    found: dict[str, dict[str, list[str]]] = {}
    for pair in report.pairs:
        if pair.plan is None or pair.verdict is Verdict.INCOMPATIBLE:
            continue
        for name in pair.plan.adapters:
            found.setdefault(name, {}).setdefault(pair.downstream, []).append(pair.surface.version)
    return [
        (name, {d: spans(versions, report.releases) for d, versions in by_downstream.items()})
        for name, by_downstream in sorted(found.items())
    ]


def knowledges(report: Report) -> list[tuple[str, dict[str, str]]]:
    """Return, for every downstream, the releases that are known, by device, inferred, or unknown."""
    found: dict[str, dict[str, list[str]]] = {}
    for pair in report.pairs:
        by_word = found.setdefault(pair.downstream, {})
        by_word.setdefault(pair.knowledge.brief, []).append(pair.surface.version)
    return [
        (downstream, {word: spans(versions, report.releases) for word, versions in by_word.items()})
        for downstream, by_word in found.items()
    ]


KNOWLEDGE_TITLE = "What has been run (known), and what is judged by its source alone (inferred)"


def uses_of_vllm(pair: Pair) -> str:
    """Return how often a downstream uses vLLM, by name or through a server: ``94 call sites``."""
    names = len(pair.contract.sites)
    asks = f"{count(pair.asks, 'use')} of a vLLM server" if pair.asks else ""
    return ", ".join(filter(None, (count(names, "call site") if names or not asks else "", asks)))


def sites(finding: Finding, limit: int = 3) -> str:
    """Return a finding's call sites."""
    return sites_of(finding.sites, limit)


def sites_of(found: Iterable[CallSite], limit: int = 3) -> str:
    """Return call sites for people, each file named once: ``a.py:3, 7; b.py:1``."""
    lines: dict[str, list[int]] = {}
    for site in found:
        known = lines.setdefault(site.file, [])
        if site.line not in known:
            known.append(site.line)
    parts = []
    for file, numbers in lines.items():
        more = f" and {len(numbers) - limit} more" if len(numbers) > limit else ""
        parts.append(f"{file}:{', '.join(map(str, numbers[:limit]))}{more}")
    shown = "; ".join(parts[:limit])
    return f"{shown}; and in {count(len(parts) - limit, 'more file')}" if parts[limit:] else shown


def install_lines(pair: Pair) -> dict[str, list[str]]:
    """Return the lines that install a pair, by tool; none where it cannot run or one is no release."""
    served = pair.verdict is not Verdict.INCOMPATIBLE and pair.plan is not None
    versions = (pair.surface.version, pair.contract.version)
    releases = all(re.fullmatch(r"\d+(\.\d+)+(\.post\d+)?", version) for version in versions)
    if not served or not releases or pair.contract.name != "speculators":
        return {}
    from vllm_compat.analysis.recipes import install_lines as lines

    return {tool: lines(pair.surface.version, pair.contract.version, tool) for tool in ("uv", "pip")}
