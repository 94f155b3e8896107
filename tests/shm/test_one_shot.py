"""The one-shot all-reduce over gloo: its results, its range of sizes, and its timeout if a rank is missing."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from lightning_strategies_ext.shm.one_shot import OneShotAllReduce, is_short
from lightning_strategies_ext.shm.reduction import Reduction
from tests.shm.start import PER_HOST, start_shm
from tests.support.ranks import rank_environment, run_ranks


def contributed(rank: int) -> torch.Tensor:
    return torch.randn(1001, generator=torch.Generator().manual_seed(rank))


def reduce_in_one_shot(op: ReduceOp) -> list[torch.Tensor]:
    """Reduces with torch's process group, and with the backend itself."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    found = []
    for group in (dist.group.WORLD, dist.group.WORLD._get_backend(torch.device("cpu"))):
        tensor = contributed(rank)
        exchange = OneShotAllReduce(group, tensor, Reduction(op, tensor.dtype, size))
        exchange.wait()
        assert exchange.is_completed()
        exchange.combine()
        found.append(tensor)
    return found


@pytest.mark.processes
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX], ids=str)
def test_tensors_are_combined_in_the_order_of_the_ranks(op: ReduceOp):
    parts = [contributed(rank) for rank in range(3)]
    wanted = {
        ReduceOp.SUM: (parts[0] + parts[1]) + parts[2],
        ReduceOp.AVG: ((parts[0] + parts[1]) + parts[2]) / 3,
        ReduceOp.MAX: torch.stack(parts).amax(0),
    }[op]
    for found in run_ranks(reduce_in_one_shot, op, world_size=3):
        assert all(torch.equal(each, wanted) for each in found)


def wait_for_a_missing_rank() -> float:
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    began = time.monotonic()
    if rank == 0:
        tensor = torch.ones(4)
        exchange = OneShotAllReduce(dist.group.WORLD, tensor, Reduction(ReduceOp.SUM, tensor.dtype, 2))
        with pytest.raises(RuntimeError):
            exchange.wait(timedelta(seconds=1))
    else:
        time.sleep(3)
    return time.monotonic() - began  # on rank 0, before the other rank has exited


@pytest.mark.processes
def test_a_missing_rank_is_an_error_at_the_timeout():
    waited_s, _ = run_ranks(wait_for_a_missing_rank)
    assert 0.9 < waited_s < 3


@pytest.mark.parametrize(
    ("num_bytes", "num_ranks", "num_sharing", "is_it"),
    [
        (0, 2, 1, True),
        (2**18, 2, 8, True),  # two ranks send equally much in a ring
        (2**18 + 4, 2, 1, False),
        (21_844, 4, 1, True),  # ranks send 3 times the size, and 1.5 times the size in a ring
        (21_848, 4, 1, False),
        (21_844, 4, 2, False),
        (10_920, 4, 2, True),
        (4, 1000, 8, True),
        (40, 1000, 8, False),
    ],
)
def test_only_short_messages_use_one_shot(num_bytes: int, num_ranks: int, num_sharing: int, is_it: bool):
    assert is_short(num_bytes, num_ranks, num_sharing) == is_it


def reduce_a_dtype_that_gloo_rejects() -> list[list[int]]:
    rank = start_shm()
    with pytest.raises(ValueError, match="on one host"):
        dist.group.WORLD.share_memory(64)
    found = []
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BXOR):
        tensor = torch.full((1_300_000,), rank + 2, dtype=torch.int16)
        dist.all_reduce(tensor, op)
        found.append(tensor.unique().tolist())
    return found


@pytest.mark.processes
def test_long_tensors_of_any_dtype_are_reduced_between_hosts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(rank_environment, PER_HOST, "1")
    assert run_ranks(reduce_a_dtype_that_gloo_rejects) == [[[5], [3], [1]]] * 2
