"""The source of the downstream and of transformers → facts; neither is imported."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from vllm_compat.analysis.facts import (
    Fact,
    MissingNames,
    Preprocessing,
    TorchForTyping,
    Trainer,
    texts_of,
)

_TORCH_ANNOTATION = re.compile(
    r"^(?: {1,4}|\t)\w+[ \t]*:[^\n]*(?:\btorch\b|[\[(,|\\][ \t]*(?:#.*)?$)", re.MULTILINE
)
"""Finds, among others, each annotation in a class's body that names torch, or goes on in a next line."""

_FROM_TRANSFORMERS = re.compile(r"^from\s+transformers\s*\.|;\s*from\s+transformers\s*\.", re.MULTILINE)


def read_features(downstream: Path, transformers: Path | None) -> tuple[str, ...]:
    """Read from source what transformers and the downstream are to each other.

    ``downstream`` and ``transformers`` are package folders.
    """
    own = own_features(downstream)
    if transformers is None:
        return own
    wanted = names_from_transformers(downstream)
    return own + features_of(wanted, torch_for_typing(transformers), transformers)


def own_features(downstream: Path) -> tuple[str, ...]:
    """Return where the downstream makes samples and drafts, whatever transformers is."""
    files = list(_sources(downstream))
    return texts_of((*_preprocessing(files), *_trainers(files)))


def features_of(
    wanted: Mapping[str, Iterable[str]], typing: bool, transformers: Path
) -> tuple[str, ...]:
    """Return what follows from the names wanted, and from transformers as it is there."""
    facts: list[Fact] = [TorchForTyping()] if typing else []
    for module, names in sorted(wanted.items()):
        place = transformers.joinpath(*module.split(".")[1:])
        if not place.with_suffix(".py").exists() and not place.is_dir():
            facts.append(MissingNames(module, tuple(sorted(names))))
    return texts_of(facts)


def names_from_transformers(downstream: Path) -> dict[str, list[str]]:
    """Return ``{module: names}`` of what the downstream imports from modules of transformers."""
    wanted: dict[str, set[str]] = {}
    for _, text in _sources(downstream):
        for node in _with_imports_from_transformers(text):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
                assert node.module
                wanted.setdefault(node.module, set()).update(a.name for a in node.names)
    return {module: sorted(names) for module, names in sorted(wanted.items())}


def _with_imports_from_transformers(text: str) -> list[ast.stmt]:
    """Return a module's statements up to its last import from transformers, or more of them.

    Most modules have none, and in the others they stand at the head: parsing takes its time.
    """
    last = None
    for match in _FROM_TRANSFORMERS.finditer(text):
        last = match
    if last is None:
        return []
    end = text.find("\n", last.end())
    if "(" in text[last.end() : end]:
        end = text.find(")", last.end()) + 1
    try:
        return ast.parse(text[:end]).body if end > 0 else ast.parse(text).body
    except SyntaxError:  # cut within a string, or before the statement's end
        return ast.parse(text).body


def torch_for_typing(transformers: Path) -> bool:
    """Whether transformers' configuration classes name torch, which only type checkers import."""
    configuration = transformers / "configuration_utils.py"
    return configuration.is_file() and _torch_for_typing(configuration.read_text(encoding="utf-8"))


def _sources(package: Path) -> Iterator[tuple[str, str]]:
    """Iterate over (path from the package's folder on, text) of a package's source, sorted."""
    paths = [
        os.path.join(where, name)
        for where, _, names in os.walk(package)
        for name in names
        if name.endswith(".py")
    ]
    start = len(str(package.parent)) + 1
    for path in sorted(paths):
        with open(path, encoding="utf-8") as file:
            yield path[start:].replace(os.sep, "/"), file.read()


