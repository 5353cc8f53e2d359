"""All that is known of the downstream while it is read: its modules, classes, functions."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vllm_compat.analysis.callsites.values import NOTHING, VLLM, Value, is_vllm
from vllm_compat.analysis.surface.files import PackageFiles
from vllm_compat.errors import UsageError

WORKER = "vllm.v1.worker.gpu_worker.Worker"
"""The class that vLLM mixes a worker extension into, on the platforms with a plain GPU or CPU."""

# Bases that bring no attributes of their own.
_PLAIN_BASES = frozenset({"object", "ABC", "Generic", "Protocol"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Class:
    """A class of the downstream: its bases, the values of its attributes, its own names."""

    path: str
    bases: list[str] = field(default_factory=list)
    attributes: dict[str, Value] = field(default_factory=dict)
    methods: dict[str, Function] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    module: Module | None = None

    @property
    def name(self) -> str:
        """The class's own name."""
        return self.path.rsplit(".", 1)[-1]


@dataclass
class Module:
    """A parsed module of the downstream, and what its names stand for."""

    name: str
    is_package: bool
    file: str
    tree: ast.Module
    names: dict[str, Value] = field(default_factory=dict)


class Package:
    """All that is known of the downstream while it is read.

    ``learn`` reads a module's names into it, without noting call sites.
    """

    def __init__(self, files: PackageFiles, learn: Callable[[Package, Module], None]) -> None:
        self.files = files
        self.modules: dict[str, Module | None] = {}
        self.classes: dict[str, Class] = {}
        self.functions: dict[str, ast.expr | None] = {}
        self.hooks: set[str] = set()
        self.tests: set[str] = set()
        self.texts: dict[ast.AST, str] = {}
        self.questions: dict[ast.expr, tuple[bool, frozenset[str]]] = {}
        self.narrows = False  # some ``isinstance`` test is about an attribute or an item
        self.references: dict[str, bool] = {}
        self.written: set[str] = set()
        self._learn = learn
        self._busy: set[str] = set()

    def refer(self, name: str, guarded: bool) -> None:
        """Note that a name is used, and whether a test of a version or a feature guards that."""
        self.references[name] = guarded and self.references.get(name, True)

    def text(self, node: ast.AST) -> str:
        """Return a node's source text, written once."""
        text = self.texts.get(node)
        if text is None:
            text = self.texts[node] = ast.unparse(node)
        return text

    def ours(self, path: str) -> bool:
        """Whether a dotted path is the package's."""
        package = self.files.package
        return path == package or path.startswith(package + ".")

    # Modules.

    def parse(self, name: str) -> Module | None:
        """Parse a module of the package, once; None where there is none."""
        if name not in self.modules:
            self.modules[name] = self._parsed(name)
        return self.modules[name]

    def _parsed(self, name: str) -> Module | None:
        found = self.files.locate(name)
        source = self.files.source(name) if found else None
        if not found or source is None:
            return None
        file = self.files.file(name)
        try:
            tree = ast.parse(source, filename=file)
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise UsageError(
                f"{file}{line} in {self.files.origin} is not valid Python: {reason}."
            ) from error
        return Module(name, found[1], file, tree)

    def name_in(self, module_name: str, name: str) -> Value:
        """Return what a module-level name of the package stands for."""
        source = self.files.source(module_name)
        if source is None or VLLM.encode() not in source:
            return Value((f"{module_name}.{name}",))
        module = self.parse(module_name)
        if module is None:
            return NOTHING
        if not module.names and module_name not in self._busy:
            self._busy.add(module_name)
            self._learn(self, module)
            self._busy.discard(module_name)
        return module.names.get(name, Value((f"{module_name}.{name}",)))

    # Classes.

    def class_at(self, path: str) -> Class:
        """Return the package's class of that path, made if it is new."""
        return self.classes.setdefault(path, Class(path))

    def _line(self, path: str) -> Iterator[Class | str]:
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

    def attribute(self, path: str, name: str) -> Value | None:
        """Return the value of an attribute of one of the package's classes, bases included."""
        for cls in self._line(path):
            if isinstance(cls, Class) and name in cls.attributes:
                return cls.attributes[name]
        return None

    def defines(self, path: str, name: str) -> bool:
        """Whether one of the package's classes, or a base in the package, defines a name."""
        return any(isinstance(cls, Class) and name in cls.names for cls in self._line(path))

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
