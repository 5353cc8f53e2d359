"""What ``vllm serve`` offers, read from vLLM's source: flags, JSON, methods, connectors, HTTP."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_compat.analysis.serving.model import Offered, RequestModel, Route
from vllm_compat.analysis.serving.modules import Modules, fields_of

if TYPE_CHECKING:
    from vllm_compat.analysis.surface.files import PackageFiles

_ENGINE = "vllm.engine.arg_utils"
_SPECULATIVE = "vllm.config.speculative"
_TRANSFER = "vllm.config.kv_transfer"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_CONFIG = "vllm.config.vllm"
_PROTOCOLS = (
    "vllm.entrypoints.openai.completion.protocol",
    "vllm.entrypoints.openai.chat_completion.protocol",
    "vllm.entrypoints.openai.protocol",
)
_REQUESTS = ("CompletionRequest", "ChatCompletionRequest")
_RESPONSES = ("CompletionResponse", "CompletionResponseChoice", "ChatCompletionResponse")


def read_offered(files: PackageFiles) -> Offered:
    """Return what the server of a vLLM source offers.

    What is not there stays empty: a caller that finds no flags has no source of ``vllm serve``.
    """
    modules = Modules(files)
    flags = _flags(modules)
    keys = {
        "speculative_config": _fields(modules, _SPECULATIVE, "SpeculativeConfig"),
        "kv_transfer_config": _fields(modules, _TRANSFER, "KVTransferConfig"),
    }
    return Offered(
        flags=flags,
        keys=keys,
        methods=_members(modules, _SPECULATIVE, "SpeculativeMethod"),
        connectors=_connectors(modules),
        requests=dict(_requests(modules)),
        responses={name: found for name in _RESPONSES if (found := _first(modules, name))},
        routes=_routes(modules, flags),
        refuses=_refusals(modules),
    )


def _fields(modules: Modules, module: str, name: str) -> frozenset[str]:
    return frozenset().union(*(fields_of(node) for _, node in modules.lineage(module, name)))


def _flags(modules: Modules) -> frozenset[str]:
    """Return the fields that ``vllm serve`` makes flags of: the engine's and the front end's."""
    found = set(_fields(modules, _ENGINE, "EngineArgs"))
    found |= _fields(modules, _ENGINE, "AsyncEngineArgs")
    front = (m for m in modules.files.modules() if re.fullmatch(r"vllm\.entrypoints\..*\bcli_args", m))
    for module in front:
        tree = modules.tree(module)
        for node in tree.body if tree else ():
            if isinstance(node, ast.ClassDef):
                found |= fields_of(node)
    return frozenset(found)


def _members(modules: Modules, module: str, name: str) -> frozenset[str]:
    """Return the strings of a ``Literal``, those of the literals that it names included."""
    found = modules.lookup(module, name)
    if found is None or not isinstance(found[1], ast.Assign):
        return frozenset()
    members: set[str] = set()
    for node in ast.walk(found[1].value):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            members.add(node.value)
        elif isinstance(node, ast.Name) and node.id not in (name, "Literal", "Union"):
            members |= _members(modules, found[0], node.id)
    return frozenset(members)


def _connectors(modules: Modules) -> frozenset[str]:
    tree = modules.tree(_FACTORY)
    return frozenset(
        str(node.args[0].value)
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "register_connector"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    )


def _first(modules: Modules, name: str) -> frozenset[str]:
    for module in _PROTOCOLS:
        if found := _fields(modules, module, name):
            return found
    return frozenset()


def _requests(modules: Modules) -> Iterator[tuple[str, RequestModel]]:
    for name in _REQUESTS:
        for module in _PROTOCOLS:
            classes = [node for _, node in modules.lineage(module, name)]
            if classes:
                fields = frozenset().union(*map(fields_of, classes))
                extra = next((e for node in classes if (e := _extra(node))), "ignore")
                yield name, RequestModel(fields, extra != "forbid")
                break


def _extra(node: ast.ClassDef) -> str:
    """Return what a class's ``model_config`` says of extra fields."""
    for statement in node.body:
        if not isinstance(statement, ast.Assign) or "model_config" not in map(
            ast.unparse, statement.targets
        ):
            continue
        for keyword in ast.walk(statement.value):
            if isinstance(keyword, ast.keyword) and keyword.arg == "extra":
                return str(getattr(keyword.value, "value", ""))
    return ""


# Routes.


