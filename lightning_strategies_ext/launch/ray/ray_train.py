"""Processes whose ranks come from Ray: workers of a ``TorchTrainer`` of Ray Train, and workers of ``ddp_ray_ext``.

A worker of a ``TorchTrainer`` has a process group before it creates a Trainer.
"""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override

from lightning_strategies_ext.arguments import DEFAULT_TIMEOUT
from lightning_strategies_ext.launch.protocol import WorkerRankInfo


def current_rank_info() -> WorkerRankInfo | None:
    """Returns this process's rank among the workers of a ``TorchTrainer``, or None if it is not one of them.

    Does not import Ray: a worker has already imported it. The number of hosts is computed as if all hosts had as many
    ranks as this one.
    """
    context = _context()
    if context is None:
        return None
    world_size, local_world_size = context.get_world_size(), context.get_local_world_size()
    return WorkerRankInfo(
        rank=context.get_world_rank(),
        world_size=world_size,
        local_rank=context.get_local_rank(),
        local_world_size=local_world_size,
        node_rank=context.get_node_rank(),
        num_nodes=-(-world_size // local_world_size),
        main_address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        main_port=int(os.environ.get("MASTER_PORT", "0")),
    )


def check_compatible(
    rank_info: WorkerRankInfo,
    strategy: str,
    *,
    starts_ranks: bool,
    num_devices: int,
    process_group_backend: str | None,
    process_group_options: Any,
    timeout: timedelta | None,
) -> None:
    """Checks arguments of the Trainer and of its strategy, whose class is named ``strategy``.

    Raises:
        ValueError: If an argument contradicts what Ray Train has set up, or the strategy starts ranks itself.
    """
    if starts_ranks:
        raise ValueError(
            f"`{strategy}` starts ranks, but Ray Train has started them already. Use `strategy='ddp_ext'` in the"
            " training function of a TorchTrainer."
        )
    backend = dist.get_backend()
    refused = [f"process_group_backend={process_group_backend!r}"] * (process_group_backend not in (None, backend))
    refused += [f"process_group_options={process_group_options!r}"] * (process_group_options is not None)
    refused += [f"timeout={timeout!r}"] * (timeout != DEFAULT_TIMEOUT)
    if refused:
        raise ValueError(
            f"`{refused[0]}`: Ray Train has already created the process group, with backend {backend!r}. Omit the"
            " argument, and pass `torch_config=ray.train.torch.TorchConfig(backend=..., timeout_s=...)` to the"
            " TorchTrainer."
        )
    if current_device().type == "cpu" and num_devices not in (1, rank_info.local_world_size):
        raise ValueError(
            f"`devices={num_devices}`: Ray Train has started {rank_info.local_world_size} of its"
            f" {rank_info.world_size} workers on this host. Omit the argument: `ScalingConfig(num_workers=...)` sets"
            " the number of ranks."
        )


def current_device() -> torch.device:
    """Returns the device that Ray Train has assigned to this process."""
    from ray.train.torch import get_device

    device: torch.device = get_device()
    return device


def _context() -> Any:
    train = sys.modules.get("ray.train")
    if train is None or not dist.is_available() or not dist.is_initialized():
        return None
    try:
        context = train.get_context()
        is_same_rank = (context.get_world_rank(), context.get_world_size()) == (dist.get_rank(), dist.get_world_size())
    except (RuntimeError, DeprecationWarning):  # not a worker of a TorchTrainer, or a trial of Ray Tune
        return None
    return context if is_same_rank else None


class RayEnvironment(ClusterEnvironment):
    """Cluster environment with the ranks and addresses of a process that Ray has started as one of several."""

    def __init__(self, rank_info: WorkerRankInfo) -> None:
        super().__init__()
        self._rank_info = rank_info

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return self._rank_info.main_address

    @property
    @override
    def main_port(self) -> int:
        return self._rank_info.main_port

    @staticmethod
    @override
    def detect() -> bool:
        return False  # the strategy creates this environment itself

    @override
    def world_size(self) -> int:
        return self._rank_info.world_size

    @override
    def set_world_size(self, size: int) -> None:
        """No-op: Ray has set the world size."""

    @override
    def global_rank(self) -> int:
        return self._rank_info.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """No-op: Ray has set the rank."""

    @override
    def local_rank(self) -> int:
        return self._rank_info.local_rank

    @override
    def node_rank(self) -> int:
        return self._rank_info.node_rank
