"""What a downstream asks of a vLLM server, read from its launcher and its HTTP clients."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_compat.analysis.contract import CallSite, SiteKind
from vllm_compat.analysis.serving.model import Ask, AskKind
from vllm_compat.errors import UsageError

if TYPE_CHECKING:
    from vllm_compat.analysis.surface.files import PackageFiles

LAUNCHER = "scripts/launch_vllm.py"
"""The launcher, from the root of speculators' repository on; no wheel has it."""

_COMPLETION = "CompletionRequest"
_CHAT = "ChatCompletionRequest"
_ANSWERS = "CompletionResponse|CompletionResponseChoice|ChatCompletionResponse"
_CONFIGS = ("speculative_config", "kv_transfer_config")


def read_launcher(source: str | bytes, file: str = LAUNCHER) -> tuple[Ask, ...]:
    """Return what a launcher asks: flags of ``vllm serve``, keys of their JSON, method, connector.

    Raises :class:`~vllm_compat.errors.UsageError` where it is not valid Python, or starts no server.
    """
    tree = _parsed(source, file)
    asks = [*_flags(tree, file), *_json(tree, file)]
    if not any(ask.kind is AskKind.FLAG for ask in asks):
        raise UsageError(f"{file} starts no `vllm serve`, as far as its source can be followed.")
    return tuple(dict.fromkeys(asks))


def read_clients(files: PackageFiles) -> tuple[Ask, ...]:
    """Return what the HTTP clients of a package ask: routes, fields that are sent, fields read."""
    asks: list[Ask] = []
    for module, source in files.texts():
        if b"completions.create" not in source and b"/v1/" not in source:
            continue
        if ".data_generation." not in module:
            continue
        file = files.file(module)
        tree = _parsed(source, file)
        asks.extend(_created(tree, file, module))
        asks.extend(_posted(tree, file, module))
    return tuple(dict.fromkeys(asks))


def find_launcher(files: PackageFiles) -> tuple[str, bytes] | None:
    """Return file and source of the launcher in the checkout or sdist that a package lies in."""
    parts = files.folder.split("/") if files.folder else []
    for end in range(len(parts), -1, -1):
        path = "/".join([*parts[:end], LAUNCHER])
        source = files.tree.read(path)
        if source is not None:
            return path, source
    return None


def _parsed(source: str | bytes, file: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{file} is not valid Python: {error}.") from error


def _site(what: str, file: str, node: ast.expr | ast.stmt, module: str = "") -> CallSite:
    return CallSite(SiteKind.CALL, what, module or file, file, node.lineno)


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


# The launcher.


def _flags(tree: ast.Module, file: str) -> Iterator[Ask]:
    """Yield the flags in the list that holds ``serve``, and those that are assigned on their own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List) and any(_text(e) == "serve" for e in node.elts):
            given: list[ast.expr] = node.elts
        elif isinstance(node, ast.Assign):
            text = _text(node.value) or ""
            given = [node.value] if text.startswith("--no-") else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            ours = node.func.attr in ("append", "extend", "insert")
            given = [e for a in node.args for e in (a.elts if isinstance(a, ast.List) else [a])]
            given = given if ours else []
        else:
            continue
        for each in given:
            text = _text(each) or ""
            if text.startswith("--") and len(text) > 2:
                yield Ask(AskKind.FLAG, text, _site("vllm serve", file, each))


def _json(tree: ast.Module, file: str) -> Iterator[Ask]:
    """Yield keys, method and connector of the dictionaries that become JSON."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            owner = node.targets[0].id
        elif isinstance(node, ast.Return):
            owner = "kv_transfer_config"
        else:
            continue
        if owner not in _CONFIGS or not isinstance(node.value, ast.Dict):
            continue
        given = {
            text: v
            for k, v in zip(node.value.keys, node.value.values, strict=True)
            if (text := _text(k))
        }
        if isinstance(node, ast.Return) and "kv_connector" not in given:
            continue
        for key, value in given.items():
            yield Ask(AskKind.KEY, key, _site(f"--{owner}", file, value), owner)
        method, connector = _text(given.get("method")), _text(given.get("kv_connector"))
        if method and owner == "speculative_config":
            yield Ask(AskKind.METHOD, method, _site(f"--{owner}", file, given["method"]))
        if connector and "kv_connector_module_path" not in given:
            yield Ask(AskKind.CONNECTOR, connector, _site(f"--{owner}", file, given["kv_connector"]))


# The clients.


def _created(tree: ast.Module, file: str, module: str) -> Iterator[Ask]:
    """Yield what ``client.completions.create`` and its chat sibling send, and what is read."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("completions.create")
    ]
    for call in calls:
        chat = ".chat." in ast.unparse(call.func)
        owner, path = (_CHAT, "/v1/chat/completions") if chat else (_COMPLETION, "/v1/completions")
        yield Ask(AskKind.ROUTE, path, _site(path, file, call, module))
        for keyword in call.keywords:
            names = [keyword.arg]
            if keyword.arg == "extra_body":
                value = keyword.value
                names = [_text(k) for k in value.keys] if isinstance(value, ast.Dict) else []
            for name in names:
                if name and name not in ("timeout", "extra_headers", "extra_query"):
                    yield Ask(AskKind.FIELD, name, _site(path, file, keyword.value, module), owner)
    if not calls:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            name = _text(node.args[1]) if len(node.args) > 1 else None
            of = ast.unparse(node.args[0]).partition(".")[0]
            if name and of in ("response", "res", "completion"):
                yield Ask(AskKind.READ, name, _site("its answer", file, node, module), _ANSWERS)


def _posted(tree: ast.Module, file: str, module: str) -> Iterator[Ask]:
    """Yield what functions that build a ``/v1/…`` address send in ``body`` and read from ``data``."""
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        body = [n for statement in function.body[_doc(function) :] for n in ast.walk(statement)]
        paths = [
            (m.group(), n) for n in body if (text := _text(n)) and (m := re.search(r"/v1/[\w/]+", text))
        ]
        sent = list(_sent(body))
        if not paths or not sent:
            continue
        path, node = paths[0]
        assert isinstance(node, ast.expr)
        yield Ask(AskKind.ROUTE, path, _site(path, file, node, module))
        owner = _CHAT if "/chat/" in path else _COMPLETION
        for name, where in sent:
            yield Ask(AskKind.FIELD, name, _site(path, file, where, module), owner)
        for name, where in _taken(body):
            yield Ask(AskKind.ANSWER, name, _site(path, file, where, module), path)


def _doc(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return int(ast.get_docstring(function, clean=False) is not None)


def _sent(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id == "body" and isinstance(node.value, ast.Dict):
            yield from ((text, k) for k in node.value.keys if k is not None and (text := _text(k)))
        elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == "body":
            name = _text(target.slice)
            if name:
                yield name, target


def _taken(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    answers = {
        t.id
        for n in nodes
        if isinstance(n, ast.Assign) and ast.unparse(n.value).endswith(".json()")
        for t in n.targets
        if isinstance(t, ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            name = _text(node.slice)
            if name and ast.unparse(node.value) in answers:
                yield name, node
