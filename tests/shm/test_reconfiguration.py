"""torch's ``reconfigure`` with the ``shm`` process group, which cannot change its ranks."""

import pytest
import torch
import torch.distributed as dist

from tests.shm.start import start_shm
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not hasattr(dist, "_reconfigure"), reason=f"torch {torch.__version__} has no `reconfigure` (2.14 has)"
    ),
]


def try_to_reconfigure() -> tuple[bool, int, float]:
    start_shm(enable_reconfigure=True)
    with pytest.raises(NotImplementedError, match="cannot change its ranks"):
        dist._get_reconfigure_handle()
    with pytest.raises(NotImplementedError, match="cannot change its ranks"):
        dist._reconfigure(1, ["gloo:0:-1:0:"])
    total = torch.ones(1)
    dist.all_reduce(total)
    return dist._supports_reconfigure(), dist.get_world_size(), total.item()


def test_a_change_of_ranks_is_refused_and_the_group_continues():
    assert run_ranks(try_to_reconfigure) == [(False, 2, 2.0)] * 2
