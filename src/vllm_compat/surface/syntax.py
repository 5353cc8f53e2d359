"""One module's syntax tree → entries: the small, JSON-able notes that surfaces are resolved from.

An entry is a list whose first item says what it is:

``["f", parameters, returns, flags, unwraps, makes]``
    a function; each parameter is ``[name, kind, annotation, default]`` with kinds numbered as in
    ``inspect``. Flags: ``p`` property, ``s`` static, ``c`` class method, ``a`` asynchronous,
    ``g`` context manager, ``t`` a ``dataclass_transform``, ``o`` an overload without definition.
    ``unwraps`` names parameters that, when given, make the function hand back one bare item instead
    of a list; ``makes`` are sketches of what a factory (``_make_model_runner``) constructs. Both
    are left out where empty.
``["c", bases, decorators, keywords, members, flags]``
    a class; flag ``g``: it defines ``__getattr__`` or fills its ``__dict__`` by hand.
``["i", module, name]``
    an import; ``name`` is None where the module itself is meant.
``["a", annotation, value, flags]``
    an attribute. Flags: ``v`` set on instances only, ``f`` the default comes from a factory,
    ``n`` not a constructor's parameter, ``k`` keyword only, ``x`` not annotated, ``d`` has a
    default. ``value`` is the default's source, or a sketch such as ``Foo()`` of what is assigned.
``["u", entries]``
    several definitions of one name, in the order in which they are tried.

Strings are source text as ``ast.unparse`` writes it.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Entry = list[Any]

_KINDS = ("posonlyargs", "args", "vararg", "kwonlyargs", "kwarg")
_LONG_DEFAULT = 80


@contextmanager
def uncollected() -> Iterator[None]:
    """Hold the garbage collector off while syntax trees grow.

    It would walk them again and again, for a third of the time, and find nothing.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def unparse(node: ast.expr | None) -> str | None:
    """Return an expression's source text, or None where there is none."""
    if node is None:
        return None
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, type(None))):
        return repr(node.value)
    return ast.unparse(node)


def _annotation(node: ast.expr | None) -> str | None:
    """Return an annotation's text, quotes of forward references taken off."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return unparse(node)


def _default(node: ast.expr | None) -> str | None:
    text = unparse(node)
    if text is not None and len(text) > _LONG_DEFAULT:
        return text[: _LONG_DEFAULT - 1] + "…"
    return text


def _dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for names and attributes (calls looked through), else an empty string."""
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def is_type_checking(test: ast.expr) -> bool:
    """Whether a condition is ``TYPE_CHECKING``."""
    return _dotted(test).rsplit(".", 1)[-1] == "TYPE_CHECKING"


def _is_true(test: ast.expr) -> bool:
    return isinstance(test, ast.Constant) and bool(test.value)


