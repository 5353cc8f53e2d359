"""Statements of the downstream → what its names stand for afterwards."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

from vllm_compat.analysis.callsites.calls import Calls
from vllm_compat.analysis.callsites.values import NOTHING, Value, is_vllm
from vllm_compat.analysis.contract import SiteKind
from vllm_compat.analysis.surface.syntax import is_type_checking, resolve_relative

_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError"})
_ALL_ERRORS = frozenset({"Exception", "BaseException"})
_CALL_ERRORS = frozenset({"AttributeError", "TypeError"})


class Statements(Calls):
    """Read statements, definitions aside. A method ``do_If`` reads the statements of that name.

    It says whether control never comes out at the statement's end.
    """

    def block(self, statements: Iterable[ast.stmt]) -> bool:
        """Read statements in order; return whether control never comes out at the end."""
        ended = False
        outer = self.context
        for node in statements:
            method = getattr(self, "do_" + type(node).__name__, None)
            if method is not None:
                ended = bool(method(node)) or ended
            else:
                self.evaluate_parts(node)
            if isinstance(node, ast.If) and not node.orelse and _leaves(node.body):
                # ``if old version: return``: the rest runs on the others only.
                self.enter(guards=self.guards_of(node.test))
        self.context = outer
        return ended

    # Imports.

    def do_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if is_vllm(alias.name):
                self.emit(SiteKind.IMPORT, alias.name, node, is_module=True)
            if alias.asname:
                self.env[alias.asname] = Value((alias.name,))
            else:
                top = alias.name.partition(".")[0]
                self.env[top] = Value((top,))

    def do_ImportFrom(self, node: ast.ImportFrom) -> None:
        origin = resolve_relative(self.module.name, self.module.is_package, node.module, node.level)
        for alias in node.names:
            if alias.name == "*":
                self._import_all(origin, node)
                continue
            self.env[alias.asname or alias.name] = self._imported(origin, alias.name, node)
            if alias.asname:
                self.package.refer(alias.name, False)  # used under another name

    def _import_all(self, origin: str, node: ast.ImportFrom) -> None:
        if is_vllm(origin):
            self.emit(SiteKind.IMPORT, origin, node, is_module=True)
        elif self.package.ours(origin):
            self.package.name_in(origin, "")
            other = self.package.modules.get(origin)
            names = other.names if other is not None else {}
            self.env.update({n: value for n, value in names.items() if not n.startswith("_")})

    def _imported(self, origin: str, name: str, node: ast.ImportFrom) -> Value:
        path = f"{origin}.{name}"
        if is_vllm(origin):
            self.emit(SiteKind.IMPORT, path, node)
        elif self.package.ours(origin) and not self.package.files.locate(path):
            return self.package.name_in(origin, name)
        return Value((path,))

    # Simple statements.

    def do_Expr(self, node: ast.Expr) -> None:
        self.use(self.evaluate(node.value), "ignored")

    def do_Assign(self, node: ast.Assign) -> None:
        value = self.evaluate(node.value)
        for target in node.targets:
            self.assign(target, value, node.value)

    def do_AnnAssign(self, node: ast.AnnAssign) -> None:
        value = self.evaluate(node.value)
        known = self.annotated(node.annotation)
        if known.paths or known.items:
            known = value if value.paths and value.instance else replace(known, calls=value.calls)
        else:
            known = value
        if node.value is not None or known is not NOTHING:
            cls = self.context.cls
            if cls is not None and isinstance(node.target, ast.Name) and self.context.me is None:
                cls.attributes[node.target.id] = known
            self.assign(node.target, known, node.value)

    def do_AugAssign(self, node: ast.AugAssign) -> None:
        self.evaluate(node.value)
        if isinstance(node.target, ast.Attribute):
            self.evaluate(node.target)
        elif isinstance(node.target, ast.Subscript):
            self.evaluate(node.target.value)
            self.evaluate(node.target.slice)

    def do_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.env.pop(target.id, None)

    def do_Assert(self, node: ast.Assert) -> None:
        self.test(node.test)
        self.evaluate(node.msg)
        self.narrow(node.test)

    # Statements that end a block.

    def do_Return(self, node: ast.Return) -> bool:
        self.use(self.evaluate(node.value), "returned")
        return True

    def do_Raise(self, node: ast.Raise) -> bool:
        self.evaluate(node.exc)
        self.evaluate(node.cause)
        return True

    def do_Continue(self, node: ast.Continue) -> bool:
        return True

    do_Break = do_Continue

    # Branches.

    def do_If(self, node: ast.If) -> bool:
        if is_type_checking(node.test):
            with self.under(import_fails=True):
                self.block(node.body)
            self.block(node.orelse)
            return False
        self.test(node.test)
        guards, tested = self.guards_of(node.test), self.tested_in(node.test)
        before = dict(self.env)
        outer = self.context.arms
        with self.under(guards=guards):
            with self.under(needs=self.needed_by(node.test), tested=tested):
                self.narrow(node.test)
                self.enter(arms=(*outer, f"{node.lineno}:then"))
                ended = self.block(node.body)
            after = self.env
            self.env = dict(before)
            self.narrow(node.test, False)
            self.enter(arms=(*outer, f"{node.lineno}:else"))
            other_ended = self.block(node.orelse)
        self.forget_narrowed(after, self.env)
        if not node.orelse and not ended:
            self.env = {**self.env, **{n: v for n, v in before.items() if n in self.env}}
        self.merge(after, ended, other_ended)
        return ended and other_ended and bool(node.orelse)

    def merge(self, after: dict[str, Value], ended: bool, other_ended: bool) -> None:
        """Join the names of two branches into ``self.env``."""
        if other_ended and not ended:
            self.env = after
        elif not ended:
            for name, value in after.items():
                mine = self.env.get(name)
                self.env[name] = value if mine is None else mine | value

    def do_Match(self, node: ast.Match) -> None:
        self.evaluate(node.subject)
        for case in node.cases:
            before = dict(self.env)
            self.evaluate(case.guard)
            ended = self.block(case.body)
            after, self.env = self.env, before
            self.merge(after, ended, False)

    # Loops.

    def do_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.iterate(node.target, node.iter)
        self.block(node.body)
        self.block(node.orelse)

    do_AsyncFor = do_For

    def do_While(self, node: ast.While) -> None:
        self.test(node.test)
        self.block(node.body)
        self.block(node.orelse)

    # What copes with errors.

    def do_With(self, node: ast.With | ast.AsyncWith) -> bool:
        caught = False
        for item in node.items:
            value = self.evaluate(item.context_expr)
            if isinstance(item.context_expr, ast.Call):
                caught |= self._last_name(item.context_expr.func) == "suppress"
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value if value.instance else NOTHING, None)
        with self._coping(imports=caught, calls=caught):
            ended = self.block(node.body)
        return ended and not caught

    do_AsyncWith = do_With

    def do_Try(self, node: ast.Try) -> bool:
        imports, calls = self._coped_with(node.handlers)
        before = dict(self.env)
        with self._coping(imports=imports, calls=calls):
            ended = self.block(node.body)
        ended = self.block(node.orelse) or ended
        tried = tuple(_imported_from_vllm(node.body))
        after, all_ended = self.env, ended
        for handler in node.handlers:
            self.env = dict(before)
            names = self._caught_by(handler)
            falls_back = imports and (not names or bool(names & (_IMPORT_ERRORS | _ALL_ERRORS)))
            with self.under():
                if falls_back and tried:
                    self.enter(unless=(*self.context.unless, *tried))
                elif falls_back:
                    self.enter(guards=(*self.context.guards, "except ImportError"))
                if handler.name:
                    self.env[handler.name] = NOTHING
                other = self.block(handler.body)
            self.merge(after, all_ended, other)
            after, all_ended = self.env, all_ended and other
        self.env = after
        self.block(node.finalbody)
        return all_ended

    do_TryStar = do_Try

    def _coped_with(self, handlers: Iterable[ast.ExceptHandler]) -> tuple[bool, bool]:
        """Say whether handlers cope with imports that fail, and with calls that fail."""
        imports = calls = False
        for handler in handlers:
            if handler.body and isinstance(handler.body[-1], ast.Raise):
                continue
            names = self._caught_by(handler)
            everything = handler.type is None or bool(names & _ALL_ERRORS)
            imports |= everything or bool(names & _IMPORT_ERRORS)
            calls |= everything or bool(names & _CALL_ERRORS)
        return imports, calls

    def _coping(self, *, imports: bool, calls: bool) -> AbstractContextManager[None]:
        context = self.context
        return self.under(
            import_fails=context.import_fails or imports, call_fails=context.call_fails or calls
        )

    def _caught_by(self, handler: ast.ExceptHandler) -> set[str]:
        """Name the errors that a handler catches, without their modules."""
        caught = handler.type
        if caught is None:
            return set()
        return set(map(self._last_name, caught.elts if isinstance(caught, ast.Tuple) else [caught]))

    def _last_name(self, node: ast.expr) -> str:
        return self.source(node).rsplit(".", 1)[-1]


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether a block ends by leaving the function, the loop or the program."""
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _imported_from_vllm(statements: list[ast.stmt]) -> Iterator[str]:
    """Name what a ``try`` imports from vLLM."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names if is_vllm(alias.name))
        elif isinstance(statement, ast.ImportFrom) and is_vllm(statement.module or ""):
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
