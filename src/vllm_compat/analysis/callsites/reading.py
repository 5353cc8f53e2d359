"""Where a reader stands in a module, and how what it meets there is noted."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from vllm_compat.analysis.callsites.notes import Notes
from vllm_compat.analysis.callsites.package import Class, Module, Package
from vllm_compat.analysis.callsites.values import NOTHING, Place, Value
from vllm_compat.analysis.contract import CallSite, SiteKind, Use


class Context(NamedTuple):
    """Where a statement or expression stands. A tuple, for it is replaced at every branch.

    ``within`` are the definitions around it, ``cls`` the innermost class, ``me`` the name of its
    instance where it is a method's body. ``guards`` are the tests of versions and features that it
    runs under, ``tested`` the attributes that they ask for, ``needs`` the vLLM symbols without which
    it does not run, ``unless`` those that keep it from running, ``arms`` the branches.
    ``import_fails`` and ``call_fails`` say that the code around copes where one does.
    """

    within: tuple[str, ...] = ()
    cls: Class | None = None
    me: str | None = None
    guards: tuple[str, ...] = ()
    tested: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    import_fails: bool = False
    call_fails: bool = False

    @property
    def guarded(self) -> bool:
        """Whether a test of a version or a feature decides about it."""
        return bool(self.guards or self.tested or self.unless)

    @property
    def in_class_body(self) -> bool:
        """Whether it stands right in a class, in none of its methods."""
        return self.cls is not None and self.me is None and self.within[-1:] == (self.cls.name,)


class Reading:
    """One module, being read. Without ``notes`` it only learns names and attributes.

    ``env`` says what the names in sight stand for.
    """

    def __init__(
        self, package: Package, module: Module, notes: Notes | None, context: Context | None = None
    ) -> None:
        self.package = package
        self.module = module
        self.notes = notes
        self.env: dict[str, Value] = {}
        self.context = context or Context()

    @contextmanager
    def under(self, **more: Any) -> Iterator[None]:
        """Read on with some of the context replaced, and come back to it as it was."""
        before = self.context
        self.context = before._replace(**more)
        try:
            yield
        finally:
            self.context = before

    def enter(self, **more: Any) -> None:
        """Replace some of the context, until who called puts back what was there."""
        self.context = self.context._replace(**more)

    # Expressions: a method ``on_Name`` reads the nodes of that name.

    def evaluate(self, node: ast.expr | None) -> Value:
        """Return what is known of an expression, its call sites noted on the way."""
        if node is None:
            return NOTHING
        method = getattr(self, "on_" + type(node).__name__, None)
        if method is not None:
            value: Value = method(node)
            return value
        self.evaluate_parts(node)
        return NOTHING

    def evaluate_parts(self, node: ast.AST) -> None:
        """Note the call sites in the expressions that a node consists of."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.evaluate(child)

    def glance(self, node: ast.expr) -> Value:
        """Return what is known of a name or an attribute, without noting call sites."""
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return NOTHING
        notes, self.notes = self.notes, None
        value = self.evaluate(node)
        self.notes = notes
        return value

    # Notes.

    def source(self, node: ast.AST) -> str:
        """Return a node's source text."""
        return self.package.text(node)

    def place(self, node: ast.AST) -> Place:
        """Return where a node stands."""
        return (
            self.module.name,
            getattr(node, "lineno", 0),
            getattr(node, "end_col_offset", 0) + 100_000 * getattr(node, "end_lineno", 0),
        )

    def use(self, value: Value, how: str, detail: str | ast.expr = "") -> None:
        """Note what is done with a value that calls gave."""
        if self.notes is not None and value.calls:
            text = detail if isinstance(detail, str) else self.source(detail)
            for call in value.calls:
                self.notes.use(call, Use(how, text))

    def emit(
        self,
        kind: SiteKind,
        symbol: str,
        node: ast.AST,
        *,
        call: ast.Call | None = None,
        optional: bool = False,
        store: bool = False,
        any_of: Iterable[str] = (),
        unbound: bool = False,
        is_module: bool = False,
    ) -> None:
        """Note a call site, as :class:`~vllm_compat.analysis.contract.CallSite` describes it."""
        if self.notes is None:
            return
        positional, keywords, star = self._arguments(call) if call is not None else ((), (), False)
        context = self.context
        fails = context.import_fails if kind is SiteKind.IMPORT else context.call_fails
        last = symbol.rsplit(".", 1)[-1].removesuffix("()")
        self.notes.add(
            CallSite(
                kind=kind,
                symbol=symbol,
                module=self.module.name,
                file=self.module.file,
                line=getattr(node, "lineno", 0),
                within=".".join(context.within),
                positional=positional,
                keywords=keywords,
                star=star,
                optional=optional or fails or bool(context.guards) or last in context.tested,
                guard=" and ".join(context.guards),
                unless=context.unless,
                store=store,
                any_of=tuple(other for other in any_of if other != symbol),
                unbound=unbound,
                needs=context.needs,
                arms=context.arms,
                is_module=is_module,
            ),
            self.place(call) if call is not None else None,
        )

    def _arguments(self, call: ast.Call) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], bool]:
        """Return the source of a call's arguments, and whether some are hidden in ``*`` or ``**``."""
        positional = [self.source(a) for a in call.args if not isinstance(a, ast.Starred)]
        keywords = [(k.arg, self.source(k.value)) for k in call.keywords if k.arg is not None]
        star = len(positional) < len(call.args) or len(keywords) < len(call.keywords)
        return tuple(positional), tuple(keywords), star
