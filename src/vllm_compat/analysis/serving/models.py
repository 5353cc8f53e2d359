"""Which of a model's states ``extract_hidden_states`` can have, read from the model class's source.

vLLM asks the class of an architecture for auxiliary hidden states: its ``forward`` gives the residual
stream before layer *k* for id *k*, and, where it says so, after the last of *n* layers for id *n*. A
class without ``SupportsEagle3`` is refused after loading; one that does not offer id *n* ends the engine
there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_compat.analysis.serving.modules import Modules

_REGISTRY = "vllm.model_executor.models.registry"
_MODELS = "vllm.model_executor.models"
_IDS = "aux_hidden_state_layers"
_ADDS = "_maybe_add_hidden_state"


@dataclass(frozen=True)
class ModelOffer:
    """What the class of one architecture offers; None where its source does not say.

    ``known``: the registry has the architecture. ``interface``: the class implements
    ``SupportsEagle3``. ``ids``: a ``forward`` gives states by layer id at all. ``last``: it also gives
    the one after the last layer. ``where`` is the file and line of that ``forward``, or of the class
    where there is none.
    """

    architecture: str
    known: bool = False
    interface: bool | None = None
    ids: bool | None = None
    last: bool | None = None
    where: str = ""

    @property
    def lacks(self) -> str:
        """What keeps the server from giving its states, for people; empty where nothing is known to."""
        if self.interface is False:
            return "does not implement SupportsEagle3: it is refused after loading"
        if self.ids is False:
            return "offers no states by layer id: the engine ends after loading"
        if self.last is False:
            return (
                "offers no state after its last layer, which the launcher asks for"
                " (--include-last-layer is its default): the engine ends after loading"
            )
        return ""

    @property
    def sentence(self) -> str:
        """What was read, in one sentence."""
        if self.lacks:
            return f"{self.architecture} {self.lacks} ({self.where})."
        if self.ids and self.last:
            return f"{self.architecture} offers states of all layers, the last included ({self.where})."
        why = "holds another model, whose class decides" if self.where else "is not in vLLM's own source"
        return f"{self.architecture} {why}: nothing can be said of its layers."


def read_model(modules: Modules, architecture: str) -> ModelOffer:
    """Return what the model class of an architecture offers in a vLLM source.

    A class that is chosen by platform is read as for CUDA. A model that holds another one from the
    registry (a language model inside a multimodal one) does not say what that offers: None.
    """
    entry = _registered(modules, architecture)
    if entry is None:
        return ModelOffer(architecture)
    classes = list(modules.lineage(*entry))
    if not classes:
        return ModelOffer(architecture, known=True)
    interface = any(
        ast.unparse(base).rpartition(".")[2] == "SupportsEagle3"
        for _, node in classes
        for base in node.bases
    )
    module, node = classes[0]
    where = f"{modules.files.file(module)}:{node.lineno}"
    for forward_module, forward in _forwards(modules, classes):
        if _mentions(forward):
            where = f"{modules.files.file(forward_module)}:{forward.lineno}"
            return ModelOffer(architecture, True, interface, True, _offers_last(forward), where)
    if any(b"init_vllm_registered_model" in (modules.files.source(m) or b"") for m, _ in classes):
        return ModelOffer(architecture, True, interface, where=where)
    return ModelOffer(architecture, True, interface, False, False, where)


def named_in(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the architectures that a model's ``config.json`` names, its language model's included."""
    inner = config.get("text_config")
    both = (config, inner if isinstance(inner, Mapping) else {})
    return tuple(dict.fromkeys(str(name) for part in both for name in part.get("architectures") or ()))


def is_hybrid(modules: Modules, architecture: str) -> bool:
    """Whether the class of an architecture has Mamba or linear attention beside attention."""
    entry = _registered(modules, architecture)
    return entry is not None and any(
        ast.unparse(base).rpartition(".")[2] == "IsHybrid"
        for _, node in modules.lineage(*entry)
        for base in node.bases
    )


def architectures_in(modules: Modules) -> tuple[str, ...]:
    """Return the architectures that vLLM's registry has, in its order."""
    return tuple(dict.fromkeys(name for name, _ in _registry(modules)))


def _registered(modules: Modules, architecture: str) -> tuple[str, str] | None:
    return next((entry for name, entry in _registry(modules) if name == architecture), None)


def _registry(modules: Modules) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield architectures, each with the module and the name of its class."""
    tree = modules.tree(_REGISTRY)
    for node in ast.walk(tree) if tree else ():
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                continue
            if isinstance(value, ast.Tuple) and len(value.elts) == 2:
                module, name = (str(getattr(e, "value", "")) for e in value.elts)
                yield key.value, ((module if "." in module else f"{_MODELS}.{module}"), name)


def _forwards(
    modules: Modules, classes: list[tuple[str, ast.ClassDef]]
) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the ``forward`` of the class, and of those that it or its bases are made of."""
    inner: dict[tuple[str, str], None] = {}
    for module, node in classes:
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and each.id.endswith("Model"):
                inner.setdefault((module, each.id))
    lines = [classes, *(list(modules.lineage(*names)) for names in inner)]
    for line in lines:
        for module, node in line:
            own = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "forward"]
            if own:
                yield module, own[0]
                break


def _mentions(forward: ast.FunctionDef) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr in (_IDS, _ADDS) for n in ast.walk(forward))


def _asked(forward: ast.FunctionDef) -> Iterator[ast.expr]:
    """Yield the ids that a ``forward`` looks for: ``ID in self.aux_hidden_state_layers``."""
    for node in ast.walk(forward):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            if ast.unparse(node.comparators[0]).endswith(f".{_IDS}"):
                yield node.left
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(f".{_ADDS}"):
            ids = [k.value for k in node.keywords if k.arg == "layer_idx"] or node.args[1:2]
            yield from ids


def _offers_last(forward: ast.FunctionDef) -> bool:
    """Whether an id is looked for after a layer has run: ``i + 1`` in the loop, or one behind it."""
    loops = [n for n in ast.walk(forward) if isinstance(n, (ast.For, ast.While))]
    end = max((loop.end_lineno or loop.lineno for loop in loops), default=0)
    return any(
        (isinstance(asked, ast.BinOp) and isinstance(asked.op, ast.Add))
        or (bool(loops) and asked.lineno > end)
        for asked in _asked(forward)
    )
