"""Several ranks on one GPU: NCCL refuses two ranks of one host on a GPU, so that each rank acts as a host.

pass_for_own_host()
make_trainer("ddp_ext", accelerator="gpu", devices=1, num_nodes=2)
"""

import os
from typing import Any

import torch


def pass_for_own_host() -> None:
    """Lets NCCL take this process for another host than any other; called before it joins a group."""
    os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


def put_all_on_one(strategy: Any, num_workers: int) -> None:
    """Gives all workers of a strategy the first GPU; a user who wants that is refused."""
    strategy.parallel_devices = [torch.device("cuda", 0)] * num_workers
