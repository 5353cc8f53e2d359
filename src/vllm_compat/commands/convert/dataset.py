"""The server flow's prepared data set: token ids and loss masks, row *i* for ``hs_<i>``.

Stock's ``prepare-data`` writes it with ``save_to_disk``: columns ``input_ids``, ``loss_mask`` and
``seq_len`` in torch format; ``ArrowDataset`` opens it with ``load_from_disk``. Columns and file layout
are the same from 0.5 to 0.9 (the mask is bool or int64 in 0.5 to 0.7, int64 since).
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.commands.convert.model import ConversionError

if TYPE_CHECKING:
    import torch

STATE = "state.json"
"""The file without which ``load_from_disk`` takes a folder for none of its own."""


class Rows:
    """A prepared data set, row by row."""

    def __init__(self, folder: Path) -> None:
        from datasets import load_from_disk

        try:
            found: Any = load_from_disk(str(folder))
            columns = set(found.column_names)
        except Exception as error:  # datasets and pyarrow raise many types for a damaged folder
            said = str(error).strip().partition("\n")[0].rstrip(".")
            raise ConversionError(f"The data set {folder} cannot be opened: {said}.") from error
        missing = {"input_ids", "loss_mask"} - columns
        if missing:
            raise ConversionError(
                f"The data set {folder} has no column {' and '.join(sorted(missing))}: it is not one"
                " that stock's preparation wrote, and the files have no loss masks of their own."
            )
        self.folder = folder
        self.others = tuple(sorted(columns - {"input_ids", "loss_mask", "seq_len"}))
        self._table = found.select_columns(["input_ids", "loss_mask"]).with_format("arrow")

    def __len__(self) -> int:
        return len(self._table)

    def row(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids as int64, and the loss mask in the dtype that the data set has."""
        import torch

        row = self._table[index]
        tokens, mask = (
            torch.from_numpy(row.column(name)[0].values.to_numpy(zero_copy_only=False).copy())
            for name in ("input_ids", "loss_mask")
        )
        return tokens.long(), mask


def write_rows(
    folder: Path,
    read: Callable[[int], tuple[Sequence[int], Sequence[int]]],
    count: int,
    mask_dtype: str,
) -> None:
    """Write the data set into a folder, in one step: its ``state.json`` comes last.

    ``read`` gives the token ids and the mask of a row; rows are written one by one.
    """
    import datasets

    kind = "bool" if mask_dtype == "bool" else "int64"
    features = datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int64")),
            "loss_mask": datasets.Sequence(datasets.Value(kind)),
            "seq_len": datasets.Value("int64"),
        }
    )
    work = folder / ".dataset.part"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)

    try:
        from datasets.arrow_writer import ArrowWriter

        written = work / "rows.arrow"
        with ArrowWriter(path=str(written), features=features) as writer:
            for row in _rows(read, count):
                writer.write(row)
            writer.finalize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = datasets.Dataset.from_file(str(written))
        found.set_format(type="torch")
        shown = not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            found.save_to_disk(str(work / "out"))
        finally:
            if shown:
                datasets.enable_progress_bars()
        names = sorted(os.listdir(work / "out"), key=lambda name: (name == STATE, name))
        for name in names:
            os.replace(work / "out" / name, folder / name)
    except OSError as error:
        raise ConversionError(f"The data set could not be written to {folder}: {error}.") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _rows(
    read: Callable[[int], tuple[Sequence[int], Sequence[int]]], count: int
) -> Iterator[dict[str, Any]]:
    for index in range(count):
        tokens, mask = read(index)
        yield {"input_ids": tokens, "loss_mask": mask, "seq_len": len(tokens)}
