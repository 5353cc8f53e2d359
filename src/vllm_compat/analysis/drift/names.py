"""Names and attributes that a downstream uses and a vLLM has not, or has elsewhere."""

from __future__ import annotations

import re

from vllm_compat.analysis.contract import CallSite, SiteKind, Use
from vllm_compat.analysis.drift.annotated import returned_type
from vllm_compat.analysis.drift.model import Finding, FindingKind, Findings
from vllm_compat.analysis.drift.places import Places
from vllm_compat.analysis.drift.words import last, prefixes
from vllm_compat.analysis.surface.model import Symbol, SymbolKind


class NameChecks:
    """Compare the names that call sites use with what there is."""

    def __init__(self, places: Places, findings: Findings) -> None:
        self.places = places
        self.contract = places.contract
        self.surface = places.surface
        self.add = findings.add
        sites = self.contract.sites
        imports = [s for s in sites if s.kind is SiteKind.IMPORT]
        self._optional_imports = {s.symbol for s in imports if s.optional} - {
            s.symbol for s in imports if not s.optional
        }
        # What a function asks for before it uses it, and what the downstream adds itself.
        self._asked = {(s.symbol, s.within) for s in sites if s.optional}
        self._stored = {s.symbol for s in sites if s.store}
        self._subclassed = {s.symbol for s in sites if s.kind is SiteKind.SUBCLASS}

    def there(self, site: CallSite) -> bool:
        """Whether a site's symbol is there, a moved one in its new place; note it if not."""
        missing = self.places.missing(site.symbol)
        if missing is None:
            return True
        if any(self.places.missing(other) is None for other in site.any_of):
            return False
        self._lacks(site, missing)
        return self.places.missing(site.symbol) is None  # a moved name is looked at in its new place

    def patched(self, site: CallSite) -> None:
        """A name that the downstream replaces, and that was there where it was written."""
        if self.places.home is None or self.places.home.resolve(site.symbol) is None:
            return
        if self.places.missing(site.symbol) is None:
            return
        owner, _, name = site.symbol.rpartition(".")
        self._note_missing(
            site, f"{last(owner)} has no {name} here, so that replacing it changes nothing."
        )

    def _note_missing(self, site: CallSite, message: str) -> None:
        """Note that a site's attribute is missing, where that stops nothing by itself."""
        owner, _, name = site.symbol.rpartition(".")
        kind = FindingKind.ATTRIBUTE_MISSING
        self.add(Finding(kind, owner, name, (site,), None, message, fatal=False))

    def _lacks(self, site: CallSite, missing: str) -> None:
        if any(missing == name or name.startswith(missing + ".") for name in self._optional_imports):
            return
        if (missing, site.within) in self._asked or missing in self._stored:
            return
        parent, _, name = self.places.here(missing).rpartition(".")
        owner = self.surface.resolve(parent) if parent else None
        if owner is None or owner.kind is SymbolKind.MODULE:
            self._absent(site, missing)
            return
        if {name, re.split(r"\W", last(parent), maxsplit=1)[0]} & set(self.contract.written):
            return  # the downstream gives objects this attribute, or puts its own object there
        returned = returned_type(self.surface, parent)
        if returned is not None:
            call = missing.rpartition(".")[0].removesuffix("()")
            self.add(
                Finding(
                    FindingKind.RETURN_SHAPE,
                    call,
                    None,
                    (*self._calls_before(site, call), site),
                    returned,
                    f"{last(call)} hands back {returned} here, and the downstream uses the "
                    f"result's {name}, which that has not.",
                )
            )
            return
        derived = self._derived(parent, owner, name)
        if derived is None:
            return
        also = f" (a {last(derived)}, which it may be, has)" if derived else ""
        self.add(
            Finding(
                FindingKind.ATTRIBUTE_MISSING,
                missing.rpartition(".")[0],
                name,
                (site,),
                None,
                f"{last(owner.path)} has no {name} here{also}.",
                fatal=not derived,
            )
        )

    def _derived(self, parent: str, owner: Symbol, name: str) -> str | None:
        """Return a subclass that has a name which a value's annotated class has not.

        An annotation may promise less than there is. Empty where no subclass has it, or where the
        class is named itself; None where it can't be known: the downstream's own subclasses may, or one
        with a base from outside vLLM.
        """
        if owner.kind is SymbolKind.MODULE:
            return ""
        if owner.kind is SymbolKind.CLASS:
            if owner.path == parent:
                return ""
            path = owner.path
        else:
            types = self.surface.value_types(parent)
            if types is None or len(types - {"None"}) != 1:
                return "" if owner.path == parent else None
            path = next(iter(types - {"None"}))
        return None if self._derived_by_downstream(path) else self._heir_with(path, name)

    def _derived_by_downstream(self, path: str) -> bool:
        """Whether the downstream has a class of its own that derives from this one."""
        bases = (self.surface.resolve(self.places.here(symbol)) for symbol in self._subclassed)
        return any(path in self.surface.ancestors(base.path) for base in bases if base is not None)

    def _heir_with(self, path: str, name: str) -> str | None:
        """Return a subclass that has a name: empty where none has, None where it can't be known."""
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

    def _absent(self, site: CallSite, missing: str) -> None:
        """A module, or a module's name, is not there."""
        imported = self.places.imported(site, missing)
        parent, _, name = imported.rpartition(".")
        new = self.places.find_moved(imported)
        if new is not None:
            self.places.note_moved(imported, new)
        whole = self.places.is_module_import(imported)
        if whole:
            new = self.places.moved_module(imported)
            if new is not None:
                self.places.note_moved(imported, new)
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

    def reach(self, site: CallSite) -> None:
        """Note that only some of the classes that an owner may be have the name."""
        symbol = self.surface.resolve(self.places.here(site.symbol))
        if symbol is None or not symbol.lacking:
            return
        owner, _, name = site.symbol.rpartition(".")
        lacking = " and ".join(symbol.lacking)
        self._note_missing(site, f"{owner} may be {lacking} here, which has no {name}.")

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