def blocks(statements: Iterable[ast.stmt], typing: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Iterate over simple statements, conditions and ``try`` looked into, in order of preference.

    The flag says whether a statement is seen by type checkers only.
    """
    for node in statements:
        if isinstance(node, ast.If):
            if is_type_checking(node.test):
                yield from blocks(node.body, True)
                yield from blocks(node.orelse, typing)
            elif (
                isinstance(node.test, ast.UnaryOp)
                and isinstance(node.test.op, ast.Not)
                and is_type_checking(node.test.operand)
            ):
                yield from blocks(node.body, typing)
                yield from blocks(node.orelse, True)
            else:
                yield from blocks(node.body, typing)
                yield from blocks(node.orelse, typing)
        elif isinstance(node, ast.Try):
            yield from blocks(node.body, typing)
            yield from blocks(node.orelse, typing)
            for handler in node.handlers:
                yield from blocks(handler.body, typing)
            yield from blocks(node.finalbody, typing)
        elif isinstance(node, (ast.With, ast.For, ast.While)):
            yield from blocks(node.body, typing)
        elif isinstance(node, ast.Match):
            for case in node.cases:
                yield from blocks(case.body, typing)
        else:
            yield node, typing


def resolve_relative(module: str, is_package: bool, name: str | None, level: int) -> str:
    """Return the absolute name that ``from <dots><name> import`` means inside ``module``."""
    if not level:
        return name or ""
    parts = module.split(".")
    if not is_package:
        parts.pop()
    if level > 1:
        parts = parts[: len(parts) - (level - 1)]
    return ".".join([*parts, name] if name else parts)


def _unwraps(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Name the parameters that turn a list of results into a bare one.

    The pattern is ``return xs[0] if p is not None else xs``, in the function or one nested in it,
    where ``p`` is a parameter or a local that was assigned from it.
    """
    arguments = function.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    origin = {name: name for name in names}
    found: list[str] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            for target in node.targets:
                if isinstance(target, ast.Name) and node.value.id in origin:
                    origin.setdefault(target.id, origin[node.value.id])
    for node in ast.walk(function):
        if not (isinstance(node, ast.Return) and isinstance(node.value, ast.IfExp)):
            continue
        test, one, many = node.value.test, node.value.body, node.value.orelse
        if (
            isinstance(test, ast.Compare)
            and len(test.ops) == 1
            and isinstance(test.left, ast.Name)
            and test.left.id in origin
            and isinstance(test.comparators[0], ast.Constant)
            and test.comparators[0].value is None
        ):
            if isinstance(test.ops[0], ast.Is):
                one, many = many, one
            if (
                isinstance(one, ast.Subscript)
                and isinstance(one.slice, ast.Constant)
                and one.slice.value == 0
                and ast.dump(one.value) == ast.dump(many)
                and origin[test.left.id] not in found
            ):
                found.append(origin[test.left.id])
    return found


def _parameters(arguments: ast.arguments) -> list[list[Any]]:
    result: list[list[Any]] = []
    plain = [*((0, a) for a in arguments.posonlyargs), *((1, a) for a in arguments.args)]
    first = len(plain) - len(arguments.defaults)
    for index, (kind, argument) in enumerate(plain):
        default = arguments.defaults[index - first] if index >= first else None
        result.append([argument.arg, kind, _annotation(argument.annotation), _default(default)])
    if arguments.vararg:
        result.append([arguments.vararg.arg, 2, _annotation(arguments.vararg.annotation), None])
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        result.append([argument.arg, 3, _annotation(argument.annotation), _default(value)])
    if arguments.kwarg:
        result.append([arguments.kwarg.arg, 4, _annotation(arguments.kwarg.annotation), None])
    return result


_PROPERTIES = ("property", "cached_property", "lazy_property", "abstractproperty")


def function_entry(node: ast.FunctionDef | ast.AsyncFunctionDef, in_class: bool) -> Entry | None:
    """Return a function's entry; None for ``@x.setter``. Flag ``o`` marks an ``@overload``."""
    flags = "a" if isinstance(node, ast.AsyncFunctionDef) else ""
    for decorator in node.decorator_list:
        name = _dotted(decorator)
        last = name.rsplit(".", 1)[-1]
        if in_class and last in ("setter", "deleter"):
            return None
        if last == "overload":
            flags += "o"
        if in_class and last in _PROPERTIES:
            flags += "p"
        elif last == "staticmethod":
            flags += "s"
        elif last == "classmethod":
            flags += "c"
        elif last in ("contextmanager", "asynccontextmanager"):
            flags += "g"
        elif last == "dataclass_transform":
            flags += "t"
    parameters = _parameters(node.args)
    implicit = in_class and "s" not in flags
    if node.name in ("__new__", "__init_subclass__", "__class_getitem__"):
        implicit = in_class
    if implicit and parameters and parameters[0][1] in (0, 1):
        parameters.pop(0)
    entry: Entry = ["f", parameters, _annotation(node.returns), flags]
    if in_class:
        ranked = any(str(p[0]).endswith("rank") for p in parameters)
        unwraps = _unwraps(node) if ranked else []
        makes = _makes(node) if node.name.lstrip("_").startswith(_FACTORIES) else []
        if unwraps or makes:
            entry.append(unwraps)
        if makes:
            entry.append(makes)
    return entry


_FACTORIES = ("make_", "create_", "build_")


def _makes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return sketches of the constructors whose result a factory returns."""
    aliases: dict[str, str] = {}
    found: list[str] = []
    for node in statements_in(function.body):
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Return):
            text = _sketch(node.value, aliases)
            last = text.rsplit(".", 1)[-1] if text else ""
            if text and last.endswith("()") and last[:1].isupper() and text not in found:
                found.append(text)
    return found


def _sketch(node: ast.expr | None, aliases: dict[str, str]) -> str | None:
    """Return ``Foo()`` for a constructor-like call, a dotted name, or None for all else."""
    if isinstance(node, ast.Await):
        node = node.value
    if isinstance(node, ast.IfExp):
        left, right = _sketch(node.body, aliases), _sketch(node.orelse, aliases)
        if left == right:
            return left
        known = [x for x in (left, right) if x and x != "None"]
        return known[0] if len(known) == 1 and "None" in (left, right) else None
    if isinstance(node, ast.Constant):
        return "None" if node.value is None else None
    call = isinstance(node, ast.Call)
    if isinstance(node, ast.Call):
        name = _dotted(node.func)
        if name.rsplit(".", 1)[-1] == "cast":
            return None
    elif isinstance(node, (ast.Name, ast.Attribute)):
        name = _dotted(node)
    else:
        return None
    if not name:
        return None
    head, _, rest = name.partition(".")
    if head in aliases:
        name = f"{aliases[head]}.{rest}" if rest else aliases[head]
    return f"{name}()" if call else name


def _field(annotation: ast.expr | None, value: ast.expr | None) -> Entry:
    """Return the entry of an annotated name in a class body."""
    text = _annotation(annotation)
    if isinstance(value, ast.Call):
        called = _dotted(value.func).rsplit(".", 1)[-1].lower()
        if called.endswith("field") or called == "privateattr":
            given = {k.arg: k.value for k in value.keywords if k.arg}
            flags = ""
            default: str | None = None
            if "default" in given:
                default = _default(given["default"])
            elif value.args:
                default = _default(value.args[0])
            if default in ("...", "Ellipsis", "MISSING", "dataclasses.MISSING"):
                default = None
            if "default_factory" in given:
                flags += "f"
                default = _default(given["default_factory"])
            init = given.get("init")
            if called == "privateattr" or (isinstance(init, ast.Constant) and init.value is False):
                flags += "n"
            only = given.get("kw_only")
            if isinstance(only, ast.Constant) and only.value is True:
                flags += "k"
            if default is not None:
                flags += "d"
            return ["a", text, default, flags]
    if value is None:
        return ["a", text, None, ""]
    return ["a", text, _default(value), "d"]


def statements_in(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Iterate over statements and all that stand inside them; expressions are not entered."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            inner = getattr(node, part, None)
            if inner:
                yield from statements_in(inner)
        for branch in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from statements_in(branch.body)


def _written(node: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr | None, ast.expr | None]]:
    """Iterate over (target, annotation, value) of what a statement writes, tuples taken apart."""
    todo: list[tuple[ast.expr, ast.expr | None, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        todo = [(target, None, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign):
        todo = [(node.target, node.annotation, node.value)]
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        todo = [(node.target, None, None)]
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        todo = [(i.optional_vars, None, None) for i in node.items if i.optional_vars]
    while todo:
        target, annotation, value = todo.pop(0)
        if isinstance(target, (ast.Tuple, ast.List)):
            same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            values = value.elts if same else [None] * len(target.elts)  # type: ignore[union-attr]
            todo[:0] = [(t, None, v) for t, v in zip(target.elts, values, strict=True)]
        elif isinstance(target, ast.Starred):
            todo.insert(0, (target.value, None, None))
        else:
            yield target, annotation, value


def _setattr(node: ast.stmt, me: str) -> tuple[ast.expr, ast.expr] | None:
    """Return (name, value) of a statement ``setattr(self, name, value)``, or None."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return None
    call = node.value
    if _dotted(call.func) not in ("setattr", "object.__setattr__") or len(call.args) != 3:
        return None
    owner = call.args[0]
    return (call.args[1], call.args[2]) if isinstance(owner, ast.Name) and owner.id == me else None


def _instance_attributes(node: ast.ClassDef) -> tuple[dict[str, list[Entry]], bool]:
    """Collect ``self.x = …`` of all methods.

    The flag says whether the class adds attributes in ways that can't be read off.
    """
    found: dict[str, list[Entry]] = {}
    hidden = False
    for method in node.body:
        if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if method.name in ("__getattr__", "__getattribute__"):
            hidden = True
        arguments = [*method.args.posonlyargs, *method.args.args]
        if not arguments or any(_dotted(d) == "staticmethod" for d in method.decorator_list):
            continue
        me = arguments[0].arg
        making = method.name in ("__init__", "__post_init__", "__new__")
        statements = list(statements_in(method.body))
        writes = [write for statement in statements for write in _written(statement)]
        # Names that are local to the method mean nothing elsewhere: imports are written out in
        # full, parameters are replaced by their annotation, all others are dropped.
        typed = {a.arg: _annotation(a.annotation) for a in (*arguments[1:], *method.args.kwonlyargs)}
        local = {target.id for target, _, _ in writes if isinstance(target, ast.Name)}
        aliases: dict[str, str] = {}
        for statement in statements:
            if isinstance(statement, ast.ImportFrom) and not statement.level:
                for alias in statement.names:
                    aliases[alias.asname or alias.name] = f"{statement.module}.{alias.name}"
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                hidden |= _dotted(statement.value.func).endswith("__dict__.update")
                pair = _setattr(statement, me)
                if pair is not None and isinstance(pair[0], ast.Constant):
                    attribute = ast.Attribute(ast.Name(me), str(pair[0].value))
                    writes.append((attribute, None, pair[1]))
                elif pair is not None:
                    hidden |= making
        for target, annotation, value in writes:
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == me
            ):
                text = _sketch(value, aliases)
                head = text.partition(".")[0].removesuffix("()") if text else ""
                if text and head in typed:
                    rest = text[len(head) :]
                    text = f"@{typed[head]}@{rest}" if typed[head] and "(" not in rest else None
                elif head in local:
                    text = None
                elif text and head == me:
                    text = "self" + text[len(head) :]
                entry = ["a", _annotation(annotation), text, "v"]
                seen = found.setdefault(target.attr, [])
                if entry not in seen:
                    seen.append(entry)
    return found, hidden


