"""What else decides besides source: versions and the device, read without importing any of them."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("torch", "transformers", "pydantic", "datasets", "huggingface-hub", "triton")
"""Distributions whose version is part of every record."""

CAPTURES = ("auto", "hooks", "auxiliary", "stock")
"""The capture strategies that can be asked for (`vllm_compat.capture.worker.Capture`)."""


@dataclass(frozen=True)
class Environment:
    """Versions and device of one interpreter.

    ``versions`` maps distribution names to version strings (absent where not installed);
    ``device`` is ``cpu``, ``cuda``, ``rocm`` or ``unknown``, where ``cpu`` means that this vLLM
    build computes on the CPU, whatever else the machine has.
    ``capture`` is the capture strategy asked for, one of `CAPTURES`;
    ``transfer`` how rows leave the worker: ``auto`` or ``rpc``; ``canary`` whether the first batch is
    repeated and compared (`vllm_compat.checks.canary`). ``features`` are facts read from
    installed source, in the words of this module.
    """

    python: str
    versions: tuple[tuple[str, str], ...]
    device: str
    capture: str = "auto"
    transfer: str = "auto"
    canary: bool = False
    features: tuple[str, ...] = ()

    def version(self, name: str) -> str | None:
        """Return the version of a distribution, or None."""
        return dict(self.versions).get(name)


TORCH_FOR_TYPING = "transformers.configuration_utils names torch, imported for type checking only"
"""The feature that pydantic trips over when it evaluates PreTrainedConfig's annotations."""

_MISSING = "missing "
_TORCH_ANNOTATION = re.compile(
    r"^(?: {1,4}|\t)\w+[ \t]*:[^\n]*(?:\btorch\b|[\[(,|\\][ \t]*(?:#.*)?$)", re.MULTILINE
)
"""Finds, among others, each annotation in a class's body that names torch, or goes on in a next line."""

_FROM_TRANSFORMERS = re.compile(r"^from\s+transformers\s*\.|;\s*from\s+transformers\s*\.", re.MULTILINE)


def missing_names(environment: Environment) -> dict[str, tuple[str, ...]]:
    """Return ``{module: names}`` of what the downstream imports and transformers lacks."""
    found: dict[str, tuple[str, ...]] = {}
    for feature in environment.features:
        if feature.startswith(_MISSING):
            module, _, names = feature.removeprefix(_MISSING).partition(":")
            found[module] = tuple(names.split(","))
    return found


_OFFSETS = "offsets asked "


@dataclass(frozen=True)
class Preprocessing:
    """Where the downstream turns conversations into samples, read from its source.

    ``site`` is ``file:line`` of the call that asks the tokenizer for offsets, ``dataset`` the
    function that maps a dataset by it, written ``module:function``, ``frequencies`` the name under
    which that module holds the function that saves token frequencies, or empty.
    """

    site: str
    dataset: str
    frequencies: str = ""

    @property
    def module(self) -> str:
        """The module that holds them."""
        return self.dataset.partition(":")[0]


def preprocessing_of(environment: Environment) -> Preprocessing | None:
    """Return where the downstream turns conversations into samples, where it does."""
    for feature in environment.features:
        if feature.startswith(_OFFSETS):
            return Preprocessing(*feature.removeprefix(_OFFSETS).split(" "))
    return None


_TRAINER = "draft made by "


@dataclass(frozen=True)
class Trainer:
    """Where the downstream makes a draft to train, read from its source.

    ``site`` is ``file:line`` of the call that reads the verifier's configuration without trust,
    ``draft`` the draft's class, written ``module:Class``, ``setup`` its method that reads the
    verifier. ``gaps`` are the things that it does not know of: ``text_config`` (a configuration
    that nests the decoder's), ``prefix`` (weights' names with something in front), ``norm`` (the
    verifier's last norm, between the last hidden state and the head).
    """

    site: str
    draft: str
    setup: str
    gaps: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The module that holds the draft's class."""
        return self.draft.partition(":")[0]


def trainer_of(environment: Environment) -> Trainer | None:
    """Return where the downstream makes a draft to train, where it does."""
    for feature in environment.features:
        if feature.startswith(_TRAINER):
            site, draft, setup, *gaps = feature.removeprefix(_TRAINER).split(" ")
            return Trainer(site, draft, setup, tuple(gaps))
    return None


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
    """Read from source where the downstream makes samples and drafts, whatever transformers is."""
    files = list(_sources(downstream))
    prepared = (" ".join((p.site, p.dataset, p.frequencies)) for p in _preprocessing(files))
    trained = (" ".join((t.site, t.draft, t.setup, *t.gaps)) for t in _trainers(files))
    return (*(f"{_OFFSETS}{p.rstrip()}" for p in prepared), *(f"{_TRAINER}{t}" for t in trained))


