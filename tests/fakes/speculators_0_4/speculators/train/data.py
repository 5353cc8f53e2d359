"""FAKE dataset of extracted files."""

from __future__ import annotations


class Eagle3SampleFileDataset:
    def __init__(
        self, max_len: int, datapath: str | None = None, file_list: list[str] | None = None
    ) -> None:
        self.max_len = max_len
