"""What is known of an expression of the downstream: which names, objects and results it may be."""

from __future__ import annotations

from dataclasses import dataclass

VLLM = "vllm"

Place = tuple[str, int, int]
"""Where a call stands: its module, its line, its end."""


def is_vllm(path: str) -> bool:
    """Whether a dotted path is vLLM's."""
    return path == VLLM or path.startswith("vllm.")


@dataclass(frozen=True)
class Value:
    """What is known of an expression.

    ``paths`` are dotted names, ``instance`` whether the value is an instance of the class they
    name, ``items`` the paths of what it contains, ``calls`` the calls whose result it is,
    ``unbound`` whether it is a method that was looked up on its class, ``exact`` whether an
    instance is of that very class and of none derived from it.
    """

    paths: tuple[str, ...] = ()
    instance: bool = False
    items: tuple[str, ...] = ()
    calls: tuple[Place, ...] = ()
    unbound: bool = False
    exact: bool = False

    def __or__(self, other: Value) -> Value:
        if self == other:
            return self
        return Value(
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

    @property
    def vllm_paths(self) -> tuple[str, ...]:
        """Those of its names that are vLLM's."""
        return tuple(path for path in self.paths if is_vllm(path))


NOTHING = Value()


def is_class_name(path: str) -> bool:
    """Whether a name is a class's by its looks: ``Request``, ``_Private``, ``LLM``; no constant."""
    *above, last = path.split(".")
    last = last.lstrip("_")
    if last.isupper():
        return "_" not in last and not (above and above[-1][:1].isupper())
    return last[:1].isupper() and "(" not in last and "[" not in last


def result_path(path: str) -> str:
    """Return the path of what a call gives; instances are written as their class."""
    return path if is_class_name(path) else f"{path}()"


def called_path(path: str, value: Value) -> str:
    """Return the symbol that a call of ``path``, one of a value's names, calls."""
    return f"{path}.__call__" if value.instance and is_class_name(path) else path
