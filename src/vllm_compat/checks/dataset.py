"""What must hold of step 1, conversations to token ids and loss masks: checked, never changed.

The downstream logs what goes wrong with a conversation and goes on; what is lost shows hours later,
or never. Here the counts are compared, and the first reason is kept, in whichever worker process of
``datasets.map`` it was logged.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.analysis.facts import Preprocessing
from vllm_compat.checks.losses import Losses, in_words, spread
from vllm_compat.errors import GuardError
from vllm_compat.runtime import run_record

if TYPE_CHECKING:
    from vllm_compat.runtime.patching import Transaction

logger = logging.getLogger("vllm_compat")

PROBED, PROBED_AT_ONCE, PROBE_SECONDS = 256, 16, 20.0
"""How many conversations are looked at once more for a reason, and for how long."""


def install(transaction: Transaction, place: Preprocessing, *, max_loss: float) -> None:
    """Enlist the guards of the downstream's preprocessing.

    ``max_loss`` is the largest share of conversations, turns or answers that may be lost.
    """
    transaction.wrap(place.dataset, _checked(place.module, max_loss))
    if place.frequencies:
        transaction.wrap(place.frequencies, _no_old_emptiness)


def _checked(module: str, max_loss: float) -> Any:
    def build(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = inspect.signature(wrapped).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        dataset = given["dataset"]
        run_record.open_here()
        try:
            check_own_class(given["tokenizer"])
            with _reasons(module) as reasons:
                built = wrapped(*args, **kwargs)
                if not reasons() and lost_of(dataset, len(built)) > 0:
                    # It comes out of the cache of `datasets`, or of processes that were not forked.
                    _probe(wrapped, args, kwargs, reasons)
                check_counts(dataset, len(built), reasons(), max_loss)
            check_trainable(built)
            check_within(_look_within(module, given, built), max_loss)
        except GuardError as error:
            run_record.fail(f"{error}")
            raise
        return built

    return build


def without_turns(dataset: Any) -> int:
    """Return how many conversations of a dataset are empty."""
    columns = getattr(dataset, "column_names", None) or ()
    return sum(1 for turns in dataset["conversations"] if not turns) if "conversations" in columns else 0


def lost_of(dataset: Any, built: int) -> int:
    """Return how many conversations with turns have not become one of ``built`` samples."""
    missing = len(dataset) - built
    return missing - without_turns(dataset) if missing else 0


def check_counts(dataset: Any, built: int, reasons: list[str], max_loss: float) -> None:
    """Check that conversations have become samples, all but a share; one without turns need not.

    ``dataset`` is what the downstream was given, ``built`` the number of samples that came out of
    it, ``reasons`` what was logged meanwhile, ``max_loss`` the share that may be lost.

    Raises:
        GuardError: Counts, and the first reason.
    """
    total = len(dataset)
    if built == total and total:
        return
    columns = getattr(dataset, "column_names", None) or ()
    if "conversations" not in columns:
        raise GuardError(
            f"The data have no column 'conversations' (they have {', '.join(columns) or 'none'}), so"
            " none of their rows can become a sample; rename the column that holds the turns."
        )
    lost, empty = lost_of(dataset, built), without_turns(dataset)
    if lost > 0:
        any_ = next(iter(reasons), f"none is logged (the first {PROBED} were tried again)")
        first = next((reason for reason in reasons if reason.startswith("Failed")), any_)
        told = (
            f"{lost} of {total} conversations are lost on the way to token ids, {built} are left"
            f"{f' and {empty} have no turns' if empty else ''}. The first reason: {first}."
        )
        if not built:
            raise GuardError(f"{told} Nothing of this dataset is used.")
        _tell_or_refuse(lost / (total - empty), told, max_loss)
    if not built:
        raise GuardError(f"The dataset is empty: {total} conversations, {empty} of them without turns.")
    if empty:
        logger.warning("%d of %d conversations have no turns and are left out.", empty, total)


def _tell_or_refuse(share: float, told: str, max_loss: float) -> None:
    """Refuse a loss above the share that may be lost; else say it now and in the verdict.

    Raises:
        GuardError: With the share that would let it through.
    """
    if share > max_loss:
        raise GuardError(
            f"{told} That is more than the share of {in_words(max_loss)} that may be lost, so nothing of"
            f" this dataset is used; to go on without them, raise it: --max-loss {in_words(share)}"
            f" (apply(max_loss={in_words(share)}))."
        )
    logger.warning("%s", told)
    run_record.note(told.rstrip(".").replace(". The first reason:", ", the first because:"))


def check_within(losses: Losses, max_loss: float) -> None:
    """Check what is lost within conversations: turns, parts of turns, answers.

    Raises:
        GuardError: More than the share that may be lost.
    """
    for share, sentence, advice in losses.sentences():
        _tell_or_refuse(share, f"{sentence}. {advice}.", max_loss)


def _look_within(module: str, given: Mapping[str, Any], built: Any) -> Losses:
    """Count what is lost within the conversations of a data set, or of a part of a large one.

    Answers are counted where samples are those conversations one by one, whole, with all their turns.
    """
    losses = Losses()
    dataset = given["dataset"]
    normalise = getattr(sys.modules[module], "_normalize_conversation", None)
    if normalise is None:
        return losses
    places = spread(len(dataset))
    template = str(getattr(given["tokenizer"], "chat_template", None) or "")
    limit = given.get("max_length")
    paired = len(built) == len(dataset) and not given.get("turn_dropout")
    with _silent(module):
        for place, turns in zip(places, dataset.select(places)["conversations"], strict=True):
            kept = losses.add_turns(turns or [], normalise, template)
            if not paired or not limit:
                continue
            sample = built[place]
            if len(sample["input_ids"]) < limit:
                mask = sample["loss_mask"]
                losses.add_mask(kept, mask.tolist() if hasattr(mask, "tolist") else mask)
    return losses


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Let a logger be silent: what it would say has been said."""
    log = logging.getLogger(name)
    shut = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = shut


