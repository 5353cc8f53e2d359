"""Syntax trees of a downstream → call sites: which names, objects and results come from vLLM.

The reader follows names through imports (those of the package's own modules included),
assignments, ``self`` attributes, annotations, parameters and branches, as far as they carry, and
notes what is done with each call's result. It evaluates nothing and guesses nothing: what it cannot
follow is simply not a call site.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from vllm_compat.contract import CallSite, Contract, SiteKind, Use
from vllm_compat.errors import UsageError
from vllm_compat.surface.files import PackageFiles
from vllm_compat.surface.syntax import (
    is_type_checking,
    resolve_relative,
    statements_in,
    uncollected,
)

VLLM = "vllm"

# The class that vLLM mixes a worker extension into, on the platforms with a plain GPU or CPU.
WORKER = "vllm.v1.worker.gpu_worker.Worker"
_HOOK = "worker_extension_cls"

_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError"})
_ALL_ERRORS = frozenset({"Exception", "BaseException"})
_CALL_ERRORS = frozenset({"AttributeError", "TypeError"})
# ``hasattr(self, …)`` asks for the downstream's own state.
_OWN_TEST = re.compile(r"hasattr\((self|model|config)\b")
# What a test's outcome is assigned from.
_TESTING = (ast.Compare, ast.Call, ast.BoolOp, ast.UnaryOp, ast.Attribute, ast.IfExp)
# Bases that bring no attributes of their own.
_PLAIN_BASES = frozenset({"object", "ABC", "Generic", "Protocol"})
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")
_VERSION_TEST = re.compile(
    r"version|^is_\w*available$|^find_spec$|^signature$|^hasattr$|^getfullargspec$|^__code__$",
    re.IGNORECASE,
)


def is_vllm(path: str) -> bool:
    """Whether a dotted path is vLLM's."""
    return path == VLLM or path.startswith("vllm.")


@dataclass(frozen=True)
class _Value:
    """What is known of an expression.

    ``paths`` are dotted names, ``instance`` whether the value is an instance of the class they
    name, ``items`` the paths of what it contains, ``calls`` the calls whose result it is,
    ``unbound`` whether it is a method that was looked up on its class, ``exact`` whether an
    instance is of that very class and of none derived from it.
    """

    paths: tuple[str, ...] = ()
    instance: bool = False
    items: tuple[str, ...] = ()
    calls: tuple[tuple[str, int, int], ...] = ()
    unbound: bool = False
    exact: bool = False

    def __or__(self, other: _Value) -> _Value:
        if self == other:
            return self
        return _Value(
            tuple(dict.fromkeys((*self.paths, *other.paths))),
            self.instance or other.instance,
            tuple(dict.fromkeys((*self.items, *other.items))),
            tuple(dict.fromkeys((*self.calls, *other.calls))),
            self.unbound or other.unbound,
            self.exact and other.exact,
        )

    @property
    def uncertain(self) -> bool:
        """Whether it may be vLLM's or something else, which has names of its own."""
        return len({is_vllm(path) for path in self.paths}) > 1


NOTHING = _Value()


@dataclass
class _Class:
    """A class of the downstream: its bases, the values of its attributes, its own names."""

    path: str
    bases: list[str] = field(default_factory=list)
    attributes: dict[str, _Value] = field(default_factory=dict)
    methods: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    module: _Module | None = None


@dataclass
class _Module:
    """A parsed module of the downstream."""

    name: str
    is_package: bool
    file: str
    tree: ast.Module
    names: dict[str, _Value] = field(default_factory=dict)


@dataclass
class _Draft:
    """A call site that is being written."""

    site: CallSite
    uses: dict[Use, None] = field(default_factory=dict)


def _is_class_name(path: str) -> bool:
    """Whether a name is a class's by its looks: ``Request``, ``_Private``, ``LLM``; no constant."""
    *above, last = path.split(".")
    last = last.lstrip("_")
    if last.isupper():
        return "_" not in last and not (above and above[-1][:1].isupper())
    return last[:1].isupper() and "(" not in last and "[" not in last


def _result(path: str) -> str:
    """Return the path of what a call gives; instances are written as their class."""
    return path if _is_class_name(path) else f"{path}()"


