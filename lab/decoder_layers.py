"""The table of decoder layers: what each hands on, read from releases' sources."""

from __future__ import annotations

import ast
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vllm_compat.analysis.decoder_layers import Handed, Place, Sources, read_layer

_REGISTRY = "vllm.model_executor.models.registry"
_SECTIONS = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
_OTHER = re.compile(
    r"vision|visual|audio|vit(_|\d|$|model|encoder)|siglip|clip|encoder|tower|projector|resampler|perceiver"
    r"|qformer|mtp|draft|eagle|medusa|dspark|dflash|whisper|speech|conformer|bert|transformers",
    re.IGNORECASE,
)
_EMBEDS = re.compile(
    r"VocabParallelEmbedding|embed_tokens|embed_input_ids|get_input_embeddings|make_input_emb"
)


class Tree:
    """The Python sources of one release, as a source of modules for the reader."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, module: str) -> str | None:
        """Return a module's source."""
        path = self.folder.joinpath(*module.split("."))
        for one in (path.with_suffix(".py"), path / "__init__.py"):
            if one.is_file():
                return one.read_text(encoding="utf-8")
        return None

    def is_package(self, module: str) -> bool:
        """Whether a module is a package."""
        return (self.folder.joinpath(*module.split(".")) / "__init__.py").is_file()


@dataclass(frozen=True)
class Use:
    """A layer class in a model class's list, and an architecture that has it on some platforms."""

    layer: Place
    model: Place
    attribute: str
    architecture: str
    platforms: tuple[str, ...] = ()


