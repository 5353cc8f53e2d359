"""What is lost of a data set between its conversations and the tokens that are trained on.

The downstream leaves out what it does not know, a conversation, a turn or a part of one, with a line in
its log or without any, and goes on. Here the losses are counted, told always, and refused above a share
that the user sets. What the downstream keeps of a turn is asked of its own function, not known here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

LOOKED_AT = 4096
"""How many conversations are looked into at most, evenly spread; all of a smaller data set."""

Turn = Mapping[str, Any]
Normalise = Callable[[Sequence[Turn]], Sequence[Turn]]


@dataclass
class Losses:
    """What was counted in the conversations that were looked into.

    ``turns`` are those given, ``unknown`` those left out, by role; ``cut`` the parts of turns that the
    chat template would render and the downstream does not hand on, by name. ``answers`` are assistant
    turns with text that the limit leaves whole, ``untrained`` those without a token to train on.
    """

    conversations: int = 0
    turns: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    untrained: int = 0

    def add_turns(self, turns: Sequence[Turn], normalise: Normalise, template: str) -> list[Turn]:
        """Count what the downstream leaves out of one conversation, and return what it keeps.

        Args:
            turns: The conversation as it was given.
            normalise: The downstream's own function; it is asked for one turn at a time.
            template: The text of the tokenizer's chat template, empty where there is none.
        """
        self.conversations += 1
        kept_turns: list[Turn] = []
        for turn in turns:
            self.turns += 1
            kept = list(normalise([turn]))
            kept_turns += kept
            if not kept:
                self.unknown[str(turn.get("from") or turn.get("role"))] += 1
                continue
            for name, value in turn.items():
                if not value or name in kept[0] or not _renders(template, name):
                    continue
                rest = {other: held for other, held in turn.items() if other != name}
                if list(normalise([rest])) == kept:
                    self.cut[name] += 1
        return kept_turns

    def add_mask(self, turns: Iterable[Turn], mask: Sequence[Any]) -> None:
        """Count the answers of one conversation, and those without a token to train on.

        ``mask`` is the sample's loss mask, which the limit on its length has not cut.
        """
        texts = [turn.get("content") for turn in turns if turn.get("role") == "assistant"]
        answers = sum(1 for text in texts if isinstance(text, str) and text.strip())
        spans = sum(1 for before, here in pairwise([0, *mask]) if here and not before)
        self.answers += answers
        self.untrained += max(0, answers - spans)

    def sentences(self) -> list[tuple[float, str, str]]:
        """Return share, sentence and advice of each kind of loss, none where nothing is lost."""
        found = []
        if lost := sum(self.unknown.values()):
            roles = ", ".join(f"{role!r} ({count})" for role, count in self.unknown.most_common(3))
            sentence = f"{lost} of {self.turns} turns are left out for their role: {roles}"
            found.append((lost / self.turns, sentence, "Rename the roles to user, assistant or system"))
        if lost := sum(self.cut.values()):
            parts = ", ".join(f"{name!r} ({count})" for name, count in self.cut.most_common(3))
            sentence = f"parts of turns that the chat template would render are left out: {parts}"
            found.append((lost / self.turns, sentence, "Write them into the turns' text"))
        if self.untrained:
            sentence = f"{self.untrained} of {self.answers} answers have no token to train on"
            advice = (
                "The pattern that is read from the chat template does not fit them: give"
                " assistant_pattern"
            )
            found.append((self.untrained / self.answers, sentence, advice))
        return found


def spread(total: int, most: int = LOOKED_AT) -> list[int]:
    """Return at most ``most`` places of ``total``, evenly spread and ascending."""
    return list(range(total)) if total <= most else [place * total // most for place in range(most)]


def _renders(template: str, name: str) -> bool:
    """Whether a chat template reads this part of a turn."""
    return re.search(rf"""(?:\.\s*|\[\s*['"]|get\(\s*['"]){re.escape(name)}\b""", template) is not None


def in_words(share: float) -> str:
    """Return a share as an option takes it, rounded up so that it lets this share through."""
    if not share:
        return "0"
    digits = 1 - math.floor(math.log10(share))
    return f"{math.ceil(share * 10**digits) / 10**digits:.{digits}f}".rstrip("0").rstrip(".")