class _Package:
    """All that is known of the downstream while it is read."""

    def __init__(self, files: PackageFiles) -> None:
        self.files = files
        self.modules: dict[str, _Module | None] = {}
        self.classes: dict[str, _Class] = {}
        self.functions: dict[str, ast.expr | None] = {}
        self.hooks: set[str] = set()
        self.tests: set[str] = set()
        self.busy: set[str] = set()
        self.texts: dict[ast.AST, str] = {}
        self.references: dict[str, bool] = {}
        self.written: set[str] = set()

    def refer(self, name: str, guarded: bool) -> None:
        """Note that a name is used, and whether a test of a version or a feature guards that."""
        self.references[name] = guarded and self.references.get(name, True)

    def ours(self, path: str) -> bool:
        package = self.files.package
        return path == package or path.startswith(package + ".")

    def parse(self, name: str) -> _Module | None:
        """Parse a module of the package, once; None where there is none."""
        if name in self.modules:
            return self.modules[name]
        found = self.files.locate(name)
        source = self.files.source(name) if found else None
        module: _Module | None = None
        if found and source is not None:
            file = self.files.file(name)
            try:
                tree = ast.parse(source, filename=file)
            except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
                line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
                reason = error.msg if isinstance(error, SyntaxError) else str(error)
                raise UsageError(
                    f"{file}{line} in {self.files.origin} is not valid Python: {reason}."
                ) from error
            module = _Module(name, found[1], file, tree)
        self.modules[name] = module
        return module

    def name_in(self, module_name: str, name: str) -> _Value:
        """Return what a module-level name of the package stands for."""
        source = self.files.source(module_name)
        if source is None or VLLM.encode() not in source:
            return _Value((f"{module_name}.{name}",))
        module = self.parse(module_name)
        if module is None:
            return NOTHING
        if not module.names and module_name not in self.busy:
            self.busy.add(module_name)
            _Reader(self, module, None).bind_module()
            self.busy.discard(module_name)
        return module.names.get(name, _Value((f"{module_name}.{name}",)))

    def _line(self, path: str) -> Iterator[_Class | str]:
        """Iterate over a class of the package and its bases; those outside come as their names."""
        seen: set[str] = set()
        todo = [path]
        while todo:
            current = todo.pop(0)
            if current in seen:
                continue
            seen.add(current)
            known = self.classes.get(current)
            if known is None:
                yield current
                continue
            yield known
            todo += known.bases
            if current in self.hooks:
                todo.append(WORKER)  # vLLM adds the extension to the worker's bases

    def attribute(self, path: str, name: str) -> _Value | None:
        """Return the value of an attribute of one of the package's classes, bases included."""
        for cls in self._line(path):
            if isinstance(cls, _Class) and name in cls.attributes:
                return cls.attributes[name]
        return None

    def defines(self, path: str, name: str) -> bool:
        """Whether one of the package's classes, or a base in the package, defines a name."""
        return any(isinstance(cls, _Class) and name in cls.names for cls in self._line(path))

    def vllm_bases(self, path: str) -> tuple[str, ...]:
        """Return the vLLM classes that one of the package's classes derives from."""
        return tuple(c for c in self._line(path) if isinstance(c, str) and is_vllm(c))

    def own_heir_defines(self, path: str, name: str) -> bool:
        """Whether a class of the package derives from a vLLM class and defines a name."""
        return any(
            name in cls.names and path in self.vllm_bases(own) for own, cls in self.classes.items()
        )

    def has_other_bases(self, path: str) -> bool:
        """Whether a class derives from something that is neither the package's nor vLLM's."""
        return any(
            isinstance(c, str) and not is_vllm(c) and c.rsplit(".", 1)[-1] not in _PLAIN_BASES
            for c in self._line(path)
        )


