"""Segments: their sizes, and their descriptors after a group was not created."""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from lightning_strategies_ext.shm import creation, segments
from lightning_strategies_ext.shm.rendezvous import Rendezvous
from lightning_strategies_ext.shm.segments import DEFAULT_NUM_BYTES, DEFAULT_NUM_BYTES_WHEN_CROWDED, grow_if_crowded


@pytest.fixture
def fd() -> Iterator[int]:
    """Provides the descriptor of a segment of the default size."""
    created = segments.create(DEFAULT_NUM_BYTES)
    yield created
    os.close(created)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates four cores and no earlier group."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(segments, "_max_local_ranks", 0)


@pytest.mark.parametrize(
    ("num_local_ranks", "num_bytes"), [(4, DEFAULT_NUM_BYTES), (5, DEFAULT_NUM_BYTES_WHEN_CROWDED)]
)
def test_segments_are_larger_if_the_host_has_more_ranks_than_cores(fd: int, num_local_ranks: int, num_bytes: int):
    grow_if_crowded(fd, num_local_ranks)
    assert os.fstat(fd).st_size == num_bytes


def test_segments_of_a_small_group_are_larger_on_a_crowded_host(fd: int):
    other = segments.create(DEFAULT_NUM_BYTES)
    grow_if_crowded(other, 8)
    os.close(other)
    grow_if_crowded(fd, 2)
    assert os.fstat(fd).st_size == DEFAULT_NUM_BYTES_WHEN_CROWDED


def test_a_segment_keeps_its_size_if_dev_shm_is_full(fd: int, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    grow_if_crowded(fd, 8)
    assert os.fstat(fd).st_size == DEFAULT_NUM_BYTES


def num_open_segments() -> int:
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum("/dev/shm/" in os.readlink(path) for path in paths if os.path.lexists(path))


@pytest.mark.parametrize("step", ["announce", "connect"])
def test_a_group_that_was_not_created_leaves_no_descriptor(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise TimeoutError(step)

    monkeypatch.setattr(Rendezvous, step, fail)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    options = SimpleNamespace(
        group_rank=0, group_size=1, store=store, timeout=timedelta(seconds=20), global_ranks_in_group=[]
    )
    num_before = num_open_segments()
    for _ in range(2):
        with pytest.raises(TimeoutError, match=step):
            creation.create_process_group(options, None)
    assert num_open_segments() == num_before
