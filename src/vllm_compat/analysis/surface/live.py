"""The surface of the vLLM that this process imports: ``importlib`` and ``inspect``.

What no live object shows (attributes that only instances have, results by their annotation, where a
name is defined) is taken from the source of the same package.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from vllm_compat.analysis.surface.files import installed_package
from vllm_compat.analysis.surface.model import (
    Parameter,
    ParameterKind,
    Signature,
    Surface,
    Symbol,
    SymbolKind,
)
from vllm_compat.analysis.surface.source import SourceSurface

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: ParameterKind.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: ParameterKind.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL: ParameterKind.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY: ParameterKind.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD: ParameterKind.VAR_KEYWORD,
}
_MISSING: Any = object()


def _text(annotation: Any) -> str | None:
    if annotation is inspect.Signature.empty:
        return None
    if annotation is None or annotation is type(None):
        return "None"
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def live_signature(
    target: Any, *, bound: bool = False, unwraps: tuple[str, ...] = ()
) -> Signature | None:
    """Return the signature of a live object in the shape that static surfaces have.

    ``bound`` drops the first parameter of a plain function that is looked up in its class. None
    where ``inspect`` can't tell.
    """
    try:
        found = inspect.signature(target)
    except (TypeError, ValueError):
        return None
    parameters = list(found.parameters.values())
    if (
        bound
        and parameters
        and parameters[0].kind
        in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
    ):
        parameters.pop(0)
    returns = None if inspect.isclass(target) else _text(found.return_annotation)
    return Signature(
        tuple(
            Parameter(
                p.name,
                _KINDS[p.kind],
                None if p.default is inspect.Parameter.empty else _default(p.default),
                _text(p.annotation),
            )
            for p in parameters
        ),
        returns,
        unwraps,
    )


def _default(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # a default's own repr may do anything
        text = f"<{type(value).__name__}>"
    return text


class LiveSurface(Surface):
    """What the vLLM that this process can import offers. Making one imports vLLM."""

    def __init__(self) -> None:
        module = importlib.import_module("vllm")
        self.source = SourceSurface(installed_package("vllm"))
        self.version = str(getattr(module, "__version__", self.source.version))
        self.distribution = self.source.distribution
        self.origin = f"live import of {self.source.origin}"

    def has_module(self, name: str) -> bool:
        """Whether the module is imported, or could be found."""
        if name in sys.modules:
            return True
        if name != "vllm" and not name.startswith("vllm."):
            return False
        try:
            return importlib.util.find_spec(name) is not None
        except (ImportError, AttributeError, ValueError):
            return False

    def modules(self) -> Iterator[str]:
        """Iterate over the dotted names of all modules with source."""
        return self.source.modules()

    def find(self, name: str) -> tuple[str, ...]:
        """Return the dotted paths of every top-level definition called ``name``, sorted."""
        return self.source.find(name)

    def result_types(self, path: str) -> frozenset[str] | None:
        return self.source.result_types(path)

    def value_types(self, path: str) -> frozenset[str] | None:
        return self.source.value_types(path)

    def parameter_types(self, path: str, name: str) -> frozenset[str] | None:
        return self.source.parameter_types(path, name)

    def ancestors(self, path: str) -> frozenset[str]:
        return self.source.ancestors(path)

    def deriving(self, path: str) -> tuple[str, ...]:
        return self.source.deriving(path)

    def object_at(self, path: str) -> tuple[Any, Any]:
        """Return the live object behind a dotted path, and the object that holds it.

        ``(missing, None)`` where there is none; see :meth:`is_missing`. Descriptors are returned as
        they stand in the class.
        """
        parts = path.split(".")
        end = 1
        while end < len(parts) and self.has_module(".".join(parts[: end + 1])):
            end += 1
        try:
            current: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            return _MISSING, None
        owner: Any = None
        if end == len(parts) > 1:
            parent = sys.modules.get(".".join(parts[:-1]))
            other = vars(parent).get(parts[-1], _MISSING) if parent is not None else _MISSING
            if inspect.isclass(other) or inspect.isroutine(other):
                return other, parent
        for name in parts[end:]:
            owner = current
            if inspect.isclass(current):
                current = inspect.getattr_static(current, name, _MISSING)
            else:
                try:
                    current = getattr(current, name)
                except Exception:  # a lazy module attribute may fail in any way
                    current = _MISSING
            if current is _MISSING:
                return _MISSING, None
        return current, owner

    @staticmethod
    def is_missing(target: Any) -> bool:
        """Whether :meth:`object_at` found nothing."""
        return target is _MISSING

    def resolve(self, path: str) -> Symbol | None:
        """Return the symbol behind a dotted path; see :meth:`StaticSurface.resolve`."""
        static = self.source.resolve(path)
        if "()" in path or "[]" in path:
            if static is not None and static.path != path and "()" not in static.path:
                return self.resolve(static.path) or static
            return static
        target, owner = self.object_at(path)
        if target is _MISSING:
            # Attributes of instances stand in methods only.
            is_value = static is not None and static.kind is SymbolKind.ATTRIBUTE
            return static if is_value else None
        if isinstance(target, ModuleType) and _is_ours(target.__name__):
            return Symbol(target.__name__, SymbolKind.MODULE)
        if not _is_ours(_home(target)):
            # What vLLM only imports from elsewhere is no part of what it offers.
            return Symbol(path, SymbolKind.ATTRIBUTE, open_ended=True)
        if inspect.isclass(target):
            return self._class(path, target, static)
        unwraps = static.signature.unwraps if static is not None and static.signature else ()
        if isinstance(target, (staticmethod, classmethod)):
            inner = target.__get__(None, owner)
            return Symbol(
                _path(inner, path), SymbolKind.FUNCTION, live_signature(inner, unwraps=unwraps)
            )
        if inspect.isroutine(target) or "__wrapped__" in getattr(target, "__dict__", {}):
            in_class = inspect.isclass(owner)
            return Symbol(
                _path(target, path),
                SymbolKind.FUNCTION,
                live_signature(target, bound=in_class, unwraps=unwraps),
                plain_method=in_class and inspect.isfunction(target),
            )
        where = static.path if static is not None else path
        return Symbol(
            where,
            SymbolKind.ATTRIBUTE,
            annotation=static.annotation if static is not None else None,
            open_ended=static.open_ended if static is not None else True,
            lacking=static.lacking if static is not None else (),
        )

    def _class(self, path: str, target: type, static: Symbol | None) -> Symbol:
        members: dict[str, SymbolKind] = {}
        for base in reversed(target.__mro__):
            if not _is_ours(base.__module__):
                continue
            for name, found in vars(base).items():
                if not (name.startswith("_") and name.endswith("_")):
                    members[name] = _kind(found)
            annotations = vars(base).get("__annotations__")
            for name in annotations if isinstance(annotations, dict) else ():
                members.setdefault(name, SymbolKind.ATTRIBUTE)
        if static is not None:
            for name, kind in static.members.items():
                if kind is SymbolKind.ATTRIBUTE:
                    members.setdefault(name, kind)
        signature = live_signature(target)
        if issubclass(target, enum.Enum):
            signature = Signature((Parameter("value"),))
            members.update(name=SymbolKind.ATTRIBUTE, value=SymbolKind.ATTRIBUTE)
        return Symbol(
            _path(target, path),
            SymbolKind.CLASS,
            signature,
            tuple(base.__name__ for base in target.__bases__),
            dict(sorted(members.items())),
            static.open_ended if static is not None else False,
        )


def _is_ours(name: str) -> bool:
    return name == "vllm" or name.startswith("vllm.")


def _home(target: Any) -> str:
    """Return the module that defines a class or function; vLLM for all that is neither."""
    if isinstance(target, ModuleType):
        return target.__name__
    if inspect.isclass(target) or inspect.isroutine(target):
        inner = getattr(target, "__func__", target)
        return str(getattr(inner, "__module__", None) or "vllm")
    return "vllm"


def _kind(target: Any) -> SymbolKind:
    if isinstance(target, (staticmethod, classmethod)):
        return SymbolKind.FUNCTION
    if inspect.isclass(target):
        return SymbolKind.CLASS
    if inspect.isroutine(target) and not inspect.isdatadescriptor(target):
        return SymbolKind.FUNCTION
    return SymbolKind.ATTRIBUTE


def _path(target: Any, path: str) -> str:
    module = getattr(target, "__module__", None)
    name = getattr(target, "__qualname__", None)
    return f"{module}.{name}" if module and name and str(module).startswith("vllm") else path