def check_trainable(built: Any) -> None:
    """Check that there is a token to train on.

    Raises:
        GuardError: The loss mask of every sample is zero.
    """
    if not any(bool(sample["loss_mask"].any()) for sample in built):
        raise GuardError(
            f"None of {len(built)} samples has a token to train on: no assistant turn was found by the"
            " pattern that is read from the chat template; give assistant_pattern (--assistant-pattern)."
        )


def check_own_class(tokenizer: Any) -> None:
    """Check that a model's own tokenizer is in use, not one that transformers has made out of it.

    transformers 5 makes one where a model brings only a slow tokenizer as remote code and trust is
    not given (`TokenizersBackend`); its ids differ from the model's, silently. No remote code runs
    here: the model's files say which class is its own.

    Raises:
        GuardError: Another class is in use and the model ships no `tokenizer.json` for it.
    """
    path = str(getattr(tokenizer, "name_or_path", "") or "")
    config = _model_file(path, "tokenizer_config.json")
    if config is None:
        return
    described = json.loads(config.read_text(encoding="utf-8"))
    own = described.get("auto_map", {}).get("AutoTokenizer") or []
    names = {str(name).rpartition(".")[2] for name in ([own] if isinstance(own, str) else own) if name}
    found = type(tokenizer).__name__
    if not names or found in names or _model_file(path, "tokenizer.json") is not None:
        return
    shifted = [
        f"{entry['content']} is {there} instead of {token_id}"
        for token_id, entry in described.get("added_tokens_decoder", {}).items()
        if (there := tokenizer.convert_tokens_to_ids(entry["content"])) != int(token_id)
    ]
    what = "ids of text may differ"
    if shifted:
        what = f"{len(shifted)} special tokens are shifted ({shifted[0]})"
    raise GuardError(
        f"The tokenizer of {path} is a {found} that transformers has converted; the model's own class is"
        f" {' or '.join(sorted(names))}, and {what}. Load it with trust_remote_code=True."
    )