class _Reader(ast.NodeVisitor):
    """Read one module. Without ``out`` it only learns names and attributes."""

    def __init__(self, package: _Package, module: _Module, out: _Out | None) -> None:
        self.package = package
        self.module = module
        self.out = out
        self.env: dict[str, _Value] = {}
        self.within: list[str] = []
        self.cls: _Class | None = None
        self.me: str | None = None
        self.returns: ast.expr | None = None
        self.optional_imports = 0
        self.optional_calls = 0
        self.guards: list[str] = []
        self.tested: list[str] = []
        self.needs: list[str] = []
        self.unless: list[tuple[str, ...]] = []
        self.arms: list[str] = []
        self.deferred: list[Callable[[], None]] = []
        self.uses: dict[tuple[str, int, int], dict[Use, None]] = {}

    # Running.

    def bind_module(self) -> None:
        """Learn the module's names, and its classes' attributes."""
        self.module.names = self.env
        self.block(self.module.tree.body)
        self.flush()
        self.module.names = dict(self.env)

    def flush(self) -> None:
        while self.deferred:
            self.deferred.pop(0)()

    # Emitting.

    def source(self, node: ast.AST) -> str:
        text = self.package.texts.get(node)
        if text is None:
            text = self.package.texts[node] = ast.unparse(node)
        return text

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
        if self.out is None:
            return
        positional: list[str] = []
        keywords: list[tuple[str, str]] = []
        star = False
        if call is not None:
            for argument in call.args:
                if isinstance(argument, ast.Starred):
                    star = True
                else:
                    positional.append(self.source(argument))
            for keyword in call.keywords:
                if keyword.arg is None:
                    star = True
                else:
                    keywords.append((keyword.arg, self.source(keyword.value)))
        caught = self.optional_imports if kind is SiteKind.IMPORT else self.optional_calls
        last = symbol.rsplit(".", 1)[-1].removesuffix("()")
        self.out.add(
            CallSite(
                kind=kind,
                symbol=symbol,
                module=self.module.name,
                file=self.module.file,
                line=getattr(node, "lineno", 0),
                within=".".join(self.within),
                positional=tuple(positional),
                keywords=tuple(keywords),
                star=star,
                optional=optional or caught > 0 or bool(self.guards) or last in self.tested,
                guard=" and ".join(self.guards),
                unless=tuple(name for names in self.unless for name in names),
                store=store,
                any_of=tuple(other for other in any_of if other != symbol),
                unbound=unbound,
                needs=tuple(self.needs),
                arms=tuple(self.arms),
                is_module=is_module,
            ),
            self.key(call) if call is not None else None,
            is_vllm(symbol),
        )

    def key(self, node: ast.AST) -> tuple[str, int, int]:
        return (
            self.module.name,
            getattr(node, "lineno", 0),
            getattr(node, "end_col_offset", 0) + 100_000 * getattr(node, "end_lineno", 0),
        )

    def use(self, value: _Value, how: str, detail: str | ast.expr = "") -> None:
        if self.out is not None and value.calls:
            text = detail if isinstance(detail, str) else self.source(detail)
            for call in value.calls:
                self.out.use(call, Use(how, text))

    # Expressions.

    def evaluate(self, node: ast.expr | None) -> _Value:
        """Return what is known of an expression, its call sites noted on the way."""
        if node is None:
            return NOTHING
        method = getattr(self, "on_" + type(node).__name__, None)
        if method is not None:
            value: _Value = method(node)
            return value
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.evaluate(child)
        return NOTHING

    @property
    def guarded(self) -> bool:
        return bool(self.guards or self.tested or self.unless)

    def on_Name(self, node: ast.Name) -> _Value:
        self.package.refer(node.id, self.guarded)
        return self.env.get(node.id, NOTHING)

    def on_Constant(self, node: ast.Constant) -> _Value:
        return NOTHING

    def on_Await(self, node: ast.Await) -> _Value:
        return self.evaluate(node.value)

    def on_NamedExpr(self, node: ast.NamedExpr) -> _Value:
        value = self.evaluate(node.value)
        self.assign(node.target, value, node.value)
        return value

    def on_IfExp(self, node: ast.IfExp) -> _Value:
        self.test(node.test)
        with_guard = self.guard_of(node.test)
        tested = list(_tested_names(node.test))
        self.guards += with_guard
        self.tested += tested
        before = dict(self.env)
        self.narrow(node.test)
        left = self.evaluate(node.body)
        self.env = dict(before)
        self.narrow(node.test, False)
        right = self.evaluate(node.orelse)
        self.env = before
        del self.guards[len(self.guards) - len(with_guard) :]
        del self.tested[len(self.tested) - len(tested) :]
        return left | right

    def on_BoolOp(self, node: ast.BoolOp) -> _Value:
        value = NOTHING
        added = 0
        for item in node.values:
            one = self.evaluate(item)
            self.use(one, "truth")
            value = value | one
            if isinstance(node.op, ast.And):
                names = list(_tested_names(item))
                self.tested += names
                added += len(names)
        if added:
            del self.tested[len(self.tested) - added :]
        return value

    def on_UnaryOp(self, node: ast.UnaryOp) -> _Value:
        value = self.evaluate(node.operand)
        if isinstance(node.op, ast.Not):
            self.use(value, "truth")
        return NOTHING

    def on_Compare(self, node: ast.Compare) -> _Value:
        values = [self.evaluate(node.left), *(self.evaluate(c) for c in node.comparators)]
        operands = [node.left, *node.comparators]
        for index, operator in enumerate(node.ops):
            if isinstance(operator, (ast.In, ast.NotIn)):
                self.use(values[index + 1], "contains")
            else:
                if values[index].calls and self.out is not None:
                    whole = ast.Compare(ast.Name("x"), [operator], [operands[index + 1]])
                    self.use(values[index], "compared", ast.unparse(whole)[2:])
        return NOTHING

    def narrowed(self, node: ast.expr) -> _Value | None:
        """Return what an ``isinstance`` test says of an attribute or item."""
        if any("." in name or "[" in name for name in self.env):
            return self.env.get(self.source(node))
        return None

    def on_Attribute(self, node: ast.Attribute) -> _Value:
        self.package.refer(node.attr, self.guarded)
        known = self.narrowed(node)
        if known is not None:
            return known
        value = self.evaluate(node.value)
        return self.attribute(value, node.attr, node)

    def attribute(
        self, value: _Value, name: str, node: ast.AST, *, optional: bool = False, read: bool = True
    ) -> _Value:
        """Return what is known of ``value.name``; ``read`` notes it as a call site."""
        self.use(value, "attribute", name)
        found = NOTHING
        symbols: list[str] = []
        unbound = False
        for path in value.paths:
            if is_vllm(path):
                inexact = value.instance and not value.exact
                if inexact and self.package.own_heir_defines(path, name):
                    continue  # annotated as vLLM's class, and may be the downstream's own
                symbols.append(f"{path}.{name}")
                unbound |= not value.instance and _is_class_name(path)
            elif path in self.package.classes:
                known = self.package.attribute(path, name)
                bases = self.package.vllm_bases(path)
                dunder = name.startswith("__") and name.endswith("__")
                if known is not None:
                    found = found | known
                elif self.package.defines(path, name) or dunder or not bases:
                    found = found | _Value((f"{path}.{name}",))
                elif not self.package.has_other_bases(path):
                    symbols += [f"{base}.{name}" for base in bases]
            elif self.package.ours(path) and self.package.files.locate(path) and not value.instance:
                found = found | self.package.name_in(path, name)
            else:
                found = found | _Value((f"{path}.{name}",))
        if read:
            for symbol in symbols:
                self.emit(
                    SiteKind.ATTRIBUTE,
                    symbol,
                    node,
                    optional=optional or value.uncertain,
                    any_of=symbols,
                )
        return found | _Value(tuple(dict.fromkeys(symbols)), unbound=unbound)

    def on_Subscript(self, node: ast.Subscript) -> _Value:
        known = self.narrowed(node)
        if known is not None:
            return known
        value = self.evaluate(node.value)
        self.evaluate(node.slice)
        self.use(value, "subscript", node.slice)
        if value.items:
            return _Value(value.items, True)
        if isinstance(node.slice, ast.Slice):
            return NOTHING
        return _Value(tuple(f"{p}[]" for p in value.paths if is_vllm(p) and p.count("[]") < 2))

    def on_Starred(self, node: ast.Starred) -> _Value:
        self.use(self.evaluate(node.value), "iterate")
        return NOTHING

    def on_Lambda(self, node: ast.Lambda) -> _Value:
        before = dict(self.env)
        for argument in _arguments(node.args):
            self.env[argument.arg] = NOTHING
        for default in (*node.args.defaults, *node.args.kw_defaults):
            self.evaluate(default)
        self.evaluate(node.body)
        self.env = before
        return NOTHING

    def comprehension(
        self, generators: list[ast.comprehension], elements: list[ast.expr]
    ) -> list[_Value]:
        before = dict(self.env)
        for generator in generators:
            self.iterate(generator.target, generator.iter)
            for condition in generator.ifs:
                self.test(condition)
        values = [self.evaluate(element) for element in elements]
        self.env = before
        return values

    def on_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> _Value:
        value = self.comprehension(node.generators, [node.elt])[0]
        return _Value(items=value.paths if value.instance else ())

    on_SetComp = on_GeneratorExp = on_ListComp

    def on_DictComp(self, node: ast.DictComp) -> _Value:
        value = self.comprehension(node.generators, [node.key, node.value])[1]
        return _Value(items=value.paths if value.instance else ())

    def on_List(self, node: ast.List | ast.Tuple | ast.Set) -> _Value:
        values = [self.evaluate(item) for item in node.elts]
        items = {p for v in values if v.instance for p in v.paths}
        return _Value(items=tuple(sorted(items)) if len(items) == 1 else ())

    on_Set = on_Tuple = on_List

    def iterate(self, target: ast.expr, iterable: ast.expr) -> None:
        value = self.evaluate(iterable)
        self.use(value, "iterate", target)
        self.assign(target, _Value(value.items, True) if value.items else NOTHING, None)

    # Calls.

    def callee(self, node: ast.expr, value: _Value) -> str:
        """Return how a callee is written in ``Use.detail`` and for calls of others."""
        if len(value.paths) == 1 and not (value.instance and not is_vllm(value.paths[0])):
            return value.paths[0]
        root = node
        while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
            root = root.func if isinstance(root, ast.Call) else root.value
        text = self.source(node)
        if isinstance(root, ast.Name):
            known = self.module.names.get(root.id) or self.env.get(root.id)
            if known and len(known.paths) == 1 and not known.instance and not known.calls:
                return known.paths[0] + text[len(root.id) :]
        return text

    def on_Call(self, node: ast.Call) -> _Value:
        special = self.special_call(node)
        if special is not None:
            return special
        self.worker_extension(node)
        # The callee: an attribute is noted as a call, not as a read.
        base: _Value | None = None
        if isinstance(node.func, ast.Attribute):
            self.package.refer(node.func.attr, self.guarded)
            base = self.evaluate(node.func.value)
            value = self.attribute(base, node.func.attr, node.func, read=False)
        else:
            value = self.evaluate(node.func)
        name = self.callee(node.func, value) if self.out is not None else ""
        for index, argument in enumerate(node.args):
            one = self.evaluate(argument)
            self.use(one, "argument", f"{name}[{index}]")
        for keyword in node.keywords:
            one = self.evaluate(keyword.value)
            self.use(one, "argument", f"{name}[{keyword.arg or '**'}]")
        symbols = [self.called(path, value) for path in value.paths if is_vllm(path)]
        if symbols:
            uncertain = value.uncertain or (base is not None and base.uncertain)
            for symbol in symbols:
                self.emit(
                    SiteKind.CALL,
                    symbol,
                    node,
                    call=node,
                    optional=uncertain,
                    any_of=symbols,
                    unbound=value.unbound,
                )
                self.remote(symbol, node)
            return _Value(
                tuple(_result(symbol) for symbol in symbols),
                any(_is_class_name(symbol) for symbol in symbols),
                calls=(self.key(node),),
                exact=True,
            )
        # What can't be followed through vLLM's values is named by its text: it is no name of vLLM.
        self.emit(SiteKind.CALL, self.source(node.func) if is_vllm(name) else name, node, call=node)
        for path in value.paths:
            if path in self.package.classes:
                return _Value((path,), True)
            returned = self.package.functions.get(path)
            if returned is not None:
                return self.annotated(returned)
        return NOTHING

    @staticmethod
    def called(path: str, value: _Value) -> str:
        """Return the symbol that a call of ``path`` calls."""
        return f"{path}.__call__" if value.instance and _is_class_name(path) else path

    def special_call(self, node: ast.Call) -> _Value | None:
        """Handle the calls that name a module or an attribute in a string, and ``super()``."""
        function = node.func
        if isinstance(function, ast.Name):
            if function.id == "super" and self.cls is not None and function.id not in self.env:
                bases = self.package.vllm_bases(self.cls.path)
                others = self.package.has_other_bases(self.cls.path)
                return _Value(bases, True, exact=True) if bases and not others else NOTHING
            if (
                function.id in ("getattr", "hasattr", "setattr", "delattr")
                and len(node.args) >= 2
                and isinstance(node.args[1], ast.Constant)
                and isinstance(node.args[1].value, str)
            ):
                value = self.evaluate(node.args[0])
                for argument in node.args[2:]:
                    self.evaluate(argument)
                if function.id == "setattr":
                    self.package.written.add(node.args[1].value)
                    self.store(value, node.args[1].value, node)
                    return NOTHING
                asked = function.id == "hasattr" or len(node.args) > 2
                return self.attribute(value, node.args[1].value, node, optional=asked)
            if function.id == "isinstance" and len(node.args) == 2:
                self.evaluate(node.args[0])
                self.evaluate(node.args[1])
                return NOTHING
            if function.id == "cast" and len(node.args) == 2:
                self.evaluate(node.args[1])
                return self.annotated(node.args[0])
        if not node.args or not isinstance(function, (ast.Name, ast.Attribute)):
            return None
        if isinstance(function, ast.Attribute) and function.attr != "import_module":
            return None
        if "importlib.import_module" in self.silently(function).paths:
            first = node.args[0]
            named = first.value if isinstance(first, ast.Constant) else None
            if isinstance(named, str) and is_vllm(named):
                self.emit(SiteKind.IMPORT, named, node, is_module=True)
                return _Value((named,))
        return None

    def silently(self, node: ast.expr) -> _Value:
        """Evaluate an expression without noting call sites."""
        out, self.out = self.out, None
        value = self.evaluate(node) if isinstance(node, (ast.Name, ast.Attribute)) else NOTHING
        self.out = out
        return value

    def worker_extension(self, node: ast.Call) -> None:
        """Note the class that ``worker_extension_cls`` names."""
        for keyword in node.keywords:
            if keyword.arg == _HOOK:
                self.package.hooks.update(self.class_names(keyword.value))
        if len(node.args) == 2 and _is_hook(node.args[0]):  # kwargs.setdefault(…)
            self.package.hooks.update(self.class_names(node.args[1]))

    def on_Dict(self, node: ast.Dict) -> _Value:
        for key, item in zip(node.keys, node.values, strict=True):
            self.evaluate(key)
            value = self.evaluate(item)
            self.use(value, "assigned", key if key is not None else "**")
            if key is not None and _is_hook(key):
                self.package.hooks.update(self.class_names(item))
        return NOTHING

    def class_names(self, node: ast.expr) -> Iterator[str]:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                if _DOTTED.match(inner.value):
                    yield inner.value
            elif isinstance(inner, ast.Attribute) and inner.attr in ("__name__", "__qualname__"):
                yield from self.silently(inner.value).paths

    def remote(self, symbol: str, node: ast.Call) -> None:
        """Note the worker's method that ``collective_rpc("name", args=…)`` calls."""
        if not symbol.endswith(".collective_rpc") or not node.args:
            given = {k.arg: k.value for k in node.keywords}
            first = given.get("method")
        else:
            first = node.args[0]
        if not symbol.endswith(".collective_rpc") or self.out is None:
            return
        if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
            return
        given = {k.arg: k.value for k in node.keywords}
        arguments, keywords = given.get("args"), given.get("kwargs")
        call = ast.Call(
            func=node.func,
            args=list(arguments.elts)
            if isinstance(arguments, (ast.Tuple, ast.List))
            else [ast.Starred(arguments)]
            if arguments is not None
            else [],
            keywords=[ast.keyword(None, keywords)] if keywords is not None else [],
        )
        if isinstance(keywords, ast.Dict):
            call.keywords = [
                ast.keyword(str(k.value) if isinstance(k, ast.Constant) else None, v)
                for k, v in zip(keywords.keys, keywords.values, strict=True)
            ]
        self.out.remote.append((self, first.value, node, call, list(self.within)))

    # Names and attributes that are written.

    def assign(self, target: ast.expr, value: _Value, node: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self.use(value, "assigned", target.id)
            self.env[target.id] = value
            if isinstance(node, _TESTING) and self.is_test(node):
                self.package.tests.add(target.id)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self.use(value, "iterate", target)
            parts: list[ast.expr | None] = [None] * len(target.elts)
            if isinstance(node, (ast.Tuple, ast.List)) and len(node.elts) == len(target.elts):
                parts = list(node.elts)
            for item, part in zip(target.elts, parts, strict=True):
                known = self.silently(part) if part is not None else NOTHING
                self.assign(item, known, None)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, NOTHING, None)
        elif isinstance(target, ast.Attribute):
            base = self.evaluate(target.value)
            self.use(value, "assigned", target)
            if (
                isinstance(target.value, ast.Name)
                and target.value.id == self.me
                and self.cls is not None
            ):
                before = self.cls.attributes.get(target.attr)
                self.cls.attributes[target.attr] = value if before is None else before | value
                self.cls.names.add(target.attr)
            else:
                self.package.written.add(target.attr)
                self.store(base, target.attr, target)
        elif isinstance(target, ast.Subscript):
            self.evaluate(target.value)
            self.evaluate(target.slice)
            if node is not None and _is_hook(target.slice):
                self.package.hooks.update(self.class_names(node))

    def store(self, base: _Value, name: str, node: ast.AST) -> None:
        """Note a write to a name of a vLLM module or class; one to an instance is free."""
        if base.instance:
            return
        for path in base.paths:
            inside = path.split(".")[:-1]
            if is_vllm(path) and "()" not in path and not any(map(_is_class_name, inside)):
                self.emit(SiteKind.ATTRIBUTE, f"{path}.{name}", node, store=True)

    def annotated(self, node: ast.expr | None) -> _Value:
        """Return the value that an annotation promises."""
        if node is None:
            return NOTHING
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                return self.annotated(ast.parse(node.value, mode="eval").body)
            except SyntaxError:
                return NOTHING
        if isinstance(node, ast.BinOp):
            return self.annotated(node.left) | self.annotated(node.right)
        if isinstance(node, ast.Subscript):
            name = ast.unparse(node.value).rsplit(".", 1)[-1]
            inner = node.slice
            parts = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
            if name in ("Optional", "Union"):
                value = NOTHING
                for part in parts:
                    value = value | self.annotated(part)
                return value
            if name in ("Annotated", "ClassVar", "Final"):
                return self.annotated(parts[0])
            if name in ("type", "Type"):
                return _Value(self.annotated(parts[0]).paths)
            if name in ("list", "List", "Sequence", "Iterable", "set", "Iterator", "deque"):
                return _Value(items=self.annotated(parts[0]).paths)
            if name in ("tuple", "Tuple") and len(parts) == 2 and _is_ellipsis(parts[1]):
                return _Value(items=self.annotated(parts[0]).paths)
            return NOTHING
        if isinstance(node, (ast.Name, ast.Attribute)):
            out, self.out = self.out, None
            value = self.evaluate(node)
            self.out = out
            paths = tuple(p for p in value.paths if is_vllm(p) or p in self.package.classes)
            paths = tuple(p for p in paths if p in self.package.classes or _is_class_name(p))
            return _Value(paths, True) if paths else NOTHING
        return NOTHING

    # Statements.

    def block(self, statements: Iterable[ast.stmt]) -> bool:
        """Read statements in order; return whether control never comes out at the end."""
        ended = False
        added = 0
        for node in statements:
            method = getattr(self, "do_" + type(node).__name__, None)
            if method is not None:
                ended = bool(method(node)) or ended
            else:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.evaluate(child)
            if isinstance(node, ast.If) and not node.orelse and _leaves(node.body):
                # ``if old version: return``: the rest runs on the others only.
                guards = self.guard_of(node.test)
                self.guards += guards
                added += len(guards)
        del self.guards[len(self.guards) - added :]
        return ended

    def do_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if is_vllm(alias.name):
                self.emit(SiteKind.IMPORT, alias.name, node, is_module=True)
            if alias.asname:
                self.bind(alias.asname, _Value((alias.name,)))
            else:
                top = alias.name.partition(".")[0]
                self.bind(top, _Value((top,)))

    def do_ImportFrom(self, node: ast.ImportFrom) -> None:
        origin = resolve_relative(self.module.name, self.module.is_package, node.module, node.level)
        for alias in node.names:
            if alias.name == "*":
                if is_vllm(origin):
                    self.emit(SiteKind.IMPORT, origin, node, is_module=True)
                elif self.package.ours(origin):
                    self.package.name_in(origin, "")
                    other = self.package.modules.get(origin)
                    if other is not None:
                        for name, value in other.names.items():
                            if not name.startswith("_"):
                                self.bind(name, value)
                continue
            path = f"{origin}.{alias.name}"
            if is_vllm(origin):
                self.emit(SiteKind.IMPORT, path, node)
                value = _Value((path,))
            elif self.package.ours(origin) and not self.package.files.locate(path):
                value = self.package.name_in(origin, alias.name)
            else:
                value = _Value((path,))
            self.bind(alias.asname or alias.name, value)
            if alias.asname:
                self.package.refer(alias.name, False)  # used under another name

    def bind(self, name: str, value: _Value) -> None:
        self.env[name] = value

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
            known = replace(known, calls=value.calls)
            if value.paths and value.instance:
                known = value
        else:
            known = value
        if node.value is not None or known is not NOTHING:
            if self.cls is not None and isinstance(node.target, ast.Name) and self.me is None:
                self.cls.attributes[node.target.id] = known
            self.assign(node.target, known, node.value)

    def do_AugAssign(self, node: ast.AugAssign) -> None:
        self.evaluate(node.value)
        if isinstance(node.target, ast.Attribute):
            self.evaluate(node.target)
        elif isinstance(node.target, ast.Subscript):
            self.evaluate(node.target.value)
            self.evaluate(node.target.slice)

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

    def do_Assert(self, node: ast.Assert) -> None:
        self.test(node.test)
        self.evaluate(node.msg)
        self.narrow(node.test)

    def test(self, node: ast.expr) -> None:
        self.use(self.evaluate(node), "truth")

    def is_test(self, node: ast.expr) -> bool:
        """Whether an expression asks for a version or a feature, itself or through a name."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name):
                if inner.id in self.package.tests or _VERSION_TEST.search(inner.id):
                    return True
            elif isinstance(inner, ast.Attribute) and _VERSION_TEST.search(inner.attr):
                return True
        return False

    def guard_of(self, node: ast.expr) -> list[str]:
        """Return a test's source where it asks for a version or a feature of vLLM."""
        if not self.is_test(node):
            return []
        text = self.source(node)
        return [] if _OWN_TEST.search(text) else [text]

    def needed(self, test: ast.expr) -> Iterator[str]:
        """Name the vLLM symbols without which a test can't hold."""
        both = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
        for part in test.values if both and isinstance(test, ast.BoolOp) else [test]:
            for name in _tested_names(part) if isinstance(part, ast.Call) else ():
                if isinstance(part, ast.Call):
                    paths = self.silently(part.args[0]).paths
                    if len(paths) == 1 and is_vllm(paths[0]):
                        yield f"{paths[0]}.{name}"

    def narrow(self, test: ast.expr, holds: bool = True) -> None:
        """Take ``isinstance(x, C)`` into account, where it holds or where it doesn't."""
        both = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
        parts = test.values if both and isinstance(test, ast.BoolOp) else [test]
        for part in parts:
            if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
                self.narrow(part.operand, not holds)
            elif (
                isinstance(part, ast.Call)
                and isinstance(part.func, ast.Name)
                and part.func.id == "isinstance"
                and len(part.args) == 2
            ):
                value = NOTHING
                if holds:
                    classes = part.args[1]
                    for node in classes.elts if isinstance(classes, ast.Tuple) else [classes]:
                        value = value | self.annotated(node)
                subject = part.args[0]
                if isinstance(subject, ast.Name):
                    self.env[subject.id] = value
                while isinstance(subject, (ast.Subscript, ast.Attribute)):
                    self.env[self.source(subject)] = value
                    value = NOTHING
                    if isinstance(subject, ast.Attribute):
                        break
                    subject = subject.value

    def do_If(self, node: ast.If) -> bool:
        if is_type_checking(node.test):
            self.optional_imports += 1
            self.block(node.body)
            self.optional_imports -= 1
            self.block(node.orelse)
            return False
        self.test(node.test)
        guards = self.guard_of(node.test)
        tested = list(_tested_names(node.test))
        before = dict(self.env)
        self.guards += guards
        needs = list(self.needed(node.test))
        self.tested += tested
        self.needs += needs
        self.narrow(node.test)
        self.arms.append(f"{node.lineno}:then")
        ended = self.block(node.body)
        after = self.env
        del self.tested[len(self.tested) - len(tested) :]
        del self.needs[len(self.needs) - len(needs) :]
        self.env = dict(before)
        self.narrow(node.test, False)
        self.arms[-1] = f"{node.lineno}:else"
        other_ended = self.block(node.orelse)
        self.arms.pop()
        del self.guards[len(self.guards) - len(guards) :]
        for name in [n for n in (*after, *self.env) if "." in n or "[" in n]:
            after.pop(name, None)
            self.env.pop(name, None)
        if not node.orelse and not ended:
            self.env = {**self.env, **{n: v for n, v in before.items() if n in self.env}}
        self.merge(after, ended, other_ended)
        return ended and other_ended and bool(node.orelse)

    def merge(self, after: dict[str, _Value], ended: bool, other_ended: bool) -> None:
        """Join the names of two branches into ``self.env``."""
        if other_ended and not ended:
            self.env = after
        elif not ended:
            for name, value in after.items():
                mine = self.env.get(name)
                self.env[name] = value if mine is None else mine | value

    def do_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.iterate(node.target, node.iter)
        self.block(node.body)
        self.block(node.orelse)

    do_AsyncFor = do_For

    def do_While(self, node: ast.While) -> None:
        self.test(node.test)
        self.block(node.body)
        self.block(node.orelse)

    def do_With(self, node: ast.With | ast.AsyncWith) -> bool:
        caught = 0
        for item in node.items:
            value = self.evaluate(item.context_expr)
            if isinstance(item.context_expr, ast.Call):
                name = self.source(item.context_expr.func).rsplit(".", 1)[-1]
                caught += name == "suppress"
            if item.optional_vars is not None:
                own = value if value.instance else NOTHING
                self.assign(item.optional_vars, own, None)
        self.optional_calls += caught
        self.optional_imports += caught
        ended = self.block(node.body)
        self.optional_calls -= caught
        self.optional_imports -= caught
        return ended and not caught

    do_AsyncWith = do_With

    def do_Try(self, node: ast.Try) -> bool:
        imports = calls = False
        for handler in node.handlers:
            if handler.body and isinstance(handler.body[-1], ast.Raise):
                continue
            names = {self.source(n).rsplit(".", 1)[-1] for n in _caught(handler)}
            everything = handler.type is None or bool(names & _ALL_ERRORS)
            imports |= everything or bool(names & _IMPORT_ERRORS)
            calls |= everything or bool(names & _CALL_ERRORS)
        before = dict(self.env)
        self.optional_imports += imports
        self.optional_calls += calls
        ended = self.block(node.body)
        self.optional_imports -= imports
        self.optional_calls -= calls
        ended = self.block(node.orelse) or ended
        tried = tuple(_imported(node.body))
        after, all_ended = self.env, ended
        for handler in node.handlers:
            self.env = dict(before)
            names = {self.source(n).rsplit(".", 1)[-1] for n in _caught(handler)}
            fallback = imports and (not names or bool(names & (_IMPORT_ERRORS | _ALL_ERRORS)))
            if fallback and tried:
                self.unless.append(tried)
            elif fallback:
                self.guards.append("except ImportError")
            if handler.name:
                self.env[handler.name] = NOTHING
            other = self.block(handler.body)
            if fallback and tried:
                self.unless.pop()
            elif fallback:
                self.guards.pop()
            self.merge(after, all_ended, other)
            after, all_ended = self.env, all_ended and other
        self.env = after
        self.block(node.finalbody)
        return all_ended

    do_TryStar = do_Try

    def do_Match(self, node: ast.Match) -> None:
        self.evaluate(node.subject)
        for case in node.cases:
            before = dict(self.env)
            self.evaluate(case.guard)
            ended = self.block(case.body)
            after, self.env = self.env, before
            self.merge(after, ended, False)

    def do_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.env.pop(target.id, None)

    # Definitions.

    def do_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.evaluate(decorator)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            self.evaluate(default)
        if not self.within:
            path = f"{self.module.name}.{node.name}"
            self.package.functions[path] = node.returns
        elif self.cls is not None and self.me is None:
            self.package.functions[f"{self.cls.path}.{node.name}"] = node.returns
        is_method = (
            self.cls is not None
            and self.me is None
            and self.within[-1:] == [self.cls.path.rsplit(".", 1)[-1]]
        )
        if not is_method:
            scope = ".".join([self.module.name, *self.within, node.name])
            self.env[node.name] = _Value((scope,))
        state = (list(self.within), self.cls, self.me if not is_method else None, list(self.guards))
        unless = list(self.unless)
        closure = self.env if self.within and not is_method else None

        def run() -> None:
            kept = (self.env, self.within, self.cls, self.me, self.guards, self.unless, self.arms)
            self.arms = []
            within, self.cls, me, guards = state
            self.within = [*within, node.name]
            self.guards = list(guards)
            if self.package.references.get(node.name) and not self.guards:
                self.guards.append(f"{node.name} is used under a test only")
            self.unless = list(unless)
            self.env = dict(closure if closure is not None else self.module_env(kept[0]))
            arguments = list(_arguments(node.args))
            for argument in arguments:
                self.env[argument.arg] = self.annotated(argument.annotation)
            if node.args.vararg:
                self.env[node.args.vararg.arg] = NOTHING
            if node.args.kwarg:
                self.env[node.args.kwarg.arg] = NOTHING
            self.me = me
            plain = [*node.args.posonlyargs, *node.args.args]
            static = any(self.source(d) == "staticmethod" for d in node.decorator_list)
            if is_method and plain and not static and self.cls is not None:
                self.me = plain[0].arg
                self.env[self.me] = _Value((self.cls.path,), True)
            self.block(node.body)
            self.env, self.within, self.cls, self.me, self.guards, self.unless, self.arms = kept

        self.deferred.append(run)

    do_AsyncFunctionDef = do_FunctionDef

    def module_env(self, fallback: dict[str, _Value]) -> dict[str, _Value]:
        return self.module.names if self.module.names else fallback

    def do_ClassDef(self, node: ast.ClassDef) -> None:
        path = ".".join([self.module.name, *self.within, node.name])
        known = self.package.classes.get(path)
        if known is None:
            known = self.package.classes[path] = _Class(path)
        known.bases = []
        for base in node.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base
            value = self.evaluate(inner)
            for dotted in value.paths:
                known.bases.append(dotted)
                if is_vllm(dotted):
                    self.emit(SiteKind.SUBCLASS, dotted, node)
        for keyword in node.keywords:
            self.evaluate(keyword.value)
        for decorator in node.decorator_list:
            self.evaluate(decorator)
        self.env[node.name] = _Value((path,))
        kept = (self.cls, self.me, self.env)
        self.cls, self.me, self.env = known, None, dict(self.env)
        self.within.append(node.name)
        for inner_node in node.body:
            if isinstance(inner_node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                known.methods[inner_node.name] = inner_node
                known.names.add(inner_node.name)
                is_property = any("property" in self.source(d) for d in inner_node.decorator_list)
                if is_property:
                    known.attributes[inner_node.name] = self.annotated(inner_node.returns)
            elif isinstance(inner_node, ast.ClassDef):
                known.names.add(inner_node.name)
            elif isinstance(inner_node, (ast.Assign, ast.AnnAssign)):
                targets = (
                    inner_node.targets if isinstance(inner_node, ast.Assign) else [inner_node.target]
                )
                known.names.update(t.id for t in targets if isinstance(t, ast.Name))
        self.block(node.body)
        self.within.pop()
        self.cls, self.me, self.env = kept
        known.module = self.module


class _Out:
    """The sites of the whole package, in the order in which they are met."""

    def __init__(self) -> None:
        self.sites: dict[tuple[CallSite, tuple[str, int, int] | None], bool] = {}
        self.uses: dict[tuple[str, int, int], dict[Use, None]] = {}
        self.remote: list[tuple[_Reader, str, ast.Call, ast.Call, list[str]]] = []

    def add(self, site: CallSite, key: tuple[str, int, int] | None, vllm: bool) -> None:
        self.sites.setdefault((site, key), vllm)

    def use(self, key: tuple[str, int, int], use: Use) -> None:
        self.uses.setdefault(key, {}).setdefault(use)

    def finished(self, vllm: bool) -> tuple[CallSite, ...]:
        chosen = [
            replace(site, uses=tuple(self.uses.get(key, {}))) if key else site
            for (site, key), ours in self.sites.items()
            if ours is vllm
        ]
        return tuple(sorted(chosen, key=lambda s: (s.file, s.line)))


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether a block ends by leaving the function, the loop or the program."""
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _is_hook(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == _HOOK


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _arguments(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from arguments.posonlyargs
    yield from arguments.args
    yield from arguments.kwonlyargs


def _caught(handler: ast.ExceptHandler) -> list[ast.expr]:
    if handler.type is None:
        return []
    return list(handler.type.elts) if isinstance(handler.type, ast.Tuple) else [handler.type]


def _imported(statements: list[ast.stmt]) -> Iterator[str]:
    """Name what a ``try`` imports from vLLM."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names if is_vllm(alias.name))
        elif isinstance(statement, ast.ImportFrom) and is_vllm(statement.module or ""):
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def _tested_names(test: ast.expr) -> Iterator[str]:
    """Name the attributes that ``hasattr`` or ``getattr`` asks for in a test."""
    for node in ast.walk(test):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and (node.func.id, len(node.args)) in (("hasattr", 2), ("getattr", 3))
            and isinstance(node.args[1], ast.Constant)
        ):
            yield str(node.args[1].value)


