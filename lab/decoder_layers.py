"""The table of decoder layers: what each hands on, read from releases' sources."""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.version import Version

from lab.layer_reading import Handed, Place, Sources, read_layer
from vllm_compat.analysis.surface.files import package_at

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


Row = dict[str, Any]
Found = dict[tuple[Place, Place], tuple[Handed, set[str], set[str]]]
TABLE = Path(__file__).resolve().parent.parent / "records" / "decoder_layers" / "table.json"


class Tree:
    """The Python sources of one release, as a source of modules for the reader."""

    def __init__(self, source: Path) -> None:
        self.package = package_at(source, "vllm")

    def __call__(self, module: str) -> str | None:
        """Return a module's source."""
        content = self.package.source(module)
        return None if content is None else content.decode("utf-8", "replace")

    def is_package(self, module: str) -> bool:
        """Whether a module is a package."""
        found = self.package.locate(module)
        return bool(found and found[1])


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
            for key, value in zip(node.keys, node.values, strict=False):
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
        cache: dict[Place, dict[str, Place]] = self.__dict__.setdefault("_default_classes", {})
        if place in cache:
            return cache[place]
        found: dict[str, Place] = {}
        cache[place] = found
        node = self.sources.cls(place)
        for inner in ast.walk(node) if node else []:
            pairs: list[tuple[str, ast.expr]] = []
            if isinstance(inner, ast.arguments):
                names = [*inner.posonlyargs, *inner.args]
                pairs = [(a.arg, d) for a, d in zip(names[::-1], inner.defaults[::-1], strict=False)]
                pairs += [
                    (a.arg, d) for a, d in zip(inner.kwonlyargs, inner.kw_defaults, strict=False) if d
                ]
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
        cache: dict[Place, set[Place]] = self.__dict__.setdefault("_refs", {})
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
        cache: dict[Place, bool] = self.__dict__.setdefault("_decoders", {})
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
        cache: dict[Place, list[tuple[str, tuple[Place, ...]]]] = self.__dict__.setdefault("_lists", {})
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
        found: dict[Place, None] = {}
        local = _local_values(function)
        seen: set[tuple[str, str]] = set()
        pending: list[tuple[str, ast.AST]] = [(owner.module, value)]
        for module, node in pending:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self":
                    if ("self", inner.attr) not in seen:
                        name = inner.attr
                        held = self.sources.method(owner, name) or self.sources.attribute(owner, name)
                        if held:
                            seen.add(("self", name))
                            pending.append((held[0].module, held[1]))
                elif isinstance(inner, ast.Name) and (module, inner.id) not in seen:
                    seen.add((module, inner.id))
                    if inner.id in over:
                        found.update(dict.fromkeys(over[inner.id]))
                    elif inner.id in local:
                        pending += [(module, more) for more in local[inner.id]]
                    else:
                        layers, further = self._global(module, inner.id)
                        found.update(dict.fromkeys(layers))
                        pending += further
        return tuple(found)

    def _global(self, module: str, name: str) -> tuple[list[Place], list[tuple[str, ast.AST]]]:
        """Return the layer classes that a module's name means, and what else to look at for it."""
        layers: list[Place] = []
        further: list[tuple[str, ast.AST]] = []
        value = self.sources.names(module).get(name)
        if isinstance(value, ast.Dict):
            further.append((module, value))
        for at, _ in self.sources.places(module, name):
            node = self.sources.names(at.module).get(at.name)
            if isinstance(node, ast.ClassDef):
                if self._is_layer(at):
                    layers.append(at)
            elif (
                isinstance(node, ast.FunctionDef)
                and _is_model_module(at.module)
                and at.name not in ("make_layers", "maybe_prefix", "extract_layer_index")
            ):
                further.append((at.module, node))
        return layers, further

    def _is_layer(self, place: Place) -> bool:
        if not _is_model_module(place.module):
            return False
        named = re.search(r"Decoder(Layer|Block)$", place.name)
        if self.sources.method(place, "forward") is None and not named:
            return False
        return not re.search(
            r"Norm|Linear$|Embedding|MoE$|MLP$|Attention$|Missing|Conv\w*$|Gate$", place.name
        )


def _local_values(function: ast.FunctionDef) -> dict[str, list[ast.AST]]:
    """Return what a function's local names may stand for: assigned, appended, defined, defaults."""
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
    last = names[len(names) - len(arguments.defaults) :]
    for one, default in zip(last, arguments.defaults, strict=False):
        local.setdefault(one.arg, []).append(default)
    for one, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=False):
        if given is not None:
            local.setdefault(one.arg, []).append(given)
    return local


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


def read_release(folder: Path) -> Found:
    """Return every decoder layer of a release, and the architectures that have it."""
    release = Release(folder)
    found: Found = {}
    for use in release.uses():
        key = (use.layer, use.model)
        if key not in found:
            handed = read_layer(use.layer, use.model, use.attribute, release.sources)
            found[key] = (handed, set(), set())
        found[key][1].add(use.architecture)
        found[key][2].update(use.platforms)
    return found