def class_entry(node: ast.ClassDef) -> Entry:
    """Return a class's entry, with its own members only."""
    members: dict[str, Entry] = {}
    fallback: dict[str, Entry] = {}
    keyword_only = False
    for inner, typing in blocks(node.body):
        into = fallback if typing else members
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            entry = function_entry(inner, in_class=True)
            known = into.get(inner.name)
            if entry is not None and (known is None or (known[0] == "f" and "o" in known[3])):
                into[inner.name] = entry
        elif isinstance(inner, ast.ClassDef):
            into.setdefault(inner.name, class_entry(inner))
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            if _dotted(inner.annotation).rsplit(".", 1)[-1] == "KW_ONLY":
                keyword_only = True
                continue
            entry = _field(inner.annotation, inner.value)
            if keyword_only and "k" not in entry[3]:
                entry[3] += "k"
            into[inner.target.id] = entry
        elif isinstance(inner, ast.Assign):
            for target in inner.targets:
                names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
                for name in names:
                    if isinstance(name, ast.Name):
                        value = _sketch(inner.value, {}) if name is target else None
                        if name.id == "model_config":
                            value = _default(inner.value)
                        into.setdefault(name.id, ["a", None, value, "x"])
        elif isinstance(inner, (ast.Import, ast.ImportFrom)):
            continue
    for member, kept in fallback.items():
        members.setdefault(member, kept)
    instance, hidden = _instance_attributes(node)
    for member, entries in instance.items():
        if member not in members:
            members[member] = entries[0] if len(entries) == 1 else ["u", entries]
    return [
        "c",
        [text for base in node.bases if (text := unparse(base)) is not None],
        [text for decorator in node.decorator_list if (text := unparse(decorator)) is not None],
        {k.arg: unparse(k.value) for k in node.keywords if k.arg},
        members,
        "g" if hidden else "",
    ]


