"""What a reading says: the kinds of what a layer hands on, and the cases."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """What the values that a layer returns have to do with the residual stream."""

    STREAM = "stream"
    """One tensor, which is the stream."""
    FIRST = "first"
    """Several values; the first is the stream, the others are no part of it."""
    SUM = "sum"
    """The stream is the sum of the first two."""
    OTHER = "other sum"
    """The stream is another one, or another sum, of the returned values (`Case.stream` says which)."""
    PARTIAL = "partial"
    """As `SUM` (`Case.stream`), but one part is a rank's partial sum, which the next norm reduces."""
    SEVERAL = "several"
    """Several streams a token (hyper-connections, AltUp, residuals of earlier blocks)."""
    UNKNOWN = "unknown"
    """Not proven."""


@dataclass(frozen=True)
class Place:
    """A class: its module and its name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Case:
    """What a layer hands on under some conditions.

    ``stream`` is the residual stream in terms of the returned values, as ``1st + 2nd``,
    ``reduce(1st) + 2nd``; ``when`` are conditions from the source, true or negated with ``not``;
    ``next_norm`` and ``final_norm`` are the places (``module:line``) whose reading proves it.
    """

    kind: Kind
    stream: str = ""
    when: tuple[str, ...] = ()
    next_norm: str = ""
    final_norm: str = ""
    reason: str = ""
    returned: tuple[str, ...] = ()
    """What stands at each place of the returned value: ``tensor``, ``None``, ``tuple``, ``?``."""

    @property
    def proven(self) -> bool:
        """Whether at least one norm says so, and none says otherwise."""
        return self.kind not in (Kind.UNKNOWN, Kind.SEVERAL)


@dataclass(frozen=True)
class Handed:
    """What one decoder layer class hands on in one model: one case, or one a condition."""

    layer: Place
    model: Place
    cases: tuple[Case, ...]
    called: bool = True
    """Whether the model calls the layer itself (its ``forward``, so that a hook on it fires)."""
    keeps: bool = False
    """Whether what the layer hands on visibly contains the stream that it received."""

    @property
    def kind(self) -> Kind:
        """The worst case's kind."""
        order = list(Kind)
        return max((case.kind for case in self.cases), key=order.index, default=Kind.UNKNOWN)

    @property
    def proven(self) -> bool:
        """Whether every case is proven."""
        return bool(self.cases) and all(case.proven for case in self.cases)
