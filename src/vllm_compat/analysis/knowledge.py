"""What is known of a pair, what is inferred, and what cannot be told: three words, in every report.

*Known*: stock speculators of this release has been run on this vLLM, on this kind of device, and every
row compared with a reference. *Inferred*: it has not been run so; its source was read, and what that
shows is all that the verdict rests on. *Unknown*: not even the source tells.

The runs stand in ``data/known.json``, which ``scripts/render_records.py`` makes from the records. A run
makes nothing known but what it has run: another device, another compute capability, another layer class
stay inferred.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data" / "known.json"
KINDS = {"cpu": "CPU", "cuda": "CUDA", "rocm": "ROCm"}
_NAMED = 3
"""Layer classes that a sentence names before it only counts."""


class Word(str, Enum):
    """How a report comes to know what it says of a pair; see this module's text."""

    KNOWN = "known"
    INFERRED = "inferred"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class KnownRun:
    """What has been run of one pair on one device with one model runner.

    ``kind`` is ``cpu``, ``cuda`` or ``rocm``; ``capability`` a GPU's compute capability, empty for a
    CPU; ``kernels`` the release whose compiled code was used, where it was not the release's own, so
    that only its Python side was run. ``layers`` are the classes of decoder layers, ``models`` the
    tiny models that have them; versions are those of the latest run, on the day ``last`` (ISO, UTC).
    """

    downstream: str
    vllm: str
    kind: str
    device: str
    capability: str
    runner: str
    kernels: str
    models: tuple[str, ...]
    layers: tuple[str, ...]
    ranks: tuple[int, ...]
    dtypes: tuple[str, ...]
    python: str
    torch: str
    transformers: str
    last: str

    @property
    def place(self) -> str:
        """Return the device in a few words: ``CPU``, or ``compute capability 9.0``."""
        return f"compute capability {self.capability}" if self.capability else KINDS[self.kind]

    @property
    def sentence(self) -> str:
        """Return what was run, when and with what; no sentence's end."""
        where = f"CPU ({self.device}"
        if self.capability:
            where = f"{self.device} (compute capability {self.capability}"
        ranks = " and ".join(map(str, self.ranks))
        named = ", ".join(self.layers[:_NAMED])
        if len(self.layers) > _NAMED:
            named += f" and {len(self.layers) - _NAMED} more"
        kernels = f", its Python sources over the kernels of {self.kernels}" if self.kernels else ""
        return (
            f"on {where}, model runner {self.runner}{kernels}), {ranks} rank"
            f"{'' if self.ranks == (1,) else 's'}, layers {named}; last on {self.last} with torch"
            f" {self.torch}, transformers {self.transformers}"
        )

    def as_record(self) -> dict[str, Any]:
        """Return the run as a plain mapping."""
        told = {
            key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()
        }
        return {**told, "capability": self.capability or None, "kernels": self.kernels or None}


@dataclass(frozen=True)
class Knowledge:
    """One of the three words for a pair, the sentence that says why, and the runs it rests on."""

    word: Word
    sentence: str = ""
    runs: tuple[KnownRun, ...] = ()

    @property
    def brief(self) -> str:
        """Return the word, and where it is ``known`` on which devices: ``known on CPU``."""
        if self.word is not Word.KNOWN:
            return str(self.word.value)
        return f"known on {_listed(dict.fromkeys(run.place for run in self.runs))}"

    def as_record(self) -> dict[str, Any]:
        """Return it as plain mappings and lists."""
        return {
            "word": self.word.value,
            "sentence": self.sentence,
            "runs": [run.as_record() for run in self.runs],
        }


@lru_cache(maxsize=2)
def _known(path: Path) -> tuple[tuple[KnownRun, ...], Mapping[str, Sequence[str]]]:
    """Return the runs, and the architectures whose layers are of a class, by that class."""
    found = json.loads(path.read_text(encoding="utf-8"))
    names = found["columns"]
    runs = []
    for row in found["runs"]:
        told: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in zip(names, row, strict=True)
        }
        runs.append(KnownRun(**told))
    return tuple(runs), found["layers"]