class Release:
    """One release's models: architectures, the model classes below them, their lists of layers."""

    def __init__(self, folder: Path) -> None:
        self.sources = Sources(Tree(folder))

    @cached_property
    def architectures(self) -> dict[str, tuple[str, str]]:
        """Return module and class of every architecture that generates text."""
        found: dict[str, tuple[str, str]] = {}
        names = self.sources.names(_REGISTRY)
        for section in _SECTIONS:
            node = names.get(section)
            if not isinstance(node, ast.Dict):
                continue
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    module, name = (str(ast.literal_eval(one)) for one in value.elts[:2])
                    if not module.startswith("vllm."):
                        module = f"vllm.model_executor.models.{module}"
                    found[str(key.value)] = (module, name)
        return found

    def uses(self) -> Iterator[Use]:
        """Return every decoder layer of every architecture."""
        for architecture, (module, name) in self.architectures.items():
            for place, when in self.sources.places(module, name):
                for model in self._below(place):
                    for attribute, layers in self.lists(model):
                        for layer in self._given(place, layers):
                            yield Use(layer, model, attribute, architecture, (_platform(when),))

    def _given(self, top: Place, layers: tuple[Place, ...]) -> tuple[Place, ...]:
        """Return the layers that an architecture gives its model in place of the model's default."""
        for one in self.sources.mro(top):
            for name, given in self._defaults(one).items():
                if "layer" in name and any(base in layers for base in self.sources.mro(given)):
                    return (given,)
        return layers

    def _defaults(self, place: Place) -> dict[str, Place]:
        """Return the classes that are defaults of parameters in a class, or passed by keyword."""
        cache = self.__dict__.setdefault("_default_classes", {})
        if place in cache:
            return cache[place]
        found: dict[str, Place] = {}
        cache[place] = found
        node = self.sources.cls(place)
        for inner in ast.walk(node) if node else []:
            pairs: list[tuple[str, ast.expr]] = []
            if isinstance(inner, ast.arguments):
                names = [*inner.posonlyargs, *inner.args]
                pairs = [(a.arg, d) for a, d in zip(names[::-1], inner.defaults[::-1])]
                pairs += [(a.arg, d) for a, d in zip(inner.kwonlyargs, inner.kw_defaults) if d]
            elif isinstance(inner, ast.keyword) and inner.arg:
                pairs = [(inner.arg, inner.value)]
            for name, value in pairs:
                at = self.sources.one(place.module, value) if isinstance(value, ast.Name) else None
                if at and self.sources.cls(at):
                    found.setdefault(name, at)
        return found

    def _below(self, top: Place) -> list[Place]:
        """Return the decoder model classes that a class makes, itself included."""
        seen = {top}
        pending = [top]
        for place in pending:
            for found in self._references(place):
                if found not in seen:
                    seen.add(found)
                    pending.append(found)
        return [p for p in pending if self._is_decoder(p)]

    def _references(self, place: Place) -> set[Place]:
        key = place
        cache = self.__dict__.setdefault("_refs", {})
        if key in cache:
            return cache[key]
        found: set[Place] = set()
        for one in self.sources.mro(place):
            node = self.sources.cls(one)
            if node is None or not _is_model_module(one.module):
                continue
            for name in {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id[:1].isupper()}:
                for at, _ in self.sources.places(one.module, name):
                    if _is_model_module(at.module) and self.sources.method(at, "forward"):
                        found.add(at)
            for inner in ast.walk(node):
                if isinstance(inner, ast.keyword) and inner.arg == "architectures":
                    for arch in ast.walk(inner.value):
                        if isinstance(arch, ast.Constant) and arch.value in self.architectures:
                            for at, _ in self.sources.places(*self.architectures[str(arch.value)]):
                                found.add(at)
        cache[key] = found
        return found

    def _is_decoder(self, place: Place) -> bool:
        cache = self.__dict__.setdefault("_decoders", {})
        if place not in cache:
            cache[place] = self._looks_like_decoder(place)
        return cache[place]

    def _looks_like_decoder(self, place: Place) -> bool:
        if _OTHER.search(place.name) or _OTHER.search(place.module.rpartition(".")[2]):
            return False
        if self.sources.method(place, "forward") is None or not self.lists(place):
            return False
        text = "".join(self.sources.text(one) for one in self.sources.mro(place))
        named = any("Decoder" in layer.name for _, layers in self.lists(place) for layer in layers)
        return bool(_EMBEDS.search(text) or "make_layers(" in text or named)

    def lists(self, model: Place) -> list[tuple[str, tuple[Place, ...]]]:
        """Return a model's lists of layers: attribute, and the classes that it may hold."""
        cache = self.__dict__.setdefault("_lists", {})
        if model in cache:
            return cache[model]
        cache[model] = result = []
        seen = set()
        over = self._overrides(model)
        for one in self.sources.mro(model):
            node = self.sources.cls(one)
            for function in node.body if node else []:
                if not isinstance(function, ast.FunctionDef):
                    continue
                for inner in ast.walk(function):
                    if not isinstance(inner, (ast.Assign, ast.AnnAssign)) or inner.value is None:
                        continue
                    text = ast.unparse(inner.value)
                    if not re.search(r"make_layers\w*\(|ModuleList\(|get_layers\(", text):
                        continue
                    targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                    for target in ast.walk(ast.Tuple(list(targets), ast.Store())):
                        if isinstance(target, ast.Attribute) and target.attr not in (
                            "start_layer",
                            "end_layer",
                        ):
                            layers = self._made(one, function, inner.value, over)
                            if layers and target.attr not in seen:
                                seen.add(target.attr)
                                result.append((target.attr, layers))
        usual = [one for one in result if re.fullmatch(r"(\w+_)?(layers|h|blocks)", one[0])]
        result[:] = usual or result
        return result

    def _overrides(self, model: Place) -> dict[str, list[Place]]:
        """Return classes passed by keyword to a base class's constructor (``layer_type=...``)."""
        found: dict[str, list[Place]] = {}
        for one in self.sources.mro(model):
            for name, given in self._defaults(one).items():
                if "layer" in name:
                    found.setdefault(name, [given])
        return found

    def _made(
        self, owner: Place, function: ast.FunctionDef, value: ast.expr, over: dict[str, list[Place]]
    ) -> tuple[Place, ...]:
        """Return the layer classes that an expression makes, following local names."""
        found: list[Place] = []
        local: dict[str, list[ast.AST]] = {}
        for inner in ast.walk(function):
            if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name):
                local.setdefault(inner.targets[0].id, []).append(inner.value)
            elif (
                isinstance(inner, ast.Call)
                and isinstance(inner.func, ast.Attribute)
                and inner.func.attr == "append"
                and isinstance(inner.func.value, ast.Name)
            ):
                local.setdefault(inner.func.value.id, []).extend(inner.args)
            elif isinstance(inner, ast.FunctionDef) and inner is not function:
                local.setdefault(inner.name, []).append(inner)
        arguments = function.args
        names = [*arguments.posonlyargs, *arguments.args]
        for one, default in zip(names[len(names) - len(arguments.defaults) :], arguments.defaults):
            local.setdefault(one.arg, []).append(default)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
            if default is not None:
                local.setdefault(one.arg, []).append(default)
        seen: set[str] = set()
        pending: list[tuple[str, ast.AST]] = [(owner.module, value)]
        for module, node in pending:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self":
                    method = self.sources.method(owner, inner.attr)
                    if method and inner.attr not in seen:
                        seen.add(inner.attr)
                        pending.append((method[0].module, method[1]))
                        continue
                    at = self.sources.attribute(owner, inner.attr)
                    if at and inner.attr not in seen:
                        seen.add(inner.attr)
                        pending.append((at[0].module, at[1]))
                if not isinstance(inner, ast.Name) or (module, inner.id) in seen:
                    continue
                seen.add((module, inner.id))  # type: ignore[arg-type]
                if inner.id in over:
                    found += [p for p in over[inner.id] if p not in found]
                    continue
                for more in local.get(inner.id, []):
                    pending.append((module, more))
                if inner.id in local:
                    continue
                at_names = self.sources.names(module).get(inner.id)
                if isinstance(at_names, ast.Dict):
                    pending.append((module, at_names))
                for at, _ in self.sources.places(module, inner.id):
                    node_at = self.sources.names(at.module).get(at.name)
                    if isinstance(node_at, ast.ClassDef):
                        if self._is_layer(at) and at not in found:
                            found.append(at)
                    elif isinstance(node_at, ast.FunctionDef) and _is_model_module(at.module):
                        if at.name not in ("make_layers", "maybe_prefix", "extract_layer_index"):
                            pending.append((at.module, node_at))
        return tuple(found)

    def _is_layer(self, place: Place) -> bool:
        if not _is_model_module(place.module):
            return False
        named = re.search(r"Decoder(Layer|Block)$", place.name)
        if self.sources.method(place, "forward") is None and not named:
            return False
        return not re.search(
            r"Norm|Linear$|Embedding|MoE$|MLP$|Attention$|Missing|Conv\w*$|Gate$", place.name
        )


