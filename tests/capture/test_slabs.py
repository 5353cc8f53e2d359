"""Which bytes of a slab are free, what a machine may use, and the try before rows are shared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_compat.capture import slabs
from vllm_compat.capture.slabs import Space

SIZE = 64


@given(st.lists(st.tuples(st.integers(1, 24), st.integers(0, 30)), max_size=60))
def test_blocks_never_overlap_and_every_byte_comes_back(steps: list[tuple[int, int]]) -> None:
    space, taken = Space(SIZE), []
    for size, which in steps:
        offset = space.take(size)
        if offset is None:
            if taken:
                space.give(*taken.pop(which % len(taken)))
            continue
        block = range(offset, offset + size)
        assert offset + size <= SIZE
        assert all(not set(block) & set(range(o, o + s)) for o, s in taken)
        taken.append((offset, size))
    for block in taken:
        assert not space.empty
        space.give(*block)
    assert space.empty
    assert space.take(SIZE) == 0, "the holes have grown together again"


def test_a_block_that_does_not_fit_is_refused() -> None:
    space = Space(SIZE)
    assert space.take(SIZE + 1) is None
    assert space.take(SIZE) == 0
    assert space.take(1) is None


@pytest.mark.parametrize(
    ("group", "expected"), [(None, 64 * 2**30), ("max", 64 * 2**30), (str(2**30), 2**30)]
)
def test_memory_is_the_machines_or_the_control_groups(
    tmp_path: Path, group: str | None, expected: int
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal:  {64 * 2**20} kB\nMemFree: 1 kB\n")
    if group:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(group + "\n")
    assert slabs.machine_memory(tmp_path) == expected


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/user.slice/job.scope", "user.slice/memory.max"),
        ("0::/user.slice/job.scope", "user.slice/job.scope/memory.max"),
        ("9:cpu,memory:/docker/x", "memory/docker/x/memory.limit_in_bytes"),
    ],
)
def test_the_limit_of_a_nested_group_counts(tmp_path: Path, line: str, file: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal:  {64 * 2**20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(line + "\n")
    limit = tmp_path / "sys/fs/cgroup" / file
    limit.parent.mkdir(parents=True)
    limit.write_text(f"{3 * 2**30}\n")
    assert slabs.machine_memory(tmp_path) == 3 * 2**30


def test_an_offer_that_can_be_opened_is_taken() -> None:
    offered = slabs.offer(None)
    assert slabs.try_offer(offered) == ""
    slabs.settle(None, "")
    assert slabs.refused() == ""
    assert not os.path.exists(f"/proc/{os.getpid()}/fd/{offered['fd']}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pid": 2**22 + 1}, "the driver cannot open the worker's memory"),
        ({"secret": b"another"}, "the worker runs on another host"),
        ({"refused": "the worker gets no anonymous"}, "the worker gets no anonymous"),
    ],
)
def test_an_offer_that_cannot_is_refused_with_its_reason(change: dict[str, object], words: str) -> None:
    refused = slabs.try_offer({**slabs.offer(None), **change})
    assert words in refused
    slabs.settle(None, refused)
    assert slabs.refused() == refused


def test_a_system_without_memfds_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", denied)
    assert "no anonymous shared memory" in slabs.try_offer(slabs.offer(None))


def test_the_runtimes_last_error_is_found_by_what_the_process_has_loaded(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r--p 00000000 08:01 12      /usr/lib/libc.so.6\n7f01-7f02 r--p 0 0:0 0\n")
    assert slabs._of_the_runtime(maps) is None
    maps.write_text("7f00-7f01 r--p 00000000 08:01 12      /no/such/libcudart.so.12\n")
    assert slabs._of_the_runtime(maps) is None
    assert slabs._of_the_runtime(tmp_path / "missing") is None