def rows_of(found: Found, sources: Sources) -> list[Row]:
    """Return one release's rows: what the table keeps of each layer."""
    rows = []
    for (layer, model), (handed, architectures, _) in found.items():
        sums = by_parameter_order(sources, layer)
        cases = []
        for case in handed.cases[:6]:
            proof = [f"next norm {_place(case.next_norm)}"] if case.next_norm else []
            proof += [f"final norm {_place(case.final_norm)}"] if case.final_norm else []
            entry: Row = {"kind": case.kind.value, "stream": case.stream, "proof": "; ".join(proof)}
            entry["when"] = [text[:120] for text in case.when[:3]]
            entry["reason"] = _place(case.reason)
            entry["today"] = _today(case.returned, sums)
            cases.append({key: value for key, value in entry.items() if value})
        rows.append(
            {
                "layer": layer.name,
                "file": _file(layer.module),
                "model": model.name,
                "kind": handed.kind.value,
                "cases": cases,
                "architectures": sorted(architectures),
            }
        )
    return sorted(rows, key=lambda row: (row["file"], row["layer"], row["model"]))


def by_parameter_order(sources: Sources, layer: Place) -> bool | None:
    """Return what `capture.layers.leaves_the_sum` says, from a layer's source."""
    from vllm_compat.capture import layers

    for place in sources.mro(layer):
        node = sources.cls(place)
        own = (
            [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "forward"]
            if node
            else []
        )
        if not own:
            continue
        returned = [n.value for n in ast.walk(own[0]) if isinstance(n, ast.Return)]
        if all(map(layers._hands_on, returned)):
            continue
        pairs = [v for v in returned if isinstance(v, ast.Tuple) and len(v.elts) > 1]
        names = {ast.unparse(v.elts[1]) for v in pairs} - {"None"}
        if len(names) != 1:
            return None
        name = next(iter(names))
        if not name.isidentifier():
            return None
        arguments = own[0].args
        if name not in [a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]:
            return False
        first = layers._first_uses(own[0].body, name)
        if first <= {"store", "none"}:
            return False
        return True if first <= {"load", "none"} else None
    return None


def _today(returned: tuple[str, ...], sums: bool | None) -> str:
    """Return what capture takes for the stream where it goes by the order of use alone."""
    if returned in (("tensor",), ("?",)):
        return "the output"
    if len(returned) < 2:
        return ""
    if len(returned) > 2 and not sums:
        return "refused"
    if returned[1] == "None":
        return "1st"
    if returned[:2] != ("tensor", "tensor") or sums is None:
        return "refused"
    return "1st + 2nd" if sums else "1st"


def _file(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _place(text: str) -> str:
    return re.sub(r"vllm(\.\w+)+(?=:\d)", lambda found: _file(found[0]), text)


def make_table(releases: Mapping[str, list[Row]]) -> Row:
    """Return the table: a row once for all releases in a row in which it reads the same."""
    order = sorted(releases, key=Version)
    open_rows: dict[tuple[str, ...], Row] = {}
    done: list[Row] = []
    counts: dict[str, dict[str, int]] = {}
    for number, version in enumerate(order):
        counts[version] = {}
        for row in releases[version]:
            counts[version][row["kind"]] = counts[version].get(row["kind"], 0) + 1
            key = (row["file"], row["layer"], row["model"])
            last = open_rows.get(key)
            if last and last["last"] == number - 1 and _signature(last) == _signature(row):
                last.update({**row, "first": last["first"], "last": number})
                continue
            open_rows[key] = {**row, "first": number, "last": number}
            done.append(open_rows[key])
    for row in done:
        row["releases"] = [order[row.pop("first")], order[row.pop("last")]]
    done.sort(key=lambda row: (row["file"], row["layer"], row["model"], Version(row["releases"][0])))
    return {"kind": "decoder layers", "releases": order, "counts": counts, "rows": done}


def _signature(row: Row) -> str:
    cases = [{k: v for k, v in case.items() if k not in ("proof", "when")} for case in row["cases"]]
    return re.sub(r":\d+", "", json.dumps([row["kind"], cases], sort_keys=True))


def releases_of(table: Row) -> dict[str, list[Row]]:
    """Return a table's rows by release, as `make_table` takes them."""
    order = table["releases"]
    found: dict[str, list[Row]] = {version: [] for version in order}
    for row in table["rows"]:
        first, last = (order.index(version) for version in row["releases"])
        plain = {key: value for key, value in row.items() if key != "releases"}
        for version in order[first : last + 1]:
            found[version].append(plain)
    return found


def write_table(table: Row, path: Path = TABLE) -> None:
    """Write the table, one row a line."""
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in table["rows"])
    head = json.dumps(
        {key: value for key, value in table.items() if key != "rows"}, separators=(",", ":")
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head[:-1]},"rows":[\n{rows}\n]}}\n', encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "source", nargs="+", type=Path, help="a wheel, an sdist or a folder that holds vLLM"
    )
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE", help="the table to add to")


def run_layers(options: argparse.Namespace) -> int:
    """Read the decoder layers of sources and put them into the table, in place of older readings."""
    releases = releases_of(json.loads(options.table.read_text())) if options.table.exists() else {}
    for source in options.source:
        package = package_at(source, "vllm")
        release = Release(source)
        version = package.version.partition("+")[0]
        releases[version] = rows_of(read_release(source), release.sources)
        print(f"{version}: {len(releases[version])} layer classes", flush=True)
    write_table(make_table(releases), options.table)
    return 0
