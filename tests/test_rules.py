"""Rules of the house, held by reading the source: modules keep no state, and checks change nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_compat import features

SOURCE = Path(__file__).parent.parent / "src" / "vllm_compat"
FILES = {str(path.relative_to(SOURCE)): path for path in sorted(SOURCE.rglob("*.py"))}

STATE = {
    "runtime/run.py:_current": "the Run itself, ended by revert()",
    "capture/handover.py:_mappings": "what tensors of this process look into, past the end of a run",
    "entry/apply.py:_forking": "whether this thread holds the lock for a fork under way",
    "entry/apply.py:_lock": "a lock, new in a forked child",
    "runtime/patching.py:_held": "transactions that are alive, whose locks are new in a forked child",
}
"""What a module may hold and change, and why."""

CACHES = {
    "analysis/environment.py:compute_capabilities": "the machine's GPUs, which stay what they are",
    "analysis/knowledge.py:_known": "a file of the package",
    "adapters/__init__.py:registry": "the adapters there are",
    "adapters/_offsets.py:_byte_of": "a table of GPT-2's",
    "adapters/_offsets.py:_byte_level": "by the token's text",
    "analysis/annotations.py:expression": "by the expression's text",
    "analysis/annotations.py:form_of": "by the annotation's text",
    "analysis/drift/annotated.py:union": "by the annotation's text",
    "analysis/recorded_downstreams.py:_read": "a file of the package, by its folder",
    "analysis/serving/recorded.py:_read": "a file of the package, by its folder",
    "analysis/serving/recorded.py:recorded_models": "of the package's file, by the release",
    "analysis/serving/recorded.py:recorded_offer": "of the package's file, by the release",
    "analysis/surface/constructors.py:_as_parameter": "by the entry of a field, which is frozen",
    "analysis/surface/constructors.py:_is_field": "by an attribute's entry, which is frozen",
    "analysis/surface/recorded.py:mask_of": "by the text of the ranges",
    "analysis/surface/recorded.py:store": "files of the package, by their folder",
    "commands/report/shapes.py:_canonical": "by the annotation's text",
    "commands/verify/model.py:stock_order": "by the number of prompts",
    "features/__init__.py:registry": "the features there are",
    "features/save_backlog.py:bound": "the memory of this machine",
    "trial/models.py:_ranks": "a constant",
}
"""Functions that remember answers: each by its arguments alone, or one that no run changes."""

CHANGING = {
    "__setitem__", "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop",
    "popitem", "popleft", "remove", "setdefault", "update",
}  # fmt: skip


def root(node: ast.expr) -> str:
    """Return the name that a chain of attributes, items and calls begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.Starred):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def targets(node: ast.AST) -> list[ast.expr]:
    """Return what a statement assigns to or deletes, tuples taken apart."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        found = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.comprehension):
        found = [node.target]
    for each in list(found):
        if isinstance(each, ast.Tuple | ast.List):
            found.remove(each)
            found += each.elts
    return found


def of_module(tree: ast.Module) -> set[str]:
    """Return the names that a module binds to values at its top, also under a condition."""
    bodies, found = [tree.body], set()
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.If | ast.Try | ast.With):
                bodies += [node.body, getattr(node, "orelse", [])]
            found |= {target.id for target in targets(node) if isinstance(target, ast.Name)}
    return found


def changed(tree: ast.Module) -> set[str]:
    """Return the names of a module that its functions bind anew or change in place."""
    names, found = of_module(tree), set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        nodes = list(ast.walk(function))
        mine = {each.arg for each in nodes if isinstance(each, ast.arg)}
        bound = [t.id for node in nodes for t in targets(node) if isinstance(t, ast.Name)]
        anew = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        for node in nodes:
            for target in targets(node):
                if isinstance(target, ast.Attribute | ast.Subscript):
                    found.add(root(target))
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in CHANGING
            ):
                found.add(root(node.func))
        found -= mine | (set(bound) - anew)
        found |= anew
    return found & names


def caches(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                words = ast.unparse(decorator).partition("(")[0].rpartition(".")[2]
                if words in ("cache", "lru_cache"):
                    yield node.name


def everywhere(reader: str) -> set[str]:
    found = set()
    for name, path in FILES.items():
        names = {"changed": changed, "caches": caches}[reader](ast.parse(path.read_text()))
        found |= {f"{name}:{each}" for each in names}
    return found


def test_no_module_keeps_state_of_its_own() -> None:
    assert everywhere("changed") == set(STATE), (
        "what a run remembers is a part of its Run (runtime/run.py)"
    )


def test_what_is_remembered_for_good_depends_on_its_arguments_alone() -> None:
    assert everywhere("caches") == set(CACHES)


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("    global X\n    X = 1", {"X"}),
        ("    X['a'] = 1", {"X"}),
        ("    X.append(1)", {"X"}),
        ("    X.inner.y += 1", {"X"}),
        ("    del X[0]", {"X"}),
        ("    return X['a']", set()),
        ("    X = []\n    X.append(1)", set()),
    ],
)
def test_a_change_of_a_modules_value_is_seen(line: str, state: set[str]) -> None:
    assert changed(ast.parse(f"X = {{}}\n\ndef f():\n{line}\n")) == state


# Checks change nothing.

MUTATORS = {
    "setattr", "delattr", "setLevel", "addHandler", "removeHandler", "finish_requests", "add_request",
    "shutdown", "terminate", "kill", "disable_caching", "enable_caching", "putenv", "unlink",
    "register_forward_hook", "manual_seed",
}  # fmt: skip

FOR_A_BLOCK = {
    "dataset.py:_reasons": "listens to the downstream's logger while a dataset is built",
    "dataset.py:_silent": "keeps that logger silent while turns are looked at once more",
    "dataset.py:_probe": "builds a few rows past the cache of `datasets`, to hear why rows are lost",
}
"""Functions of checks that change something of others' while they run, and put it back then."""


def meddling(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the functions that change an object which they have not made, and where."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        made = {  # what the function itself has made: displays, comprehensions, and calls of classes
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)
            for target in targets(node)
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            for target in targets(node):
                foreign = isinstance(target, ast.Attribute | ast.Subscript)
                if foreign and root(target) not in {"self", *made}:
                    yield function.name, target.lineno
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")[2]
                if called in MUTATORS:
                    yield function.name, node.lineno


def test_checks_change_nothing_of_others() -> None:
    found = {
        f"{path.name}:{function}": line
        for path in sorted((SOURCE / "checks").glob("*.py"))
        for function, line in meddling(ast.parse(path.read_text()))
    }
    assert set(found) == set(FOR_A_BLOCK), f"a change of behaviour is a feature, with a name: {found}"


@pytest.mark.parametrize(
    ("line", "meddles"),
    [
        ("instance.mark = 1", True),
        ("instance.__dict__['mark'] = 1", True),
        ("instance.count += 1", True),
        ("setattr(instance, 'mark', 1)", True),
        ("instance.scheduler.finish_requests([], 1)", True),
        ("del instance.mark", True),
        ("self.mark = 1", False),
        ("found = {}; found['a'] = instance.mark", False),
    ],
)
def test_a_check_that_meddles_is_seen(line: str, meddles: bool) -> None:
    tree = ast.parse(f"def check(self, instance):\n    {line}\n")
    assert bool(list(meddling(tree))) is meddles


def test_whatever_ends_requests_or_workers_can_be_switched_off() -> None:
    assert {"clean_scheduler", "shut_down", "end_orphans"} <= set(features.names())
