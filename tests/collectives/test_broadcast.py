"""Broadcasts of objects, of any size and from any rank."""

import pickle
from pathlib import Path

import pytest
import torch

from tests.collectives.test_collectives import DTYPES, input_of, rank_env, start
from tests.support.ranks import run_ranks


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value


def broadcast_objects() -> None:
    rank = rank_env()
    collectives = start()
    objects = [
        True, None, 3, 2.5, "text", b"", Path("a/b"), {"a": [1, {2}]}, Custom(4), "x" * 1003, "x" * 1016, "x" * 100_000,
    ]  # fmt: skip
    for obj in objects:
        for src in (0, 1):
            assert collectives.broadcast(obj if rank == src else "mine", src) == obj
    tensor = collectives.broadcast(torch.arange(1000.0) if rank == 1 else None, src=1)
    assert torch.equal(tensor, torch.arange(1000.0))
    with pytest.raises(ValueError, match="`src=2`: there are 2 ranks"):
        collectives.broadcast(1, src=2)
    shapes = [(3, 2), (), (0,)]
    received, expected = ([input_of(r, dtype, shape) for dtype in DTYPES for shape in shapes] for r in (rank, 1))
    for tensors in (received, expected):  # not contiguous
        tensors += [tensors[0].t(), tensors[0].clone().repeat(2, 2, 1, 1).to(memory_format=torch.channels_last)]
    collectives.broadcast_tensors(received, src=1)
    assert all(torch.equal(*pair) for pair in zip(received, expected, strict=True))


@pytest.mark.processes
def test_broadcast_of_any_object_from_any_rank():
    run_ranks(broadcast_objects)


def broadcast_unpicklable() -> str:
    rank_env()
    collectives = start()
    with pytest.raises(RuntimeError) as caught:
        collectives.broadcast(lambda: None)
    assert collectives.broadcast("still working") == "still working"
    return str(caught.value)


@pytest.mark.processes
def test_broadcast_of_what_cannot_be_pickled_raises_on_every_rank():
    assert all("Broadcast from rank 0 failed" in message for message in run_ranks(broadcast_unpicklable))


def broadcast_around_the_inline_limit() -> None:
    rank_env()
    collectives = start()
    overhead = len(pickle.dumps(b"x" * 500, protocol=pickle.HIGHEST_PROTOCOL)) - 500
    for size in range(1016 - overhead - 3, 1016 - overhead + 4):
        assert collectives.broadcast(b"y" * size) == b"y" * size


@pytest.mark.processes
def test_broadcast_around_the_size_of_the_first_message():
    run_ranks(broadcast_around_the_inline_limit)
