"""What the annotations of signatures say, as far as drifts go."""

from __future__ import annotations

import builtins
from functools import lru_cache

from vllm_compat.analysis.annotations import Either, Form, Generic, Named, Nothing, form_of
from vllm_compat.analysis.surface.model import Surface


@lru_cache(maxsize=4096)
def union(annotation: str | None) -> frozenset[str]:
    """Return the names of the types that an annotation allows, generics without their arguments.

    Empty where it can't be said.
    """
    names: set[str] = set()
    known = bool(annotation) and _collect(form_of(annotation or ""), names)
    return frozenset(names) if known else frozenset()


def _collect(form: Form, names: set[str]) -> bool:
    """Add the types that a form allows; return whether all of it could be read."""
    if isinstance(form, Either):
        return all(_collect(part, names) for part in form.parts)
    if isinstance(form, Generic) and form.last == "Annotated":
        return _collect(form.parts[0], names)
    if isinstance(form, (Named, Generic)):
        names.add(form.dotted)
    elif isinstance(form, Nothing):
        names.add("None")
    else:
        return False
    return True


def returned_type(surface: Surface, parent: str) -> str | None:
    """Return the builtin type that a path ending in a call is annotated to give, or None."""
    if not parent.endswith("()"):
        return None
    signature = surface.signature(parent.removesuffix("()"))
    names = union(signature.returns) if signature is not None else frozenset()
    plain = names - {"None"}
    if len(plain) == 1 and hasattr(builtins, next(iter(plain)).lower()) and signature is not None:
        return signature.returns
    return None
