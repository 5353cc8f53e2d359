"""What is noted while a downstream is read: its call sites, and what is done with each call's result."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import NamedTuple

from vllm_compat.analysis.callsites.package import Module
from vllm_compat.analysis.callsites.values import Place, is_vllm
from vllm_compat.analysis.contract import CallSite, Use


class RemoteCall(NamedTuple):
    """A worker's method that is called by its name, as ``collective_rpc("name", args=…)`` does."""

    module: Module
    within: tuple[str, ...]
    method: str
    node: ast.Call
    call: ast.Call


class Notes:
    """The sites of the whole package, in the order in which they are met."""

    def __init__(self) -> None:
        self.sites: dict[tuple[CallSite, Place | None], bool] = {}
        self.uses: dict[Place, dict[Use, None]] = {}
        self.remote: list[RemoteCall] = []

    def add(self, site: CallSite, place: Place | None) -> None:
        """Note a site, and where the call stands that it is."""
        self.sites.setdefault((site, place), is_vllm(site.symbol))

    def use(self, place: Place, use: Use) -> None:
        """Note what is done with a call's result."""
        self.uses.setdefault(place, {}).setdefault(use)

    def finished(self, vllm: bool) -> tuple[CallSite, ...]:
        """Return the sites of vLLM, or the calls of all else, sorted by file and line."""
        chosen = [
            replace(site, uses=tuple(self.uses.get(place, {}))) if place else site
            for (site, place), ours in self.sites.items()
            if ours is vllm
        ]
        return tuple(sorted(chosen, key=lambda s: (s.file, s.line)))