def _imports_vllm(tree: ast.Module, source: bytes) -> bool:
    for node in statements_in(tree.body):
        if isinstance(node, ast.ImportFrom) and not node.level and is_vllm(node.module or ""):
            return True
        if isinstance(node, ast.Import) and any(is_vllm(a.name) for a in node.names):
            return True
    return b"import_module" in source and any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "import_module"
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
        and is_vllm(str(node.args[0].value))
        for node in ast.walk(tree)
    )


def _inner_imports(package: _Package, module: _Module) -> tuple[str, ...]:
    """Return the package's modules that a module imports, parents of both included."""
    found: dict[str, None] = {}

    def add(name: str) -> None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            dotted = ".".join(parts[:end])
            if package.ours(dotted) and package.files.locate(dotted) and dotted != module.name:
                found.setdefault(dotted)

    add(module.name)
    for node in statements_in(module.tree.body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if package.ours(alias.name):
                    add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_relative(module.name, module.is_package, node.module, node.level)
            if package.ours(origin):
                add(origin)
                for alias in node.names:
                    add(f"{origin}.{alias.name}")
    return tuple(sorted(found))


def read_package(files: PackageFiles) -> Contract:
    """Read all call sites of vLLM in a package.

    Raises :class:`~vllm_compat.errors.UsageError` where a module that names vLLM can't be parsed.
    """
    with uncollected():
        return _read_package(_Package(files))


def _read_package(package: _Package) -> Contract:
    files = package.files
    using: list[_Module] = []
    for name in files.modules():
        source = files.source(name)
        if source is None or VLLM.encode() not in source or is_vllm(name):
            continue
        module = package.parse(name)
        if module is not None and _imports_vllm(module.tree, source):
            using.append(module)
    # Twice without notes, so that a method sees what a later one assigns to ``self``, and a module
    # what another learns; then once for good.
    for _ in range(2):
        for module in using:
            _Reader(package, module, None).bind_module()
    out = _Out()
    for module in using:
        _Reader(package, module, out).bind_module()
    _emit_hooks(package, out)
    modules: dict[str, tuple[str, ...]] = {}
    todo = [module.name for module in using]
    while todo:
        name = todo.pop()
        if name in modules:
            continue
        parsed = package.parse(name)
        modules[name] = _inner_imports(package, parsed) if parsed is not None else ()
        todo += [other for other in modules[name] if other not in modules]
    return Contract(
        name=files.distribution,
        version=files.version,
        package=files.package,
        root=files.origin,
        sites=out.finished(True),
        other_calls=out.finished(False),
        modules=dict(sorted(modules.items())),
        written=tuple(sorted(package.written)),
    )


def _hook_methods(
    package: _Package, path: str
) -> tuple[_Module, dict[str, ast.FunctionDef | ast.AsyncFunctionDef]] | None:
    """Return the module and the methods of a worker extension; None where it isn't found."""
    known = package.classes.get(path)
    if known is not None and known.module is not None:
        return known.module, known.methods
    where, _, name = path.rpartition(".")
    module = package.parse(where) if package.ours(where) else None
    for node in module.tree.body if module is not None else ():
        if module is not None and isinstance(node, ast.ClassDef) and node.name == name:
            functions = (n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
            return module, {function.name: function for function in functions}
    return None


def _emit_hooks(package: _Package, out: _Out) -> None:
    """Note what worker extensions define, and what is called in workers by name."""
    defined: set[str] = set()
    all_known = bool(package.hooks)
    for path in sorted(package.hooks):
        found = _hook_methods(package, path)
        if found is None:
            all_known = False
            continue
        module, methods = found
        reader = _Reader(package, module, out)
        reader.within = [path[len(module.name) + 1 :]]
        for name, method in methods.items():
            defined.add(name)
            if not (name.startswith("__") and name.endswith("__")):
                reader.emit(SiteKind.HOOK, f"{WORKER}.{name}", method)
    for reader, name, node, call, within in out.remote if all_known else ():
        if name in defined:
            continue
        reader.within = within
        reader.guards, reader.unless, reader.tested = [], [], []
        call.lineno, call.end_lineno = node.lineno, -1
        call.end_col_offset = node.end_col_offset
        reader.emit(SiteKind.CALL, f"{WORKER}.{name}", node, call=call)