def _preprocessing(files: Iterable[tuple[str, str]]) -> Iterator[Preprocessing]:
    """Find the function that asks for offsets, and the one that maps a dataset by it."""
    for file, text in files:
        if "return_offsets_mapping" not in text:
            continue
        module = _module_of(file)
        body = ast.parse(text).body
        functions = [node for node in body if isinstance(node, ast.FunctionDef)]
        frequencies = _imported_as(body, "save_token_frequency_distribution")
        for asking in functions:
            line = _line_of_keyword(asking, "return_offsets_mapping")
            for mapping in functions if line else ():
                if _maps_by(mapping, asking.name):
                    yield Preprocessing(
                        f"{file}:{line}",
                        f"{module}:{mapping.name}",
                        f"{module}:{frequencies}" if frequencies else "",
                    )


def _module_of(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


def _imported_as(body: Iterable[ast.stmt], name: str) -> str:
    """Return the name that a module imports another one's under; empty where it doesn't."""
    imports = (node for node in body if isinstance(node, ast.ImportFrom))
    aliases = (alias for node in imports for alias in node.names if alias.name == name)
    return next((alias.asname or alias.name for alias in aliases), "")


def _line_of_keyword(function: ast.FunctionDef, name: str) -> int:
    """Return the line where a function first gives a keyword to a call; 0 where it doesn't."""
    keywords = (node for node in ast.walk(function) if isinstance(node, ast.keyword))
    return next((keyword.value.lineno for keyword in keywords if keyword.arg == name), 0)


def _maps_by(function: ast.FunctionDef, name: str) -> bool:
    """Whether a function takes a dataset and a tokenizer and uses another function."""
    arguments = {argument.arg for argument in function.args.args}
    return {"dataset", "tokenizer"} <= arguments and any(
        isinstance(node, ast.Name) and node.id == name for node in ast.walk(function)
    )


def _trainers(files: Iterable[tuple[str, str]]) -> Iterator[Trainer]:
    """Find the class whose method reads the verifier's configuration and some of its weights."""
    for file, text in files:
        if "load_model_layers(" not in text or "AutoConfig.from_pretrained(" not in text:
            continue
        for cls in ast.parse(text).body:
            for method in cls.body if isinstance(cls, ast.ClassDef) else ():
                line = _line_of_untrusted_read(method)
                if line and isinstance(cls, ast.ClassDef) and isinstance(method, ast.FunctionDef):
                    draft = f"{_module_of(file)}:{cls.name}"
                    yield Trainer(f"{file}:{line}", draft, method.name, _gaps(cls, method))


def _line_of_untrusted_read(method: ast.stmt) -> int:
    """Return the line where a method reads a configuration without trust, and then weights, or 0."""
    if not isinstance(method, ast.FunctionDef):
        return 0
    calls = {ast.unparse(n.func): n for n in ast.walk(method) if isinstance(n, ast.Call)}
    read = calls.get("AutoConfig.from_pretrained")
    if read is None or "load_model_layers" not in calls:
        return 0
    return 0 if any(keyword.arg == "trust_remote_code" for keyword in read.keywords) else read.lineno


def _gaps(cls: ast.ClassDef, method: ast.FunctionDef) -> tuple[str, ...]:
    """Return what a draft's class does not know of (see `Trainer`)."""
    body, whole = ast.unparse(method), ast.unparse(cls)
    missing = {
        "text_config": "text_config" not in body,
        "prefix": "'model.embed_tokens.weight'" in body,
        "norm": "verifier_norm" not in whole,
    }
    return tuple(name for name, is_missing in missing.items() if is_missing)


def _torch_for_typing(source: str) -> bool:
    """Whether the module's class annotations name torch, which it imports under TYPE_CHECKING."""
    if not _TORCH_ANNOTATION.search(source):  # parsing takes its time
        return False
    tree = ast.parse(source)
    runtime = any(
        alias.name.partition(".")[0] == "torch"
        for node in tree.body
        if isinstance(node, ast.Import)
        for alias in node.names
    )
    # As text, since annotations may be strings, or hold some: Union[str, "torch.dtype"].
    named = any(
        re.search(r"\btorch\b", ast.unparse(node.annotation))
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
    )
    return named and not runtime
