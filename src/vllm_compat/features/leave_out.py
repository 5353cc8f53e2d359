"""Samples that are left out on request, so that one bad sample does not block the rest for ever.

The user names them by the numbers of their files (``vllm-compat run --leave-out 17,42``). Their prompts
are not computed and their files not written; every other sample keeps its number. The generator answers
for them with no rows at all, which nothing can be trained on; the program hands that to ``torch.save``
under the file's name, and there it ends. A list in the output folder keeps what was left out, so that a
later run does not take it for missing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.errors import GuardError
from vllm_compat.features.atomic_save import SAMPLE
from vllm_compat.features.base import Feature, generate_rest
from vllm_compat.runtime import heartbeat, numbering, run_record

if TYPE_CHECKING:
    from vllm_compat.analysis.plan import Plan
    from vllm_compat.runtime.patching import Transaction


class LeaveOut(Feature):
    """Leave samples out that the user has named."""

    name = "leave_out"
    does = (
        "Leaves out the samples that `run --leave-out` names: their prompts are not computed, their"
        " files not written, and all others keep their numbers. The list stands in left_out.json of the"
        " output folder, and a later run honours it."
    )
    why = (
        "One prompt that this model gives no right rows for ends the run, and the script begins again at"
        " it each time."
    )
    targets = ("VllmHiddenStatesGenerator.generate", "torch.save")
    needs_launcher = True

    def applies(self, plan: Plan) -> bool:
        """Whether the launcher has named samples."""
        return bool(plan.roles.generator) and bool(numbering.told().left_out)

    def install(self, transaction: Transaction, plan: Plan, role: str) -> None:
        """Enlist the wrappers of the generator and of ``torch.save``, outside of all others."""
        module, _, cls = plan.roles.generator.partition(":")
        transaction.wrap(f"{module}:{cls}.generate", _Rest().generate)
        transaction.wrap("torch:save", _save)


class _Rest:
    """Hands on the prompts that are not left out."""

    def __init__(self) -> None:
        self.at = numbering.told().next

    def generate(
        self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = args[0] if args else kwargs.get("token_ids")
        given = [] if given is None else given
        mine = numbering.current()
        numbers = range(self.at, self.at + len(given))
        out = [number for number in numbers if number in mine.left_out]
        kept = [place for place, number in enumerate(numbers) if number not in mine.left_out]
        with numbering.handing_on([numbers[place] for place in kept]):
            if not out:
                results = wrapped(*args, **kwargs)
            else:
                rest = [given[place] for place in kept]
                results = generate_rest(wrapped, rest, args, kwargs) if rest else ()
        self.at += len(given)
        if not out:
            return results
        _note(mine, out)
        made = iter(results)
        return [
            next(made) if number not in mine.left_out else _nothing(instance, given[place])
            for place, number in enumerate(numbers)
        ]


@heartbeat.only_told
def _note(mine: numbering.Numbering, out: list[int]) -> None:
    """Count what was left out, and keep it in the folder."""
    run_record.leave_out(out)
    mine.written.update(out)
    if mine.folder is not None:
        numbering.write_list(mine.folder, mine.written | numbering.read_list(mine.folder))


def _nothing(instance: Any, prompt: Any) -> Mapping[str, Any]:
    """Return the answer to a prompt that is left out: no tokens, no rows."""
    import torch

    rows = [torch.empty(0, 0) for _ in instance.layer_ids]
    return {"input_ids": torch.empty(0, dtype=torch.long), "hidden_states": rows, "loss_mask": None}


def _save(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sample = args[0] if args else kwargs.get("obj")
    if not run_record.is_ours() or not _is_nothing(sample):
        return wrapped(*args, **kwargs)
    target = args[1] if len(args) > 1 else kwargs.get("f")
    mine = numbering.current()
    if isinstance(target, str | os.PathLike) and mine.folder is not None:
        path = Path(os.path.realpath(os.fsdecode(target)))
        match = SAMPLE.fullmatch(path.name)
        if match and int(match[1]) in mine.left_out and path.parent == mine.folder.resolve():
            return None
    raise GuardError(
        f"A sample that was left out on request was to be saved as {target}, which is not its own name:"
        " the program numbers its files otherwise than stock's script, so leave conversations out of"
        " its data instead."
    )


def _is_nothing(sample: Any) -> bool:
    """Whether this is what was made of an answer to a prompt that is left out."""
    if not isinstance(sample, Mapping):
        return False
    states = sample.get("hidden_states")
    return isinstance(states, list | tuple) and any(
        tuple(getattr(state, "shape", ())) == (0, 0) for state in states
    )