def _routes(modules: Modules, flags: frozenset[str]) -> dict[str, Route]:
    routes: dict[str, Route] = {}
    switches: dict[str, str] = {}
    for module, source in modules.files.texts():
        if not module.startswith("vllm.entrypoints."):
            continue
        if b"include_router(" in source:
            switches.update(_switches(modules, module, flags))
        if b"@router." in source:
            for path, route in _defined(modules, module):
                routes.setdefault(path, route)
    return {
        path: Route(r.answers, r.fields, r.where, switches.get(r.where.rpartition(":")[0], ""))
        for path, r in routes.items()
    }


def _defined(modules: Modules, module: str) -> Iterator[tuple[str, Route]]:
    tree = modules.tree(module)
    for node in ast.walk(tree) if tree else ():
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for call in node.decorator_list:
            if not isinstance(call, ast.Call) or not ast.unparse(call.func).startswith("router."):
                continue
            if not call.args or not isinstance(call.args[0], ast.Constant):
                continue
            model = next((k.value for k in call.keywords if k.arg == "response_model"), None)
            answers = "" if model is None else ast.unparse(model)
            fields = _fields(modules, module, answers) if isinstance(model, ast.Name) else frozenset()
            where = f"{modules.files.file(module)}:{call.lineno}"
            yield str(call.args[0].value), Route(answers, fields or None, where)


def _switches(modules: Modules, module: str, flags: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield the files of routers that a function includes only where a flag is given, and the flag."""
    tree = modules.tree(module)
    for function in ast.walk(tree) if tree else ():
        if not isinstance(function, ast.FunctionDef):
            continue
        asked = {
            node.targets[0].id: flag
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and (flag := _flag_in(node.value, flags))
        }
        routers = {
            alias.asname or alias.name: modules.files.file(modules.imported(module, node))
            for node in ast.walk(function)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for name, flag in _guarded(function.body, asked, flags):
            if name in routers:
                yield routers[name], flag


def _flag_in(node: ast.expr, flags: frozenset[str]) -> str:
    """Return the flag that an expression looks at, as the command line has it."""
    for each in ast.walk(node):
        name: object = None
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "getattr" and len(each.args) > 1:
            name = getattr(each.args[1], "value", None)
        elif isinstance(each, ast.Attribute) and ast.unparse(each.value).endswith("args"):
            name = each.attr
        if isinstance(name, str) and name in flags:
            return "--" + name.replace("_", "-")
    return ""


def _guarded(
    body: list[ast.stmt], asked: dict[str, str], flags: frozenset[str], flag: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield routers that ``include_router`` takes, each with the flag that it is taken for."""
    for statement in body:
        if isinstance(statement, ast.If):
            test, negated = statement.test, False
            if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                test, negated = test.operand, True
            known = asked.get(test.id, "") if isinstance(test, ast.Name) else _flag_in(test, flags)
            yield from _guarded(statement.body, asked, flags, flag if negated else known or flag)
            yield from _guarded(statement.orelse, asked, flags, known or flag if negated else flag)
            if negated and isinstance(statement.body[-1], ast.Return):
                flag = known or flag
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            if ast.unparse(call.func).endswith("include_router") and call.args and flag:
                yield ast.unparse(call.args[0]), flag


# What is refused at the start.


def _refusals(modules: Modules) -> dict[str, tuple[str, ...]]:
    """Return the connectors that the configuration refuses with a feature, and the flag against it.

    Read from ``if … kv_connector == "NAME" and ….enable_X: raise``.
    """
    found: dict[str, tuple[str, ...]] = {}
    tree = modules.tree(_CONFIG)
    for node in ast.walk(tree) if tree else ():
        if not isinstance(node, ast.If) or not isinstance(node.body[0], ast.Raise):
            continue
        if not isinstance(node.test, ast.BoolOp) or not isinstance(node.test.op, ast.And):
            continue
        names: list[str] = []
        features: list[str] = []
        for test in node.test.values:
            if isinstance(test, ast.Attribute) and test.attr.startswith("enable_"):
                features.append("--no-" + test.attr.replace("_", "-"))
            elif isinstance(test, ast.Compare) and ast.unparse(test.left).endswith(".kv_connector"):
                other = test.comparators[0]
                if isinstance(test.ops[0], ast.Eq) and isinstance(other, ast.Constant):
                    names.append(str(other.value))
        for name in names:
            found[name] = (*found.get(name, ()), *features)
    return found