def features_of(
    wanted: Mapping[str, Iterable[str]], typing: bool, transformers: Path
) -> tuple[str, ...]:
    """Return the features that follow from the names wanted, and from transformers as it is there."""
    features = [TORCH_FOR_TYPING] if typing else []
    for module, names in sorted(wanted.items()):
        place = transformers.joinpath(*module.split(".")[1:])
        if not place.with_suffix(".py").exists() and not place.is_dir():
            features.append(f"{_MISSING}{module}:{','.join(sorted(names))}")
    return tuple(features)


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
        parts = file.removesuffix(".py").split("/")
        module = ".".join(parts)
        tree = ast.parse(text)
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        frequencies = next(
            (
                f"{module}:{alias.asname or alias.name}"
                for node in tree.body
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
                if alias.name == "save_token_frequency_distribution"
            ),
            "",
        )
        for asking in functions:
            lines = [
                node.value.lineno
                for node in ast.walk(asking)
                if isinstance(node, ast.keyword) and node.arg == "return_offsets_mapping"
            ]
            for mapping in functions if lines else ():
                if not {"dataset", "tokenizer"} <= {argument.arg for argument in mapping.args.args}:
                    continue
                names = {node.id for node in ast.walk(mapping) if isinstance(node, ast.Name)}
                if asking.name in names:
                    site = f"{'/'.join(parts)}.py:{lines[0]}"
                    yield Preprocessing(site, f"{module}:{mapping.name}", frequencies)


def _trainers(files: Iterable[tuple[str, str]]) -> Iterator[Trainer]:
    """Find the class whose method reads the verifier's configuration and some of its weights."""
    for file, text in files:
        if "load_model_layers(" not in text or "AutoConfig.from_pretrained(" not in text:
            continue
        parts = file.removesuffix(".py").split("/")
        for cls in ast.parse(text).body:
            if not isinstance(cls, ast.ClassDef):
                continue
            for method in cls.body:
                if not isinstance(method, ast.FunctionDef):
                    continue
                calls = {ast.unparse(n.func): n for n in ast.walk(method) if isinstance(n, ast.Call)}
                read = calls.get("AutoConfig.from_pretrained")
                if read is None or "load_model_layers" not in calls:
                    continue
                if any(keyword.arg == "trust_remote_code" for keyword in read.keywords):
                    continue
                body, whole = ast.unparse(method), ast.unparse(cls)
                gaps = [
                    name
                    for name, missing in (
                        ("text_config", "text_config" not in body),
                        ("prefix", "'model.embed_tokens.weight'" in body),
                        ("norm", "verifier_norm" not in whole),
                    )
                    if missing
                ]
                site = f"{'/'.join(parts)}.py:{read.lineno}"
                yield Trainer(site, f"{'.'.join(parts)}:{cls.name}", method.name, tuple(gaps))


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


def normal_name(distribution: str) -> str:
    """Return a distribution's name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def distributions(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return ``{name: (name as written, version)}`` of those distributions that are installed.

    The first on ``sys.path`` counts, as for :mod:`importlib.metadata`, whose import alone takes as
    long as the rest of a check's start; it is asked where an entry of the path is no folder.
    """
    wanted = {normal_name(name): name for name in names}
    found: dict[str, tuple[str, str]] = {}
    for entry in sys.path:
        try:
            listed = os.listdir(entry or ".")
        except NotADirectoryError:
            found = _in_archives(wanted.values()) | found
            continue
        except OSError:
            continue
        for name in listed:
            stem, dot, kind = name.rpartition(".")
            if not dot or kind not in ("dist-info", "egg-info"):
                continue
            asked = wanted.get(normal_name(stem.partition("-")[0]))
            if asked is None or asked in found:
                continue
            told = _told(Path(entry, name))
            if told is not None:
                found[asked] = told
    return found


def _told(info: Path) -> tuple[str, str] | None:
    """Return name and version from a distribution's metadata, a folder's or (eggs) a file's."""
    for path in (info / "METADATA", info / "PKG-INFO", info):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        # A description of thousands of lines may follow the headers.
        head = re.split(rb"\r?\n\r?\n", text, maxsplit=1)[0].decode("utf-8", "replace")
        told = dict(re.findall(r"^(Name|Version):[ \t]*(\S+)", head, re.MULTILINE))
        if len(told) == 2:
            return told["Name"], told["Version"]
    return None


def _in_archives(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    from importlib import metadata

    found = {}
    for name in names:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = (distribution.metadata["Name"], distribution.version)
    return found


def read_environment(
    vllm_version: str,
    vllm_distribution: str,
    *,
    capture: str = "auto",
    transfer: str = "auto",
    canary: bool = False,
    features: tuple[str, ...] = (),
    root: Path = Path("/"),
) -> Environment:
    """Read the running interpreter's environment from distribution records and device files.

    ``root`` is where ``proc`` and ``dev`` are looked for, for tests. torch is not imported.
    """
    found = distributions(PACKAGES)
    return Environment(
        python=sys.version.split()[0],  # as platform.python_version() has it
        versions=tuple((name, found[name][1]) for name in PACKAGES if name in found),
        device=_device(vllm_version, vllm_distribution, os.environ, root),
        capture=capture,
        transfer=transfer,
        canary=canary,
        features=features,
    )


def _device(version: str, distribution: str, environ: Mapping[str, str], root: Path) -> str:
    if distribution.endswith("-cpu") or "cpu" in version.partition("+")[2].split("."):
        return "cpu"
    if environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return "cpu"
    if (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidiactl").exists():
        return "cuda"
    if (root / "dev/kfd").exists():
        return "rocm"
    return "unknown"