def _is_model_module(module: str) -> bool:
    return module.startswith(("vllm.model_executor.models.", "vllm.models."))


def _platform(when: Iterable[str]) -> str:
    tests = [test for test in when if test != "TYPE_CHECKING"]
    for test in tests:
        if test.startswith("not ("):
            continue
        for name in ("rocm", "xpu", "cpu", "tpu", "cuda"):
            if f"is_{name}" in test or f"'{name}'" in test:
                return name
    negated = " ".join(tests)
    if "is_cuda" in negated:
        return "not cuda"
    return "cuda" if tests else ""


def read_release(folder: Path) -> dict[tuple[Place, Place], tuple[Handed, set[str], set[str]]]:
    release = Release(folder)
    found: dict[tuple[Place, Place], tuple[Handed, set[str], set[str]]] = {}
    for use in release.uses():
        key = (use.layer, use.model)
        if key not in found:
            handed = read_layer(use.layer, use.model, use.attribute, release.sources)
            found[key] = (handed, set(), set())
        found[key][1].add(use.architecture)
        found[key][2].update(use.platforms)
    return found


if __name__ == "__main__":
    start = time.time()
    table = read_release(Path(sys.argv[1]))
    for (layer, model), (handed, archs, platforms) in table.items():
        cases = "; ".join(
            f"{c.kind.value}[{c.stream}]"
            + (f" when {c.when}" if c.when else "")
            + (f" <{c.reason}>" if c.reason else "")
            + (f" ({c.next_norm.rpartition(':')[2]},{c.final_norm.rpartition(':')[2]})")
            for c in handed.cases
        )
        print(
            layer.module.replace("vllm.model_executor.models.", "~"),
            layer.name,
            "|",
            model.name,
            "|",
            ",".join(platforms),
            "|",
            "keeps" if handed.keeps else "",
            len(archs),
            "|",
            cases,
        )
    print(len(table), time.time() - start, file=sys.stderr)
