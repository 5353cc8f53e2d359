"""A downstream's source, and what is read from it or remembered of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_compat.analysis.cache import Memory, stamp
from vllm_compat.analysis.codec import (
    Planned,
    pack_contract,
    pack_planned,
    unpack_contract,
    unpack_planned,
)
from vllm_compat.analysis.contract import Contract
from vllm_compat.analysis.downstream import contract_of, find_downstream
from vllm_compat.analysis.environment import Environment
from vllm_compat.analysis.fact_reading import (
    features_of,
    names_from_transformers,
    own_features,
    torch_for_typing,
)
from vllm_compat.analysis.recorded_downstreams import (
    RecordedDownstream,
    recorded_downstream,
    recorded_names,
)
from vllm_compat.analysis.server_flow import in_server_flow
from vllm_compat.analysis.serving.launchers import launcher_of
from vllm_compat.analysis.serving.model import Ask
from vllm_compat.analysis.surface.files import PackageFiles
from vllm_compat.analysis.surface.model import Surface
from vllm_compat.commands.checking.judging import find_and_plan
from vllm_compat.commands.checking.server import asks_of
from vllm_compat.errors import UsageError


class Source:
    """One downstream's source, and what is read from it or remembered of it."""

    def __init__(self, files: PackageFiles, memory: Memory) -> None:
        self.files = files
        self.memory = memory
        self.key = [
            files.distribution,
            files.version,
            files.package,
            files.folder,
            files.origin,
            *map(stamp, files.tree.sources(files.folder)),
        ]
        self.contract: Contract = memory.recall(
            "contract",
            self.key,
            lambda: contract_of(files),
            pack=pack_contract,
            unpack=unpack_contract,
        )

    @property
    def described(self) -> bool:
        """Whether metadata, and not the source itself, says which release it is."""
        return self.files.described

    def asks(self) -> tuple[Ask, ...]:
        """Return what it asks of a vLLM server; nothing where hidden states come from no server."""
        return asks_of(self.files) if in_server_flow(self.contract) else ()

    def planned(self, surface: Surface, environment: Environment, *, keep: bool) -> Planned:
        """Find what does not fit, and plan; ``keep``: or remember both."""
        memory = self.memory if keep else Memory(None)
        return memory.recall(
            "plan",
            (*self.key, *surface.stamps(), environment) if memory.on else (),
            lambda: find_and_plan(self.contract, surface, environment),
            pack=pack_planned,
            unpack=unpack_planned,
        )

    def features(self, transformers: Path) -> tuple[str, ...]:
        """Read what transformers, a package's folder, and the downstream are to each other."""
        try:
            own: tuple[str, ...] = self.memory.recall("own", self.key, self.own, pack=list, unpack=tuple)
            wanted: dict[str, list[str]] = self.memory.recall(
                "names", self.key, self.names, pack=dict, unpack=dict
            )
            typing = self.memory.recall(
                "typing",
                [stamp(transformers / "configuration_utils.py")],
                lambda: torch_for_typing(transformers),
                pack=bool,
                unpack=bool,
            )
        except (OSError, SyntaxError, ValueError) as error:
            raise UsageError(
                f"The source of {self.contract.name}, or of the transformers beside it, cannot be"
                f" read: {error}."
            ) from error
        return own + features_of(wanted, typing, transformers)

    def own(self) -> tuple[str, ...]:
        """Return where the downstream makes samples and drafts, whatever transformers is."""
        with self._folder() as folder:
            return own_features(folder)

    def names(self) -> dict[str, list[str]]:
        """Return what the downstream imports from modules of transformers, by module."""
        with self._folder() as folder:
            return names_from_transformers(folder)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Give the source as a folder, unpacked for the moment where it is one file."""
        root = Path(self.contract.root)
        if root.is_dir():
            yield root
            return
        import tempfile

        with tempfile.TemporaryDirectory(prefix="vllm-compat-check-") as name:
            modules = tuple(self.files.modules())
            for module in modules:
                parts = module.split(".")
                package = len(parts) == 1 or any(m.startswith(f"{module}.") for m in modules)
                place = Path(name, *parts)
                place = place / "__init__.py" if package else place.with_suffix(".py")
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(self.files.source(module) or b"")
            yield Path(name, self.contract.package)


class RecordedSource(Source):
    """A released downstream of which nothing is here but its record."""

    def __init__(self, record: RecordedDownstream, memory: Memory) -> None:
        self.record = record
        self.memory = memory
        self.key = [record.file, record.sha256]
        self.contract = record.contract

    @property
    def described(self) -> bool:
        return True

    def asks(self) -> tuple[Ask, ...]:
        from packaging.version import Version

        if not in_server_flow(self.contract):
            return ()
        return (*launcher_of(Version(self.contract.version)), *self.record.asks)

    def own(self) -> tuple[str, ...]:
        return self.record.own

    def names(self) -> dict[str, list[str]]:
        return self.record.names


def source_of(what: str | Path | None, python: str | None, memory: Memory) -> Source:
    """Find a downstream: its source, or, for a release that is not here, its record.

    Raises :class:`~vllm_compat.errors.UsageError` where there is neither.
    """
    try:
        return Source(find_downstream(what, python=python), memory)
    except UsageError as error:
        record = recorded_downstream(what) if isinstance(what, str) else None
        if record is not None:
            return RecordedSource(record, memory)
        if isinstance(what, str) and what.startswith("speculators=="):
            versions = ", ".join(name.partition("==")[2] for name in recorded_names())
            raise UsageError(f"{str(error).rstrip('.')}; recorded are {versions}.") from error
        raise