def _model_file(path: str, name: str) -> Path | None:
    """Return a file of a model, from its folder or the hub's local cache; None where there is none."""
    if not path:
        return None
    if os.path.isdir(path):
        found = Path(path) / name
        return found if found.is_file() else None
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, name)
    except (ImportError, ValueError):
        return None
    return Path(cached) if isinstance(cached, str) else None


def _probe(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reasons: Any) -> None:
    """Build a few conversations once more, past the cache of `datasets`, until one says why it is lost.

    Not the whole dataset: in one process that may take hours, and the counts are an error all the same.
    """
    import datasets

    given = inspect.signature(wrapped).bind(*args, **kwargs)
    given.apply_defaults()
    given.arguments["num_proc"] = None
    dataset = given.arguments["dataset"]
    if not hasattr(dataset, "select"):
        return
    enabled = datasets.is_caching_enabled()
    datasets.disable_caching()
    deadline = time.monotonic() + PROBE_SECONDS
    try:
        for start in range(0, min(len(dataset), PROBED), PROBED_AT_ONCE):
            end = min(start + PROBED_AT_ONCE, len(dataset))
            given.arguments["dataset"] = dataset.select(range(start, end))
            with suppress(Exception):  # where none of these few is left
                wrapped(*given.args, **given.kwargs)
            if reasons() or time.monotonic() > deadline:
                return
    finally:
        if enabled:
            datasets.enable_caching()


@contextmanager
def _reasons(name: str) -> Iterator[Any]:
    """Collect what a logger warns of, here and in processes that are forked meanwhile.

    Gives a function that returns the messages so far, the oldest first.
    """
    log = logging.getLogger(name)
    level = log.level
    with ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile("a+", encoding="utf-8"))
        except OSError as error:  # no disk takes a file: the counts are checked all the same
            cause = f"not known, no temporary file can be written ({error.strerror})"
            yield lambda: [cause]
            return
        handler = _ToFile(file.fileno())
        log.addHandler(handler)
        if not log.isEnabledFor(logging.WARNING):
            log.setLevel(logging.WARNING)

        def so_far() -> list[str]:
            file.seek(0)
            return [found for line in file.read().splitlines() for found in _read_line(line)]

        try:
            yield so_far
        finally:
            log.removeHandler(handler)
            log.setLevel(level)


def _read_line(line: str) -> list[str]:
    """Return the message in a line; none where a full disk has cut it off."""
    with suppress(ValueError):
        return [str(json.loads(line))]
    return []


class _ToFile(logging.Handler):
    """Appends each message, without the marks of the downstream's logger, as a line of JSON."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(logging.WARNING)
        self._descriptor = descriptor
        self._left = 1000  # the first are enough, and a disk is not filled

    def emit(self, record: logging.LogRecord) -> None:
        if self._left > 0:
            self._left -= 1
            text = " ".join(record.getMessage().split())
            for mark in ("\u26a0", "\u2717", "\x1b[93m", "\x1b[91m", "\x1b[0m"):
                text = text.replace(mark, "")
            with suppress(OSError):  # a full disk: reasons are only told
                os.write(self._descriptor, (json.dumps(text.strip()) + "\n").encode())


def _no_old_emptiness(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse a file of token frequencies that a run without data has left: it would be kept."""
    path = Path(str(inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("output_path", "")))
    if path.is_file():
        import torch

        if not torch.load(path, weights_only=True):
            error = GuardError(
                f"{path} holds no token frequencies: an earlier run without data has left it, and it"
                " would be kept. Remove it."
            )
            run_record.fail(f"{error}")
            raise error
    return wrapped(*args, **kwargs)