class ModuleSyntax:
    """A parsed module, whose entries are made when they are asked for."""

    def __init__(self, source: bytes | str, module: str, is_package: bool, file: str) -> None:
        with uncollected():
            tree = ast.parse(source, filename=file)
        self.module = module
        self.is_package = is_package
        self.stars: list[str] = []
        self._nodes: dict[str, list[Callable[[], Entry | None]]] = {}
        self._typing: dict[str, list[Callable[[], Entry | None]]] = {}
        self._made: dict[str, Entry | None] = {}
        self._exported: list[str] | None = None
        getter: ast.FunctionDef | None = None
        tables: dict[str, ast.Dict] = {}
        for node, typing in blocks(tree.body):
            if isinstance(node, ast.FunctionDef) and node.name == "__getattr__" and not typing:
                getter = node
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                tables.update({t.id: node.value for t in targets if isinstance(t, ast.Name)})
            self._take(node, typing)
        self.dynamic = getter is not None
        if getter is not None:
            self._lazy(getter, tables)

    def _put(self, name: str, make: Callable[[], Entry | None], typing: bool) -> None:
        (self._typing if typing else self._nodes).setdefault(name, []).append(make)

    def _take(self, node: ast.stmt, typing: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._put(node.name, lambda n=node: function_entry(n, False), typing)  # type: ignore[misc]
        elif isinstance(node, ast.ClassDef):
            self._put(node.name, lambda n=node: class_entry(n), typing)  # type: ignore[misc]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                target = alias.name if alias.asname else name
                self._put(name, lambda t=target: ["i", t, None], typing)  # type: ignore[misc]
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_relative(self.module, self.is_package, node.module, node.level)
            for alias in node.names:
                if alias.name == "*":
                    if not typing:
                        self.stars.append(origin)
                    continue
                entry: Entry = ["i", origin, alias.name]
                self._put(alias.asname or alias.name, lambda e=entry: e, typing)  # type: ignore[misc]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotation, value = node.annotation, node.value
            self._put(
                node.target.id,
                lambda a=annotation, v=value: ["a", _annotation(a), _sketch(v, {}), ""],  # type: ignore[misc]
                typing,
            )
        elif isinstance(node, ast.Assign):
            for written in node.targets:
                if isinstance(written, ast.Name):
                    if written.id == "__all__":
                        self._read_all(node.value)
                    self._put(
                        written.id,
                        lambda v=node.value: ["a", None, _sketch(v, {}), ""],  # type: ignore[misc]
                        typing,
                    )
                elif isinstance(written, (ast.Tuple, ast.List)):
                    for item in written.elts:
                        if isinstance(item, ast.Name):
                            self._put(item.id, lambda: ["a", None, None, ""], typing)

    def _read_all(self, value: ast.expr) -> None:
        if isinstance(value, (ast.List, ast.Tuple)):
            names = [e.value for e in value.elts if isinstance(e, ast.Constant)]
            self._exported = [n for n in names if isinstance(n, str)]

    def _lazy(self, getter: ast.FunctionDef, tables: dict[str, ast.Dict]) -> None:
        """Read the names that a module's ``__getattr__`` serves."""
        served: dict[str, Entry] = {}
        for node in ast.walk(getter):
            if isinstance(node, ast.Name) and node.id in tables:
                for key, value in zip(tables[node.id].keys, tables[node.id].values, strict=True):
                    if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                        continue
                    entry: Entry = ["a", None, None, ""]
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        where, _, name = value.value.partition(":")
                        if where.startswith("."):
                            level = len(where) - len(where.lstrip("."))
                            where = resolve_relative(
                                self.module, self.is_package, where.lstrip("."), level
                            )
                        if "." in where and where.replace(".", "").isidentifier():
                            entry = ["i", where, name or key.value]
                    served[key.value] = entry
            elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Name):
                for item in node.comparators:
                    if isinstance(item, ast.Constant) and isinstance(item.value, str):
                        served.setdefault(item.value, ["a", None, None, ""])
        if served:
            self.dynamic = False
        for name, entry in served.items():
            if name not in self._nodes:
                seen = [make() for make in self._typing.get(name, [])]
                if entry[0] == "a" and seen and seen[0] is not None:
                    entry = seen[0]
                self._nodes[name] = [lambda e=entry: e]  # type: ignore[misc]

    def may_have(self, name: str) -> bool:
        """Return whether the module may have a name that could not be read."""
        return self.dynamic

    def names(self) -> list[str]:
        """Return the names that exist at run time, in order."""
        return list(self._nodes)

    def typing_names(self) -> list[str]:
        """Return the names that only type checkers see, in order."""
        return [name for name in self._typing if name not in self._nodes]

    @property
    def exported(self) -> list[str] | None:
        """The module's ``__all__`` where it is a plain list, else None."""
        return self._exported

    def _make(self, makers: list[Callable[[], Entry | None]]) -> Entry | None:
        entries: list[Entry] = []
        for make in makers:
            entry = make()
            if entry is not None and entry not in entries:
                entries.append(entry)
        if len(entries) > 1:
            # A name that is first None or a plain value and then defined is the definition.
            real = [e for e in entries if e[0] != "a"]
            entries = real or entries
            # An overload counts where no definition follows.
            defined = [e for e in entries if e[0] != "f" or "o" not in e[3]]
            entries = defined or entries[-1:]
        if not entries:
            return None
        return entries[0] if len(entries) == 1 else ["u", entries]

    def entry(self, name: str) -> Entry | None:
        """Return the entry of a name that exists at run time, or None."""
        if name not in self._made:
            makers = self._nodes.get(name)
            self._made[name] = self._make(makers) if makers else None
        return self._made[name]

    def typing_entry(self, name: str) -> Entry | None:
        """Return the entry of a name that only type checkers see, or None."""
        makers = self._typing.get(name)
        return self._make(makers) if makers else None
