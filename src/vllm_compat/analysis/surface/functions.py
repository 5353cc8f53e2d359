"""A function's syntax → its entry."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from vllm_compat.analysis.surface.entries import KINDS, FunctionEntry
from vllm_compat.analysis.surface.model import Parameter, ParameterKind
from vllm_compat.analysis.surface.syntax import (
    annotation_text,
    default_text,
    dotted,
    import_aliases,
    sketch,
    statements_in,
)

Function = ast.FunctionDef | ast.AsyncFunctionDef

_MEMBER_FLAGS = dict.fromkeys(("property", "cached_property", "lazy_property", "abstractproperty"), "p")
_FLAGS = {
    "overload": "o",
    "staticmethod": "s",
    "classmethod": "c",
    "contextmanager": "g",
    "asynccontextmanager": "g",
    "dataclass_transform": "t",
}
_FACTORIES = ("make_", "create_", "build_")
_ALWAYS_IMPLICIT = ("__new__", "__init_subclass__", "__class_getitem__")


def function_entry(node: Function, in_class: bool) -> FunctionEntry | None:
    """Return a function's entry; None for ``@x.setter``. Flag ``o`` marks an ``@overload``."""
    decorators = [dotted(decorator).rsplit(".", 1)[-1] for decorator in node.decorator_list]
    if in_class and not {"setter", "deleter"}.isdisjoint(decorators):
        return None
    known = {**_FLAGS, **_MEMBER_FLAGS} if in_class else _FLAGS
    flags = "a" if isinstance(node, ast.AsyncFunctionDef) else ""
    flags += "".join(known.get(name, "") for name in decorators)
    parameters = list(_parameters(node.args))
    implicit = in_class and ("s" not in flags or node.name in _ALWAYS_IMPLICIT)
    if implicit and parameters and parameters[0].kind in KINDS[:2]:
        parameters.pop(0)
    unwraps: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    if in_class and any(parameter.name.endswith("rank") for parameter in parameters):
        unwraps = tuple(dict.fromkeys(_unwraps(node)))
    if in_class and node.name.lstrip("_").startswith(_FACTORIES):
        makes = tuple(dict.fromkeys(_makes(node)))
    return FunctionEntry(tuple(parameters), annotation_text(node.returns), flags, unwraps, makes)


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    plain = [
        *((argument, ParameterKind.POSITIONAL_ONLY) for argument in arguments.posonlyargs),
        *((argument, ParameterKind.POSITIONAL_OR_KEYWORD) for argument in arguments.args),
    ]
    without = len(plain) - len(arguments.defaults)
    for (argument, kind), default in zip(plain, [*[None] * without, *arguments.defaults], strict=True):
        yield _parameter(argument, kind, default)
    if arguments.vararg:
        yield _parameter(arguments.vararg, ParameterKind.VAR_POSITIONAL)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(argument, ParameterKind.KEYWORD_ONLY, default)
    if arguments.kwarg:
        yield _parameter(arguments.kwarg, ParameterKind.VAR_KEYWORD)


def _parameter(argument: ast.arg, kind: ParameterKind, default: ast.expr | None = None) -> Parameter:
    return Parameter(argument.arg, kind, default_text(default), annotation_text(argument.annotation))


# Results.


def _unwraps(function: Function) -> Iterator[str]:
    """Name the parameters that turn a list of results into a bare one.

    The pattern is ``return xs[0] if p is not None else xs``, in the function or one nested in it,
    where ``p`` is a parameter or a local that was assigned from it.
    """
    origin = _origins(function)
    for node in ast.walk(function):
        if not (isinstance(node, ast.Return) and isinstance(node.value, ast.IfExp)):
            continue
        name, is_none = _compared_with_none(node.value.test)
        bare, whole = node.value.body, node.value.orelse
        if is_none:
            bare, whole = whole, bare
        if name in origin and _is_first_of(bare, whole):
            yield origin[name]


def _origins(function: Function) -> dict[str, str]:
    """Return ``{name: parameter}`` of the parameters, and of the locals assigned from them."""
    arguments = function.args
    names = (a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    origin = {name: name for name in names}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            for target in node.targets:
                if isinstance(target, ast.Name) and node.value.id in origin:
                    origin.setdefault(target.id, origin[node.value.id])
    return origin


def _compared_with_none(test: ast.expr) -> tuple[str, bool]:
    """Return the name that a test compares with None, and whether it asks that it is None."""
    if (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and isinstance(test.left, ast.Name)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    ):
        return test.left.id, isinstance(test.ops[0], ast.Is)
    return "", False


def _is_first_of(one: ast.expr, many: ast.expr) -> bool:
    """Whether an expression is ``many[0]``."""
    return (
        isinstance(one, ast.Subscript)
        and isinstance(one.slice, ast.Constant)
        and one.slice.value == 0
        and ast.dump(one.value) == ast.dump(many)
    )


def _makes(function: Function) -> Iterator[str]:
    """Iterate over sketches of the constructors whose result a factory returns."""
    aliases: dict[str, str] = {}
    for node in statements_in(function.body):
        aliases.update(import_aliases(node))
        if isinstance(node, ast.Return):
            text = sketch(node.value, aliases)
            last = text.rsplit(".", 1)[-1] if text else ""
            if text and last.endswith("()") and last[:1].isupper():
                yield text