def known_runs(path: Path = DATA) -> tuple[KnownRun, ...]:
    """Return all runs that make something known, by vLLM release and downstream."""
    return _known(path)[0]


def knowledge_of(
    downstream: str,
    version: str,
    vllm: str,
    device: str = "unknown",
    *,
    capabilities: Collection[str] = (),
    architectures: Sequence[str] = (),
    can_tell: bool = True,
    path: Path = DATA,
) -> Knowledge:
    """Return what is known of a downstream's release on a vLLM, and why that word.

    Args:
        downstream: The distribution's name.
        version: Its version.
        vllm: vLLM's version; a label of its build (``+cpu``) does not count.
        device: Where vLLM computes: ``cpu``, ``cuda``, ``rocm``, or ``unknown``, where a run on any
            device counts and the sentence says on which.
        capabilities: The compute capabilities of this machine's GPUs, as far as they are known.
        architectures: The model's, where it is known: its layers' class must have been run.
        can_tell: Whether its source is enough for a verdict; what was run is known all the same.
        path: The file of what was run.
    """
    runs, layers = _known(path)
    own = [run for run in runs if (run.downstream, run.vllm) == (version, _public(vllm))]
    if downstream != "speculators":
        own = []
    here = [run for run in own if device in ("unknown", run.kind)]
    missing = sorted(set(capabilities) - {run.capability for run in here}) if device == "cuda" else []
    if capabilities and device == "cuda":
        here = [run for run in here if run.capability in capabilities]
    fitting = [run for run in here if _has_layers(run, architectures, layers)]
    if fitting and not missing:
        told = "; ".join(run.sentence for run in fitting)
        return Knowledge(Word.KNOWN, f"It has been run {told}. {_limits(fitting)}", tuple(fitting))
    if not can_tell:
        return Knowledge(Word.UNKNOWN, "It has not been run, and its source alone does not tell.")
    why = _never(runs, own, here, vllm, device, missing, architectures)
    return Knowledge(Word.INFERRED, f"{why}: judged by its source alone.")


def _public(version: str) -> str:
    return version.partition("+")[0]


def _has_layers(
    run: KnownRun, architectures: Sequence[str], layers: Mapping[str, Sequence[str]]
) -> bool:
    """Tell whether the layers of one of these architectures were run, any where none is named."""
    return not architectures or any(
        architecture in layers.get(layer, ()) for layer in run.layers for architecture in architectures
    )


def _limits(runs: Sequence[KnownRun]) -> str:
    """Say what these runs do not make known."""
    if any(run.capability for run in runs):
        return "Nothing is known by that of other compute capabilities and layer classes."
    return "Nothing is known by that of GPUs and of other layer classes."


def _never(
    runs: Sequence[KnownRun],
    own: Sequence[KnownRun],
    here: Sequence[KnownRun],
    vllm: str,
    device: str,
    missing: Sequence[str],
    architectures: Sequence[str],
) -> str:
    """Say what has not been run, and what comes nearest to it."""
    if here and not missing:
        return f"It has been run, but never with the layers of {_listed(architectures)}"
    if own:
        where = f"compute capability {_listed(missing)}" if missing else KINDS.get(device, device)
        places = _listed(dict.fromkeys(run.place for run in own))
        return f"It has been run on {places} only, never on {where}"
    newest = max((run.vllm for run in runs), key=_order, default="")
    if newest and _order(vllm) > _order(newest):
        return f"vLLM {vllm} is newer than every release that has been run ({newest} is the newest)"
    return "This pair has never been run"


def _order(version: str) -> tuple[int, ...]:
    """Return what versions are compared by: their release numbers; nothing where there are none."""
    numbers = []
    for part in _public(version).split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _listed(names: Iterable[str]) -> str:
    """Return names as ``a``, ``a and b``, ``a, b and c``."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
