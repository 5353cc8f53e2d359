"""Facts that are read from the source of the downstream and of transformers, and how they are written.

A plan that crosses into other processes, the cache and reports hold a fact as one line of text: each
class here knows its own line, and :func:`facts_in` reads them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from vllm_compat.analysis.environment import Environment

_TORCH = "transformers.configuration_utils names torch, imported for type checking only"
_MISSING = "missing "
_OFFSETS = "offsets asked "
_TRAINER = "draft made by "


@dataclass(frozen=True)
class TorchForTyping:
    """transformers' configuration classes name torch, which only type checkers import.

    pydantic trips over it when it evaluates PreTrainedConfig's annotations.
    """

    @property
    def text(self) -> str:
        """The line that says it."""
        return _TORCH

    @classmethod
    def from_text(cls, text: str) -> TorchForTyping | None:
        """Return what a line says; None where it says something else."""
        return cls() if text == _TORCH else None


TORCH_FOR_TYPING = TorchForTyping().text


@dataclass(frozen=True)
class MissingNames:
    """A module of transformers that is not there, and the names that the downstream imports from it."""

    module: str
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        """The line that says it."""
        return f"{_MISSING}{self.module}:{','.join(self.names)}"

    @classmethod
    def from_text(cls, text: str) -> MissingNames | None:
        """Return what a line says; None where it says something else."""
        if not text.startswith(_MISSING):
            return None
        module, _, names = text.removeprefix(_MISSING).partition(":")
        return cls(module, tuple(names.split(",")))


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
    def text(self) -> str:
        """The line that says it."""
        return _OFFSETS + " ".join((self.site, self.dataset, self.frequencies)).rstrip()

    @classmethod
    def from_text(cls, text: str) -> Preprocessing | None:
        """Return what a line says; None where it says something else."""
        return cls(*text.removeprefix(_OFFSETS).split(" ")) if text.startswith(_OFFSETS) else None

    @property
    def module(self) -> str:
        """The module that holds them."""
        return self.dataset.partition(":")[0]


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
    def text(self) -> str:
        """The line that says it."""
        return _TRAINER + " ".join((self.site, self.draft, self.setup, *self.gaps))

    @classmethod
    def from_text(cls, text: str) -> Trainer | None:
        """Return what a line says; None where it says something else."""
        if not text.startswith(_TRAINER):
            return None
        site, draft, setup, *gaps = text.removeprefix(_TRAINER).split(" ")
        return cls(site, draft, setup, tuple(gaps))

    @property
    def module(self) -> str:
        """The module that holds the draft's class."""
        return self.draft.partition(":")[0]


Fact = TorchForTyping | MissingNames | Preprocessing | Trainer
F = TypeVar("F", TorchForTyping, MissingNames, Preprocessing, Trainer)


def texts_of(facts: Iterable[Fact]) -> tuple[str, ...]:
    """Return the lines that say these facts, as `Environment.features` holds them."""
    return tuple(fact.text for fact in facts)


def facts_in(environment: Environment, kind: type[F]) -> Iterator[F]:
    """Iterate over the facts of a kind that are known of an environment."""
    for text in environment.features:
        fact = kind.from_text(text)
        if fact is not None:
            yield fact


def names_torch_for_typing(environment: Environment) -> bool:
    """Whether pydantic trips over transformers' annotations (`TorchForTyping`)."""
    return any(True for _ in facts_in(environment, TorchForTyping))


def missing_names(environment: Environment) -> dict[str, tuple[str, ...]]:
    """Return ``{module: names}`` of what the downstream imports and transformers lacks."""
    return {fact.module: fact.names for fact in facts_in(environment, MissingNames)}


def preprocessing_of(environment: Environment) -> Preprocessing | None:
    """Return where the downstream turns conversations into samples, where it does."""
    return next(facts_in(environment, Preprocessing), None)


def trainer_of(environment: Environment) -> Trainer | None:
    """Return where the downstream makes a draft to train, where it does."""
    return next(facts_in(environment, Trainer), None)
