"""Functions and classes of the downstream: the reader of a whole module."""

from __future__ import annotations

import ast
from collections.abc import Callable

from vllm_compat.analysis.callsites.expressions import arguments_of
from vllm_compat.analysis.callsites.notes import Notes
from vllm_compat.analysis.callsites.package import Class, Function, Module, Package
from vllm_compat.analysis.callsites.reading import Context
from vllm_compat.analysis.callsites.statements import Statements
from vllm_compat.analysis.callsites.values import NOTHING, Value
from vllm_compat.analysis.contract import SiteKind


class ModuleReader(Statements):
    """Read a module: what stands at its top first, and the functions' bodies after that."""

    def __init__(self, package: Package, module: Module, notes: Notes | None) -> None:
        super().__init__(package, module, notes)
        self._deferred: list[Callable[[], None]] = []

    def read(self) -> None:
        """Learn the module's names and its classes' attributes, and note its call sites."""
        self.module.names = self.env
        self.block(self.module.tree.body)
        while self._deferred:
            self._deferred.pop(0)()
        self.module.names = dict(self.env)

    # Functions.

    def do_FunctionDef(self, node: Function) -> None:
        for decorator in node.decorator_list:
            self.evaluate(decorator)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            self.evaluate(default)
        context = self.context
        is_method = context.in_class_body
        if not context.within:
            self.package.functions[f"{self.module.name}.{node.name}"] = node.returns
        elif context.cls is not None and context.me is None:
            self.package.functions[f"{context.cls.path}.{node.name}"] = node.returns
        if not is_method:
            self.env[node.name] = Value((self._path(node.name),))
        closure = self.env if context.within and not is_method else None
        inside = Context(
            within=(*context.within, node.name),
            cls=context.cls,
            me=None if is_method else context.me,
            guards=context.guards,
            unless=context.unless,
        )
        self._deferred.append(lambda: self._body(node, inside, closure, is_method))

    do_AsyncFunctionDef = do_FunctionDef

    def _body(
        self, node: Function, context: Context, closure: dict[str, Value] | None, is_method: bool
    ) -> None:
        """Read a function's body, where all names of its module are known."""
        kept, before = self.env, self.context
        self.context = context
        if self.package.references.get(node.name) and not context.guards:
            self.enter(guards=(f"{node.name} is used under a test only",))
        self.env = dict(closure if closure is not None else self.module.names or kept)
        self._bind_arguments(node.args)
        if is_method:
            self._bind_instance(node)
        self.block(node.body)
        self.env, self.context = kept, before

    def _bind_arguments(self, arguments: ast.arguments) -> None:
        for argument in arguments_of(arguments):
            self.env[argument.arg] = self.annotated(argument.annotation)
        for collected in (arguments.vararg, arguments.kwarg):
            if collected is not None:
                self.env[collected.arg] = NOTHING

    def _bind_instance(self, node: Function) -> None:
        """Take a method's first parameter for an instance of its class."""
        plain = [*node.args.posonlyargs, *node.args.args]
        static = any(self.source(d) == "staticmethod" for d in node.decorator_list)
        cls = self.context.cls
        if plain and not static and cls is not None:
            me = plain[0].arg
            self.enter(me=me)
            self.env[me] = Value((cls.path,), True)

    def _path(self, name: str) -> str:
        return ".".join([self.module.name, *self.context.within, name])

    # Classes.

    def do_ClassDef(self, node: ast.ClassDef) -> None:
        path = self._path(node.name)
        known = self.package.class_at(path)
        known.bases = []
        for base in node.bases:
            value = self.evaluate(base.value if isinstance(base, ast.Subscript) else base)
            known.bases += value.paths
            for symbol in value.vllm_paths:
                self.emit(SiteKind.SUBCLASS, symbol, node)
        for keyword in node.keywords:
            self.evaluate(keyword.value)
        for decorator in node.decorator_list:
            self.evaluate(decorator)
        self.env[node.name] = Value((path,))
        kept = self.env
        self.env = dict(kept)
        with self.under(cls=known, me=None, within=(*self.context.within, node.name)):
            for member in node.body:
                self._take_member(known, member)
            self.block(node.body)
        self.env = kept
        known.module = self.module

    def _take_member(self, known: Class, node: ast.stmt) -> None:
        """Learn which name a statement in a class's body gives it."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            known.methods[node.name] = node
            known.names.add(node.name)
            if any("property" in self.source(d) for d in node.decorator_list):
                known.attributes[node.name] = self.annotated(node.returns)
        elif isinstance(node, ast.ClassDef):
            known.names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known.names.update(t.id for t in targets if isinstance(t, ast.Name))
